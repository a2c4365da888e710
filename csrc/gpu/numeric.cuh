// Own 16-bit storage types: 16 bits and two conversions, the same on every vendor and bit for bit the CPU's.
#pragma once

#include <type_traits>

#include "../core/types.h"
#include "compat.cuh"

namespace int4_emu::gpu {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

__device__ inline float as_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline uint32_t as_bits(float f) { return __float_as_uint(f); }

__device__ inline float to_float(float f) { return f; }
__device__ inline float to_float(Bf16 h) { return as_float(static_cast<uint32_t>(h.bits) << 16); }
__device__ inline float to_float(Fp16 h) {
  // Moves exponent and mantissa into place, then rebases the exponent by a multiplication, which also normalises denormals.
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t finite = as_bits(as_float(magnitude) * as_float(0x77800000u));  // 2^112
  const uint32_t special = magnitude | 0x7f800000u;                              // infinity or NaN
  return as_float(sign | ((h.bits & 0x7c00u) == 0x7c00u ? special : finite));
}

// Nearest even; a NaN stays a NaN, overflow becomes infinity.
__device__ inline void from_float(float f, float& out) { out = f; }
__device__ inline void from_float(float f, Bf16& out) {
  const uint32_t u = as_bits(f);
  out.bits = static_cast<uint16_t>(f != f ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
__device__ inline void from_float(float f, Fp16& out) {
  const uint32_t u = as_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 lets the fp32 adder round at the denormal's last place (2^-24).
  const uint32_t denormal = as_bits(as_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  out.bits = static_cast<uint16_t>(sign | (a >= 0x47800000u ? special : (a < 0x38800000u ? denormal : normal)));
}

template <class T>
__device__ inline T rounded(float f) {
  T out;
  from_float(f, out);
  return out;
}

__device__ inline float load_float(const void* p, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  return type == DType::bf16 ? to_float(static_cast<const Bf16*>(p)[i]) : to_float(static_cast<const Fp16*>(p)[i]);
}

__device__ inline void store_float(void* p, DType type, int64_t i, float f) {
  if (type == DType::f32) {
    static_cast<float*>(p)[i] = f;
  } else if (type == DType::bf16) {
    static_cast<Bf16*>(p)[i] = rounded<Bf16>(f);
  } else {
    static_cast<Fp16*>(p)[i] = rounded<Fp16>(f);
  }
}

// 16 bytes at a time.
struct alignas(16) Vec4 {
  uint32_t w[4];
};

__host__ __device__ inline bool is_aligned(const void* p, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(p) & static_cast<uintptr_t>(bytes - 1)) == 0;
}

template <class T>
__device__ inline uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if (std::is_same<T, Bf16>::value ? hardware_pack_bf16(low, high, &pair) : hardware_pack_fp16(low, high, &pair)) return pair;
  return static_cast<uint32_t>(rounded<T>(low).bits) | static_cast<uint32_t>(rounded<T>(high).bits) << 16;
}

// Eight floats to eight elements, in 16-byte stores; `to` must be 16-byte aligned.
__device__ inline void store_eight(float* to, const float* f) {
  store_16_bytes(to, as_bits(f[0]), as_bits(f[1]), as_bits(f[2]), as_bits(f[3]));
  store_16_bytes(to + 4, as_bits(f[4]), as_bits(f[5]), as_bits(f[6]), as_bits(f[7]));
}
template <class T>
__device__ inline void store_eight(T* to, const float* f) {
  store_16_bytes(to, pack_pair<T>(f[0], f[1]), pack_pair<T>(f[2], f[3]), pack_pair<T>(f[4], f[5]), pack_pair<T>(f[6], f[7]));
}

// The same at p[i..i + 8) of a type known at run time.
__device__ inline void store_eight(void* p, DType type, int64_t i, const float* f) {
  if (type == DType::f32) return store_eight(static_cast<float*>(p) + i, f);
  if (type == DType::bf16) return store_eight(static_cast<Bf16*>(p) + i, f);
  store_eight(static_cast<Fp16*>(p) + i, f);
}
// Eight 16-bit elements of a type known at run time.
__device__ inline void widen_eight(const Vec4& v, DType type, float* f) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint16_t bits = static_cast<uint16_t>(v.w[j / 2] >> (j % 2 * 16));
    f[j] = type == DType::bf16 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
  }
}

__device__ inline uint32_t low_pair(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
__device__ inline uint32_t high_pair(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }

// (code - zero) * factor of the codes in bits 0..3 and 16..19, in T's own arithmetic: exact but for one rounding. `minus_zero` and
// `factor` are pairs. Only where kPairMath.
template <class T>
__device__ inline uint32_t scale_code_pair(uint32_t codes, uint32_t minus_zero, uint32_t factor) {
  // The number in whose last bits a code fits, its negative, and one.
  constexpr bool kBf16 = std::is_same<T, Bf16>::value;
  constexpr uint32_t kMagic = kBf16 ? 0x43004300u : 0x64006400u, kOne = kBf16 ? 0x3f803f80u : 0x3c003c00u;
  const uint32_t code = hardware_pair_fma(kBf16, hardware_merge(codes, 0x000f000fu, kMagic), kOne, kMagic | 0x80008000u);
  return hardware_pair_fma(kBf16, hardware_pair_fma(kBf16, code, kOne, minus_zero), factor, 0x80008000u);  // + (-0)
}

}  // namespace int4_emu::gpu
