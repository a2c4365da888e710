// The only file that says cuda* or hip*: runtime names, launch checks, and the few device idioms that differ.
#pragma once

#if defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define INT4_EMU_RUNTIME(name) hip##name
#define INT4_EMU_DEVICE_PROPERTIES hipDeviceProp_t
#else
#include <cuda_runtime.h>
#define INT4_EMU_RUNTIME(name) cuda##name
#define INT4_EMU_DEVICE_PROPERTIES cudaDeviceProp
#endif

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include "../core/status.h"

namespace int4_emu::gpu {

using Stream = INT4_EMU_RUNTIME(Stream_t);
using Error = INT4_EMU_RUNTIME(Error_t);
using DeviceProperties = INT4_EMU_DEVICE_PROPERTIES;

inline Stream as_stream(void* stream) { return static_cast<Stream>(stream); }

inline Status check(Error error, const char* what) {
  if (error == INT4_EMU_RUNTIME(Success)) return {};
  return make_error(Code::internal, "%s failed: %s", what, INT4_EMU_RUNTIME(GetErrorString)(error));
}

inline Status runtime_set_device(int device) { return check(INT4_EMU_RUNTIME(SetDevice)(device), "set_device"); }

inline Error runtime_get_device(int* device) { return INT4_EMU_RUNTIME(GetDevice)(device); }

inline Error runtime_properties(DeviceProperties* properties, int device) {
  return INT4_EMU_RUNTIME(GetDeviceProperties)(properties, device);
}

// A device's architecture as its compilers spell it: "sm_90", "gfx942:sramecc+:xnack-".
inline void architecture_of(const DeviceProperties& properties, char* out, size_t size) {
#if defined(__HIP__) || defined(__HIPCC__)
  std::snprintf(out, size, "%s", properties.gcnArchName);
#else
  std::snprintf(out, size, "sm_%d%d", properties.major, properties.minor);
#endif
}

// Multiprocessors (compute units) of the current device, 1 when it cannot be asked.
inline int multiprocessors() {
  int device = 0, count = 1;
  if (runtime_get_device(&device) != INT4_EMU_RUNTIME(Success)) return 1;
#if defined(__HIP__) || defined(__HIPCC__)
  const auto attribute = hipDeviceAttributeMultiprocessorCount;
#else
  const auto attribute = cudaDevAttrMultiProcessorCount;
#endif
  return INT4_EMU_RUNTIME(DeviceGetAttribute)(&count, attribute, device) == INT4_EMU_RUNTIME(Success) ? count : 1;
}

// Lets a kernel ask for more shared memory than the default 48 KB, of which its static part takes little.
template <class Kernel>
Status allow_shared_memory(Kernel kernel, size_t bytes, const char* name) {
  if (bytes <= 40 * 1024) return {};
  const auto attribute = INT4_EMU_RUNTIME(FuncAttributeMaxDynamicSharedMemorySize);
  return check(INT4_EMU_RUNTIME(FuncSetAttribute)(reinterpret_cast<const void*>(kernel), attribute, static_cast<int>(bytes)), name);
}

// Every launch goes through here: `blocks` thread blocks in one dimension, `shared` bytes of dynamic shared memory. Asking for the
// error also clears it, so that the next call starts unharmed.
template <class... Parameters, class... Arguments>
Status launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, Stream stream,
              Arguments&&... arguments) {
  if (blocks <= 0) return {};
#if defined(__HIP__) || defined(__HIPCC__)
  const int64_t most = UINT32_MAX / threads;  // HIP counts the threads of a grid in 32 bits
#else
  const int64_t most = INT32_MAX;
#endif
  if (blocks > most)
    return make_error(Code::unsupported, "%s must have at most %lld blocks, got %lld", name, (long long)most, (long long)blocks);
#if defined(INT4_EMU_SIMT)
  (void)stream;
  simt::launch(name, kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared, std::forward<Arguments>(arguments)...);
#else
  if (Status s = allow_shared_memory(kernel, shared, name); !s) return s;
  kernel<<<dim3{static_cast<unsigned>(blocks)}, static_cast<unsigned>(threads), shared, stream>>>(std::forward<Arguments>(arguments)...);
#endif
  return check(INT4_EMU_RUNTIME(GetLastError)(), name);
}

// Whether this kernel may start on the current device before the one ahead of it on the stream has ended.
template <class... Parameters>
bool may_overlap(void (*kernel)(Parameters...)) {
#if defined(__HIP__) || defined(__HIPCC__) || defined(INT4_EMU_SIMT)
  (void)kernel;
  return false;
#else
  // wait_for_previous() must be in the code that runs: PTX of an older architecture, compiled by the driver, has none.
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
  cudaGetLastError();
  return false;
#endif
}

// Like launch(), but the blocks may start early, as soon as every block of the kernel before has called let_next_start() or ended:
// only after wait_for_previous() is that kernel's work there to be read.
template <class... Parameters, class... Arguments>
Status launch_after(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, Stream stream,
                    Arguments&&... arguments) {
#if !defined(__HIP__) && !defined(__HIPCC__) && !defined(INT4_EMU_SIMT)
  if (blocks > 0 && blocks <= INT32_MAX && may_overlap(kernel)) {
    if (Status s = allow_shared_memory(kernel, shared, name); !s) return s;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3{static_cast<unsigned>(blocks)};
    config.blockDim = dim3{static_cast<unsigned>(threads)};
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const Error error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    INT4_EMU_RUNTIME(GetLastError)();
    return check(error, name);
  }
#endif
  return launch(name, kernel, blocks, threads, shared, stream, std::forward<Arguments>(arguments)...);
}

__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// The block's dynamic shared memory, 16-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
#if defined(INT4_EMU_SIMT)
  return static_cast<T*>(simt::dynamic_shared());
#else
  extern __shared__ uint4 dynamic_shared_units[];
  return reinterpret_cast<T*>(dynamic_shared_units);
#endif
}

// 16 bytes to an aligned place, in one store: nvcc splits that of a struct into words, which L2 then has to put together.
__device__ inline void store_16_bytes(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d));
#else
  *static_cast<uint4*>(to) = {a, b, c, d};
#endif
}

// Two floats to 16-bit floats, nearest even, low first. The vendor instruction where there is one, else false.
__device__ inline bool hardware_pack_bf16(float low, float high, uint32_t* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(*out) : "f"(high), "f"(low));
  return true;
#else
  (void)low, (void)high, (void)out;
  return false;
#endif
}
__device__ inline bool hardware_pack_fp16(float low, float high, uint32_t* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(*out) : "f"(high), "f"(low));
  return true;
#else
  (void)low, (void)high, (void)out;
  return false;
#endif
}

// Shared memory of a multiprocessor that several blocks divide among them, in KB.
#if defined(__HIP__) || defined(__HIPCC__)
constexpr int kSharedKilobytes = 64;
#else
constexpr int kSharedKilobytes = 160;
#endif

// Arithmetic on pairs of 16-bit floats, where the compiler is given none: the same results as through fp32, faster.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kPairMath = true;
__device__ inline uint32_t hardware_pair_fma(bool bf16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if (bf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}
// (word & mask) | bits
__device__ inline uint32_t hardware_merge(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(d) : "r"(word), "r"(mask), "r"(bits));
  return d;
}
#else
constexpr bool kPairMath = false;
__device__ inline uint32_t hardware_pair_fma(bool, uint32_t, uint32_t, uint32_t) { return 0; }
__device__ inline uint32_t hardware_merge(uint32_t, uint32_t, uint32_t) { return 0; }
#endif

// Lane exchange inside aligned groups of 32, whatever the wave's width.
__device__ inline int shfl_in_32(int value, int lane) {
#if defined(__HIP__) || defined(__HIPCC__)
  return __shfl(value, lane, 32);
#else
  return __shfl_sync(0xffffffffu, value, lane, 32);
#endif
}

__device__ inline float shfl_xor_in_32(float value, int mask) {
#if defined(__HIP__) || defined(__HIPCC__)
  return __shfl_xor(value, mask, 32);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask, 32);
#endif
}

}  // namespace int4_emu::gpu
