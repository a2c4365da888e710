// A parallel_for that its caller owns (torch's thread pool, std::thread in native tests, or none).
#pragma once

#include <cstdint>

namespace int4_emu {

struct Parallel {
  int threads = 1;
  void* context = nullptr;
  // Calls body(argument, begin, end) over disjoint chunks that cover [0, n), each at least `grain` long but the last.
  void (*run)(void* context, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* argument) = nullptr;

  // Body is callable as body(begin, end). Runs serially when no pool is given.
  template <class Body>
  void for_each(int64_t n, int64_t grain, Body&& body) const {
    if (n <= 0) return;
    if (run == nullptr || threads <= 1 || n <= grain) {
      body(int64_t{0}, n);
      return;
    }
    run(context, n, grain, [](void* b, int64_t begin, int64_t end) { (*static_cast<Body*>(b))(begin, end); }, &body);
  }
};

}  // namespace int4_emu
