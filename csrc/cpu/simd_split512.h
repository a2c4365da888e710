// Rows of x as sums of bf16 rows, and what the products on exact codes share. AVX-512 only; included after simd_bf16.h.
//
// A bf16 number has 8 significant bits, fp16 has 11 and fp32 24: cut off instead of rounded, two or three of them hold x exactly, so that
// products of bf16 serve every type of x without an error of their own.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int kMaxSplits = 3;
inline int64_t splits_of(DType x) { return x == DType::bf16 ? 1 : x == DType::f16 ? 2 : 3; }

// Element 0..count - 1 <= kLanes of an array of D from element i on, zero beyond; nothing beyond is read.
template <DType D>
inline Vf load_first(const void* p, int64_t i, int64_t count) {
  if (count >= kLanes) return load_as<D>(p, i);
  if constexpr (D == DType::f32) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), static_cast<const float*>(p) + i);
  } else {
    alignas(32) uint16_t buffer[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffer),
                       _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), static_cast<const uint16_t*>(p) + i));
    return load_as<D>(buffer, 0);
  }
}
inline Vf load_first(const void* p, DType dtype, int64_t i, int64_t count) {
  if (dtype == DType::f32) return load_first<DType::f32>(p, i, count);
  if (dtype == DType::f16) return load_first<DType::f16>(p, i, count);
  return load_first<DType::bf16>(p, i, count);
}
inline Vi load_first_bytes(const uint8_t* p, int64_t count) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), p));
}

// Columns first..first + 32 of row i of x (zeros beyond k) as bf16, part s at out + s * step.
template <DType D>
inline void split_columns(const PackXArgs& a, const void* row, int64_t i, int64_t first, uint16_t* out, int64_t step) {
  if (D == DType::bf16 && a.perm == nullptr && a.row_scale == nullptr && first + 32 <= a.k) {
    _mm512_storeu_si512(out, _mm512_loadu_si512(static_cast<const uint16_t*>(row) + first));
    return;
  }
  const Vi high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t j = 0; j < 32; j += kLanes) {
    Vf v = first + j < a.k ? x_vector<D>(a, row, i, first + j) : zero();
    for (int64_t s = 0; s < splits_of(D); ++s) {
      const Vi bits = _mm512_castps_si512(v);
      const Vi part = _mm512_srli_epi32(bits, 16), quiet = _mm512_or_si512(part, _mm512_set1_epi32(0x40));
      const Vi kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), part, quiet);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + s * step + j), _mm512_cvtepi32_epi16(kept));
      // What is left of an infinity or a NaN is nothing: the first part alone has it.
      const Vf rest = sub(v, _mm512_castsi512_ps(_mm512_and_si512(bits, high_half)));
      v = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q), rest, zero());
    }
  }
}
inline void split_columns(const PackXArgs& a, int64_t i, int64_t first, uint16_t* out, int64_t step) {
  if (a.dtype == DType::bf16) split_columns<DType::bf16>(a, x_row(a, i, 2), i, first, out, step);
  else if (a.dtype == DType::f16) split_columns<DType::f16>(a, x_row(a, i, 2), i, first, out, step);
  else split_columns<DType::f32>(a, x_row(a, i, 4), i, first, out, step);
}

// The bf16 numbers q or q - z for the low five bits of a lookup's index: 0..15 and, where a zero point was subtracted, -16..-1; else q - 8.
inline Vi code_table(bool subtracted) {
  alignas(64) uint16_t entries[32];
  for (int64_t i = 0; i < 32; i += kLanes) {
    const Vf code = to_float(iota());
    store_bf16(entries + i, subtracted ? sub(code, set1(static_cast<float>(i))) : sub(code, set1(8.f)));
  }
  return _mm512_load_si512(entries);
}

// A word of eight codes a lane to lookup indices, codes i and i + 4 of the eight in the halves of lanes of index[i]. `zeros` has the zero
// point in each byte.
template <bool kZeros>
inline void code_indices(Vi words, Vi zeros, Vi index[4]) {
  if constexpr (kZeros) {
    const Vi nibbles = _mm512_set1_epi32(0x0f0f0f0f);
    index[0] = _mm512_sub_epi8(_mm512_and_si512(words, nibbles), zeros);
    index[1] = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles), zeros);
    index[2] = _mm512_srli_epi32(index[0], 8);
    index[3] = _mm512_srli_epi32(index[1], 8);
  } else {
    index[0] = words;
    index[1] = _mm512_srli_epi32(words, 4);
    index[2] = _mm512_srli_epi32(words, 8);
    index[3] = _mm512_srli_epi32(words, 12);
  }
}

inline Vi replicate_bytes(Vi low_bytes) {
  const Vi pairs = _mm512_or_si512(low_bytes, _mm512_slli_epi32(low_bytes, 8));
  return _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 16));
}

// Groups of a whole number of runs of `run` columns, or one group for all of them.
inline bool groups_are_whole(const Weight& w, int64_t run) { return w.group_size % run == 0 || w.group_size >= w.k; }

inline const char* scales_of(const Weight& w, int64_t expert, int64_t n) {
  return static_cast<const char*>(w.scales) + (expert * w.n + n) * w.groups * (w.scale_dtype == DType::f32 ? 4 : 2);
}
inline const uint8_t* zeros_of(const Weight& w, int64_t expert, int64_t n) { return w.zeros + (expert * w.n + n) * w.groups; }

}  // namespace
}  // namespace int4_emu::cpu
