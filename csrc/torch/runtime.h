// torch's thread pool and allocator as the torch-free code sees them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <mutex>

#include "../core/parallel.h"
#include "check.h"

namespace int4_emu::binding {

// torch's own pool, honouring torch.set_num_threads. An exception in a body is carried out of the pool (torch before 2.13 loses it).
inline Parallel torch_parallel() {
  Parallel p;
  p.threads = static_cast<int>(torch::stable::get_num_threads());
  p.run = [](void*, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* argument) {
    std::exception_ptr error;
    std::mutex lock;
    torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
      try {
        body(argument, begin, end);
      } catch (...) {
        const std::lock_guard<std::mutex> hold(lock);
        error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  };
  return p;
}

// Scratch from torch's allocator, 64-byte aligned, freed when the call returns.
struct Workspace {
  Workspace(const Tensor& like, size_t bytes)
      : tensor(torch::stable::new_empty(like, {static_cast<int64_t>(bytes) + 64}, ScalarType::Byte)), bytes(bytes) {}
  void* data() const {
    const auto p = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    return reinterpret_cast<void*>((p + 63) & ~uintptr_t{63});
  }
  Tensor tensor;
  size_t bytes;
};

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline OptionalTensor as_contiguous(const OptionalTensor& t) { return t.has_value() ? OptionalTensor(as_contiguous(*t)) : t; }

}  // namespace int4_emu::binding
