// The atom that runs anywhere: fp32 multiply-adds over fp32 tiles. The yardstick of the other families.
//
// An atom has: kRows x kColumns x kDepth (rows of x, rows of the weight, k) of a block's tile, kThreads, kStages, kBlocks (wanted per
// multiprocessor); Element, the type in shared memory; tile_elements(rows); put(tile, row, unit, float[8]); Sums; multiply(x tile,
// weight tile, sums); for_each(sums, f), which calls f(row, r, a0, a1, b0, b1) as finish() in activation.cuh wants it; commit() and
// wait(). With kAsync also copy_async(tile, row, unit, source, inside), wait() being for all but the newest kStages - 2 commits.
#pragma once

#include "gemm_args.h"

namespace int4_emu::gpu {

template <int kRowCount>
struct FmaAtom {
  using Element = float;
  static constexpr int kRows = kRowCount, kColumns = 64, kDepth = 32, kThreads = 256, kStages = 2, kBlocks = 2;
  static constexpr bool kAsync = false;
  static constexpr int kPitch = kDepth + 4;  // floats: rows lie 4 banks apart

  __host__ __device__ static constexpr int tile_elements(int rows) { return rows * kPitch; }

  __device__ static void put(Element* tile, int row, int unit, const float* v) {
    float4* to = reinterpret_cast<float4*>(tile + row * kPitch + unit * 8);
    to[0] = float4{v[0], v[1], v[2], v[3]};
    to[1] = float4{v[4], v[5], v[6], v[7]};
  }

  __device__ static void commit() {}
  __device__ static void wait() {}

  // Thread (tx, ty) of 16 x 16: rows ty + 16 i, columns r, r + 1, r + 8, r + 9.
  struct Sums {
    float c[kRows / 16][4];
  };

  __device__ static int first_column() {
    const int tx = static_cast<int>(threadIdx.x) % 16;
    return tx / 4 * 16 + tx % 4 * 2;
  }

  // Inlined by force: as a call it would take `sums` through memory.
  __device__ __forceinline__ static void multiply(const Element* x, const Element* w, Sums& sums) {
    const int ty = static_cast<int>(threadIdx.x) / 16, r = first_column();
#pragma unroll 4
    for (int k = 0; k < kDepth; k += 4) {
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = *reinterpret_cast<const float4*>(w + (r + j % 2 + j / 2 * 8) * kPitch + k);
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        const float4 a = *reinterpret_cast<const float4*>(x + (ty + 16 * i) * kPitch + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums.c[i][j] = fmaf(a.x, b[j].x, sums.c[i][j]);
          sums.c[i][j] = fmaf(a.y, b[j].y, sums.c[i][j]);
          sums.c[i][j] = fmaf(a.z, b[j].z, sums.c[i][j]);
          sums.c[i][j] = fmaf(a.w, b[j].w, sums.c[i][j]);
        }
      }
    }
  }

  template <class F>
  __device__ __forceinline__ static void for_each(const Sums& sums, const F& f) {
    const int ty = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) f(ty + 16 * i, first_column(), sums.c[i][0], sums.c[i][1], sums.c[i][2], sums.c[i][3]);
  }
};

}  // namespace int4_emu::gpu
