// Hopper's wgmma, for kernels of mma_sm80 that are also compiled for sm_90a: same launch, same shared memory, another main loop. Tiles
// are rows of 128 bytes whose 16-byte units are swapped about by row, which is the instruction's 128-byte swizzle; they start at
// multiples of 1024 bytes.
#pragma once

#include "mma_sm80.cuh"

namespace int4_emu::gpu::sm80 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define INT4_EMU_WGMMA 1

// Describes a tile of 128-byte rows to the instruction: eight rows are 1024 bytes apart from the next eight.
__device__ inline uint64_t wgmma_tile(const void* shared) {
  const uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(shared));
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory"); }
// Makes what this thread wrote, or copied, to shared memory visible to wgmma.
__device__ inline void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// c[64 x kN] += a[64 x 16] b[kN x 16]^T. A thread's c: rows 16 warp + g and + 8, columns 8 j + 2 q and + 1, as [j][row][column].
template <class T, int kN>
struct Wgmma;

#define INT4_EMU_FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define INT4_EMU_EIGHT(c, i) INT4_EMU_FOUR(c, i), INT4_EMU_FOUR(c, i + 4)
#define INT4_EMU_WGMMA_FORM(n, type, sums, a_at, b_at, ...)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums "}, " a_at ", " b_at ", 1, 1, 1, 0, 0;\n" \
               : __VA_ARGS__                                                                                                  \
               : "l"(a), "l"(b))
#define INT4_EMU_WGMMA_STRUCT(n, sums, a_at, b_at, ...)                              \
  template <class T>                                                                \
  struct Wgmma<T, n> {                                                              \
    __device__ static void run(float* c, uint64_t a, uint64_t b) {                  \
      if constexpr (std::is_same<T, Bf16>::value) {                                 \
        INT4_EMU_WGMMA_FORM(n, "bf16", sums, a_at, b_at, __VA_ARGS__);              \
      } else {                                                                      \
        INT4_EMU_WGMMA_FORM(n, "f16", sums, a_at, b_at, __VA_ARGS__);               \
      }                                                                             \
    }                                                                               \
  }

INT4_EMU_WGMMA_STRUCT(32,
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                      "%16", "%17",
                      INT4_EMU_EIGHT(c, 0), INT4_EMU_EIGHT(c, 8));
INT4_EMU_WGMMA_STRUCT(64,
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                      "%32", "%33",
                      INT4_EMU_EIGHT(c, 0), INT4_EMU_EIGHT(c, 8), INT4_EMU_EIGHT(c, 16), INT4_EMU_EIGHT(c, 24));
INT4_EMU_WGMMA_STRUCT(96,
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                      "%48", "%49",
                      INT4_EMU_EIGHT(c, 0), INT4_EMU_EIGHT(c, 8), INT4_EMU_EIGHT(c, 16), INT4_EMU_EIGHT(c, 24),
                      INT4_EMU_EIGHT(c, 32), INT4_EMU_EIGHT(c, 40));
INT4_EMU_WGMMA_STRUCT(128,
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                      "%64", "%65",
                      INT4_EMU_EIGHT(c, 0), INT4_EMU_EIGHT(c, 8), INT4_EMU_EIGHT(c, 16), INT4_EMU_EIGHT(c, 24),
                      INT4_EMU_EIGHT(c, 32), INT4_EMU_EIGHT(c, 40), INT4_EMU_EIGHT(c, 48), INT4_EMU_EIGHT(c, 56));

#undef INT4_EMU_FOUR
#undef INT4_EMU_EIGHT
#undef INT4_EMU_WGMMA_FORM
#undef INT4_EMU_WGMMA_STRUCT
#endif

}  // namespace int4_emu::gpu::sm80
