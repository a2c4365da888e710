#include "canonical.h"

#include "bits.h"

namespace int4_emu::cpu {
namespace {

// Words [K/kw][O] of codes packed along K: each is four bytes of a canonical row, so only the words move.
// source points at word (k0/kw, o0); out [n][stride].
void transpose_words(const uint8_t* source, int64_t source_row, int64_t n, int64_t words, uint8_t* out, int64_t stride) {
  constexpr int64_t kTile = 16;
  for (int64_t w0 = 0; w0 < words; w0 += kTile) {
    const int64_t w1 = w0 + kTile < words ? w0 + kTile : words;
    for (int64_t o0 = 0; o0 < n; o0 += kTile) {
      const int64_t o1 = o0 + kTile < n ? o0 + kTile : n;
      for (int64_t w = w0; w < w1; ++w) {
        for (int64_t o = o0; o < o1; ++o) store_word(out + o * stride + w * 4, load_word(source + w * source_row + o * 4));
      }
    }
  }
}

// Words [K][O/8] of codes packed along O; slot_row[j] is the row, of eight, that slot j holds. source points at word (k0, o0/8).
// `k` columns are there; the rest of the last eight become zero. At most n rows are written.
void transpose_packed_along_out(const uint8_t* source, int64_t source_row, uint32_t flip, const int* slot_row, int64_t n, int64_t k,
                                uint8_t* out, int64_t stride) {
  const int64_t word_columns = ceil_div(n, 8);
  for (int64_t k0 = 0; k0 < k; k0 += 8) {
    const int64_t rows = k - k0 < 8 ? k - k0 : 8;
    for (int64_t w0 = 0; w0 < word_columns; w0 += 4) {
      const int64_t lanes = word_columns - w0 < 4 ? word_columns - w0 : 4;
      Words4 tile[8] = {};
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(&tile[r], source + (k0 + r) * source_row + w0 * 4, static_cast<size_t>(lanes) * 4);
        tile[r] ^= flip;
      }
      transpose_nibbles(tile);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        uint8_t* first = out + (w0 + lane) * 8 * stride + k0 / 2;
        const int64_t limit = n - (w0 + lane) * 8;
        for (int j = 0; j < 8; ++j) {
          if (slot_row[j] < limit) store_word(first + slot_row[j] * stride, tile[j][lane]);
        }
      }
    }
  }
}

// Bytes [K][O] of one code each.
void transpose_bytes(const uint8_t* source, int64_t source_row, uint8_t flip, int64_t n, int64_t k, uint8_t* out, int64_t stride) {
  constexpr int64_t kTile = 32;
  for (int64_t k0 = 0; k0 < k; k0 += kTile) {
    const int64_t k1 = k0 + kTile < k ? k0 + kTile : k;
    for (int64_t o = 0; o < n; ++o) {
      for (int64_t j = k0; j < k1; ++j) out[o * stride + j] = source[j * source_row + o] ^ flip;
    }
  }
}

constexpr int kPlainSlots[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int kInterleavedSlots[8] = {0, 2, 4, 6, 1, 3, 5, 7};

}  // namespace

CanonicalReader::CanonicalReader(const PackedMatrix& m) : m_(m), traits_(format_traits(m.format)) {
  flip_ = !traits_.is_signed ? 0u : (m.bits == 4 ? 0x88888888u : 0x80808080u);
  const int64_t kw = codes_per_word();
  if (traits_.transposed) {
    const int64_t stored_rows = plain_bytes() || traits_.packed_along_out ? m.in_features : ceil_div(m.in_features, kw);
    source_row_ = plain_bytes() ? m.out_features : (traits_.packed_along_out ? ceil_div(m.out_features, kw) : m.out_features) * 4;
    source_size_ = stored_rows * source_row_;
  } else {
    const bool whole_words = m.format != Format::canonical && !plain_bytes();
    source_row_ = whole_words ? ceil_div(m.in_features, kw) * 4 : row_bytes(m.in_features, m.bits);
    source_size_ = m.out_features * source_row_;
  }
}

Status CanonicalReader::check() const {
  if (m_.bits != 4 && m_.bits != 8) return make_error(Code::invalid_value, "bits must be 4 or 8, got %d", m_.bits);
  if (m_.bits == 8 && traits_.packed_along_out && !traits_.plain_int8) {
    return make_error(Code::unsupported, "bits must be 4 for format %s, got 8", format_name(m_.format));
  }
  return {};
}

const uint8_t* CanonicalReader::codes_in_place(int64_t b, int64_t o) const {
  if (traits_.transposed || flip_ != 0 || (traits_.interleaved && m_.bits == 4)) return nullptr;
  return static_cast<const uint8_t*>(m_.qweight) + b * source_size_ + o * source_row_;
}

void CanonicalReader::read_codes(int64_t b, int64_t o0, int64_t n, int64_t k0, int64_t k, uint8_t* out, int64_t stride) const {
  const uint8_t* source = static_cast<const uint8_t*>(m_.qweight) + b * source_size_;
  const int64_t kw = codes_per_word(), words = ceil_div(k, kw);
  if (traits_.transposed) {
    if (plain_bytes()) {
      transpose_bytes(source + k0 * source_row_ + o0, source_row_, static_cast<uint8_t>(flip_), n, k, out, stride);
    } else if (traits_.packed_along_out) {
      transpose_packed_along_out(source + k0 * source_row_ + o0 / 2, source_row_, flip_,
                                 traits_.interleaved ? kInterleavedSlots : kPlainSlots, n, k, out, stride);
    } else {
      transpose_words(source + k0 / kw * source_row_ + o0 * 4, source_row_, n, words, out, stride);
    }
  } else {
    const bool interleaved = traits_.interleaved && m_.bits == 4;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* row = source + (o0 + i) * source_row_ + k0 * m_.bits / 8;
      uint8_t* to = out + i * stride;
      if (flip_ == 0 && !interleaved) {
        std::memcpy(to, row, static_cast<size_t>(row_bytes(k, m_.bits)));
      } else if (plain_bytes()) {
        for (int64_t j = 0; j < k; ++j) to[j] = row[j] ^ static_cast<uint8_t>(flip_);
      } else {
        for (int64_t w = 0; w < words; ++w) {
          const uint32_t word = load_word(row + w * 4) ^ flip_;
          store_word(to + w * 4, interleaved ? deinterleave_nibbles(word) : word);
        }
      }
    }
  }
  // A format's padding codes are whatever its writer left there.
  if (m_.bits == 4 && k % 2 == 1 && k0 + k == m_.in_features && m_.format != Format::canonical) {
    for (int64_t i = 0; i < n; ++i) out[i * stride + k / 2] &= 0x0f;
  }
}

void CanonicalReader::read_scales(int64_t b, int64_t o0, int64_t n, void* out) const {
  const int64_t groups = m_.groups, rows = m_.out_features, size = dtype_bytes(m_.scale_dtype);
  const char* source = static_cast<const char*>(m_.scales) + b * rows * groups * size;
  if (!traits_.transposed) {
    std::memcpy(out, source + o0 * groups * size, static_cast<size_t>(n * groups * size));
    return;
  }
  const auto transpose = [&](auto* to, const auto* from) {
    for (int64_t c = 0; c < groups; ++c) {
      for (int64_t i = 0; i < n; ++i) to[i * groups + c] = from[c * rows + o0 + i];
    }
  };
  if (size == 4) {
    transpose(static_cast<uint32_t*>(out), reinterpret_cast<const uint32_t*>(source));
  } else {
    transpose(static_cast<uint16_t*>(out), reinterpret_cast<const uint16_t*>(source));
  }
}

void CanonicalReader::read_zeros(int64_t b, int64_t o0, int64_t n, uint8_t* out) const {
  const int64_t groups = m_.groups, rows = m_.out_features, kw = codes_per_word();
  const uint8_t* source = static_cast<const uint8_t*>(m_.qzeros);
  if (m_.format == Format::canonical) {
    std::memcpy(out, source + (b * rows + o0) * groups, static_cast<size_t>(n * groups));
    return;
  }
  // Zeros of one group lie along O: [C, O] where transposed, else [O, C].
  const int64_t stored = plain_bytes() ? rows : ceil_div(rows, kw);
  const int64_t unit_step = traits_.transposed ? 1 : groups, group_step = traits_.transposed ? stored : 1;
  if (plain_bytes()) {
    source += b * rows * groups;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < groups; ++c) {
        out[i * groups + c] = source[(o0 + i) * unit_step + c * group_step] ^ static_cast<uint8_t>(flip_);
      }
    }
    return;
  }
  const uint32_t mask = m_.bits == 4 ? 0xfu : 0xffu;
  // GPTQ v1 writers subtract from the whole word, with borrow: the inverse adds to the whole word and wraps.
  const uint32_t word_add = traits_.zeros != FormatTraits::Zeros::word_minus_one ? 0u : (m_.bits == 4 ? 0x11111111u : 0x01010101u);
  const uint32_t code_add = traits_.zeros == FormatTraits::Zeros::code_minus_one ? 1u : 0u;
  source += b * stored * groups * 4;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t o = o0 + i;
    const int64_t j = o % kw, slot = traits_.interleaved && m_.bits == 4 ? (j >> 1) | ((j & 1) << 2) : j;
    for (int64_t c = 0; c < groups; ++c) {
      const uint32_t word = (load_word(source + 4 * (o / kw * unit_step + c * group_step)) + word_add) ^ flip_;
      out[i * groups + c] = static_cast<uint8_t>(((word >> (slot * m_.bits)) + code_add) & mask);
    }
  }
}

void expand_codes(const uint8_t* codes, int bits, int64_t k, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, static_cast<size_t>(k));
    return;
  }
  for (int64_t i = 0; i < k / 2; ++i) {
    out[2 * i] = codes[i] & 0x0f;
    out[2 * i + 1] = codes[i] >> 4;
  }
  if (k % 2) out[k - 1] = codes[k / 2] & 0x0f;
}

void pack_codes(const uint8_t* in, int bits, int64_t k, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, in, static_cast<size_t>(k));
    return;
  }
  for (int64_t i = 0; i < k / 2; ++i) out[i] = static_cast<uint8_t>(in[2 * i] | in[2 * i + 1] << 4);
  if (k % 2) out[k / 2] = in[k - 1];
}

}  // namespace int4_emu::cpu
