// Rows of x times canonical int4 or int8 codes on tdpbf16ps: exact q - z as bf16, the scale of each group in fp32. Included after
// simd_amx_tiles.h.
//
// x is the A operand, so few rows cost few cycles; the weights of 16 columns are the B operand, a column a lane, so that the scales of a
// group are one vector. Words of the columns' codes are transposed on their way; a word of eight codes makes four rows of a B tile by a
// shift and a lookup each. Three steps are in flight, each on what the one before it left behind: decoding, products, scaling.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kExactDepth = 32;      // columns of the matrix in a tile
constexpr int64_t kExactRun = 32768;     // most columns: bounds the list of groups
constexpr int64_t kExactRows = 512;      // most rows of x: bounds the sums on the stack
constexpr int64_t kExactRing = 32;       // groups whose scales are held, in windows of 16

bool serves_exact(const Weight& w, int64_t m) {
  return w.packed && (w.bits == 4 || w.bits == 8) && w.layout == Layout::canonical && w.k % kExactDepth == 0 && w.k > 0 &&
         w.k <= kExactRun && groups_are_whole(w, kExactDepth) && m <= kExactRows;
}

// [ceil(m / 16)][k / 32][parts of the split] tiles.
size_t packed_x_bytes_exact(const Weight& w, DType x, int64_t m) {
  return static_cast<size_t>(round_up_to(m, kTile) / kTile * (w.k / kExactDepth) * splits_of(x) * kTileBytes);
}

// The order of 32 columns in a row of an A tile: neighbours are the columns whose weights share a lane of a row of the B tile.
inline Vi exact_order(int bits) {
  alignas(64) uint16_t order[32];
  const int word = bits == 4 ? 8 : 4;  // columns
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / word * word + i % word / 2 + i % 2 * (word / 2));
  return _mm512_load_si512(order);
}

void pack_x_exact(const Weight& w, const PackXArgs& a) {
  const int64_t splits = splits_of(a.dtype), tiles = w.k / kExactDepth;
  const Vi order = exact_order(w.bits);
  char* out = static_cast<char*>(a.out);
  alignas(64) uint16_t parts[kMaxSplits * 32];
  for (int64_t i = 0; i < round_up_to(a.m, kTile); ++i) {
    char* row = out + i / kTile * tiles * splits * kTileBytes + i % kTile * 64;
    for (int64_t t = 0; t < tiles; ++t) {
      if (i < a.m) split_columns(a, i, t * kExactDepth, parts, 32);
      else __builtin_memset(parts, 0, sizeof parts);
      for (int64_t s = 0; s < splits; ++s)
        _mm512_storeu_si512(row + (t * splits + s) * kTileBytes, _mm512_permutexvar_epi16(order, _mm512_load_si512(parts + s * 32)));
    }
  }
}

// Sixteen columns of one expert's matrix; a column beyond the last repeats it.
struct ExactColumns {
  const uint8_t* codes[kTile];
  const char* scales[kTile];
  const uint8_t* zeros[kTile];
};

// Scales of groups, a column a lane, and what its zero point is to the decoder: in each byte (int4), 2^23 + z in fp32 (int8).
struct ExactGroups {
  alignas(64) float scales[kExactRing][kTile];
  alignas(64) uint32_t zeros[kExactRing][kTile];
  int64_t loaded;  // groups so far
};

void load_window(const Weight& w, const ExactColumns& columns, ExactGroups& groups) {
  const int64_t first = groups.loaded, count = w.groups - first < kTile ? w.groups - first : kTile, at = first % kExactRing;
  __m512i v[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) v[i] = _mm512_castps_si512(load_first(columns.scales[i], w.scale_dtype, first, count));
  transpose16(v);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) _mm512_store_ps(groups.scales[at + i], _mm512_castsi512_ps(v[i]));
  groups.loaded = first + kTile;
  if (w.zeros == nullptr && w.bits == 4) return;
  const Vf magic = set1(8388608.f);
  for (int i = 0; i < kTile; ++i) v[i] = w.zeros ? load_first_bytes(columns.zeros[i] + first, count) : _mm512_set1_epi32(128);
  transpose16(v);
  for (int i = 0; i < kTile; ++i)
    _mm512_store_si512(groups.zeros[at + i], w.bits == 4 ? replicate_bytes(v[i]) : _mm512_castps_si512(add(to_float(v[i]), magic)));
}

// Words 0..3 at `offset` of every column, a column a lane.
inline void load_words(const ExactColumns& columns, int64_t offset, Vi words[4]) {
  Vi v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto quarter = [&](int column) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns.codes[column] + offset)); };
    v[i] = _mm512_castsi128_si512(quarter(i));
    v[i] = _mm512_inserti32x4(v[i], quarter(4 + i), 1);
    v[i] = _mm512_inserti32x4(v[i], quarter(8 + i), 2);
    v[i] = _mm512_inserti32x4(v[i], quarter(12 + i), 3);
  }
  const Vi a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const Vi c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  words[0] = _mm512_unpacklo_epi64(a, c);
  words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d);
  words[3] = _mm512_unpackhi_epi64(b, d);
}

// Columns 32 t.. of the matrix to a B tile.
template <bool kZeros>
inline void decode_tile4(const ExactColumns& columns, int64_t t, Vi zeros, Vi table, char* out) {
  Vi words[4], index[4];
  load_words(columns, t * 16, words);
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
    code_indices<kZeros>(words[w], zeros, index);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_store_si512(out + (4 * w + i) * 64, _mm512_permutexvar_epi16(index[i], table));
  }
}

// Byte q of a lane as q - z: 2^23 + q is exact in fp32, and so is its difference from 2^23 + z; |q - z| < 256 fits into bf16.
inline Vi byte_value(Vi low_byte, Vf zeros) {
  const Vi magic = _mm512_set1_epi32(0x4b000000);
  return _mm512_castps_si512(sub(_mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(low_byte, _mm512_set1_epi32(255)), magic)), zeros));
}

inline void decode_tile8(const ExactColumns& columns, int64_t t, Vf zeros, char* out) {
  const Vi high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int half = 0; half < 2; ++half, out += 8 * 64) {
    Vi words[4];
    load_words(columns, t * 32 + half * 16, words);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vi low = byte_value(_mm512_srli_epi32(words[w], 8 * i), zeros);
        const Vi high = byte_value(_mm512_srli_epi32(words[w], 8 * i + 16), zeros);
        _mm512_store_si512(out + (2 * w + i) * 64, _mm512_or_si512(_mm512_srli_epi32(low, 16), _mm512_and_si512(high, high_half)));
      }
    }
  }
}

constexpr int64_t kBlockTiles = 2;  // tiles decoded in one step

// What one call has in flight. Both rings are no larger than 4 KB: a load waits for an older store whose address agrees in its low 12 bits,
// so the steps would run one after the other.
struct ExactState {
  alignas(4096) char weights[2][kBlockTiles * kTileBytes];
  alignas(4096) float products[2][kBlockTiles][kTile * kTile];
  alignas(64) float sums[kExactRows * kTile];
  ExactGroups groups;
  uint16_t group_of[kExactRun / kExactDepth];  // of each tile
};

struct ExactShape {
  int64_t tiles, row_blocks, splits;
  int64_t rows;      // of a tile of x or sums
  bool paired;       // two tiles of a group share their sums
};

// sum tile += x tiles * weights of tile `at` of the block; tile numbers are part of the instruction.
#define INT4_EMU_ADD_TILE(sum, x_tile, w_tile, at)                                        \
  do {                                                                                    \
    _tile_loadd(w_tile, w + (at) * kTileBytes, 64);                                       \
    for (int64_t s_ = 0; s_ < splits; ++s_) {                                             \
      _tile_loadd(x_tile, x + ((at) * splits + s_) * kTileBytes, 64);                     \
      _tile_dpbf16ps(sum, x_tile, w_tile);                                                \
    }                                                                                     \
  } while (false)

// Products of one block of weights (`count` tiles) and 16 rows of x, each tile's apart.
inline void multiply_apart(const char* x, const char* w, int64_t count, int64_t splits, float* products) {
  _tile_zero(0);
  INT4_EMU_ADD_TILE(0, 4, 6, 0);
  if (count > 1) {
    _tile_zero(1);
    INT4_EMU_ADD_TILE(1, 5, 7, 1);
    _tile_stored(1, products + 256, 64);
  }
  _tile_stored(0, products, 64);
}

// The same in one sum, from both.
inline void multiply_paired(const char* x, const char* w, int64_t count, int64_t splits, float* products) {
  _tile_zero(2);
  INT4_EMU_ADD_TILE(2, 4, 6, 0);
  if (count > 1) INT4_EMU_ADD_TILE(2, 5, 7, 1);
  _tile_stored(2, products, 64);
}
#undef INT4_EMU_ADD_TILE

// sums += products * scales, kCount groups or parts of one.
template <int kCount>
inline void scale_products(const float* products, const float* const* scales, int64_t rows, bool first, float* sums) {
  Vf scale[kCount];
#pragma GCC unroll 4
  for (int u = 0; u < kCount; ++u) scale[u] = _mm512_load_ps(scales[u]);
  for (int64_t r = 0; r < rows; ++r) {
    Vf sum = first ? zero() : _mm512_load_ps(sums + r * kTile);
#pragma GCC unroll 4
    for (int u = 0; u < kCount; ++u) sum = fma(_mm512_load_ps(products + u * 256 + r * kTile), scale[u], sum);
    _mm512_store_ps(sums + r * kTile, sum);
  }
}

template <int kBits, bool kZeros>
struct ExactProduct {
  const ProductArgs& a;
  const ExactShape& shape;
  const ExactColumns& columns;
  ExactState& state;
  Vi table;
  CodesAhead ahead;

  int64_t tiles_of(int64_t block) const {
    const int64_t left = shape.tiles - block * kBlockTiles;
    return left < kBlockTiles ? left : kBlockTiles;
  }

  void decode(int64_t block) {
    char* out = state.weights[block & 1];
    if (constexpr int64_t line = 16 / (kBlockTiles * kBits); block % line == 0) {  // blocks of a cache line of codes
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) fetch_codes(columns.codes[0], ahead, i, block / line);
    }
    for (int64_t i = 0; i < tiles_of(block); ++i) {
      const int64_t t = block * kBlockTiles + i, group = state.group_of[t];
      while (group >= state.groups.loaded) load_window(*a.weight, columns, state.groups);
      const uint32_t* zeros = state.groups.zeros[group % kExactRing];
      if constexpr (kBits == 8) decode_tile8(columns, t, _mm512_load_ps(reinterpret_cast<const float*>(zeros)), out + i * kTileBytes);
      else if constexpr (kZeros) decode_tile4<true>(columns, t, _mm512_load_si512(zeros), table, out + i * kTileBytes);
      else decode_tile4<false>(columns, t, table, table, out + i * kTileBytes);
    }
  }

  void scale(int64_t block, int64_t row_block, const float* products) {
    const int64_t count = tiles_of(block);
    const auto scale_of = [&](int64_t tile) { return state.groups.scales[state.group_of[block * kBlockTiles + tile] % kExactRing]; };
    const int64_t left = a.m - row_block * kTile, rows = left < kTile ? left : kTile;
    float* sums = state.sums + row_block * kTile * kTile;
    const float* scales[kBlockTiles] = {scale_of(0), scale_of(count - 1)};
    if (count == 1 || shape.paired) scale_products<1>(products, scales, rows, block == 0, sums);
    else scale_products<2>(products, scales, rows, block == 0, sums);
  }

  void run() {
    const int64_t blocks = (shape.tiles + kBlockTiles - 1) / kBlockTiles;
    const char* x = static_cast<const char*>(a.packed_x);
    state.groups.loaded = 0;
    decode(0);
    int64_t step = 0, last_block = 0, last_rows = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      if (b + 1 < blocks) decode(b + 1);
      finish_stores(state.weights);
      for (int64_t r = 0; r < shape.row_blocks; ++r, ++step) {
        const char* tiles = x + (r * shape.tiles + b * kBlockTiles) * shape.splits * kTileBytes;
        float* products = state.products[step & 1][0];
        if (shape.paired) multiply_paired(tiles, state.weights[b & 1], tiles_of(b), shape.splits, products);
        else multiply_apart(tiles, state.weights[b & 1], tiles_of(b), shape.splits, products);
        if (step > 0) scale(last_block, last_rows, state.products[~step & 1][0]);
        last_block = b;
        last_rows = r;
      }
    }
    finish_stores(state.products);
    scale(last_block, last_rows, state.products[~step & 1][0]);
  }
};

void multiply_exact(const ProductArgs& a) {
  const Weight& w = *a.weight;
  ExactState state;
  ExactShape shape;
  shape.tiles = w.k / kExactDepth;
  shape.row_blocks = round_up_to(a.m, kTile) / kTile;
  shape.splits = splits_of(a.dtype);
  shape.rows = shape.row_blocks == 1 ? a.m : kTile;
  shape.paired = groups_are_whole(w, 2 * kExactDepth);
  const int64_t per_group = (w.group_size < w.k ? w.group_size : w.k) / kExactDepth;
  for (int64_t t = 0, inside = 0, group = 0; t < shape.tiles; ++t) {
    state.group_of[t] = static_cast<uint16_t>(group);
    if (++inside == per_group) inside = 0, ++group;
  }
  if (shape.rows < kTile) configure_tiles(shape.rows);
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + a.expert * w.expert_stride;
  const Vi table = code_table(w.zeros != nullptr);
  for (int p = 0; p < a.parts; ++p) {
    float* c = a.c + p * a.m * a.ldc;
    for (int64_t j = 0; j < a.n; j += kTile) {
      const int64_t count = a.n - j < kTile ? a.n - j : kTile;
      const CodesAhead ahead = tile_ahead(a, p, j, 2048);
      ExactColumns columns;
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t row = a.row0[p] + (j + (i < count ? i : count - 1)) * a.step;
        columns.codes[i] = codes + row * w.n_stride;
        columns.scales[i] = scales_of(w, a.expert, row);
        columns.zeros[i] = w.zeros ? zeros_of(w, a.expert, row) : nullptr;
      }
      if (w.bits == 8) ExactProduct<8, true>{a, shape, columns, state, table, ahead}.run();
      else if (w.zeros != nullptr) ExactProduct<4, true>{a, shape, columns, state, table, ahead}.run();
      else ExactProduct<4, false>{a, shape, columns, state, table, ahead}.run();
      const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (kTile - count));
      for (int64_t i = 0; i < a.m; ++i) _mm512_mask_storeu_ps(c + i * a.ldc + j, mask, _mm512_load_ps(state.sums + i * kTile));
    }
  }
  if (shape.rows < kTile) configure_tiles(kTile);
}

}  // namespace
}  // namespace int4_emu::cpu
