// Sixteen-lane primitives that simd_math.h, simd_tile.h and simd_bf16.h are written in. Include once, from an AVX-512 file only.
//
// Everything sits in the including file's anonymous namespace, for the reason given in simd_avx2.h.
#pragma once

#include <immintrin.h>

#include "tile.h"

namespace int4_emu::cpu {
namespace {

using Vf = __m512;   // fp32 lanes
using Vi = __m512i;  // int32 lanes
constexpr int64_t kLanes = 16;
constexpr int kRegisters = 32;

inline __attribute__((always_inline)) void keep_in_register([[maybe_unused]] Vf& a) {
#if !defined(INT4_EMU_EMULATED)  // by the tests' emulated_avx512.h
  __asm__("" : "+v"(a));
#endif
}
inline Vf zero() { return _mm512_setzero_ps(); }
inline Vf set1(float a) { return _mm512_set1_ps(a); }
inline Vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vf a) { _mm512_storeu_ps(p, a); }
inline Vf add(Vf a, Vf b) { return _mm512_add_ps(a, b); }
inline Vf sub(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
inline Vf mul(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
inline Vf div(Vf a, Vf b) { return _mm512_div_ps(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline Vf fnma(Vf a, Vf b, Vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// A NaN in the second argument survives, one in the first does not.
inline Vf vmin(Vf a, Vf b) { return _mm512_min_ps(a, b); }
inline Vf vmax(Vf a, Vf b) { return _mm512_max_ps(a, b); }
inline Vf vabs(Vf a) { return _mm512_andnot_ps(set1(-0.f), a); }
inline Vf round_even(Vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vf select_negative(Vf sign, Vf if_negative, Vf otherwise) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), otherwise, if_negative);
}

inline Vi to_int(Vf a) { return _mm512_cvtps_epi32(a); }
inline Vf to_float(Vi a) { return _mm512_cvtepi32_ps(a); }
inline Vi half_floor(Vi a) { return _mm512_srai_epi32(a, 1); }
inline Vi sub(Vi a, Vi b) { return _mm512_sub_epi32(a, b); }
inline Vf power_of_two(Vi n) {  // -126 <= n <= 127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline Vi iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

inline Vf load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline Vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// The numbers at even and at odd places of 2 * kLanes bf16 numbers.
inline Vf even_bf16(const char* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
template <bool kMask>
inline Vf odd_bf16(const char* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Of two vectors of numbers, one behind the other.
inline Vf even_lanes(Vf a, Vf b) {
  return _mm512_permutex2var_ps(a, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), b);
}
inline Vf odd_lanes(Vf a, Vf b) {
  return _mm512_permutex2var_ps(a, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), b);
}

// Nearest, ties to even; NaN stays NaN (quiet). Not vcvtneps2bf16: that flushes subnormal numbers to zero.
inline Vi bf16_bits(Vf a) {
  const Vi bits = _mm512_castps_si512(a);
  const Vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Vi rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const Vi quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, quiet);
}
inline void store_bf16(uint16_t* p, Vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(a)));
}
inline void store_bf16_numbers(uint16_t* p, Vf a, Vf b) {
  store_bf16(p, a);
  store_bf16(p + kLanes, b);
}
inline void store_f16(uint16_t* p, Vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// {sum of a, sum of b, sum of c, sum of d}.
inline __m256 fold(Vf a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
inline __m128 sum4(Vf a, Vf b, Vf c, Vf d) {
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

// Sixteen codes as fp32 integers. `p` need not be aligned; int4 reads 8 bytes, int8 sixteen.
inline Vf codes4(const uint8_t* p, Vi shifts) {
  const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const Vi spread = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_castsi128_si512(words));
  return to_float(_mm512_and_si512(_mm512_srlv_epi32(spread, shifts), _mm512_set1_epi32(15)));
}
inline Vf codes8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
// Where code j of a vector sits in its word: canonical order, or k0,k2,k4,k6,k1,k3,k5,k7.
inline Vi code_shifts(bool even_odd) {
  return _mm512_broadcast_i64x4(even_odd ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28) : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}

// Two vectors to nearest bf16, ties to even, as one word a lane, the even one in the low half. Not for subnormal numbers.
inline __m256i round_pair_bf16(__m256 even, __m256 odd) {
  const __m256i halves = reinterpret_cast<__m256i>(_mm256_cvtne2ps_pbh(odd, even));
  return _mm256_permutexvar_epi16(_mm256_setr_epi16(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), halves);
}
// Whether round_pair_bf16 takes all small integers times these scales.
inline bool rounds_in_pairs(__m256 scale) {
  constexpr int kSubnormal = 0x20;
  return _mm256_fpclass_ps_mask(scale, kSubnormal) == 0;
}

// A 16-entry table of 16-bit values, looked up for 32 codes (16 bytes, low nibble first) at a time.
struct Table16 {
  __m512i entries;  // the table twice: a lookup ignores the fifth bit of its index
};
inline Table16 make_table(const uint16_t* entries) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries)))};
}
inline void lookup32(const Table16& table, const uint8_t* codes, uint16_t* out) {
  const Vi bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // Low 16 bits: low nibble in bits 0-3; high 16 bits: the high nibble. Bits above the fifth are ignored by the lookup.
  const Vi index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table.entries));
}

}  // namespace
}  // namespace int4_emu::cpu
