// Blocks of packed weights as tiles of bf16, for simd_amx_strips.h. Included after simd_amx_tiles.h.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kStripRows = 2 * kTile;
constexpr int64_t kBlockK = 128;       // columns of a block: for each sixteen rows of a strip, four tiles
constexpr int64_t kBlockBytes = kBlockK / 32 * kTileBytes;
constexpr int64_t kStripBlockBytes = 2 * kBlockBytes;
constexpr int64_t kStripK = 8192;      // most columns in hand
constexpr int64_t kStripGroups = kStripK / 32;

inline bool strip_groups(const Weight& w) {
  return w.packed && w.layout == Layout::canonical && w.k % 32 == 0 &&
         (w.group_size == 32 || w.group_size == 64 || groups_are_whole(w, kBlockK));
}

// Whether a block's codes are looked up in tables of their group's sixteen values. Columns are then ordered as a vector of codes comes
// apart: tile i of a block has code i of each half word.
inline bool strip_looks_up(const Weight& w) { return w.bits == 4 && strip_groups(w); }

// Rows of one expert's matrix that make a strip; rows beyond the last repeat it, and their sums are not written.
struct Strip {
  int64_t rows[kStripRows];
  const uint8_t* codes[kStripRows];
  alignas(64) float scales[kStripRows][kStripGroups + kLanes];  // of the groups of the columns in hand
  alignas(64) float zeros[kStripRows][kStripGroups + kLanes];
};

// Where row r of a block's first tile goes.
inline char* block_row(char* block, int64_t r) { return block + r / kTile * kBlockBytes + r % kTile * 64; }

// What a product's strips share.
struct StripShape {
  const Weight* weight;
  int64_t expert, row0[3], step, n, strips;  // of the parts, and of the columns after these, which most often come next; strips of a part
  int64_t k0, k, blocks;                     // the columns in hand
  bool ends;                                 // a row ends with them
  int64_t rows(int64_t q) const { return n - q % strips * kStripRows < kStripRows ? n - q % strips * kStripRows : kStripRows; }
  int64_t row(int64_t q, int64_t r) const {
    const int64_t most = rows(q) - 1;
    return row0[q / strips] + (q % strips * kStripRows + (r < most ? r : most)) * step;
  }
};

// Bit 4 of both halves of a lane, in the lanes of every second group of 32 or 64 columns: which of two tables.
constexpr uint32_t kSecond = 0x00100010;
alignas(64) constexpr uint32_t kSelectQuarter[16] = {0, 0, 0, 0, kSecond, kSecond, kSecond, kSecond,
                                                     0, 0, 0, 0, kSecond, kSecond, kSecond, kSecond};
alignas(64) constexpr uint32_t kSelectHalf[16] = {0,       0,       0,       0,       0,       0,       0,       0,
                                                  kSecond, kSecond, kSecond, kSecond, kSecond, kSecond, kSecond, kSecond};

// (word & 0x000f000f) | selector
inline Vi select_entry(Vi word, Vi selector) { return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(0x000f000f), selector, 0xea); }

// A block to decode, by value: what its rows need is then in registers, whatever their stores may overwrite.
struct CodesBlock {
  const Strip* strip;
  int64_t group, offset, left;  // of its first scale; bytes from the row's first code in hand; columns from here on
  const uint8_t* fetch;         // the line to fetch beside row 0, and bytes to that of the next row
  int64_t fetch_row;
};

// Canonical codes of kBits bits, kGroups groups to a block: 4, 2, or 1 where a group is one block or more.
template <int kBits, int kGroups>
struct CodeBlocks {
  const StripShape& shape;
  int64_t blocks_per_group;
  CodesAhead ahead;
  // The block to decode.
  const Strip* strip = nullptr;
  const Strip* after = nullptr;  // the strip to fetch
  int64_t block = 0, group = 0, next_group_in = 0;

  explicit CodeBlocks(const StripShape& s)
      : shape(s), blocks_per_group(s.weight->group_size < s.weight->k ? s.weight->group_size / kBlockK : 0) {
    const Weight& w = *s.weight;
    ahead = codes_ahead(w, s.step, kStripRows, 0, s.k == w.k && w.k % kBlockK == 0);
  }

  void place(int64_t q, Strip& to) const {
    const Weight& w = *shape.weight;
    for (int64_t r = 0; r < kStripRows; ++r)
      to.codes[r] = static_cast<const uint8_t*>(w.data) + shape.expert * w.expert_stride + shape.row(q, r) * w.n_stride + shape.k0 * kBits / 8;
  }
  void prepare(int64_t q, Strip& to) const {
    const Weight& w = *shape.weight;
    const int64_t first = w.group_size < w.k ? shape.k0 / w.group_size : 0;
    const int64_t last = w.group_size < w.k ? (shape.k0 + shape.k + w.group_size - 1) / w.group_size : 1;
    for (int64_t r = 0; r < kStripRows; ++r) {
      const int64_t row = shape.row(q, r);
      for (int64_t g = first; g < last; g += kLanes) {
        const int64_t count = last - g < kLanes ? last - g : kLanes;
        store(to.scales[r] + g - first, load_first(scales_of(w, shape.expert, row), w.scale_dtype, g, count));
        if (w.zeros != nullptr) store(to.zeros[r] + g - first, to_float(load_first_bytes(zeros_of(w, shape.expert, row) + g, count)));
      }
    }
  }
  void begin(const Strip& s) {
    strip = &s;
    block = group = 0;
    next_group_in = blocks_per_group > 0 ? blocks_per_group - shape.k0 / kBlockK % blocks_per_group : 0;
  }
  void advance() {
    ++block;
    if constexpr (kGroups > 1) group += kGroups;
    else if (--next_group_in == 0) ++group, next_group_in = blocks_per_group;
  }
  CodesBlock now() const {
    const uint8_t* const fetch = after->codes[0] + ahead.bytes + block * (kBits / 4) * ahead.line;
    return {strip, group, block * (kBlockK * kBits / 8), shape.k - block * kBlockK, fetch, ahead.row};
  }
};

// int4, by tables of each group's values.
template <int kGroups, bool kZeros>
struct LookupBlocks : CodeBlocks<4, kGroups> {
  using Base = CodeBlocks<4, kGroups>;
  using Base::Base;

  struct Block : CodesBlock {
    Vf codes = kZeros ? to_float(iota()) : sub(to_float(iota()), set1(8.f));
    Vi selector = _mm512_load_si512(kGroups == 4 ? kSelectQuarter : kSelectHalf);
    __mmask16 words;

    explicit Block(const Base& from) : CodesBlock(from.now()), words(static_cast<__mmask16>(left >= kBlockK ? 0xffff : (1u << left / 8) - 1)) {}
    Vf value(int64_t r, int64_t g) const {
      const Vf q = kZeros ? sub(codes, set1(strip->zeros[r][group + g])) : codes;
      return mul(q, set1(strip->scales[r][group + g]));
    }
    Vi table(int64_t r, int64_t g) const {
      if constexpr (kGroups == 1) return reinterpret_cast<Vi>(_mm512_cvtne2ps_pbh(value(r, g), value(r, g)));
      else return reinterpret_cast<Vi>(_mm512_cvtne2ps_pbh(value(r, g + 1), value(r, g)));
    }
    // Rows first.. of the block.
    template <int64_t kCount>
    inline __attribute__((always_inline)) void rows(int64_t first, char* out) const {
#pragma GCC unroll 8
      for (int64_t r = first; r < first + kCount; ++r) {
        fetch_line(fetch + r * fetch_row);
        char* const to = block_row(out, r);
        const Vi word = _mm512_maskz_loadu_epi32(words, strip->codes[r] + offset);
        const Vi low = table(r, 0), high = kGroups == 4 ? table(r, 2) : low;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          Vi index = i == 0 ? word : _mm512_srli_epi32(word, 4 * i);
          if constexpr (kGroups > 1) index = select_entry(index, selector);
          Vi v = _mm512_permutexvar_epi16(index, low);
          if constexpr (kGroups == 4) v = _mm512_mask_permutexvar_epi16(v, 0xffff0000u, index, high);
          _mm512_store_si512(to + i * kTileBytes, v);
        }
      }
    }
  };
};

// int8: q times the scale minus z times the scale, which 16-bit scales hold without rounding.
template <int kGroups>
struct ByteBlocks : CodeBlocks<8, kGroups> {
  using Base = CodeBlocks<8, kGroups>;
  using Base::Base;

  struct Block : CodesBlock {
    const bool zeros;
    const int64_t fetch_line_bytes;

    explicit Block(const Base& from) : CodesBlock(from.now()), zeros(from.shape.weight->zeros != nullptr), fetch_line_bytes(from.ahead.line) {}
    template <int64_t kCount>
    inline __attribute__((always_inline)) void rows(int64_t first, char* out) const {
      const int64_t tiles = left < kBlockK ? left / 32 : 4;
#pragma GCC unroll 8
      for (int64_t r = first; r < first + kCount; ++r) {
        fetch_line(fetch + r * fetch_row);
        fetch_line(fetch + r * fetch_row + fetch_line_bytes);
        char* const to = block_row(out, r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int64_t g = group + i * kGroups / 4;
          const Vf scale = set1(strip->scales[r][g]), shift = mul(scale, set1(zeros ? -strip->zeros[r][g] : -128.f));
          Vi v = _mm512_setzero_si512();
          if (i < tiles) {
            const uint8_t* codes = strip->codes[r] + offset + i * 32;
            const Vf low = fma(codes8(codes), scale, shift), high = fma(codes8(codes + kLanes), scale, shift);
            v = reinterpret_cast<Vi>(_mm512_cvtne2ps_pbh(high, low));
          }
          _mm512_store_si512(to + i * kTileBytes, v);
        }
      }
    }
  };
};

// Any other weight, row by row.
struct AnyBlocks {
  using Block = AnyBlocks;
  const StripShape& shape;
  const Strip *strip = nullptr, *after = nullptr;
  int64_t block = 0;

  explicit AnyBlocks(const StripShape& s) : shape(s) {}
  void place(int64_t q, Strip& to) const {
    for (int64_t r = 0; r < kStripRows; ++r) to.rows[r] = shape.row(q, r);
  }
  void prepare(int64_t, Strip&) const {}
  void begin(const Strip& s) {
    strip = &s;
    block = 0;
  }
  void advance() { ++block; }
  template <int64_t kCount>
  void rows(int64_t first, char* out) const {
    const Weight& w = *shape.weight;
    const int64_t k0 = shape.k0 + block * kBlockK, left = shape.k - block * kBlockK, k = left < kBlockK ? left : kBlockK;
    for (int64_t r = first; r < first + kCount; ++r) {
      const int64_t row = strip->rows[r];
      char* const to = block_row(out, r);
      alignas(64) uint16_t values[kBlockK];
      if (k < kBlockK) __builtin_memset(values, 0, sizeof values);
      if (w.packed) decode_weight_row<DType::bf16>(w, shape.expert, row, k0, k, values);
      else __builtin_memcpy(values, static_cast<const uint16_t*>(w.data) + shape.expert * w.expert_stride + row * w.n_stride + k0, k * 2);
      for (int i = 0; i < 4; ++i) _mm512_store_si512(to + i * kTileBytes, _mm512_load_si512(values + i * 32));
    }
  }
};

}  // namespace
}  // namespace int4_emu::cpu
