// The epilogue: bias, activation, one rounding.
#pragma once

#include "gemm_args.h"
#include "numeric.cuh"

namespace int4_emu::gpu {

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// From above only, and on both sides; a NaN passes through.
__device__ inline float cap(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float clamp_both(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

__device__ inline float silu(float x) { return x / (1.f + expf(-x)); }

// `u` is unused by the forms without gate.
__device__ __forceinline__ float activate(const ActivationSpec& spec, float g, float u) {
  switch (spec.kind) {
    case Activation::silu:
      if (spec.has_limit) return silu(cap(g, spec.limit)) * clamp_both(u, spec.limit);
      return silu(g) * u;
    case Activation::swigluoai: {
      const float capped = cap(g, spec.limit);
      return capped * sigmoid(spec.alpha * capped) * (clamp_both(u, spec.limit) + spec.beta);
    }
    case Activation::silu_no_mul:
      return silu(g);
    case Activation::gelu:
    case Activation::gelu_no_mul: {
      const float y = 0.5f * g * (1.f + erff(g * 0.70710678118654752f));
      return spec.kind == Activation::gelu ? y * u : y;
    }
    case Activation::gelu_tanh:
    case Activation::gelu_tanh_no_mul: {
      // 0.5 * (1 + tanh(v)) is sigmoid(2 v).
      const float y = g * sigmoid(2.f * 0.79788456080286536f * (g + 0.044715f * g * g * g));
      return spec.kind == Activation::gelu_tanh ? y * u : y;
    }
    case Activation::relu2:
    case Activation::relu2_no_mul: {
      const float y = g < 0.f ? 0.f : g * g;
      return spec.kind == Activation::relu2 ? y * u : y;
    }
  }
  return 0.f;
}

// Weight row of local row r of the tile that starts at output column n0; -1 outside the matrix.
__device__ __forceinline__ int64_t weight_row(const GemmArgs& a, int64_t n0, int r) {
  const int64_t column = a.gated ? n0 + (r >> 4) * 8 + (r & 7) : n0 + r;
  if (column >= a.columns) return -1;
  return a.gated ? column * a.column_step + ((r >> 3) & 1) * a.part_step : column;
}

// Two neighbouring columns; `column` is even.
__device__ __forceinline__ void store_pair(const GemmArgs& a, int64_t row, int64_t column, float v0, float v1) {
  const int64_t at = row * a.out_stride + column;
  if (column + 1 < a.columns && a.out_pairs) {
    if (a.out_dtype == DType::f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at) = float2{v0, v1};
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(a.out) + at) =
          a.out_dtype == DType::bf16 ? pack_pair<Bf16>(v0, v1) : pack_pair<Fp16>(v0, v1);
    }
    return;
  }
  if (column < a.columns) store_float(a.out, a.out_dtype, at, v0);
  if (column + 1 < a.columns) store_float(a.out, a.out_dtype, at + 1, v1);
}

// Local rows r, r + 1 and r + 8, r + 9 of the tile that starts at output column n0, r % 16 in {0, 2, 4, 6}, for any row of out.
struct Outputs {
  const GemmArgs& a;
  int64_t column;
  float bias[4] = {};

  __device__ __forceinline__ Outputs(const GemmArgs& args, int64_t expert, int64_t n0, int r) : a(args) {
    column = a.gated ? n0 + (r >> 4) * 8 + (r & 7) : n0 + r;
    if (a.w.bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = weight_row(a, n0, r + j % 2 + j / 2 * 8);
      if (row >= 0) bias[j] = load_float(a.w.bias, a.w.bias_dtype, expert * a.w.n + row);
    }
  }

  // Sums of the four.
  __device__ __forceinline__ void store(int64_t row, float a0, float a1, float b0, float b1) const {
    a0 += bias[0], a1 += bias[1], b0 += bias[2], b1 += bias[3];
    if (a.gated) {
      if (a.activation.kind == Activation::silu && !a.activation.has_limit) {  // by far the most frequent
        store_pair(a, row, column, silu(a0) * b0, silu(a1) * b1);
        return;
      }
      store_pair(a, row, column, activate(a.activation, a0, b0), activate(a.activation, a1, b1));
      return;
    }
    if (a.activated) {
      a0 = activate(a.activation, a0, 0.f);
      a1 = activate(a.activation, a1, 0.f);
      b0 = activate(a.activation, b0, 0.f);
      b1 = activate(a.activation, b1, 0.f);
    }
    store_pair(a, row, column, a0, a1);
    store_pair(a, row, column + 8, b0, b1);
  }
};

__device__ __forceinline__ void finish(const GemmArgs& a, int64_t expert, int64_t row, int64_t n0, int r, float a0, float a1, float b0,
                                       float b1) {
  Outputs(a, expert, n0, r).store(row, a0, a1, b0, b1);
}

}  // namespace int4_emu::gpu
