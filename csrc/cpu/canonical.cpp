// Three shapes of storage have to become canonical rows: rows already, words along I with the columns outermost (GPTQ), and words along O
// (AWQ, Quark). The last two are transposed in tiles; what differs beyond that is the order within a word, and the sign.
#include "canonical.h"

#include "bits.h"

namespace int4_emu::cpu {
namespace {

// Rows of a transposed source lie kilobytes apart, out of reach of the hardware's prefetchers. Into L2 only: at such strides few L1
// sets serve all rows.
inline __attribute__((always_inline)) void prefetch_rows(const uint8_t* source, int64_t source_row, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(source + r * source_row + b, 0, 2);
  }
}

// Words [K/kw][O] of codes packed along K: each is four bytes of a canonical row, so only the words move.
// source points at word (k0/kw, o0); out [n][stride].
void transpose_packed_along_in(const uint8_t* source, int64_t source_row, int64_t n, int64_t words, uint8_t* out, int64_t stride) {
  constexpr int64_t kAhead = 16;
  for (int64_t w = 0; w < words; w += 4) {
    const int64_t rows = words - w < 4 ? words - w : 4;
    prefetch_rows(source + (w + kAhead) * source_row, source_row, w + kAhead + 4 <= words ? 4 : 0, n * 4);
    int64_t o = 0;
    for (; rows == 4 && o + 4 <= n; o += 4) {
      Words4 tile[4];
      for (int64_t r = 0; r < 4; ++r) std::memcpy(&tile[r], source + (w + r) * source_row + o * 4, 16);
      transpose_words(tile);
      for (int64_t r = 0; r < 4; ++r) std::memcpy(out + (o + r) * stride + w * 4, &tile[r], 16);
    }
    for (; o < n; ++o) {
      for (int64_t r = 0; r < rows; ++r) store_word(out + o * stride + (w + r) * 4, load_word(source + (w + r) * source_row + o * 4));
    }
  }
}

// A tile of codes packed along O, 32 columns of 4 words, as bytes of two codes side by side in K: slots[0][pair] for the rows in even
// slots of their words, slots[1][pair] for the others. column(c) is where column c's words begin.
template <class Column>
void pair_columns(const Column& column, int64_t columns, int64_t lanes, uint32_t flip, Words4 slots[2][16]) {
  const auto pair = [&](int i, Words4 first, Words4 second) {
    swap_nibbles(first, second);
    slots[0][i] = first ^ flip;
    slots[1][i] = second ^ flip;
  };
  if (columns == 32 && lanes == 4) {
    for (int i = 0; i < 16; ++i) {
      Words4 first, second;
      std::memcpy(&first, column(2 * i), 16);
      std::memcpy(&second, column(2 * i + 1), 16);
      pair(i, first, second);
    }
    return;
  }
  const Words4 zeros = Words4{} ^ flip;
  for (int i = 0; i < 16; ++i) {
    Words4 both[2] = {zeros, zeros};
    for (int64_t c = 2 * i; c < 2 * i + 2 && c < columns; ++c) std::memcpy(&both[c % 2], column(c), static_cast<size_t>(lanes) * 4);
    pair(i, both[0], both[1]);
  }
}

// Which of 32 rows is in the even, and in the odd slot of each byte of four words along O.
struct TileRows {
  int of[2][16];
};
constexpr TileRows kPlainRows = {{{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
                                  {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}}};
constexpr TileRows kInterleavedRows = {{{0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29},
                                        {2, 6, 3, 7, 10, 14, 11, 15, 18, 22, 19, 23, 26, 30, 27, 31}}};
constexpr TileRows kHalvedRows = {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                   {16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31}}};

// Words [K][O/8] of codes packed along O, 32 rows of them in the places that `tile` says. source points at word (k0, o0/8).
// `k` columns are there, column j in row perm[j] of the source, or j without perm; the rest of the last eight become zero. At most n
// rows are written.
void transpose_packed_along_out(const uint8_t* source, int64_t source_row, const int32_t* perm, uint32_t flip, const TileRows& tile,
                                int64_t n, int64_t k, uint8_t* out, int64_t stride) {
  constexpr int64_t kTile = 32, kAhead = 64;
  const int64_t word_columns = ceil_div(n, 8);
  for (int64_t k0 = 0; k0 < k; k0 += kTile) {
    const int64_t columns = k - k0 < kTile ? k - k0 : kTile;
    prefetch_rows(source + (k0 + kAhead) * source_row, source_row, !perm && k0 + kAhead + kTile <= k ? kTile : 0, word_columns * 4);
    for (int64_t w0 = 0; w0 < word_columns; w0 += 4) {
      const int64_t lanes = word_columns - w0 < 4 ? word_columns - w0 : 4;
      Words4 slots[2][16];
      const uint8_t* from = source + w0 * 4;
      if (perm) {
        pair_columns([&](int64_t c) { return from + perm[k0 + c] * source_row; }, columns, lanes, flip, slots);
      } else {
        pair_columns([&](int64_t c) { return from + (k0 + c) * source_row; }, columns, lanes, flip, slots);
      }
      for (int odd = 0; odd < 2; ++odd) {
        transpose_bytes<16>(slots[odd]);
        // Byte i of a column is now row i of the tile, all of its columns.
        uint8_t* to = out + w0 * 8 * stride + k0 / 2;
        if (columns == kTile && (w0 + 4) * 8 <= n) {
          for (int64_t i = 0; i < 16; ++i) std::memcpy(to + tile.of[odd][i] * stride, &slots[odd][i], 16);
          continue;
        }
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t o = tile.of[odd][i];
          if (w0 * 8 + o < n) std::memcpy(to + o * stride, &slots[odd][i], static_cast<size_t>(ceil_div(columns, 8)) * 4);
        }
      }
    }
  }
}

// Words [K/8][O] of codes packed along K to words [K][O/8] along O, where byte i of sixteen has the rows i and 16 + i. n is a multiple
// of 32.
void turn_packed_along_in(const uint8_t* source, int64_t source_row, int64_t n, int64_t words, uint8_t* out, int64_t column) {
  constexpr int64_t kAhead = 16;
  for (int64_t w = 0; w < words; ++w) {
    prefetch_rows(source + (w + kAhead) * source_row, source_row, w + kAhead < words ? 1 : 0, n * 4);
    for (int64_t o = 0; o < n; o += 32) {
      Words4 rows[8];
      std::memcpy(rows, source + w * source_row + o * 4, sizeof(rows));
      for (int i = 0; i < 4; ++i) swap_nibbles(rows[i], rows[i + 4]);
      for (int odd = 0; odd < 2; ++odd) {
        transpose_bytes<4>(rows + odd * 4);
        for (int64_t i = 0; i < 4; ++i) std::memcpy(out + (w * 8 + i * 2 + odd) * column + o / 2, &rows[odd * 4 + i], 16);
      }
    }
  }
}

// One stage of an 8x8 byte transpose: swaps blocks of kBytes bytes across the diagonal.
template <int kBytes>
void swap_blocks(uint64_t* rows, uint64_t mask) {
  for (int i = 0; i < 8; ++i) {
    if (i & kBytes) continue;
    const uint64_t swap = ((rows[i] >> (8 * kBytes)) ^ rows[i + kBytes]) & mask;
    rows[i + kBytes] ^= swap;
    rows[i] ^= swap << (8 * kBytes);
  }
}

// Row i, byte j becomes row j, byte i.
void transpose_8x8_bytes(uint64_t* rows) {
  swap_blocks<4>(rows, 0x00000000ffffffffu);
  swap_blocks<2>(rows, 0x0000ffff0000ffffu);
  swap_blocks<1>(rows, 0x00ff00ff00ff00ffu);
}

// Bytes [K][O] of one code each.
void transpose_bytes(const uint8_t* source, int64_t source_row, uint8_t flip, int64_t n, int64_t k, uint8_t* out, int64_t stride) {
  // A tile's cache lines of the source are used whole before they leave L1.
  constexpr int64_t kTile = 64;
  const uint64_t flips = flip * 0x0101010101010101u;
  for (int64_t k0 = 0; k0 < k; k0 += kTile) {
    const int64_t k1 = k0 + kTile < k ? k0 + kTile : k;
    for (int64_t o0 = 0; o0 < n; o0 += 8) {
      int64_t j = k0;
      for (; o0 + 8 <= n && j + 8 <= k1; j += 8) {
        uint64_t block[8];
        for (int i = 0; i < 8; ++i) std::memcpy(&block[i], source + (j + i) * source_row + o0, 8);
        transpose_8x8_bytes(block);
        for (int i = 0; i < 8; ++i) {
          const uint64_t codes = block[i] ^ flips;
          std::memcpy(out + (o0 + i) * stride + j, &codes, 8);
        }
      }
      for (int64_t o = o0; o < o0 + 8 && o < n; ++o) {
        for (int64_t rest = j; rest < k1; ++rest) out[o * stride + rest] = source[rest * source_row + o] ^ flip;
      }
    }
  }
}

}  // namespace

CanonicalReader::CanonicalReader(const PackedMatrix& m) : m_(m), traits_(format_traits(m.format)) {
  // Adding half the range modulo the range is flipping the top bit of each code.
  flip_ = !traits_.is_signed ? 0u : (m.bits == 4 ? 0x88888888u : 0x80808080u);
  const int64_t kw = codes_per_word();
  // Columns that do not fill their last word are padded there; the words are stored whole.
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

// compressed_tensors words are little-endian with the first code lowest: byte for byte a canonical row.
const uint8_t* CanonicalReader::codes_in_place(int64_t b, int64_t o) const {
  if (traits_.transposed || flip_ != 0 || (traits_.interleaved && m_.bits == 4)) return nullptr;
  return matrix(b) + o * source_row_;
}

const uint8_t* CanonicalReader::transposed_source(int64_t b, int64_t o0, int64_t k0) const {
  if (plain_bytes()) return matrix(b) + k0 * source_row_ + o0;
  if (traits_.packed_along_out) return matrix(b) + k0 * source_row_ + o0 / 2;
  return matrix(b) + k0 / codes_per_word() * source_row_ + o0 * 4;
}

bool CanonicalReader::describe(int64_t b, int64_t o0, int64_t n, DequantizeTransposedArgs& a) const {
  const int64_t columns = m_.in_features, rows = m_.out_features;
  // Eight rows at a time in 16 columns at a time, none of which straddles a group.
  const bool indexed = m_.g_idx != nullptr, whole_groups = m_.group_size % 16 == 0 || m_.groups == 1;
  if (!traits_.transposed || columns % 16 != 0 || rows % 8 != 0) return false;
  if (indexed ? m_.groups > kMostIndexedGroups : !whole_groups) return false;
  a.bits = m_.bits;
  a.codes = transposed_source(b, o0, 0);
  a.code_step = source_row_;
  a.packed_along_out = traits_.packed_along_out;
  a.in_rows = false;
  a.interleaved = traits_.interleaved;
  a.flip = flip_;
  const int64_t group0 = b * m_.groups;
  a.scales = static_cast<const char*>(m_.scales) + (group0 * rows + o0) * dtype_bytes(m_.scale_dtype);
  a.scale_dtype = m_.scale_dtype;
  a.scale_step = rows;
  a.zero_step = rows * m_.bits / 8;
  a.zeros = m_.qzeros ? static_cast<const uint8_t*>(m_.qzeros) + group0 * a.zero_step + o0 * m_.bits / 8 : nullptr;
  a.zero_word_add = zero_word_add();
  a.zero_code_add = static_cast<int>(zero_code_add());
  a.group_of = indexed ? m_.g_idx + b * columns : nullptr;
  a.n = n;
  a.k = columns;
  a.group_size = m_.group_size;
  a.groups = m_.groups;
  return true;
}

bool CanonicalReader::describe_rows(int64_t b, int64_t o0, int64_t n, DequantizeTransposedArgs& a) const {
  if (codes_in_place(b, o0) == nullptr || m_.g_idx == nullptr || m_.groups > kMostIndexedGroups) return false;
  if (m_.in_features % 16 != 0 || m_.out_features % 8 != 0) return false;
  a = {};
  a.bits = m_.bits;
  a.codes = codes_in_place(b, o0);
  a.code_step = source_row_;
  a.in_rows = true;
  a.zero_word_add = zero_word_add();
  a.zero_code_add = static_cast<int>(zero_code_add());
  a.scale_dtype = m_.scale_dtype;
  a.group_of = m_.g_idx + b * m_.in_features;
  a.n = n;
  a.k = m_.in_features;
  a.group_size = m_.group_size;
  a.groups = m_.groups;
  return true;
}

const uint8_t* CanonicalReader::zero_words(int64_t b, int64_t o0) const {
  if (traits_.transposed || plain_bytes() || m_.format == Format::canonical) return nullptr;
  const int64_t words = ceil_div(m_.out_features, codes_per_word()) * m_.groups;
  return static_cast<const uint8_t*>(m_.qzeros) + (b * words + o0 / codes_per_word() * m_.groups) * 4;
}

// GPTQ v1 writers subtract from the whole word, with borrow: the inverse adds to the whole word and wraps.
uint32_t CanonicalReader::zero_word_add() const {
  return traits_.zeros != FormatTraits::Zeros::word_minus_one ? 0u : (m_.bits == 4 ? 0x11111111u : 0x01010101u);
}

uint32_t CanonicalReader::zero_code_add() const { return traits_.zeros == FormatTraits::Zeros::code_minus_one ? 1u : 0u; }

void CanonicalReader::read_codes(int64_t b, int64_t o0, int64_t n, int64_t k0, int64_t k, uint8_t* out, int64_t stride) const {
  const int64_t kw = codes_per_word(), words = ceil_div(k, kw);
  if (traits_.transposed) {
    const uint8_t* source = transposed_source(b, o0, k0);
    if (plain_bytes()) {
      transpose_bytes(source, source_row_, static_cast<uint8_t>(flip_), n, k, out, stride);
    } else if (traits_.packed_along_out) {
      transpose_packed_along_out(source, source_row_, nullptr, flip_, traits_.interleaved ? kInterleavedRows : kPlainRows, n, k, out, stride);
    } else {
      transpose_packed_along_in(source, source_row_, n, words, out, stride);
    }
  } else {
    const bool interleaved = traits_.interleaved && m_.bits == 4;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* row = matrix(b) + (o0 + i) * source_row_ + k0 * m_.bits / 8;
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

void CanonicalReader::read_permuted_codes(int64_t b, int64_t o0, int64_t n, const int32_t* perm, uint8_t* columns, uint8_t* out,
                                          int64_t stride) const {
  const int64_t k = m_.in_features, column = row_bytes(round_up(n, 8), 4);
  if (traits_.packed_along_out) {
    const TileRows& tile = traits_.interleaved ? kInterleavedRows : kPlainRows;
    transpose_packed_along_out(transposed_source(b, o0, 0), source_row_, perm, flip_, tile, n, k, out, stride);
  } else if (traits_.transposed && n % 32 == 0) {
    turn_packed_along_in(transposed_source(b, o0, 0), source_row_, n, ceil_div(k, 8), columns, column);
    transpose_packed_along_out(columns, column, perm, flip_, kHalvedRows, n, k, out, stride);
  } else {
    // Rows are turned as if they were columns, and back.
    read_codes(b, o0, n, 0, k, out, stride);
    transpose_packed_along_out(out, stride, nullptr, 0, kPlainRows, k, n, columns, column);
    transpose_packed_along_out(columns, column, perm, 0, kPlainRows, n, k, out, stride);
  }
}

void CanonicalReader::read_scales(int64_t b, int64_t o0, int64_t n, int64_t c0, int64_t c, void* out) const {
  const int64_t groups = m_.groups, rows = m_.out_features, size = dtype_bytes(m_.scale_dtype);
  const char* source = static_cast<const char*>(m_.scales) + b * rows * groups * size;
  if (!traits_.transposed) {
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(static_cast<char*>(out) + i * c * size, source + ((o0 + i) * groups + c0) * size, static_cast<size_t>(c * size));
    }
    return;
  }
  // [C, O] to [n][c]: elements of 16 or 32 bits are only moved, so their type does not matter.
  const auto transpose = [&](auto* to, const auto* from) {
    constexpr int64_t kTile = 32;  // rows whose scales stay in L1 while the groups pass
    for (int64_t i0 = 0; i0 < n; i0 += kTile) {
      const int64_t i1 = i0 + kTile < n ? i0 + kTile : n;
      for (int64_t j = 0; j < c; ++j) {
        for (int64_t i = i0; i < i1; ++i) to[i * c + j] = from[(c0 + j) * rows + o0 + i];
      }
    }
  };
  if (size == 4) {
    transpose(static_cast<uint32_t*>(out), reinterpret_cast<const uint32_t*>(source));
  } else {
    transpose(static_cast<uint16_t*>(out), reinterpret_cast<const uint16_t*>(source));
  }
}

void CanonicalReader::read_zeros(int64_t b, int64_t o0, int64_t n, int64_t c0, int64_t c, uint8_t* out) const {
  const int64_t groups = m_.groups, rows = m_.out_features, kw = codes_per_word();
  const uint8_t* source = static_cast<const uint8_t*>(m_.qzeros);
  // Zeros of one group lie along O: [C, O] where transposed, else [O, C]; one a byte or packed in words along O.
  const bool bytes = plain_bytes() || m_.format == Format::canonical;
  const int64_t stored = bytes ? rows : ceil_div(rows, kw);
  const int64_t unit_step = traits_.transposed ? 1 : groups, group_step = traits_.transposed ? stored : 1;
  source += b * stored * groups * (bytes ? 1 : 4);
  if (bytes) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < c; ++j) {
        out[i * c + j] = source[(o0 + i) * unit_step + (c0 + j) * group_step] ^ static_cast<uint8_t>(flip_);
      }
    }
    return;
  }
  const uint32_t word_add = zero_word_add(), code_add = zero_code_add();
  const uint8_t mask = m_.bits == 4 ? 0xf : 0xff;
  // Bit position of each row of a word's kw.
  int shift[8];
  for (int lane = 0; lane < kw; ++lane) shift[lane] = m_.bits * (traits_.interleaved && m_.bits == 4 ? lane / 2 + lane % 2 * 4 : lane);
  // A block may begin or end inside a word.
  for (int64_t i = 0; i < n;) {
    const int64_t unit = (o0 + i) / kw, lane0 = o0 + i - unit * kw;
    const int64_t count = kw - lane0 < n - i ? kw - lane0 : n - i;
    const uint8_t* words = source + 4 * (unit * unit_step + c0 * group_step);
    const auto read = [&](int64_t step) {
      for (int64_t r = 0; r < count; ++r) {
        uint8_t* to = out + (i + r) * c;
        const int down = shift[lane0 + r];
        for (int64_t j = 0; j < c; ++j) {
          const uint32_t word = (load_word(words + 4 * j * step) + word_add) ^ flip_;
          to[j] = static_cast<uint8_t>((word >> down) + code_add) & mask;
        }
      }
    };
    // A step that the compiler knows makes vectors of the loop.
    if (group_step == 1) read(1);
    else read(group_step);
    i += count;
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

}  // namespace int4_emu::cpu
