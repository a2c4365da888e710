// Many rows of x times bf16 weights on tdpbf16ps: dense ones, or packed ones rounded once to bf16. Included after simd_amx_blocks.h.
//
// Weights are the A operand, x the B operand, packed into tiles. A strip of 32 weight rows meets three tiles of x at a time, or two, whose sums
// stay in tiles over all columns: dense weights where they lie, packed ones from a ring of two blocks, the next of which is decoded between
// the products of this one. More instructions between two products than the core can look ahead over would run by turns instead. Packed weights
// are decoded again for every run of x tiles, which costs less than keeping them decoded in L2; so runs of three, though they load seven tiles
// for six products where two by two loads one for each. With many tiles of x, sums that go to memory and back cost less than that: four
// blocks, which L1 holds while x streams past it, are then decoded once for all runs, of two (docs/performance.md).
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kStripX = 512 << 10;  // elements of x in one go: they stay in L2 from strip to strip
constexpr int64_t kKeptRows = 9 * kTile + 1;  // rows of x from which on blocks are kept: ten tiles
constexpr int64_t kKeptBlocks = 4;

bool serves_strips(const Weight& w, DType x) {
  return x == DType::bf16 && w.k > 0 && (w.packed || (w.dtype == DType::bf16 && w.k_stride == 1));
}

inline int64_t strip_depth(const Weight& w) { return round_up_to(w.k, kBlockK); }

inline bool keeps_blocks(const Weight& w, int64_t m) { return w.packed && m >= kKeptRows; }

// Columns in one go, with m rows of x: as few goes as fit, all alike. Where blocks are kept, x of the next go is fetched to L2 beside it.
inline int64_t strip_columns(const Weight& w, int64_t m) {
  const int64_t fitting = kStripX / (keeps_blocks(w, m) ? 2 : 1) / round_up_to(m, kTile);
  const int64_t most = fitting < kBlockK ? kBlockK : fitting < kStripK ? fitting : kStripK;
  const int64_t blocks = strip_depth(w) / kBlockK, goes = (blocks + most / kBlockK - 1) / (most / kBlockK);
  return (blocks + goes - 1) / goes * kBlockK;
}

// For every run of so many columns [ceil(m / 16)][columns / 32] tiles of [16 pairs of columns][16 rows][2]: whole rows would lie a power of two
// apart, and fight for the same sets of L2.
size_t packed_x_bytes_strips(const Weight& w, int64_t m) {
  return static_cast<size_t>(round_up_to(m, kTile) / kTile * (strip_depth(w) / 32) * kTileBytes);
}

void pack_x_strips(const Weight& w, const PackXArgs& a) {
  const bool looks_up = strip_looks_up(w);
  const int64_t depth = strip_depth(w), columns = strip_columns(w, a.m);
  alignas(64) uint16_t block[kTile * 32];
  const Vi order = exact_order(4);  // (c, c + 4) of each eight
  char* out = static_cast<char*>(a.out);
  for (int64_t first = 0; first < depth; first += columns) {
    const int64_t count = depth - first < columns ? depth - first : columns;
    for (int64_t i0 = 0; i0 < a.m; i0 += kTile, out += count / 32 * kTileBytes) {
      for (int64_t k0 = 0; k0 < count; k0 += 32) {
        for (int64_t i = 0; i < kTile; ++i) {
          if (i0 + i < a.m) split_columns(a, i0 + i, first + k0, block + i * 32, 0);
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
        char* to = out + k0 / kBlockK * kBlockBytes + k0 % kBlockK / 8 * 64;
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(to + i % 4 * kTileBytes + i / 4 * 64, v[i]);
      }
    }
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

// A tile of x, which streams past L1 where that has better to hold.
template <bool kStreams>
inline __attribute__((always_inline)) void load_x6(const char* x) {
  if constexpr (kStreams) _tile_stream_loadd(6, x, 64);
  else _tile_loadd(6, x, 64);
}
template <bool kStreams>
inline __attribute__((always_inline)) void load_x7(const char* x) {
  if constexpr (kStreams) _tile_stream_loadd(7, x, 64);
  else _tile_loadd(7, x, 64);
}

// Sums of 32 weight rows and kT tiles of x += their products over 32 columns, and four parts of other work between them. A tile of sums is
// numbered as they are multiplied here.
template <int kT, bool kStreams, class Beside>
inline __attribute__((always_inline)) void multiply_tiles(const char* w, int64_t w_half, int64_t w_stride, const char* x, int64_t x_block,
                                                          const Beside& beside) {
  if constexpr (kT == 3) {  // eight tiles are one too few to keep both tiles of weights beside one of x
    _tile_loadd(6, w, w_stride);
    load_x7<false>(x);
    _tile_dpbf16ps(0, 6, 7);
    beside.part(0);
    load_x7<false>(x + x_block);
    _tile_dpbf16ps(1, 6, 7);
    beside.part(1);
    load_x7<kStreams>(x + 2 * x_block);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(6, w + w_half, w_stride);
    _tile_dpbf16ps(5, 6, 7);
    beside.part(2);
    load_x7<kStreams>(x + x_block);
    _tile_dpbf16ps(3, 6, 7);
    beside.part(3);
    load_x7<kStreams>(x);
    _tile_dpbf16ps(2, 6, 7);
  } else {
    _tile_loadd(4, w, w_stride);
    load_x6<kStreams>(x);
    _tile_dpbf16ps(0, 4, 6);
    beside.part(0);
    if constexpr (kT == 2) {
      load_x7<kStreams>(x + x_block);
      _tile_dpbf16ps(1, 4, 7);
    }
    beside.part(1);
    _tile_loadd(5, w + w_half, w_stride);
    _tile_dpbf16ps(2, 5, 6);
    beside.part(2);
    if constexpr (kT == 2) _tile_dpbf16ps(3, 5, 7);
    beside.part(3);
  }
}

// The columns in hand of one strip times some tiles of x.
struct StripStep {
  const char* x;
  int64_t x_block;  // bytes from a tile of x to that of the next sixteen rows
  float* sums;      // of the first sixteen weight rows; those of the others are `half` floats behind them
  int64_t half;
  bool first;       // sums begin at zero
};

// Sums of two times kT tiles, from and to memory; like x, they shall not drive weights out of L1.
template <int kT>
inline void begin_sums(const StripStep& a) {
  if (a.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    return;
  }
  _tile_stream_loadd(0, a.sums, 64);
  _tile_stream_loadd(2, a.sums + a.half, 64);
  if constexpr (kT > 1) {
    _tile_stream_loadd(1, a.sums + 256, 64);
    _tile_stream_loadd(3, a.sums + a.half + 256, 64);
  }
  if constexpr (kT > 2) {
    _tile_stream_loadd(4, a.sums + 512, 64);
    _tile_stream_loadd(5, a.sums + a.half + 512, 64);
  }
}
template <int kT>
inline void end_sums(const StripStep& a) {
  _tile_stored(0, a.sums, 64);
  _tile_stored(2, a.sums + a.half, 64);
  if constexpr (kT > 1) {
    _tile_stored(1, a.sums + 256, 64);
    _tile_stored(3, a.sums + a.half + 256, 64);
  }
  if constexpr (kT > 2) {
    _tile_stored(4, a.sums + 512, 64);
    _tile_stored(5, a.sums + a.half + 512, 64);
  }
  finish_stores(a.sums);
}

// Rows of the next block, eight beside each step.
template <class Block>
struct DecodeBeside {
  const Block& block;
  char* out;
  int64_t first;
  inline __attribute__((always_inline)) void part(int i) const { block.template rows<2>(first + 2 * i, out); }
};

struct NothingBeside {
  inline __attribute__((always_inline)) void part(int) const {}
};

// What runs over kept blocks fetch beside each 32 columns: x of the next go to L2, sums of the next run to L1, late, as x soon drives them out.
struct KeptAhead {
  const char* x;
  int64_t x_lines;
  const char* sums[2];  // of the first sixteen weight rows and of the others
  inline __attribute__((always_inline)) void fetch(bool late) {
    for (int64_t i = 0; i < x_lines; ++i) fetch_line(reinterpret_cast<const uint8_t*>(x + i * 64));
    x += x_lines * 64;
    if (!late) return;
#pragma GCC unroll 2
    for (const char*& half : sums) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm_prefetch(half + i * 64, _MM_HINT_T0);
      half += 256;
    }
  }
};

// Blocks of packed weights in turn, from a ring whose first block in hand is ready.
struct BlockRing {
  char* bytes;
  int64_t mask;       // blocks of the ring - 1
  int64_t begin;      // where the first block in hand is
  int64_t blocks;     // in hand
  char* block(int64_t b) const { return bytes + ((begin + b) & mask) * kStripBlockBytes; }
};

// The blocks in hand times some tiles of x. Beside each block the next one is decoded where the run `decodes`, behind the last one where it
// `ends` its blocks; after the strip's last block that is the first one of `after`.
template <int kT, class Blocks>
inline void multiply_blocks(const StripShape& shape, const StripStep& a, const BlockRing& ring, bool decodes, bool ends, Blocks& next,
                            const Strip& after, KeptAhead* ahead) {
  begin_sums<kT>(a);
  for (int64_t b = 0; b < ring.blocks; ++b) {
    const char* const w = ring.block(b);
    const char* const x = a.x + b * kBlockBytes;
    const bool late = b + 2 >= ring.blocks;
    if (b + 1 < ring.blocks ? decodes : ends) {
      char* const out = ring.block(b + 1);
      if (next.block + 1 < shape.blocks) next.advance();
      else next.begin(after);
      const typename Blocks::Block decoded(next);
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        const DecodeBeside<typename Blocks::Block> beside{decoded, out, 8 * i};
        multiply_tiles<kT, true>(w + i * kTileBytes, kBlockBytes, 64, x + i * kTileBytes, a.x_block, beside);
        if (ahead) ahead->fetch(late);
      }
      finish_stores(ring.bytes);
    } else {
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        multiply_tiles<kT, true>(w + i * kTileBytes, kBlockBytes, 64, x + i * kTileBytes, a.x_block, NothingBeside{});
        if (ahead) ahead->fetch(late);
      }
    }
  }
  end_sums<kT>(a);
}

// Lines of dense weights, a row's a step.
struct FetchBeside {
  const char* w;
  const CodesAhead& ahead;
  int64_t line;
  inline __attribute__((always_inline)) void part(int i) const {
#pragma GCC unroll 8
    for (int64_t r = 8 * i; r < 8 * i + 8; ++r) fetch_codes(reinterpret_cast<const uint8_t*>(w), ahead, r, line);
  }
};

// Dense weights, where they lie, and lines to fetch `ahead` of them.
template <int kT>
inline void multiply_in_place(const StripShape& shape, const StripStep& a, const char* w, int64_t w_stride, const CodesAhead& ahead) {
  begin_sums<kT>(a);
  for (int64_t t = 0; t < shape.k / 32; ++t) {
    const FetchBeside beside{w, ahead, t};
    multiply_tiles<kT, false>(w + t * 64, kTile * w_stride, w_stride, a.x + t * kTileBytes, a.x_block, beside);
  }
  end_sums<kT>(a);
}

// Runs of tiles of x: as few as there can be, of three tiles and, behind them, of two. A single tile is a run. Over kept blocks: runs of two.
struct StripRuns {
  StripRuns(int64_t tiles, bool kept)
      : tiles(tiles), count(kept ? (tiles + 1) / 2 : (tiles + 2) / 3), threes(kept || tiles == 1 ? 0 : tiles - 2 * count), kept(kept) {}
  int64_t tiles, count, threes;
  bool kept;
  int64_t first(int64_t g) const { return g == count ? tiles : g < threes ? 3 * g : threes + 2 * g; }
  int64_t size(int64_t g) const { return first(g + 1) - first(g); }
};

struct StripSums {
  const ProductArgs& a;
  StripRuns runs;
  int64_t half() const { return runs.tiles * kTile * kTile; }
  float* of(int64_t q, int64_t g) const { return static_cast<float*>(a.scratch) + 2 * q * half() + runs.first(g) * kTile * kTile; }
  StripStep step(const StripShape& shape, int64_t q, int64_t g, const char* x, int64_t x_block, bool first) const {
    return {x + runs.first(g) * x_block, x_block, of(q, g), half(), first && shape.k0 == 0};
  }
  void fetched(int64_t q, int64_t g, KeptAhead& ahead) const {
    ahead.sums[0] = reinterpret_cast<const char*>(of(q, g));
    ahead.sums[1] = reinterpret_cast<const char*>(of(q, g) + half());
  }
  void write(const StripShape& shape, int64_t q, int64_t g) const {
    const int64_t part = q / shape.strips, j = q % shape.strips * kStripRows;
    const float* sums = of(q, g);
    for (int64_t t = runs.first(g); t < runs.first(g + 1); ++t, sums += kTile * kTile) {
      float* const c = a.c + (part * a.m + t * kTile) * a.ldc + j;
      write_sums(sums, c, a.ldc, a.m - t * kTile, shape.rows(q));
      write_sums(sums + half(), c + kTile, a.ldc, a.m - t * kTile, shape.rows(q) - kTile);
    }
  }
};

// The columns in hand of packed weights, in goes of as many blocks as are kept.
template <class Blocks>
void multiply_packed_strips(const StripShape& shape, const StripSums& sums, const char* x, int64_t x_block) {
  alignas(4096) char bytes[kKeptBlocks * kStripBlockBytes];
  Strip strips[2];
  Blocks next(shape);
  next.place(0, strips[0]);
  next.prepare(0, strips[0]);
  next.after = &strips[0];
  next.begin(strips[0]);
  const typename Blocks::Block begun(next);
  for (int64_t r = 0; r < kStripRows; r += 2) begun.template rows<2>(r, bytes);
  finish_stores(bytes);
  const StripRuns& runs = sums.runs;
  const int64_t count = shape.strips * sums.a.parts, most = runs.kept ? kKeptBlocks : shape.blocks;
  BlockRing ring{bytes, runs.kept ? kKeptBlocks - 1 : 1, 0, 0};
  // Every strip fetches its part of the next go's x; behind the last go most often comes a task with this x.
  KeptAhead ahead{shape.ends ? static_cast<const char*>(sums.a.packed_x) : x + runs.tiles * x_block, (32 + count - 1) / count, {}};
  for (int64_t q = 0; q < count; ++q) {
    const Strip& strip = strips[q & 1];
    Strip& other = strips[(q + 1) & 1];
    next.place(q + 1, other);
    if (q + 1 < count) next.prepare(q + 1, other);
    next.after = &other;
    for (int64_t b = 0; b < shape.blocks; b += ring.blocks) {
      ring.blocks = shape.blocks - b < most ? shape.blocks - b : most;
      for (int64_t g = 0; g < runs.count; ++g) {
        const bool last = g + 1 == runs.count;
        const Strip& after = (runs.kept || last) && q + 1 < count ? other : strip;
        const StripStep step = sums.step(shape, q, g, x + b * kBlockBytes, x_block, b == 0);
        KeptAhead* const fetches = runs.kept ? &ahead : nullptr;
        const bool turns = last && b + ring.blocks == shape.blocks && q + 1 < count;
        if (runs.kept) sums.fetched(turns ? q + 1 : q, last ? 0 : g + 1, ahead);
        const bool decodes = !runs.kept || g == 0, ends = !runs.kept || last;
        if (runs.size(g) == 1) multiply_blocks<1>(shape, step, ring, decodes, ends, next, after, fetches);
        else if (runs.size(g) == 2) multiply_blocks<2>(shape, step, ring, decodes, ends, next, after, fetches);
        else multiply_blocks<3>(shape, step, ring, decodes, ends, next, after, fetches);
        if (!runs.kept) ring.begin += ring.blocks;
        if (shape.ends && b + ring.blocks == shape.blocks) sums.write(shape, q, g);
      }
      if (runs.kept) ring.begin += ring.blocks;
    }
  }
}

// Those of dense ones in whole strips.
void multiply_dense_strips(const StripShape& shape, const StripSums& sums, const char* x, int64_t x_block) {
  const Weight& w = *shape.weight;
  const int64_t row_bytes = w.n_stride * 2, stride = shape.step * row_bytes, count = shape.strips * sums.a.parts;
  const bool in_order = shape.step == 1 && w.n_stride == w.k && shape.k == w.k;  // rows lie one behind another
  const char* const rows = static_cast<const char*>(w.data) + (shape.expert * w.expert_stride + shape.k0) * 2;
  for (int64_t q = 0; q < count; ++q) {
    const char* const from = rows + shape.row(q, 0) * row_bytes;
    const int64_t next = (shape.row(q + 1, 0) - shape.row(q, 0)) * row_bytes;
    const CodesAhead ahead = in_order ? CodesAhead{next, 64, kStripRows * 64} : CodesAhead{next, stride, 64};
    for (int64_t g = 0; g < sums.runs.count; ++g) {
      const StripStep step = sums.step(shape, q, g, x, x_block, true);
      if (sums.runs.size(g) == 1) multiply_in_place<1>(shape, step, from, stride, ahead);
      else if (sums.runs.size(g) == 2) multiply_in_place<2>(shape, step, from, stride, ahead);
      else multiply_in_place<3>(shape, step, from, stride, ahead);
      if (shape.ends) sums.write(shape, q, g);
    }
  }
}

template <bool kZeros>
void multiply_lookup_strips(const StripShape& shape, const StripSums& sums, const char* x, int64_t x_block) {
  if (shape.weight->group_size == 32) multiply_packed_strips<LookupBlocks<4, kZeros>>(shape, sums, x, x_block);
  else if (shape.weight->group_size == 64) multiply_packed_strips<LookupBlocks<2, kZeros>>(shape, sums, x, x_block);
  else multiply_packed_strips<LookupBlocks<1, kZeros>>(shape, sums, x, x_block);
}

void multiply_byte_strips(const StripShape& shape, const StripSums& sums, const char* x, int64_t x_block) {
  if (shape.weight->group_size == 32) multiply_packed_strips<ByteBlocks<4>>(shape, sums, x, x_block);
  else if (shape.weight->group_size == 64) multiply_packed_strips<ByteBlocks<2>>(shape, sums, x, x_block);
  else multiply_packed_strips<ByteBlocks<1>>(shape, sums, x, x_block);
}

void multiply_strips(const ProductArgs& a) {
  const Weight& w = *a.weight;
  const int64_t tiles = (a.m + kTile - 1) / kTile, columns = strip_columns(w, a.m), after = a.row0[0] + a.n * a.step;
  const bool in_place = !w.packed && w.k % 32 == 0 && a.n % kStripRows == 0;
  const StripSums sums{a, StripRuns(tiles, keeps_blocks(w, a.m))};
  const char* x = static_cast<const char*>(a.packed_x);
  for (int64_t k0 = 0; k0 < w.k; k0 += columns) {
    const int64_t k = w.k - k0 < columns ? w.k - k0 : columns, blocks = (k + kBlockK - 1) / kBlockK;
    const StripShape shape{&w, a.expert, {a.row0[0], a.parts > 1 ? a.row0[1] : after, after}, a.step, a.n, (a.n + kStripRows - 1) / kStripRows,
                           k0, k, blocks, k0 + k == w.k};
    const int64_t x_block = blocks * kBlockBytes;
    if (in_place) multiply_dense_strips(shape, sums, x, x_block);
    else if (!strip_groups(w)) multiply_packed_strips<AnyBlocks>(shape, sums, x, x_block);
    else if (w.bits == 8) multiply_byte_strips(shape, sums, x, x_block);
    else if (w.zeros != nullptr) multiply_lookup_strips<true>(shape, sums, x, x_block);
    else multiply_lookup_strips<false>(shape, sums, x, x_block);
    x += tiles * x_block;
  }
}

}  // namespace
}  // namespace int4_emu::cpu
