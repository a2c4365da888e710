// Scalar fp16 and bf16 conversions of the files that are compiled for the baseline CPU.
//
// `static inline`, so that every object file has its own copy: a copy compiled for a newer instruction set must never serve an
// older CPU. Written without branches, so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "../core/types.h"

namespace int4_emu::cpu {

static inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static inline uint32_t as_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t h) { return as_float(static_cast<uint32_t>(h) << 16); }

// Nearest even; a NaN keeps its sign and becomes quiet.
static inline uint16_t float_to_bf16(float f) {
  const uint32_t u = as_bits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>(f != f ? nan : rounded);
}

static inline float f16_to_float(uint16_t h) {
  // Moves exponent and mantissa into place, then rebases the exponent by a multiplication, which also normalises denormals.
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t finite = as_bits(as_float(magnitude) * as_float(0x77800000u));  // 2^112
  const uint32_t special = magnitude | 0x7f800000u;                              // infinity or NaN
  return as_float(sign | ((h & 0x7c00u) == 0x7c00u ? special : finite));
}

// Nearest even; overflow becomes infinity, a NaN becomes the quiet NaN of its sign.
static inline uint16_t float_to_f16(float f) {
  const uint32_t u = as_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 lets the fp32 adder round at the denormal's last place (2^-24).
  const uint32_t denormal = as_bits(as_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = a < 0x38800000u ? denormal : normal;
  return static_cast<uint16_t>(sign | (a >= 0x47800000u ? special : finite));
}

static inline float load_float(const void* p, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  const uint16_t h = static_cast<const uint16_t*>(p)[i];
  return type == DType::f16 ? f16_to_float(h) : bf16_to_float(h);
}

static inline void store_float(void* p, DType type, int64_t i, float f) {
  if (type == DType::f32) {
    static_cast<float*>(p)[i] = f;
  } else {
    static_cast<uint16_t*>(p)[i] = type == DType::f16 ? float_to_f16(f) : float_to_bf16(f);
  }
}

// Runs of elements; the type is tested once, the loops vectorise.
static inline void load_floats(const void* p, DType type, int64_t n, float* out) {
  if (type == DType::f32) {
    std::memcpy(out, p, sizeof(float) * n);
  } else if (type == DType::f16) {
    for (int64_t i = 0; i < n; ++i) out[i] = f16_to_float(static_cast<const uint16_t*>(p)[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(static_cast<const uint16_t*>(p)[i]);
  }
}

static inline void store_floats(const float* in, DType type, int64_t n, void* out) {
  if (type == DType::f32) {
    std::memcpy(out, in, sizeof(float) * n);
  } else if (type == DType::f16) {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = float_to_f16(in[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = float_to_bf16(in[i]);
  }
}

static inline const void* element(const void* p, DType type, int64_t i) {
  return static_cast<const char*>(p) + i * dtype_bytes(type);
}

static inline void* element(void* p, DType type, int64_t i) { return static_cast<char*>(p) + i * dtype_bytes(type); }

}  // namespace int4_emu::cpu
