// The activations' functions in fp32, without branches or library calls, so that loops over them vectorise.
#pragma once

#include "convert.h"

namespace int4_emu::cpu {

// exp(x) to about 1e-7 relative. Arguments are held within +-87, where neither side leaves the normal numbers; a NaN stays one.
static inline float exp_bounded(float x) {
  x = x > 87.f ? 87.f : x;
  x = x < -87.f ? -87.f : x;
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the integer n and leaves it in the low mantissa bits.
  const float shifted = x * 1.44269504088896341f + 12582912.f;
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  float p = 1.f / 5040.f;
  p = p * r + 1.f / 720.f;
  p = p * r + 1.f / 120.f;
  p = p * r + 1.f / 24.f;
  p = p * r + 1.f / 6.f;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  return (1.f + p) * as_float((as_bits(shifted) + 127u) << 23);
}

static inline float sigmoid(float x) { return 1.f / (1.f + exp_bounded(-x)); }

static inline float silu(float x) { return x / (1.f + exp_bounded(-x)); }

static inline float gelu_tanh(float x) {
  // 0.5 * (1 + tanh(u)) is sigmoid(2 u).
  const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x / (1.f + exp_bounded(-2.f * u));
}

// From above only, and on both sides; a NaN passes through.
static inline float cap(float x, float limit) { return x > limit ? limit : x; }

static inline float clamp(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

}  // namespace int4_emu::cpu
