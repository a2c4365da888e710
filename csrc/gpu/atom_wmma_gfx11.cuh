// RDNA3's WMMA 16x16x16, wave32, for stream.cuh, which says what an atom has.
#pragma once

#include "mma_amd.cuh"

namespace int4_emu::gpu {

template <class T>
struct WmmaGfx11 {
  using Sums = amd::Float8;
  static constexpr int kWave = 32, kWaves = 8, kOccupancy = 6, kParts = 1, kStepOctets = 2, kWideRowTiles = 1, kSplit = 4;

  // Rows of results alternate between the halves of a wave: what a half holds shall be eight neighbouring rows of the tile.
  __host__ __device__ static constexpr int row(int i) { return i % 2 * 8 + i / 2; }

  __device__ static __forceinline__ void mma(const Vec4 (&a)[2], const Vec4 (&b)[2], Sums& c) { amd::wmma_gfx11<T>(a, b, c); }

  static constexpr int kCorrectSlots = 1;
  __device__ static __forceinline__ void correct(const float* minus, int, const float* x_sum, int, int lane, Sums& c) {
    c += *reinterpret_cast<const Sums*>(minus + lane / 16 * 8) * x_sum[lane % 16];
  }
};

}  // namespace int4_emu::gpu
