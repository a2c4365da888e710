// Eight-lane primitives that simd_math.h and simd_tile.h are written in. Include once, from tile_avx2.cpp only.
//
// Everything sits in the including file's anonymous namespace: a shared inline function would become one weak symbol for the
// whole library, and the copy compiled with this file's flags might then run on a CPU without them.
#pragma once

#include <immintrin.h>

#include "tile.h"

namespace int4_emu::cpu {
namespace {

using Vf = __m256;   // fp32 lanes
using Vi = __m256i;  // int32 lanes
constexpr int64_t kLanes = 8;
constexpr int kRegisters = 16;

inline __attribute__((always_inline)) void keep_in_register(Vf& a) { __asm__("" : "+x"(a)); }
inline Vf zero() { return _mm256_setzero_ps(); }
inline Vf set1(float a) { return _mm256_set1_ps(a); }
inline Vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vf a) { _mm256_storeu_ps(p, a); }
inline Vf add(Vf a, Vf b) { return _mm256_add_ps(a, b); }
inline Vf sub(Vf a, Vf b) { return _mm256_sub_ps(a, b); }
inline Vf mul(Vf a, Vf b) { return _mm256_mul_ps(a, b); }
inline Vf div(Vf a, Vf b) { return _mm256_div_ps(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
inline Vf fnma(Vf a, Vf b, Vf c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
// A NaN in the second argument survives, one in the first does not.
inline Vf vmin(Vf a, Vf b) { return _mm256_min_ps(a, b); }
inline Vf vmax(Vf a, Vf b) { return _mm256_max_ps(a, b); }
inline Vf vabs(Vf a) { return _mm256_andnot_ps(set1(-0.f), a); }
inline Vf round_even(Vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vf select_negative(Vf sign, Vf if_negative, Vf otherwise) { return _mm256_blendv_ps(otherwise, if_negative, sign); }

inline Vi to_int(Vf a) { return _mm256_cvtps_epi32(a); }
inline Vf to_float(Vi a) { return _mm256_cvtepi32_ps(a); }
inline Vi half_floor(Vi a) { return _mm256_srai_epi32(a, 1); }
inline Vi sub(Vi a, Vi b) { return _mm256_sub_epi32(a, b); }
inline Vf power_of_two(Vi n) {  // -126 <= n <= 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Vi iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

inline Vf load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline Vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// The numbers at even and at odd places of 2 * kLanes bf16 numbers; kMask: whether there is a register for a mask, which else takes two shifts.
inline Vf even_bf16(const char* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16)); }
template <bool kMask>
inline Vf odd_bf16(const char* p) {
  const Vi pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (kMask) return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pairs, 16), 16));
}
// Of two vectors of numbers, one behind the other.
inline Vf in_order(Vf pairs) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0xd8)); }
inline Vf even_lanes(Vf a, Vf b) { return in_order(_mm256_shuffle_ps(a, b, 0x88)); }
inline Vf odd_lanes(Vf a, Vf b) { return in_order(_mm256_shuffle_ps(a, b, 0xdd)); }

// fp32 to bf16 bits in the low half of each lane: nearest, ties to even; NaN stays NaN (quiet).
inline Vi bf16_bits(Vf a) {
  const Vi bits = _mm256_castps_si256(a);
  const Vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Vi rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const Vi quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
inline void store_bf16(uint16_t* p, Vf a) {
  const Vi bits = bf16_bits(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
// Two vectors, one after the other, neither with a NaN.
inline void store_bf16_numbers(uint16_t* p, Vf a, Vf b) {
  const auto rounded = [](Vf v) {
    const Vi bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  };
  const Vi pairs = _mm256_packus_epi32(rounded(a), rounded(b));  // 64 bits of a, b, a, b
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(pairs, 0xd8));
}
inline void store_f16(uint16_t* p, Vf a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// {sum of a, sum of b, sum of c, sum of d}.
inline __m128 sum4(Vf a, Vf b, Vf c, Vf d) {
  const Vf t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

// Eight codes as fp32 integers. `p` need not be aligned; int4 reads 4 bytes, int8 eight.
inline Vf codes4(const uint8_t* p, Vi shifts) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return to_float(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts), _mm256_set1_epi32(15)));
}
inline Vf codes8(const uint8_t* p) { return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
// Where code j of a vector sits in its word: canonical order, or k0,k2,k4,k6,k1,k3,k5,k7.
inline Vi code_shifts(bool even_odd) {
  return even_odd ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28) : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
}

// Two vectors to nearest bf16, ties to even, as one word a lane, the even one in the low half. Not for NaN.
inline __m256i round_pair_bf16(__m256 even, __m256 odd) {
  // Both at once: the upper halves, and what is lost below them carries one where it is more than half, or half of an odd one's unit.
  const __m256i a = _mm256_castps_si256(even), b = _mm256_castps_si256(odd);
  const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa), lost = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  const __m256i nearly_half = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi16(1)), _mm256_set1_epi16(0x7ffe));
  return _mm256_add_epi16(high, _mm256_srli_epi16(_mm256_avg_epu16(lost, nearly_half), 15));
}
// Whether round_pair_bf16 takes all small integers times these scales: only infinities and NaN make NaN.
inline bool rounds_in_pairs(__m256 scale) {
  const __m256 nothing = _mm256_sub_ps(scale, scale);
  return _mm256_movemask_ps(_mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q)) == 0;
}

// A 16-entry table of 16-bit values, looked up for 32 codes (16 bytes, low nibble first) at a time.
struct Table16 {
  __m256i low, high;  // the low and the high byte of each entry, in both halves of the register
};
inline Table16 make_table(const uint16_t* entries) {
  const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries))),
                                            _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries + 8)), 1);
  // Eight low bytes, then eight high ones, of each half.
  const __m256i bytes = _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
  return {_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xdd)};
}
inline void lookup32(const Table16& table, const uint8_t* codes, uint16_t* out) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // The bytes of codes 0-7 and 16-23 in one half, of 8-15 and 24-31 in the other: the results then lie in order.
  const __m256i bytes = _mm256_shuffle_epi8(all, _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 8, -1, 9, -1, 10, -1, 11, -1, 4, -1, 5, -1, 6, -1,
                                                                  7, -1, 12, -1, 13, -1, 14, -1, 15, -1));
  const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)), _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(table.low, nibbles), high = _mm256_shuffle_epi8(table.high, nibbles);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi8(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_unpackhi_epi8(low, high));
}

}  // namespace
}  // namespace int4_emu::cpu
