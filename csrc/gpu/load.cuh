// Units of eight values along k for the GEMM kernels, in fp32: x, and weights of any kind.
#pragma once

#include "gemm_args.h"
#include "numeric.cuh"

namespace int4_emu::gpu {

template <class T>
__device__ inline void widen_eight(const Vec4& v, float* out) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    out[2 * j] = to_float(T{static_cast<uint16_t>(v.w[j])});
    out[2 * j + 1] = to_float(T{static_cast<uint16_t>(v.w[j] >> 16)});
  }
}

// x[row][k..k+8]; zero past K and in padding rows (row < 0). 16-bit rows are padded with zeros to whole units.
template <class T>
__device__ __forceinline__ void load_x(const GemmArgs& a, int32_t row, int64_t k, float* out) {
  const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(row < 0 ? 0 : row / a.row_divisor) * a.x_stride + k;
  if constexpr (sizeof(T) == 2) {
    Vec4 v = {{0, 0, 0, 0}};  // an if, since ?: on two structs would choose between addresses and put both in memory
    if (row >= 0 && k < a.w.k) v = *reinterpret_cast<const Vec4*>(x);
    widen_eight<T>(v, out);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = row >= 0 && k + j < a.w.k ? x[j] : 0.f;
  }
}

// Weight row `row` (-1: outside), k..k+8, in fp32: exact codes times scales, or dense elements.
template <WeightKind kKind>
__device__ __forceinline__ void load_w(const GemmArgs& a, int64_t expert, int64_t row, int64_t k, float* out) {
  const Weight& w = a.w;
  if constexpr (kKind == WeightKind::dense) {
    const int64_t at = expert * w.expert_stride + (row < 0 ? 0 : row) * w.n_stride;
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = row >= 0 && k + j < w.k ? load_float(w.data, w.dtype, at + (k + j) * w.k_stride) : 0.f;
  } else {
    constexpr int kBits = kKind == WeightKind::int4 ? 4 : 8;
    const uint8_t* codes = static_cast<const uint8_t*>(w.data) + expert * w.expert_stride + (row < 0 ? 0 : row) * w.n_stride;
    const int64_t groups = (expert * w.n + (row < 0 ? 0 : row)) * w.groups;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      out[j] = 0.f;
      if (row < 0 || k + j >= w.k) continue;
      const int64_t column = k + j, c = groups + column / w.group_size;
      const int code = kBits == 4 ? (codes[column / 2] >> (column % 2 * 4)) & 0xf : codes[column];
      const int zero = w.zeros ? w.zeros[c] : (kBits == 4 ? 8 : 128);
      out[j] = static_cast<float>(code - zero) * load_float(w.scales, w.scale_dtype, c);
    }
  }
}

}  // namespace int4_emu::gpu
