// Memory of the GPU that the package was built for; without one of them this is empty.
#pragma once

#if defined(INT4_EMU_WITH_CUDA) || defined(INT4_EMU_WITH_HIP)
#define EXAMPLE_HAS_GPU

#include <int4_emu/gpu/api.h>

#include <stdexcept>
#include <vector>

#ifdef INT4_EMU_WITH_CUDA
#include <cuda_runtime_api.h>
#define RUNTIME(name) cuda##name
#else
#include <hip/hip_runtime_api.h>
#define RUNTIME(name) hip##name
#endif

namespace device {

// Null when device 0 is there.
inline const char* why_not() {
  int count = 0;
  const auto error = RUNTIME(GetDeviceCount)(&count);
  if (error != RUNTIME(Success)) return RUNTIME(GetErrorString)(error);
  return count > 0 ? nullptr : "no GPU";
}

inline void must(RUNTIME(Error_t) error) {
  if (error != RUNTIME(Success)) throw std::runtime_error(RUNTIME(GetErrorString)(error));
}

// A copy of a vector in the GPU's memory, for as long as it lives.
struct Copy {
  void* data = nullptr;

  template <class T>
  explicit Copy(const std::vector<T>& host) {
    const size_t bytes = host.size() * sizeof(T);
    must(RUNTIME(Malloc)(&data, bytes));
    must(RUNTIME(Memcpy)(data, host.data(), bytes, RUNTIME(MemcpyHostToDevice)));
  }
  Copy(const Copy&) = delete;
  ~Copy() { (void)RUNTIME(Free)(data); }

  // Waits for the default stream.
  template <class T>
  std::vector<T> read(size_t count) const {
    std::vector<T> host(count);
    must(RUNTIME(Memcpy)(host.data(), data, count * sizeof(T), RUNTIME(MemcpyDeviceToHost)));
    return host;
  }
};

}  // namespace device
#endif
