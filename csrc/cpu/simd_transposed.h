// Matrices that a checkpoint stores with the input columns outermost (GPTQ, AWQ, Quark) straight to rows of weights, and those in rows
// where act-order gives neighbouring columns different groups: their words are turned first.
//
// Eight neighbouring output rows are the lanes: there one load serves their scales or zero points, and no code moves before it has
// its value. Then 8 x 8 words, each two columns of a 16-bit type or one of fp32, are transposed into runs of the rows. Always 256 bits
// wide: wider sets are held up by memory here. Included after simd_math.h.
#pragma once

#include "simd_memory.h"

namespace int4_emu::cpu {
namespace {

constexpr int64_t kRowLanes = 8;
// A piece of the stored matrix that stays in cache while its rows are written, 32 KiB: int4 [columns][16] words along O, or
// [columns / 8][128] along I. Its width is also the run of each row that is written at once.
constexpr int64_t kPieceRows = 128;
template <int kBits>
constexpr int64_t kPieceColumns = kBits == 4 ? 512 : 256;
template <int kBits>
constexpr int64_t kColumnBytes = kPieceRows * kBits / 8;

// bits of rows[i] lane j <-> bits of rows[j] lane i.
inline void transpose8(__m256i rows[8]) {
  __m256i a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

// fp32 to bf16 in the high half of each lane, to nearest, ties to even; the low half is left over.
inline __m256i bf16_high(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}

// Two columns as one word a lane, the even one in the low half. Without kAny only what round_pair_bf16 takes.
template <DType D, bool kAny>
inline __m256i column_pair(__m256 even, __m256 odd) {
  if constexpr (D == DType::bf16 && !kAny) {
    return round_pair_bf16(even, odd);
  } else if constexpr (D == DType::bf16) {
    return _mm256_blend_epi16(_mm256_srli_epi32(bf16_high(even), 16), bf16_high(odd), 0xaa);
  } else {
    const auto half = [](__m256 a) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); };
    return _mm256_or_si256(half(even), _mm256_slli_epi32(half(odd), 16));
  }
}

// Codes and zero points as fp32 are kCodeBase more than they are: then a mask and the exponent's bits convert a code, and their difference is
// exact.
constexpr float kCodeBase = 8388608.f;  // 2^23
inline __m256 code_numbers(__m256i codes) { return _mm256_castsi256_ps(_mm256_or_si256(codes, _mm256_set1_epi32(0x4b000000))); }

// Where the code of row r of eight sits in a word packed along O.
inline __m256i row_shifts(bool interleaved) {
  return interleaved ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28) : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
}

inline __m256i broadcast_word(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// Scales, and zero points above kCodeBase, of rows row..row + 8 in one group, as fp32; `row` is a multiple of 8.
inline __m256 load_scales8(const DequantizeTransposedArgs& a, int64_t group, int64_t row) {
  const int64_t i = group * a.scale_step + row;
  if (a.scale_dtype == DType::f32) return _mm256_loadu_ps(static_cast<const float*>(a.scales) + i);
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(a.scales) + i));
  if (a.scale_dtype == DType::f16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

template <int kBits>
inline __m256 load_zeros8(const DequantizeTransposedArgs& a, int64_t group, int64_t row) {
  if (a.zeros == nullptr) return _mm256_set1_ps(kCodeBase + (kBits == 4 ? 8.f : 128.f));
  const uint8_t* zeros = a.zeros + group * a.zero_step + row * kBits / 8;
  if constexpr (kBits == 8) {
    const __m128i words = _mm_add_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros)), _mm_set1_epi32(static_cast<int>(a.zero_word_add)));
    const __m128i codes = _mm_add_epi8(_mm_xor_si128(words, _mm_set1_epi32(static_cast<int>(a.flip))), _mm_set1_epi8(static_cast<char>(a.zero_code_add)));
    return code_numbers(_mm256_cvtepu8_epi32(codes));
  }
  const __m256i word_add = _mm256_set1_epi32(static_cast<int>(a.zero_word_add));
  const __m256i word = _mm256_add_epi32(broadcast_word(zeros), word_add);
  const __m256i code = _mm256_srlv_epi32(_mm256_xor_si256(word, _mm256_set1_epi32(static_cast<int>(a.flip))), row_shifts(a.interleaved));
  return code_numbers(_mm256_and_si256(_mm256_add_epi32(code, _mm256_set1_epi32(a.zero_code_add)), _mm256_set1_epi32(15)));
}

// Zero points and scales of a strip of eight rows: those of one group, or those of all, one after the other, and the group of each column.
struct StripGroups {
  const float* values;  // [groups][zero points 8, scales 8]
  const int32_t* group_of;
};

// Codes of eight rows in one column of a piece, above kCodeBase; `piece` points at the strip.
template <int kBits, bool kAlongOut>
inline __m256 column_codes(const uint8_t* piece, int64_t column, __m256i shifts) {
  constexpr int64_t kWordColumns = 32 / kBits;
  if constexpr (kAlongOut && kBits == 8) {
    return code_numbers(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(piece + column * kColumnBytes<kBits>))));
  } else if constexpr (kAlongOut) {
    const __m256i code = _mm256_srlv_epi32(broadcast_word(piece + column * kColumnBytes<kBits>), shifts);
    return code_numbers(_mm256_and_si256(code, _mm256_set1_epi32(15)));
  } else {
    const int i = static_cast<int>(column % kWordColumns);
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece + (column - i) * kColumnBytes<kBits>));
    if constexpr (kBits == 8) {
      // Byte i of each word, zeros above it.
      const __m256i byte = _mm256_setr_epi32(i - 256, i - 252, i - 248, i - 244, i - 256, i - 252, i - 248, i - 244);
      return code_numbers(_mm256_shuffle_epi8(words, byte));
    }
    return code_numbers(_mm256_and_si256(_mm256_srli_epi32(words, i * kBits), _mm256_set1_epi32(15)));
  }
}

// Columns of eight rows, a multiple of 16 of them, which share their group or name it. `piece` points at the strip's words of the first column.
template <DType D, int kBits, bool kAlongOut, bool kAny, bool kIndexed>
inline void decode_strip(const uint8_t* piece, __m256i shifts, const StripGroups& groups, int64_t k, LinesAhead& ahead, char* out,
                         int64_t row_bytes) {
  // A pass over eight words of each row: 16 columns of a 16-bit type, or 8 of fp32.
  constexpr int kPerWord = D == DType::f32 ? 1 : 2, kColumns = 8 * kPerWord;
  const __m256 zero_point = _mm256_load_ps(groups.values), scale = _mm256_load_ps(groups.values + 8);
  for (int64_t k0 = 0; k0 < k; k0 += kColumns, out += 32) {
    // As many lines as a pass of 16 columns uses up.
    ahead.fetch();
    if constexpr (kBits == 8) ahead.fetch();
    __m256i rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      __m256 value[kPerWord];
#pragma GCC unroll 2
      for (int j = 0; j < kPerWord; ++j) {
        // Its place in a word must be a constant: k0 is a multiple of a word's columns.
        const int column = i * kPerWord + j;
        const __m256 code = column_codes<kBits, kAlongOut>(piece + k0 * kColumnBytes<kBits>, column, shifts);
        if constexpr (kIndexed) {
          const float* group = groups.values + int64_t{groups.group_of[k0 + column]} * 16;
          value[j] = _mm256_mul_ps(_mm256_sub_ps(code, _mm256_load_ps(group)), _mm256_load_ps(group + 8));
        } else {
          value[j] = _mm256_mul_ps(_mm256_sub_ps(code, zero_point), scale);
        }
      }
      if constexpr (D == DType::f32) rows[i] = _mm256_castps_si256(value[0]);
      else rows[i] = column_pair<D, kAny>(value[0], value[1]);
    }
    transpose8(rows);
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * row_bytes), rows[r]);
  }
}

template <DType D, int kBits, bool kAlongOut, bool kIndexed>
inline void decode_strip(const uint8_t* piece, __m256i shifts, const StripGroups& groups, bool any, int64_t k, LinesAhead& ahead, char* out,
                         int64_t row_bytes) {
  if (any) decode_strip<D, kBits, kAlongOut, true, kIndexed>(piece, shifts, groups, k, ahead, out, row_bytes);
  else decode_strip<D, kBits, kAlongOut, false, kIndexed>(piece, shifts, groups, k, ahead, out, row_bytes);
}

// Rows of words, `bytes` of each, and all words flipped.
inline void copy_piece(const uint8_t* from, int64_t step, int64_t stored_rows, int64_t bytes, int64_t piece_step, uint32_t flip, uint8_t* piece) {
  const __m256i flips = _mm256_set1_epi32(static_cast<int>(flip));
  for (int64_t i = 0; i < stored_rows; ++i, from += step, piece += piece_step) {
    int64_t j = 0;
    for (; j + 32 <= bytes; j += 32) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(piece + j), _mm256_xor_si256(words, flips));
    }
    for (; j < bytes; j += 4) {
      uint32_t word;
      __builtin_memcpy(&word, from + j, 4);
      word ^= flip;
      __builtin_memcpy(piece + j, &word, 4);
    }
  }
}

// As above from rows of words: `words` of each of `rows` rows become as many rows of words, piece_step bytes apart. rows is a multiple of 8.
inline void turn_piece(const uint8_t* from, int64_t step, int64_t words, int64_t rows, int64_t piece_step, uint8_t* piece) {
  for (int64_t r = 0; r < rows; r += 8, from += 8 * step, piece += 32) {
    int64_t w = 0;
    for (; w + 8 <= words; w += 8) {
      __m256i square[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) square[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * step + w * 4));
      transpose8(square);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(piece + (w + i) * piece_step), square[i]);
    }
    for (; w < words; ++w) {
      for (int64_t i = 0; i < 8; ++i) __builtin_memcpy(piece + w * piece_step + i * 4, from + i * step + w * 4, 4);
    }
  }
}

// Zero points, then scales, of rows row..row + 8 in one group to `to`; whether their weights may be such as round_pair_bf16 does not take.
template <int kBits>
inline bool load_group(const DequantizeTransposedArgs& a, int64_t group, int64_t row, float* to) {
  const __m256 scale = load_scales8(a, group, row);
  _mm256_store_ps(to, load_zeros8<kBits>(a, group, row));
  _mm256_store_ps(to + 8, scale);
  return !rounds_in_pairs(scale);
}

// Groups of the strips of a block of rows whose columns name their groups, kept from one piece to the next where they are few.
struct IndexedGroups {
  static constexpr int64_t kStrips = kPieceRows / kRowLanes, kValues = 2 * kMostIndexedGroups * 16;
  alignas(64) float values[kValues];
  bool any[kStrips];

  template <int kBits>
  StripGroups load(const DequantizeTransposedArgs& a, int64_t strip, int64_t row, bool first_piece) {
    const bool kept = a.groups * 16 * kStrips <= kValues;
    float* const of_strip = values + (kept ? strip * a.groups * 16 : 0);
    if (first_piece || !kept) {
      any[strip] = false;
      for (int64_t g = 0; g < a.groups; ++g) any[strip] |= load_group<kBits>(a, g, row, of_strip + g * 16);
    }
    return {of_strip, a.group_of};
  }
};

// Columns k0..k1 of rows row..row + 8, from `piece`, to `out`, whose rows lie row_bytes apart.
template <DType D, int kBits, bool kAlongOut>
inline void decode_strip_groups(const DequantizeTransposedArgs& a, const uint8_t* piece, __m256i shifts, int64_t row, int64_t k0, int64_t k1,
                                LinesAhead& ahead, char* out, int64_t row_bytes) {
  alignas(64) float values[16];
  for (int64_t p = k0; p < k1;) {
    const int64_t group = p / a.group_size, group_end = (group + 1) * a.group_size, end = group_end < k1 ? group_end : k1;
    const bool any = load_group<kBits>(a, group, row, values);
    decode_strip<D, kBits, kAlongOut, false>(piece + (p - k0) * kColumnBytes<kBits>, shifts, {values, nullptr}, any, end - p, ahead,
                                             out + (p - k0) * kBytes<D>, row_bytes);
    p = end;
  }
}

// Pieces of rows and columns; in each, strips of eight rows, and in a strip the groups that it crosses.
template <DType D, int kBits, bool kAlongOut>
void dequantize_pieces(const DequantizeTransposedArgs& a) {
  // Rows of weights collect here and leave one after the other: in the output they may lie a power of two apart, which would have them
  // fight for one cache set. Here they lie a line more than that.
  constexpr int64_t kColumns = kPieceColumns<kBits>, kBufferRow = kColumns * kBytes<D> + 64;
  alignas(64) uint8_t piece[kColumns * kColumnBytes<kBits>];
  alignas(64) char buffer[kRowLanes * kBufferRow];
  IndexedGroups indexed;
  constexpr int64_t kWordColumns = kAlongOut ? 1 : 32 / kBits;
  const auto row_offset = [](int64_t rows) { return rows * kBits / 8 * kWordColumns; };
  const __m256i shifts = row_shifts(a.interleaved);
  const int64_t out_row = a.ld * kBytes<D>;
  for (int64_t o0 = 0; o0 < a.n; o0 += kPieceRows) {
    const int64_t rows = a.n - o0 < kPieceRows ? a.n - o0 : kPieceRows;
    for (int64_t k0 = 0; k0 < a.k; k0 += kColumns) {
      const int64_t k1 = k0 + kColumns < a.k ? k0 + kColumns : a.k;
      const int64_t words = (k1 - k0) / kWordColumns;
      if (!kAlongOut && a.in_rows) {
        turn_piece(a.codes + o0 * a.code_step + k0 * kBits / 8, a.code_step, words, rows, row_offset(kPieceRows), piece);
      } else {
        const uint8_t* from = a.codes + k0 / kWordColumns * a.code_step + row_offset(o0);
        copy_piece(from, a.code_step, words, row_offset(rows), row_offset(kPieceRows), a.flip, piece);
      }
      // While it is decoded the next one is fetched, of these rows or of those after them: no hardware foresees rows of a line or two.
      const bool last = k1 == a.k;
      const int64_t k = last ? 0 : k1, row = last ? o0 + rows : o0;
      LinesAhead ahead = a.in_rows ? LinesAhead(a.codes + row * a.code_step + k * kBits / 8, kColumns * kBits / 8, a.code_step)
                                   : LinesAhead(a.codes + k / kWordColumns * a.code_step + row_offset(row), row_offset(rows), a.code_step);
      for (int64_t o = 0; o < rows; o += kRowLanes) {
        if (a.group_of != nullptr) {
          StripGroups groups = indexed.load<kBits>(a, o / kRowLanes, o0 + o, k0 == 0);
          groups.group_of += k0;
          decode_strip<D, kBits, kAlongOut, true>(piece + row_offset(o), shifts, groups, indexed.any[o / kRowLanes], k1 - k0, ahead, buffer,
                                                  kBufferRow);
        } else {
          decode_strip_groups<D, kBits, kAlongOut>(a, piece + row_offset(o), shifts, o0 + o, k0, k1, ahead, buffer, kBufferRow);
        }
        char* out = static_cast<char*>(a.out) + (o0 + o) * out_row + k0 * kBytes<D>;
        for (int64_t r = 0; r < kRowLanes; ++r) {
          const char* run = buffer + r * kBufferRow;
          if (a.stream) copy_run<true>(out + r * out_row, run, (k1 - k0) * kBytes<D>);
          else copy_run<false>(out + r * out_row, run, (k1 - k0) * kBytes<D>);
        }
      }
    }
  }
  // Streamed stores are not ordered with those that tell another thread that this one is done.
  if (a.stream) _mm_sfence();
}

template <DType D>
void dequantize_transposed_to(const DequantizeTransposedArgs& a) {
  if (a.bits == 4) {
    if (a.packed_along_out) dequantize_pieces<D, 4, true>(a);
    else dequantize_pieces<D, 4, false>(a);
  } else {
    if (a.packed_along_out) dequantize_pieces<D, 8, true>(a);
    else dequantize_pieces<D, 8, false>(a);
  }
}

void dequantize_transposed(const DequantizeTransposedArgs& a) {
  if (a.out_dtype == DType::f32) dequantize_transposed_to<DType::f32>(a);
  else if (a.out_dtype == DType::f16) dequantize_transposed_to<DType::f16>(a);
  else dequantize_transposed_to<DType::bf16>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
