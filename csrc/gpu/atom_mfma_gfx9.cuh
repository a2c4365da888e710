// CDNA's MFMA 16x16x16 (gfx90a, gfx942) and 16x16x32 (gfx950) for stream.cuh, which says what an atom has.
#pragma once

#include "mma_amd.cuh"

namespace int4_emu::gpu {

template <class T>
struct MfmaGfx9 {
  using Sums = amd::Float4;
  static constexpr int kWave = 64, kWaves = 4, kOccupancy = 2, kParts = 4, kStepOctets = 1, kWideRowTiles = 2, kSplit = 2;

  __host__ __device__ static constexpr int row(int i) { return i; }

  __device__ static __forceinline__ void mma(const Vec4 (&a)[1], const Vec4 (&b)[1], Sums& c) { amd::mfma_gfx9<T>(a[0], b[0], c); }

  // Four slots at a time are one fp32 product, whose k is the lane's part.
  static constexpr int kCorrectSlots = 4;
  __device__ static __forceinline__ void correct(const float* minus, int minus_pitch, const float* x_sum, int x_pitch, int lane, Sums& c) {
    amd::mfma_gfx9_f32(minus[lane / 16 * minus_pitch + lane % 16], x_sum[lane / 16 * x_pitch + lane % 16], c);
  }
};

}  // namespace int4_emu::gpu
