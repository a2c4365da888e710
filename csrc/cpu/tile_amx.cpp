// The AMX tile table: bf16 compute on tdpbf16ps, the rest as in AVX-512. Needs AMX-TILE, AMX-BF16, AMX-INT8 and what tile_avx512.cpp needs.
//
// A tile of weights is 16 rows of a panel by 32 columns, read in place: it is the A operand. x is packed into B tiles, two
// neighbouring k side by side: [ceil(m / 16)][k / 2][16 rows of x][2]. A sum tile is therefore transposed: [16 rows of w][16 rows of x].
// The same instructions serve every m, so a row's result does not depend on the others.
#include "tile.h"

// (clang before 16 spells the first two without the second underscore)
#if (defined(__AMX_TILE__) || defined(__AMXTILE__)) && (defined(__AMX_BF16__) || defined(__AMXBF16__)) && \
    (defined(__AMX_INT8__) || defined(__AMXINT8__)) && defined(__AVX512F__) && \
    defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include "simd_avx512.h"
// (order matters: each builds on the one before)
#include "simd_math.h"
#include "simd_decode.h"
#include "simd_transposed.h"
#include "simd_tile.h"
#include "simd_bf16.h"
#include "simd_split512.h"
#include "simd_codes512.h"
#include "simd_limbs512.h"
#include "simd_dense.h"
#include "simd_amx_tiles.h"
#include "simd_amx_codes.h"
#include "simd_amx_limbs.h"
#include "simd_amx_blocks.h"
#include "simd_amx_strips.h"

namespace int4_emu::cpu {
namespace {

constexpr int64_t kKMultiple = 32;         // bf16 elements of a 64-byte vector
constexpr int64_t kPairBytes = kTile * 4;  // one pair of k of a B tile

size_t packed_x_bytes_bf16(int64_t m, int64_t k) { return static_cast<size_t>(round_up_to(m, kTile) * round_up_to(k, kKMultiple)) * 2; }

// Rows of x as bf16 [m][ld], zero-padded. The driver uses bf16 compute for bf16 x; other dtypes are rounded.
template <DType D>
void pack_rows_bf16(const PackXArgs& a, int64_t ld, uint16_t* out) {
  for (int64_t i = 0; i < a.m; ++i, out += ld) {
    const void* row = x_row(a, i, kBytes<D>);
    int64_t j = 0;
    if (D == DType::bf16 && a.perm == nullptr && a.row_scale == nullptr) {
      __builtin_memcpy(out, row, a.k * 2);
      __builtin_memset(out + a.k, 0, (ld - a.k) * 2);
      continue;
    }
    for (; j < a.k; j += kLanes) store_bf16(out + j, x_vector<D>(a, row, i, j));
    for (; j < ld; j += kLanes) store_bf16(out + j, zero());
  }
}

inline void pack_rows_bf16(const PackXArgs& a, int64_t ld, uint16_t* out) {
  if (a.dtype == DType::f32) pack_rows_bf16<DType::f32>(a, ld, out);
  else if (a.dtype == DType::f16) pack_rows_bf16<DType::f16>(a, ld, out);
  else pack_rows_bf16<DType::bf16>(a, ld, out);
}

void pack_x_bf16(const PackXArgs& a) {
  const int64_t ld = round_up_to(a.k, kKMultiple);
  char* out = static_cast<char*>(a.out);
  alignas(64) uint16_t block[kTile * kKMultiple];
  for (int64_t i0 = 0; i0 < a.m; i0 += kTile) {
    const int64_t rows = a.m - i0 < kTile ? a.m - i0 : kTile;
    for (int64_t p = 0; p < ld; p += kKMultiple, out += kTile * 64) {
      PackXArgs part = a;  // 32 columns of up to 16 rows, row-major, zeros below and to the right
      part.m = rows;
      part.k = a.k - p < kKMultiple ? a.k - p : kKMultiple;
      if (a.rows != nullptr) part.rows = a.rows + i0;
      if (a.row_scale != nullptr) part.row_scale = a.row_scale + i0;
      if (a.perm != nullptr) part.perm = a.perm + p;
      const int64_t shift = (a.rows == nullptr ? i0 * a.x_stride : 0) + (a.perm == nullptr ? p : 0);
      part.x = static_cast<const char*>(a.x) + shift * (a.dtype == DType::f32 ? 4 : 2);
      if (rows < kTile) __builtin_memset(block, 0, sizeof block);
      pack_rows_bf16(part, kKMultiple, block);
      __m512i pairs[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) pairs[i] = _mm512_load_si512(block + i * kKMultiple);
      transpose16(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 64, pairs[i]);
    }
  }
}

// One 16 x 16 block of sums [w row][x row] to c[x row][w row], w rows first.. only.
void write_block(const float* sums, float* c, int64_t ldc, int64_t m, int64_t first, int64_t last, bool accumulate) {
  __m512i v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_castps_si512(_mm512_load_ps(sums + i * kTile));
  transpose16(v);
  alignas(64) float rows[kTile * kTile];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_ps(rows + i * kTile, _mm512_castsi512_ps(v[i]));
  const __mmask16 mask = static_cast<__mmask16>((0xffffu << first) & (0xffffu >> (kTile - last)));
  for (int64_t i = 0; i < m; ++i) {
    float* to = c + i * ldc;
    __m512 sum = _mm512_load_ps(rows + i * kTile);
    if (accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
    _mm512_mask_storeu_ps(to, mask, sum);
  }
}

// Weight rows of one or two A tiles against one or two B tiles. Sums of (A tile a, B tile b) go to sums + (2 a + b) * 256.
// Tile numbers are part of the instruction, hence no loops over them: 0-3 sums, 4-5 weights, 6-7 x.
struct BlockArgs {
  const uint16_t* w[2];     // first row of each A tile, at the first k
  int64_t w_stride;         // bytes
  const char* x[2];         // B tiles, at the first k
  int64_t k;                // a multiple of 32
  float* sums;              // 4 x [16][16]
  const uint8_t* ahead;     // weights to fetch beside, those of the next rows; or none
};

// Hardware prefetchers do not follow several rows within a page, but they do follow lines that are asked for in their order in memory.
constexpr int64_t kAheadColumns = 2048;  // of rows that lie in a page; longer ones come sooner without (docs/performance.md)
template <int kRows>
inline __attribute__((always_inline)) void fetch_ahead(const BlockArgs& a, int64_t p) {
  if (a.ahead == nullptr) return;
#pragma GCC unroll 32
  for (int64_t r = 0; r < kRows; ++r) fetch_line(a.ahead + p * 2 * kRows + r * 64);
}

inline void block_2x2(const BlockArgs& a) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t p = 0; p < a.k; p += kKMultiple) {
    fetch_ahead<2 * kTile>(a, p);
    _tile_loadd(4, a.w[0] + p, a.w_stride);
    _tile_loadd(6, a.x[0] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, a.x[1] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a.w[1] + p, a.w_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, a.sums, kTile * 4);
  _tile_stored(1, a.sums + 256, kTile * 4);
  _tile_stored(2, a.sums + 512, kTile * 4);
  _tile_stored(3, a.sums + 768, kTile * 4);
}

inline void block_2x1(const BlockArgs& a) {
  _tile_zero(0);
  _tile_zero(2);
  for (int64_t p = 0; p < a.k; p += kKMultiple) {
    fetch_ahead<2 * kTile>(a, p);
    _tile_loadd(6, a.x[0] + p / 2 * kPairBytes, kPairBytes);
    _tile_loadd(4, a.w[0] + p, a.w_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.w[1] + p, a.w_stride);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, a.sums, kTile * 4);
  _tile_stored(2, a.sums + 512, kTile * 4);
}

inline void block_1x2(const BlockArgs& a) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t p = 0; p < a.k; p += kKMultiple) {
    fetch_ahead<kTile>(a, p);
    _tile_loadd(4, a.w[0] + p, a.w_stride);
    _tile_loadd(6, a.x[0] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, a.x[1] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, a.sums, kTile * 4);
  _tile_stored(1, a.sums + 256, kTile * 4);
}

inline void block_1x1(const BlockArgs& a) {
  _tile_zero(0);
  for (int64_t p = 0; p < a.k; p += kKMultiple) {
    fetch_ahead<kTile>(a, p);
    _tile_loadd(4, a.w[0] + p, a.w_stride);
    _tile_loadd(6, a.x[0] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, a.sums, kTile * 4);
}

// A panel of fewer than 16 rows: an A tile would read past its end, so 32 columns at a time are copied beside zeros.
inline void block_few_rows(const BlockArgs& a, int64_t rows) {
  alignas(64) uint16_t tile[kTile * kKMultiple];
  __builtin_memset(tile, 0, sizeof tile);
  _tile_zero(0);
  for (int64_t p = 0; p < a.k; p += kKMultiple) {
    for (int64_t r = 0; r < rows; ++r)
      _mm512_store_si512(tile + r * kKMultiple, _mm512_loadu_si512(reinterpret_cast<const char*>(a.w[0] + p) + r * a.w_stride));
    finish_stores(tile);
    _tile_loadd(4, tile, 64);
    _tile_loadd(6, a.x[0] + p / 2 * kPairBytes, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, a.sums, kTile * 4);
}

void gemm_amx(const GemmArgs& a) {
  const int64_t tile_bytes = round_up_to(a.total_k, kKMultiple) / 2 * kPairBytes;  // x of 16 rows, all k
  const char* x = static_cast<const char*>(a.packed_x) + a.k0 / 2 * kPairBytes;
  const uint16_t* w = static_cast<const uint16_t*>(a.w);
  alignas(64) float sums[4 * kTile * kTile];
  BlockArgs block;
  block.w_stride = a.ldw * 2;
  block.k = round_up_to(a.k, kKMultiple);
  block.sums = sums;
  const bool fetches = a.ldw == a.total_k && a.k == a.total_k && a.k <= kAheadColumns;
  finish_stores(w);
  for (int64_t j = 0; j < a.n; j += 2 * kTile) {
    // First rows of the one or two A tiles. The last tile of a ragged n begins early and repeats rows, which are not written again.
    const int64_t left = a.n - j;
    const int64_t begin0 = left >= kTile || a.n < kTile ? j : a.n - kTile;
    const int64_t begin1 = left >= 2 * kTile ? j + kTile : a.n - kTile;
    const bool two = left > kTile;
    block.w[0] = w + begin0 * a.ldw;
    block.ahead = fetches ? reinterpret_cast<const uint8_t*>(w + (begin0 + (two ? 2 : 1) * kTile) * a.ldw) : nullptr;
    block.w[1] = two ? w + begin1 * a.ldw : nullptr;
    for (int64_t i = 0; i < a.m; i += 2 * kTile) {
      const bool wide = a.m - i > kTile;
      block.x[0] = x + i / kTile * tile_bytes;
      block.x[1] = wide ? block.x[0] + tile_bytes : nullptr;
      if (a.n < kTile) block_few_rows(block, a.n);
      else if (two && wide) block_2x2(block);
      else if (two) block_2x1(block);
      else if (wide) block_1x2(block);
      else block_1x1(block);
      if (a.n < kTile && wide) {  // the second B tile, which block_few_rows does not take
        block.x[0] = block.x[1];
        block.sums = sums + 256;
        block_few_rows(block, a.n);
        block.sums = sums;
      }
      const int64_t m0 = wide ? kTile : a.m - i, m1 = a.m - i - kTile < kTile ? a.m - i - kTile : kTile;
      float* c = a.c + i * a.ldc;
      const int64_t last0 = a.n < kTile ? a.n : kTile;
      write_block(sums, c + begin0, a.ldc, m0, j - begin0, last0, a.accumulate);
      if (wide) write_block(sums + 256, c + kTile * a.ldc + begin0, a.ldc, m1, j - begin0, last0, a.accumulate);
      if (!two) continue;
      write_block(sums + 512, c + begin1, a.ldc, m0, j + kTile - begin1, kTile, a.accumulate);
      if (wide) write_block(sums + 768, c + kTile * a.ldc + begin1, a.ldc, m1, j + kTile - begin1, kTile, a.accumulate);
    }
  }
}

// Which way m rows go, by what was measured (docs/performance.md). A few rows of bf16 or fp16 x go in integers, on vectors or on tiles; more of
// bf16 meet strips of rounded weights; what rounding may not touch multiplies exact codes, or dense weights in fp32.
enum class Way { none, limbs, limb_tiles, exact, dense, strips };
constexpr int64_t kExactFewRows = 8;   // by exact codes where strips decode blocks
constexpr int64_t kAnyRows = int64_t{1} << 40;
constexpr int64_t kInPlaceRows = 32;   // and where they decode rows, or read dense weights

// Rows that go on vectors, and the most that go on limb tiles: the more units a block has, the fewer rows a tile.
int64_t vector_rows(const Weight& w, const CodesUnits& units) { return w.bits == 4 && units.per_block >= 4 ? kLimbRows : 2; }
int64_t most_limb_rows(const Weight& w, DType x, const CodesUnits& units) {
  if (w.bits == 8) return limb_chunk_rows(units);
  if (units.per_block == 1 && x == DType::f16) return kAnyRows;
  return units.per_block <= 2 ? kExactFewRows : 0;
}

Way way_of(const Weight& w, DType x, int64_t m) {
  if (serves_dense(w) && (x != DType::bf16 || w.dtype != DType::bf16)) return Way::dense;
  if (serves_codes(w)) {
    const CodesUnits units(w);
    if (m <= vector_rows(w, units) && serves_limbs(w, x)) return Way::limbs;
    if (m <= most_limb_rows(w, x, units) && serves_limb_tiles(w, x)) return Way::limb_tiles;
  }
  const int64_t few = strip_groups(w) ? kExactFewRows : kInPlaceRows;
  if ((x != DType::bf16 || m <= few) && serves_exact(w, m)) return Way::exact;
  return m > few && serves_strips(w, x) ? Way::strips : Way::none;
}

bool serves(const Weight& w, DType x, int64_t m) { return way_of(w, x, m) != Way::none; }

size_t packed_x_bytes(const Weight& w, DType x, int64_t m) {
  switch (way_of(w, x, m)) {
    case Way::limbs: return packed_x_bytes_limbs(w, m);
    case Way::limb_tiles: return packed_x_bytes_limb_tiles(w, m);
    case Way::exact: return packed_x_bytes_exact(w, x, m);
    case Way::dense: return packed_dense_x_bytes(w, m);
    default: return packed_x_bytes_strips(w, m);
  }
}

bool pack_x(const Weight& w, const PackXArgs& a) {
  switch (way_of(w, a.dtype, a.m)) {
    case Way::limbs: return pack_x_limbs(w, a);
    case Way::limb_tiles: return pack_x_limb_tiles(w, a);
    case Way::exact: pack_x_exact(w, a); return true;
    case Way::dense: pack_dense_x(w, a); return true;
    default: pack_x_strips(w, a); return true;
  }
}

void multiply(const ProductArgs& a) {
  switch (way_of(*a.weight, a.dtype, a.m)) {
    case Way::limbs: return multiply_limbs(a);
    case Way::limb_tiles: return multiply_limb_tiles(a);
    case Way::exact: return multiply_exact(a);
    case Way::dense: return multiply_dense(a);
    default: return multiply_strips(a);
  }
}

const TileTable kTable = {"amx",
                          kKMultiple,
                          panels_of<MultiplyAdds<DType::f32>>,
                          {packed_x_bytes_bf16, pack_x_bf16, load_panel_as<DType::bf16>, gemm_amx},
                          {serves, packed_x_bytes, pack_x, multiply, kKeptRows},
                          activate,
                          combine,
                          dequantize_row,
                          dequantize_transposed,
                          begin_thread,
                          end_thread};

}  // namespace

const TileTable* amx_table() { return &kTable; }

}  // namespace int4_emu::cpu

#else

const int4_emu::cpu::TileTable* int4_emu::cpu::amx_table() { return nullptr; }

#endif
