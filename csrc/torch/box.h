// Boxing of op implementations for torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

// torch >= 2.13 can still tell what an exception inside a torch call said; older versions leave this null.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace int4_emu::binding {

// The boxer copies sizeof(T) bytes of a 64-bit slot unchecked, so a `float` or `int` parameter would read garbage.
template <class T>
constexpr bool boxable = !std::is_same_v<std::decay_t<T>, float> && !std::is_same_v<std::decay_t<T>, int32_t>;

template <class R, class... Args>
constexpr bool all_boxable(R (*)(Args...)) {
  return (boxable<Args> && ...);
}

template <auto* F>
struct Boxed {
  static_assert(all_boxable(F), "op parameters are int64_t, double, bool, Tensor or std::optional of these");
  static void call(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    try {
      torch::stable::detail::boxer<std::remove_pointer_t<decltype(F)>, F>::boxed_fn(stack, inputs, outputs);
    } catch (const std::runtime_error& e) {
      const std::string what = e.what();
      if (what.find(" API call failed at ") == std::string::npos || &torch_exception_get_what_without_backtrace == nullptr) throw;
      throw std::runtime_error(std::string(torch_exception_get_what_without_backtrace()) + " [" + what.substr(0, 60) + "]");
    }
  }
};

}  // namespace int4_emu::binding
