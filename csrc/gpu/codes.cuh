// Reads codes, scales and zero points of a checkpoint matrix, whatever its format (core/layout.h).
#pragma once

#include "../core/layout.h"
#include "../core/problem.h"
#include "numeric.cuh"

namespace int4_emu::gpu {

// AWQ's slot order to plain order.
__device__ inline uint32_t uninterleave(uint32_t word) {
  uint32_t out = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) out |= ((word >> (4 * (j / 2 + j % 2 * 4))) & 0xfu) << (4 * j);
  return out;
}

// A PackedMatrix with what follows from its format, passed to kernels by value.
struct CodeReader {
  PackedMatrix m;
  FormatTraits traits;
  uint32_t flip;        // xor that turns two's complement codes of a word into unsigned ones
  int64_t source_row;   // bytes between rows of the stored qweight, whichever axis they run along
  int64_t source_size;  // bytes of one stored matrix
  bool plain_bytes;     // one code a byte, nothing packed in words
  bool byte_zeros;      // likewise for the zero points
  bool words_aligned;   // rows of row-major words may be read 4 bytes at a time
  bool vectors_aligned; // rows of the stored qweight may be read 16 bytes at a time
  int kw_shift;         // log2 of the codes in a word

  // Where the lane-th column of a word of eight 4-bit codes stands; bit position of that of any word.
  __device__ int slot(int lane) const { return traits.interleaved ? lane / 2 + lane % 2 * 4 : lane; }
  __device__ int shift(int lane) const { return m.bits * (m.bits == 4 ? slot(lane) : lane); }

  __device__ uint8_t code(int64_t b, int64_t o, int64_t k) const {
    const uint8_t* base = static_cast<const uint8_t*>(m.qweight) + b * source_size;
    const int lanes = (1 << kw_shift) - 1;
    const uint32_t mask = m.bits == 4 ? 0xfu : 0xffu;
    if (plain_bytes) {
      return static_cast<uint8_t>((traits.transposed ? base[k * source_row + o] : base[o * source_row + k]) ^ (flip & 0xffu));
    }
    if (!traits.transposed) {
      // Words along I, addressed by byte: a canonical row need not be a whole number of words.
      const int s = shift(static_cast<int>(k & lanes));
      const uint8_t byte = base[o * source_row + (k >> kw_shift) * 4 + s / 8];
      return static_cast<uint8_t>(((byte ^ (flip & 0xffu)) >> (s % 8)) & mask);
    }
    const int64_t along = traits.packed_along_out ? o : k;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(base + (traits.packed_along_out ? k : k >> kw_shift) * source_row);
    const uint32_t word = words[traits.packed_along_out ? o >> kw_shift : o] ^ flip;
    return static_cast<uint8_t>((word >> shift(static_cast<int>(along & lanes))) & mask);
  }

  // How eight 4-bit codes along k lie in memory.
  enum class Words { rows, columns_along_in, columns_along_out };

  // Codes k..k+8 of row o as nibbles of one word; 4-bit words only, k a multiple of 8, all eight inside the matrix.
  template <Words kWords>
  __device__ uint32_t nibbles(int64_t b, int64_t o, int64_t k) const {
    const uint8_t* base = static_cast<const uint8_t*>(m.qweight) + b * source_size;
    if constexpr (kWords == Words::columns_along_out) {
      const uint8_t* column = base + k * source_row + (o >> 3) * 4;
      const int s = shift(static_cast<int>(o & 7));
      uint32_t words[8], out = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) words[j] = *reinterpret_cast<const uint32_t*>(column + j * source_row);
#pragma unroll
      for (int j = 0; j < 8; ++j) out |= (((words[j] ^ flip) >> s) & 0xfu) << (4 * j);
      return out;
    }
    if constexpr (kWords == Words::columns_along_in) {
      return *reinterpret_cast<const uint32_t*>(base + (k >> 3) * source_row + o * 4) ^ flip;
    }
    const uint8_t* at = base + o * source_row + (k >> 1);
    uint32_t word;
    if (words_aligned) {
      word = *reinterpret_cast<const uint32_t*>(at);
    } else {
      word = at[0] | static_cast<uint32_t>(at[1]) << 8 | static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
    }
    word ^= flip;
    if (!traits.interleaved) return word;
    return uninterleave(word);
  }

  __device__ uint32_t eight_nibbles(int64_t b, int64_t o, int64_t k) const {
    if (!traits.transposed) return nibbles<Words::rows>(b, o, k);
    return traits.packed_along_out ? nibbles<Words::columns_along_out>(b, o, k) : nibbles<Words::columns_along_in>(b, o, k);
  }

  // `count` <= 8 codes k..k+count of row o, k a multiple of 8; the rest become zero.
  __device__ void eight_codes(int64_t b, int64_t o, int64_t k, int count, uint8_t* out) const {
    if (m.bits == 4 && count == 8 && !plain_bytes) {
      const uint32_t word = eight_nibbles(b, o, k);
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = (word >> (4 * j)) & 0xfu;
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = j < count ? code(b, o, k + j) : 0;
  }

  __device__ int64_t scale_index(int64_t b, int64_t o, int64_t c) const {
    return traits.transposed ? (b * m.groups + c) * m.out_features + o : (b * m.out_features + o) * m.groups + c;
  }
};

// Scales and zero points of one row, with all that does not depend on the group worked out before.
struct GroupRow {
  const CodeReader& reader;
  const void* scales;
  const uint8_t* zeros;  // null: the midpoint
  int64_t scale_at, scale_step, zero_step;
  uint32_t word_add, code_add, mask;
  int zero_shift;

  __device__ GroupRow(const CodeReader& r, int64_t b, int64_t o) : reader(r), scales(r.m.scales), zeros(nullptr) {
    const PackedMatrix& m = r.m;
    scale_at = r.scale_index(b, o, 0);
    scale_step = r.traits.transposed ? m.out_features : 1;
    const int lanes = (1 << r.kw_shift) - 1;
    const int64_t stored = r.byte_zeros ? m.out_features : (m.out_features + lanes) >> r.kw_shift,
                  unit = r.byte_zeros ? o : o >> r.kw_shift;
    const int bytes = r.byte_zeros ? 1 : 4;
    zero_step = (r.traits.transposed ? stored : 1) * bytes;
    if (m.qzeros)
      zeros = static_cast<const uint8_t*>(m.qzeros) + (b * stored * m.groups + (r.traits.transposed ? unit : unit * m.groups)) * bytes;
    // GPTQ v1 writers subtract from the whole word, with borrow: the inverse adds to the whole word and wraps.
    const uint32_t ones = m.bits == 4 ? 0x11111111u : 0x01010101u;
    word_add = !r.byte_zeros && r.traits.zeros == FormatTraits::Zeros::word_minus_one ? ones : 0u;
    code_add = !r.byte_zeros && r.traits.zeros == FormatTraits::Zeros::code_minus_one ? 1u : 0u;
    mask = m.bits == 4 && !r.byte_zeros ? 0xfu : 0xffu;
    zero_shift = r.byte_zeros ? 0 : r.shift(static_cast<int>(o & lanes));
  }

  __device__ float scale(int64_t c) const { return load_float(scales, reader.m.scale_dtype, scale_at + c * scale_step); }
  // The word that holds the row's zero point of group c, unsigned; before code_add.
  __device__ uint32_t zero_word(int64_t c) const {
    const uint8_t* at = zeros + c * zero_step;
    const uint32_t word = reader.byte_zeros ? *at : *reinterpret_cast<const uint32_t*>(at);
    return (word + word_add) ^ reader.flip;
  }
  __device__ int zero(int64_t c) const {
    if (zeros == nullptr) return reader.m.bits == 4 ? 8 : 128;
    return static_cast<int>(((zero_word(c) >> zero_shift) + code_add) & mask);
  }
};

// Fills `reader`, or refuses a format and bits that no checkpoint combines.
inline Status make_reader(const PackedMatrix& m, CodeReader& reader) {
  const FormatTraits t = format_traits(m.format);
  if (m.bits != 4 && m.bits != 8) return make_error(Code::invalid_value, "bits must be 4 or 8, got %d", m.bits);
  if (m.bits == 8 && t.packed_along_out && !t.plain_int8) {
    return make_error(Code::unsupported, "bits must be 4 for format %s, got 8", format_name(m.format));
  }
  if (m.in_features > INT32_MAX || m.out_features > INT32_MAX) {
    return make_error(Code::unsupported, "in_features and out_features must be below 2^31, got %lld and %lld", (long long)m.in_features,
                      (long long)m.out_features);
  }
  const int64_t kw = 32 / m.bits;
  const bool plain = m.bits == 8 && (t.plain_int8 || m.format == Format::canonical);
  int64_t row, size;
  if (t.transposed) {
    const int64_t stored_rows = plain || t.packed_along_out ? m.in_features : ceil_div(m.in_features, kw);
    row = plain ? m.out_features : (t.packed_along_out ? ceil_div(m.out_features, kw) : m.out_features) * 4;
    size = stored_rows * row;
  } else {
    const bool whole_words = m.format != Format::canonical && !plain;
    row = whole_words ? ceil_div(m.in_features, kw) * 4 : row_bytes(m.in_features, m.bits);
    size = m.out_features * row;
  }
  const uint32_t flip = !t.is_signed ? 0u : (m.bits == 4 ? 0x88888888u : 0x80808080u);
  reader = {
      m, t, flip, row, size, plain, plain || m.format == Format::canonical, row % 4 == 0 && is_aligned(m.qweight, 4),
            row % 16 == 0 && is_aligned(m.qweight, 16), m.bits == 4 ? 3 : 2};
  return {};
}

}  // namespace int4_emu::gpu
