// Shadows the vendor's header: kernels compile as plain C++17 and run on the host, one fiber a GPU thread. See ../../README.md.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#ifndef __noinline__  // the standard library spells __attribute__((__noinline__))
#define SIMT_NOINLINE __attribute__((noinline))
#endif
// The thread-local segment of the program holds nothing else, so that the engine can poison all of it between blocks.
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// clang-format off
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
// clang-format on

// Of the thread that runs; the engine sets them whenever it resumes one.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#include "../../engine.h"
#include "../../intrinsics.h"
#include "../../matrix.h"
#include "../../runtime.h"
