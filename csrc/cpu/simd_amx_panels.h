// Many rows of x times bf16 weights on tdpbf16ps: dense ones, or packed ones rounded once to bf16. Included after simd_amx_tiles.h.
//
// Weights are the A operand: 32 rows of a depth that stays in L1 are brought into tile order once and meet all rows of x, packed into B
// tiles, which come from L2. The sums of every 32 x 32 block wait in the scratch as whole tiles until the last depth.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kPanelRows = 32;
constexpr int64_t kPanelK = 512;        // columns of a panel: 32 KB
constexpr int64_t kPanelTiles = kPanelK / 32;
constexpr int64_t kLookupBlock = 128;   // codes of a vector

// How the columns of the matrix are ordered in tiles: as they are, or in blocks of 128 as a vector of codes comes apart (simd_codes512.h).
inline bool panel_looks_up(const Weight& w) {
  return w.packed && w.bits == 4 && w.layout == Layout::canonical && w.k % 32 == 0 &&
         (w.group_size == 32 || w.group_size == 64 || groups_are_whole(w, kLookupBlock));
}

bool serves_panels(const Weight& w, DType x) {
  return x == DType::bf16 && w.k > 0 && (w.packed || (w.dtype == DType::bf16 && w.k_stride == 1));
}

inline int64_t panel_depth(const Weight& w) { return round_up_to(w.k, panel_looks_up(w) ? kLookupBlock : 32); }

// [ceil(m / 16)][depth / 32] tiles of [16 pairs of columns][16 rows][2].
size_t packed_x_bytes_panels(const Weight& w, int64_t m) {
  return static_cast<size_t>(round_up_to(m, kTile) / kTile * (panel_depth(w) / 32) * kTileBytes);
}

void pack_x_panels(const Weight& w, const PackXArgs& a) {
  const bool looks_up = panel_looks_up(w);
  const int64_t depth = panel_depth(w);
  alignas(64) uint16_t block[kTile * 32];
  const Vi order = exact_order(4);  // (c, c + 4) of each eight
  char* out = static_cast<char*>(a.out);
  for (int64_t i0 = 0; i0 < a.m; i0 += kTile, out += depth / 32 * kTileBytes) {
    for (int64_t k0 = 0; k0 < depth; k0 += 32) {
      for (int64_t i = 0; i < kTile; ++i) {
        if (i0 + i < a.m) split_columns(a, i0 + i, k0, block + i * 32, 0);
        else _mm512_store_si512(block + i * 32, _mm512_setzero_si512());
      }
      Vi v[kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) v[i] = _mm512_load_si512(block + i * 32);
      if (!looks_up) {
        transpose16(v);
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(out + k0 / 32 * kTileBytes + i * 64, v[i]);
        continue;
      }
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) v[i] = _mm512_permutexvar_epi16(order, v[i]);
      transpose16(v);
      // Pair c of eight p: row p of tile c of the block.
      char* to = out + k0 / kLookupBlock * 4 * kTileBytes + k0 % kLookupBlock / 8 * 64;
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_store_si512(to + i % 4 * kTileBytes + i / 4 * 64, v[i]);
    }
  }
}

// The sixteen values of a code in two groups, rounded to bf16: entries 0-15 and 16-31 of a lookup.
inline Vi two_tables(const float* zeros, const float* scales) {
  const Vf code = to_float(iota());
  const Vf first = mul(sub(code, set1(zeros[0])), set1(scales[0])), second = mul(sub(code, set1(zeros[1])), set1(scales[1]));
  return reinterpret_cast<Vi>(_mm512_cvtne2ps_pbh(second, first));
}
inline Vi one_table(float zero_point, float scale) {
  const Vf value = mul(sub(to_float(iota()), set1(zero_point)), set1(scale));
  return reinterpret_cast<Vi>(_mm512_cvtne2ps_pbh(value, value));
}

// Bit 4 of both halves of a lane, in the lanes of every second group of 32 or 64 columns: which of two tables.
constexpr uint32_t kSecond = 0x00100010;
alignas(64) constexpr uint32_t kSelectQuarter[16] = {0, 0, 0, 0, kSecond, kSecond, kSecond, kSecond,
                                                     0, 0, 0, 0, kSecond, kSecond, kSecond, kSecond};
alignas(64) constexpr uint32_t kSelectHalf[16] = {0,       0,       0,       0,       0,       0,       0,       0,
                                                  kSecond, kSecond, kSecond, kSecond, kSecond, kSecond, kSecond, kSecond};

// (word & 0x000f000f) | selector
inline Vi select_entry(Vi word, Vi selector) { return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(0x000f000f), selector, 0xea); }

// Codes of one row, a multiple of 32 from a block's begin on, to rows of tiles `out`, `out` + 1 KB, ...
struct LookupRow {
  const uint8_t* codes;
  int64_t k;
  const float *scales, *zeros;  // of the groups from there on, finite beyond the last
  int64_t group_size, inside;   // 32, 64 or a multiple of 128; how far inside of a group the first code lies
};

template <int kGroups>  // of a block: 4, 2 or 1
inline void look_up_row(const LookupRow& a, char* out) {
  const Vi selector = _mm512_load_si512(kGroups == 4 ? kSelectQuarter : kSelectHalf);
  const float *scales = a.scales, *zeros = a.zeros;
  Vi low = _mm512_setzero_si512(), high = low;
  int64_t inside = a.inside;
  if constexpr (kGroups == 1) low = one_table(*zeros, *scales);
  for (int64_t k0 = 0; k0 < a.k; k0 += kLookupBlock, out += 4 * kTileBytes) {
    const int64_t left = a.k - k0;
    const uint8_t* codes = a.codes + k0 / 2;
    const Vi words = left >= kLookupBlock ? _mm512_loadu_si512(codes)
                                          : _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (left / 8)) - 1), codes);
    if constexpr (kGroups == 1) {
      if (inside == a.group_size) low = one_table(*++zeros, *++scales), inside = 0;
      inside += kLookupBlock;
    } else {
      low = two_tables(zeros, scales);
      if constexpr (kGroups == 4) high = two_tables(zeros + 2, scales + 2);
      zeros += kGroups;
      scales += kGroups;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vi word = i == 0 ? words : _mm512_srli_epi32(words, 4 * i);
      Vi value;
      if constexpr (kGroups == 1) {
        value = _mm512_permutexvar_epi16(word, low);
      } else {
        const Vi index = select_entry(word, selector);
        value = _mm512_permutexvar_epi16(index, low);
        if constexpr (kGroups == 4) value = _mm512_mask_permutexvar_epi16(value, 0xffff0000u, index, high);
      }
      _mm512_store_si512(out + i * kTileBytes, value);
    }
  }
}

struct PanelArgs {
  const Weight* weight;
  int64_t expert, row0, step, rows;  // row j of the panel is row0 + j * step; those from `rows` on are zero
  int64_t k0, k, tiles;              // columns k0.., in so many tiles
  char* out;                         // [2][tiles] tiles
};

// The groups of a panel's columns: the first, how many, and how far inside of the first they begin.
struct PanelGroups {
  int64_t first, count, size, inside;
};

inline PanelGroups panel_groups(const PanelArgs& a) {
  const Weight& w = *a.weight;
  if (w.group_size >= w.k) return {0, 1, round_up_to(w.k, kLookupBlock), a.k0};
  const int64_t first = a.k0 / w.group_size;
  return {first, (a.k0 + a.k + w.group_size - 1) / w.group_size - first, w.group_size, a.k0 - first * w.group_size};
}

// One row of codes into row r of the panel's tiles.
inline void look_up_panel_row(const PanelArgs& a, const PanelGroups& groups, int64_t r) {
  const Weight& w = *a.weight;
  const int64_t row = a.row0 + r * a.step;
  char* out = a.out + r / kTile * a.tiles * kTileBytes + r % kTile * 64;
  alignas(64) float scales[kPanelK / 32 + kLanes], zeros[kPanelK / 32 + kLanes];  // at most 16 groups
  store(scales, load_first(scales_of(w, a.expert, row), w.scale_dtype, groups.first, groups.count));
  store(zeros, w.zeros ? to_float(load_first_bytes(zeros_of(w, a.expert, row) + groups.first, groups.count)) : set1(8.f));
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + a.expert * w.expert_stride + row * w.n_stride + a.k0 / 2;
  const LookupRow from{codes, a.k, scales, zeros, groups.size, groups.inside};
  if (groups.size == 32) look_up_row<4>(from, out);
  else if (groups.size == 64) look_up_row<2>(from, out);
  else look_up_row<1>(from, out);
}

// One row of any other weight into row r.
inline void load_panel_row(const PanelArgs& a, int64_t r) {
  const Weight& w = *a.weight;
  const int64_t row = a.row0 + r * a.step;
  char* out = a.out + r / kTile * a.tiles * kTileBytes + r % kTile * 64;
  alignas(64) uint16_t values[kPanelK];
  const char* from = reinterpret_cast<const char*>(values);
  if (w.packed) decode_weight_row<DType::bf16>(w, a.expert, row, a.k0, a.k, values);
  else from = static_cast<const char*>(w.data) + (a.expert * w.expert_stride + row * w.n_stride + a.k0) * 2;
  int64_t t = 0;
  for (; (t + 1) * 32 <= a.k; ++t) _mm512_store_si512(out + t * kTileBytes, _mm512_loadu_si512(from + t * 64));
  if (t * 32 == a.k) return;
  alignas(64) uint16_t last[32] = {0};
  __builtin_memcpy(last, from + t * 64, (a.k - t * 32) * 2);
  _mm512_store_si512(out + t * kTileBytes, _mm512_load_si512(last));
}

void load_panel_tiles(const PanelArgs& a) {
  const bool looks_up = panel_looks_up(*a.weight);
  const PanelGroups groups = looks_up ? panel_groups(a) : PanelGroups{};
  for (int64_t r = 0; r < kPanelRows; ++r) {
    if (r < a.rows) {
      if (looks_up) look_up_panel_row(a, groups, r);
      else load_panel_row(a, r);
      continue;
    }
    for (int64_t t = 0; t < a.tiles; ++t)
      _mm512_store_si512(a.out + (r / kTile * a.tiles + t) * kTileBytes + r % kTile * 64, _mm512_setzero_si512());
  }
}

// One 16 x 16 block of sums [w row][x row] to c[x row][w row].
inline void write_sums(const float* sums, float* c, int64_t ldc, int64_t m, int64_t columns) {
  if (m <= 0 || columns <= 0) return;
  Vi v[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) v[i] = _mm512_castps_si512(_mm512_load_ps(sums + i * kTile));
  transpose16(v);
  if (m >= kTile && columns >= kTile) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) _mm512_storeu_ps(c + i * ldc, _mm512_castsi512_ps(v[i]));
    return;
  }
  alignas(64) float rows[kTile * kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) _mm512_store_ps(rows + i * kTile, _mm512_castsi512_ps(v[i]));
  const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (kTile - (columns < kTile ? columns : kTile)));
  for (int64_t i = 0; i < (m < kTile ? m : kTile); ++i) _mm512_mask_storeu_ps(c + i * ldc, mask, _mm512_load_ps(rows + i * kTile));
}

// Lines of the next panel's weights, fetched into L2 while this one is multiplied.
struct Ahead {
  const char* row;
  int64_t stride, lines, rows, line;  // lines of a row; rows left
  void fetch(int64_t count) {
    for (; count > 0 && rows > 0; --count) {
      _mm_prefetch(row + line * 64, _MM_HINT_T1);
      if (++line == lines) line = 0, row += stride, --rows;
    }
  }
};

// 32 weight rows against 32 or, where `wide` is false, 16 rows of x.
struct PanelStep {
  const char *w0, *w1, *x0, *x1;  // tiles at the first column of the panel
  int64_t tiles;
  float* sums;                    // 4 tiles: (w0, x0), (w0, x1), (w1, x0), (w1, x1)
  bool first;                     // of the depths: sums begin at zero
  Ahead* ahead;
  int64_t lines;                  // to fetch a tile
};

inline void multiply_wide(const PanelStep& a) {
  if (a.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, a.sums, 64);
    _tile_loadd(1, a.sums + 256, 64);
    _tile_loadd(2, a.sums + 512, 64);
    _tile_loadd(3, a.sums + 768, 64);
  }
  for (int64_t t = 0; t < a.tiles; ++t) {
    const int64_t at = t * kTileBytes;
    _tile_loadd(6, a.x0 + at, 64);
    _tile_loadd(4, a.w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.w1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    a.ahead->fetch(a.lines);
    _tile_loadd(7, a.x1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, a.sums, 64);
  _tile_stored(1, a.sums + 256, 64);
  _tile_stored(2, a.sums + 512, 64);
  _tile_stored(3, a.sums + 768, 64);
}

inline void multiply_narrow(const PanelStep& a) {
  if (a.first) {
    _tile_zero(0);
    _tile_zero(2);
  } else {
    _tile_loadd(0, a.sums, 64);
    _tile_loadd(2, a.sums + 512, 64);
  }
  for (int64_t t = 0; t < a.tiles; ++t) {
    const int64_t at = t * kTileBytes;
    a.ahead->fetch(a.lines);
    _tile_loadd(6, a.x0 + at, 64);
    _tile_loadd(4, a.w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.w1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, a.sums, 64);
  _tile_stored(2, a.sums + 512, 64);
}

void multiply_panels(const ProductArgs& a) {
  const Weight& w = *a.weight;
  alignas(64) char panel[kPanelRows * kPanelK * 2];
  const int64_t depth = panel_depth(w), x_block = depth / 32 * kTileBytes;
  const char* x = static_cast<const char*>(a.packed_x);
  const int64_t panels = (a.n + kPanelRows - 1) / kPanelRows, wide_rows = 2 * kTile, row_steps = (a.m + wide_rows - 1) / wide_rows;
  float* const sums = static_cast<float*>(a.scratch);  // [parts][panels][row steps][4 tiles]
  const int64_t depths = (depth + kPanelK - 1) / kPanelK, bits = w.packed ? w.bits : 16;
  const char* weights = static_cast<const char*>(w.data) + a.expert * w.expert_stride * (w.packed ? 1 : 2);
  const int64_t row_bytes = w.n_stride * (w.packed ? 1 : 2);
  for (int64_t d = 0; d < depths; ++d) {
    const int64_t k0 = d * kPanelK, end = k0 + kPanelK < depth ? k0 + kPanelK : depth, tiles = (end - k0) / 32;
    const int64_t k = (end < w.k ? end : w.k) - k0;
    for (int64_t q = 0; q < a.parts * panels; ++q) {
      const int64_t part = q / panels, j = q % panels * kPanelRows, rows = a.n - j < kPanelRows ? a.n - j : kPanelRows;
      load_panel_tiles({&w, a.expert, a.row0[part] + j * a.step, a.step, rows, k0, k, tiles, panel});
      finish_stores(panel);
      // The panel after this one: other rows, or the same rows further on.
      const bool last = q + 1 == a.parts * panels;
      const int64_t next_q = last ? 0 : q + 1, next_k = last ? k0 + kPanelK : k0;
      const int64_t next_row = a.row0[next_q / panels] + next_q % panels * kPanelRows * a.step;
      Ahead ahead{weights + next_row * row_bytes + next_k * bits / 8, a.step * row_bytes, (kPanelK * bits / 8 + 63) / 64,
                  next_k < w.k ? kPanelRows : 0, 0};
      const int64_t lines = (ahead.lines * kPanelRows + row_steps * tiles - 1) / (row_steps * tiles);
      for (int64_t i = 0; i < row_steps; ++i) {
        const int64_t left = a.m - i * wide_rows;
        const char* x0 = x + 2 * i * x_block + k0 / 32 * kTileBytes;
        float* block = sums + (q * row_steps + i) * 4 * kTile * kTile;
        const PanelStep step{panel, panel + tiles * kTileBytes, x0, x0 + x_block, tiles, block, d == 0, &ahead, lines};
        if (left > kTile) multiply_wide(step);
        else multiply_narrow(step);
        if (end < depth) continue;
        float* c = a.c + part * a.m * a.ldc + i * wide_rows * a.ldc + j;
        write_sums(block, c, a.ldc, left, rows);
        write_sums(block + 256, c + kTile * a.ldc, a.ldc, left - kTile, rows);
        write_sums(block + 512, c + kTile, a.ldc, left, rows - kTile);
        write_sums(block + 768, c + kTile * a.ldc + kTile, a.ldc, left - kTile, rows - kTile);
      }
    }
  }
}

}  // namespace
}  // namespace int4_emu::cpu
