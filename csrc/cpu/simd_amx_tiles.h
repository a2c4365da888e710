// What the AMX files share: tile configuration, transposes. Included after simd_codes512.h.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kTile = 16;  // rows of a tile; a row is 64 bytes
constexpr int64_t kTileBytes = kTile * 64;

// gcc 12 does not tell its optimiser that ldtilecfg and tileloadd read memory: stores before them would be dropped as dead.
inline void finish_stores(const void* p) { __asm__ volatile("" ::"r"(p) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");

// Tiles 0-5 with `rows` rows, 6-7 with sixteen.
inline void configure_tiles(int64_t rows) {
  TileConfig config;
  __builtin_memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTile);
  }
  finish_stores(&config);
  _tile_loadconfig(&config);
}

void begin_thread() { configure_tiles(kTile); }
void end_thread() { _tile_release(); }

// The codes to fetch beside sixteen rows from column j of part p on: those of the next sixteen, or in rows of more than `most` bytes further on
// in the same ones. After the last rows that are the columns behind these, which most often come next.
inline CodesAhead tile_ahead(const ProductArgs& a, int p, int64_t j, int64_t most) {
  const Weight& w = *a.weight;
  if (w.n_stride > most) return codes_ahead(w, a.step, kTile, 512, false);
  const int64_t row = a.row0[p] + j * a.step;
  const int64_t next = j + kTile < a.n ? row + kTile * a.step : p + 1 < a.parts ? a.row0[1] : a.row0[0] + a.n * a.step;
  return codes_ahead(w, a.step, kTile, (next - row) * w.n_stride, true);
}

// 16 vectors of 16 dwords, transposed.
inline void transpose16(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // v[i + c]: column c of each 4 x 4 block of rows i..i + 3
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {  // columns c, c + 4, c + 8, c + 12 are the 128-bit quarters
    const __m512i a = _mm512_shuffle_i32x4(v[c], v[c + 4], 0x44), b = _mm512_shuffle_i32x4(v[c], v[c + 4], 0xee);
    const __m512i d = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0x44), e = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0xee);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[c + 8] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

}  // namespace
}  // namespace int4_emu::cpu
