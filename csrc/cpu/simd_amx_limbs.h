// Rows of bf16 or fp16 x times canonical codes in integers, on tdpbusd. Included after simd_limbs512.h and simd_amx_tiles.h.
//
// Weights are the A operand: int8 codes where they lie, of int4 codes a vector is two rows of bytes, even and odd codes, by a mask and a shift.
// x is the B operand, the limbs of simd_limbs512.h: a row takes two columns of a tile for each unit of a block, with zeros outside of the
// unit. Sums of a block are scaled in fp32, in registers or near them, while the next block is in the tiles and the one after is taken apart.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kLimbTiles = 4;     // of sums at once

// Rows of x in a tile, and at once.
inline int64_t limb_tile_rows(const CodesUnits& units) { return kTile / 2 / units.per_block; }
inline int64_t limb_chunk_rows(const CodesUnits& units) { return kLimbTiles * limb_tile_rows(units); }

bool serves_limb_tiles(const Weight& w, DType x) {
  return x != DType::f32 && serves_codes(w) && CodesUnits(w).per_block <= 4;
}

// Of 128 columns. Row p of a tile has the columns of lane p of a vector of codes.
struct alignas(64) LimbTile {
  int8_t bytes[2][kTile * 64];  // the vectors of LimbBlock
  float scale[kTile];           // of a lane's numbers
  float shift[kTile];           // the sum of a lane's numbers times its scale: for a zero point; times minus the midpoint without
};

// Tiles of a chunk of rows: one, two or four.
inline int64_t limb_tiles_of(const CodesUnits& units, int64_t rows) {
  const int64_t tiles = (rows + limb_tile_rows(units) - 1) / limb_tile_rows(units);
  return tiles == 3 ? 4 : tiles;
}

// [chunk of rows][block][tile].
size_t packed_x_bytes_limb_tiles(const Weight& w, int64_t m) {
  const CodesUnits units(w);
  const int64_t chunk = limb_chunk_rows(units);
  return static_cast<size_t>((m / chunk * kLimbTiles + limb_tiles_of(units, m % chunk)) * units.blocks) * sizeof(LimbTile);
}

// Row i of x into row `at` of a tile, of each of its blocks.
template <DType D>
bool pack_limb_tile_row(const Weight& w, const CodesUnits& units, const PackXArgs& a, int64_t i, int64_t at, LimbTile* tile, int64_t step) {
  const void* row = x_row(a, i, 2);
  const int64_t rows = limb_tile_rows(units), midpoint = w.bits == 4 ? 8 : 128;
  float most = 0.f;
  for (int64_t b = 0; b < units.blocks; ++b, tile += step) {
    LimbBlock block;
    LimbUnits of;
    pack_limbs<D>(w, units, a, row, i, b * kCodesBlock, block, of);
    most = of.most > most ? of.most : most;
    for (int64_t limb = 0; limb < 2; ++limb) {
      for (int64_t u = 0; u < units.per_block; ++u) {
        const int64_t lane = (u * rows + at) * 2 + limb;
        tile->scale[lane] = limb ? of.scale[u] : of.scale[u] * 256.f;
        tile->shift[lane] = static_cast<float>(w.zeros ? of.sums[limb][u] : -midpoint * of.sums[limb][u]) * tile->scale[lane];
      }
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t p = 0; p < kTile; ++p) {
          const int64_t column = w.bits == 4 ? p * 8 : h * 64 + p * 4;
          __builtin_memcpy(tile->bytes[h] + p * 64 + ((column / units.columns) * rows + at) * 8 + limb * 4, block.bytes[limb][h] + p * 4, 4);
        }
      }
    }
  }
  return limbs_hold(most);
}

bool pack_x_limb_tiles(const Weight& w, const PackXArgs& a) {
  const CodesUnits units(w);
  const int64_t chunk = limb_chunk_rows(units), rows = limb_tile_rows(units);
  LimbTile* out = static_cast<LimbTile*>(a.out);
  bool holds = true;
  __builtin_memset(a.out, 0, packed_x_bytes_limb_tiles(w, a.m));
  for (int64_t first = 0; first < a.m; first += chunk) {
    const int64_t count = a.m - first < chunk ? a.m - first : chunk, tiles = limb_tiles_of(units, count);
    for (int64_t i = 0; i < count; ++i) {
      if (a.dtype == DType::bf16) holds &= pack_limb_tile_row<DType::bf16>(w, units, a, first + i, i % rows, out + i / rows, tiles);
      else holds &= pack_limb_tile_row<DType::f16>(w, units, a, first + i, i % rows, out + i / rows, tiles);
    }
    out += units.blocks * tiles;
  }
  return holds;
}

// Sixteen rows of weights: where they lie, the codes to fetch beside them, and their scales and zero points [row][group].
struct LimbStrip {
  const uint8_t* codes[kTile];  // the last repeated
  int64_t rows, stride;         // of codes, bytes
  CodesAhead ahead;
  alignas(64) float scales[kTile * kCodesUnits + kLanes], zeros[kTile * kCodesUnits + kLanes];
};

struct LimbState {
  alignas(4096) uint8_t weights[2][2][kTileBytes];  // int4: the vectors of a block
  alignas(4096) int32_t products[2][kLimbTiles][kTile * kTile];
  LimbStrip strips[2];
};

// kPermute: several units to a block.
template <int kBits, bool kPermute, bool kZeros, int kTiles>
class LimbProduct {
 public:
  LimbProduct(const ProductArgs& a, const LimbTile* x, int64_t first_row, int64_t rows, LimbState& state)
      : a_(a), w_(*a.weight), units_(w_), x_(x), first_row_(first_row), rows_(rows), state_(state), lane_unit_(unit_of_lanes(units_.per_block)) {}

  void run() {
    const int64_t strips_of_part = (a_.n + kTile - 1) / kTile, strips = strips_of_part * a_.parts;
    const auto prepare = [&](int64_t q) { place(static_cast<int>(q / strips_of_part), q % strips_of_part * kTile, state_.strips[q & 1]); };
    prepare(0);
    if constexpr (kBits == 4) take_apart<0, kTile>(state_.strips[0], 0, 0);
    for (int64_t q = 0; q < strips; ++q) {
      if (q + 1 < strips) prepare(q + 1);
      const LimbStrip& strip = state_.strips[q & 1];
      if (strip.rows < kTile) configure_tiles(strip.rows);
      multiply_strip(strip, q + 1 < strips ? state_.strips[(q + 1) & 1] : strip, q);
      if (strip.rows < kTile) configure_tiles(kTile);
    }
  }

 private:
  void place(int part, int64_t j, LimbStrip& to) const {
    const int64_t row = a_.row0[part] + j * a_.step;
    to.rows = a_.n - j < kTile ? a_.n - j : kTile;
    to.stride = a_.step * w_.n_stride;
    to.ahead = tile_ahead(a_, part, j, 256 * kBits);
    const uint8_t* codes = static_cast<const uint8_t*>(w_.data) + a_.expert * w_.expert_stride + row * w_.n_stride;
    for (int64_t r = 0; r < kTile; ++r) to.codes[r] = codes + (r < to.rows ? r : to.rows - 1) * to.stride;
    for (int64_t r = 0; r < to.rows; r += a_.step == 1 ? to.rows : 1) {
      const int64_t values = (a_.step == 1 ? to.rows : 1) * w_.groups;
      const char* scales = scales_of(w_, a_.expert, row + r * a_.step);
      const uint8_t* zeros = kZeros ? zeros_of(w_, a_.expert, row + r * a_.step) : nullptr;
      for (int64_t i = 0; i < values; i += kLanes) {
        const int64_t lanes = values - i < kLanes ? values - i : kLanes;
        store(to.scales + r * w_.groups + i, load_first(scales, w_.scale_dtype, i, lanes));
        if constexpr (kZeros) store(to.zeros + r * w_.groups + i, to_float(load_first_bytes(zeros + i, lanes)));
      }
    }
  }

  // Rows kFirst..kLast - 1 of a block of int4 codes, into half `half` of the ring.
  template <int kFirst, int kLast>
  inline __attribute__((always_inline)) void take_apart(const LimbStrip& strip, int64_t block, int64_t half) {
    const Vi nibbles = _mm512_set1_epi32(0x0f0f0f0f);
    uint8_t* out = state_.weights[half][0];
#pragma GCC unroll 16
    for (int r = kFirst; r < kLast; ++r) {
      const Vi words = _mm512_loadu_si512(strip.codes[r] + block * 64);
      _mm512_store_si512(out + r * 64, _mm512_and_si512(words, nibbles));
      _mm512_store_si512(out + kTileBytes + r * 64, _mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles));
    }
  }
  template <int kFirst, int kLast>
  inline __attribute__((always_inline)) void fetch(const LimbStrip& strip, int64_t block) const {
#pragma GCC unroll 16
    for (int r = kFirst; r < kLast; ++r) {
      fetch_codes(strip.codes[0], strip.ahead, r, block * kBits / 4);
      if constexpr (kBits == 8) fetch_codes(strip.codes[0], strip.ahead, r, 2 * block + 1);
    }
  }

  // sums of tile kSum += vector kVector of the block times x; tile numbers are part of the instruction.
  template <int kVector, int kSum>
  inline __attribute__((always_inline)) void add_product(const LimbTile* x) const {
#define INT4_EMU_ADD(sum, w_tile, x_tile)                   \
  do {                                                      \
    _tile_loadd(x_tile, x[sum].bytes[kVector], 64);         \
    _tile_dpbusd(sum, w_tile, x_tile);                      \
  } while (false)
    if constexpr (kVector == 0 && kSum == 0) INT4_EMU_ADD(0, 4, 6);
    if constexpr (kVector == 0 && kSum == 1) INT4_EMU_ADD(1, 4, 7);
    if constexpr (kVector == 0 && kSum == 2) INT4_EMU_ADD(2, 4, 6);
    if constexpr (kVector == 0 && kSum == 3) INT4_EMU_ADD(3, 4, 7);
    if constexpr (kVector == 1 && kSum == 0) INT4_EMU_ADD(0, 5, 6);
    if constexpr (kVector == 1 && kSum == 1) INT4_EMU_ADD(1, 5, 7);
    if constexpr (kVector == 1 && kSum == 2) INT4_EMU_ADD(2, 5, 6);
    if constexpr (kVector == 1 && kSum == 3) INT4_EMU_ADD(3, 5, 7);
#undef INT4_EMU_ADD
  }

  // sums += the products of rows kFirst..kLast - 1 and one tile of x, scaled.
  template <int kFirst, int kLast>
  inline __attribute__((always_inline)) void scale(const LimbStrip& strip, const LimbTile& x, int64_t group, const int32_t* products,
                                                   Vf (&sums)[kTile]) const {
    const Vf x_scale = _mm512_load_ps(x.scale), shift = _mm512_load_ps(x.shift);
    const float *scales = strip.scales + group, *zeros = strip.zeros + group;
    const auto of_lanes = [&](const float* values) {
      if constexpr (kPermute) return _mm512_permutexvar_ps(lane_unit_, load(values));
      else return set1(*values);
    };
#pragma GCC unroll 16
    for (int r = kFirst; r < kLast; ++r) {
      const Vf product = to_float(_mm512_load_si512(products + r * kTile));
      Vf part;
      if constexpr (kZeros) part = fnma(of_lanes(zeros + r * w_.groups), shift, mul(product, x_scale));
      else part = fma(product, x_scale, shift);
      sums[r] = fma(part, of_lanes(scales + r * w_.groups), sums[r]);
    }
  }

  // Beside product `kProduct` of a block: its share of the next block's codes and of the last one's sums.
  template <int kProduct>
  inline __attribute__((always_inline)) void beside(const LimbStrip& strip, int64_t block, const LimbStrip& next, int64_t next_block, int64_t last,
                                                    int64_t last_group, Vf (&sums)[kTiles][kTile]) {
    constexpr int kRows = kTile / (2 * kTiles), kFrom = kProduct * kRows, kHalf = kProduct % 2 * (kTile / 2);
    if constexpr (kBits == 4) take_apart<kFrom, kFrom + kRows>(next, next_block, ~half_ & 1);
    fetch<kFrom, kFrom + kRows>(strip, block);
    if (last >= 0) {
      constexpr int kOf = kProduct / 2;
      scale<kHalf, kHalf + kTile / 2>(strip, x_[last * kTiles + kOf], last_group, state_.products[last & 1][kOf], sums[kOf]);
    }
  }

  template <int kProduct>
  inline __attribute__((always_inline)) void products_from(const LimbStrip& strip, int64_t block, const LimbStrip& next, int64_t next_block,
                                                           int64_t last, int64_t last_group, Vf (&sums)[kTiles][kTile]) {
    constexpr int kVector = kProduct / kTiles;
    const LimbTile* x = x_ + block * kTiles;
    if constexpr (kProduct % kTiles == 0) {
      const uint8_t* w = kBits == 4 ? state_.weights[half_][kVector] : strip.codes[0] + block * 128 + kVector * 64;
      const int64_t stride = kBits == 4 ? 64 : strip.stride;
      if constexpr (kVector == 0) _tile_loadd(4, w, stride);
      else _tile_loadd(5, w, stride);
    }
    add_product<kVector, kProduct % kTiles>(x);
    beside<kProduct>(strip, block, next, next_block, last, last_group, sums);
    if constexpr (kProduct + 1 < 2 * kTiles) products_from<kProduct + 1>(strip, block, next, next_block, last, last_group, sums);
  }

  void multiply_strip(const LimbStrip& strip, const LimbStrip& after, int64_t q) {
    Vf sums[kTiles][kTile];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
#pragma GCC unroll 16
      for (int r = 0; r < kTile; ++r) sums[t][r] = zero();
    }
    int64_t group = 0, last_group = 0, inside = 0;
    for (int64_t b = 0; b < units_.blocks; ++b, half_ ^= 1) {
      const bool end = b + 1 == units_.blocks;
      finish_stores(state_.weights);
      _tile_zero(0);
      if constexpr (kTiles > 1) _tile_zero(1);
      if constexpr (kTiles > 2) _tile_zero(2);
      if constexpr (kTiles > 2) _tile_zero(3);
      products_from<0>(strip, b, end ? after : strip, end ? 0 : b + 1, b - 1, last_group, sums);
      int32_t* products = state_.products[b & 1][0];
      _tile_stored(0, products, 64);
      if constexpr (kTiles > 1) _tile_stored(1, products + 256, 64);
      if constexpr (kTiles > 2) _tile_stored(2, products + 512, 64);
      if constexpr (kTiles > 2) _tile_stored(3, products + 768, 64);
      finish_stores(state_.products);
      last_group = group;
      inside += units_.per_block;
      if (inside >= units_.per_group) group += inside / units_.per_group, inside = 0;
    }
    const int64_t last = units_.blocks - 1;
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) scale<0, kTile>(strip, x_[last * kTiles + t], last_group, state_.products[last & 1][t], sums[t]);
    write(strip, q, sums);
  }

  void write(const LimbStrip& strip, int64_t q, Vf (&sums)[kTiles][kTile]) const {
    const int64_t strips_of_part = (a_.n + kTile - 1) / kTile, part = q / strips_of_part, j = q % strips_of_part * kTile;
    const int64_t tile_rows = limb_tile_rows(units_);
    const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (kTile - strip.rows));
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      Vi v[kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) v[i] = _mm512_castps_si512(sums[t][i]);
      transpose16(v);
      alignas(64) float lanes[kTile * kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_store_ps(lanes + i * kTile, _mm512_castsi512_ps(v[i]));
      for (int64_t i = 0; i < tile_rows && t * tile_rows + i < rows_; ++i) {
        Vf total = zero();
        for (int64_t u = 0; u < units_.per_block; ++u) {
          const float* of = lanes + (u * tile_rows + i) * 2 * kTile;
          total = add(total, add(_mm512_load_ps(of), _mm512_load_ps(of + kTile)));
        }
        _mm512_mask_storeu_ps(a_.c + (part * a_.m + first_row_ + t * tile_rows + i) * a_.ldc + j, mask, total);
      }
    }
  }

  const ProductArgs& a_;
  const Weight& w_;
  const CodesUnits units_;
  const LimbTile* x_;
  const int64_t first_row_, rows_;
  LimbState& state_;
  Vi lane_unit_;
  int64_t half_ = 0;  // of the ring, with the block in hand
};

template <int kBits, bool kPermute, bool kZeros>
void multiply_limb_tiles_as(const ProductArgs& a) {
  const CodesUnits units(*a.weight);
  const int64_t chunk = limb_chunk_rows(units);
  const LimbTile* x = static_cast<const LimbTile*>(a.packed_x);
  LimbState state;
  for (int64_t first = 0; first < a.m; first += chunk) {
    const int64_t rows = a.m - first < chunk ? a.m - first : chunk, tiles = limb_tiles_of(units, rows);
    if (tiles == 1) LimbProduct<kBits, kPermute, kZeros, 1>(a, x, first, rows, state).run();
    else if (tiles == 2) LimbProduct<kBits, kPermute, kZeros, 2>(a, x, first, rows, state).run();
    // (int4 in groups of half a block comes in few rows: tile_amx.cpp)
    else if constexpr (kBits == 8 || !kPermute) LimbProduct<kBits, kPermute, kZeros, 4>(a, x, first, rows, state).run();
    x += units.blocks * tiles;
  }
}

template <int kBits>
void multiply_limb_tiles_of(const ProductArgs& a) {
  const bool permute = CodesUnits(*a.weight).per_block > 1;
  if (a.weight->zeros != nullptr) permute ? multiply_limb_tiles_as<kBits, true, true>(a) : multiply_limb_tiles_as<kBits, false, true>(a);
  else permute ? multiply_limb_tiles_as<kBits, true, false>(a) : multiply_limb_tiles_as<kBits, false, false>(a);
}

void multiply_limb_tiles(const ProductArgs& a) {
  if (a.weight->bits == 4) multiply_limb_tiles_of<4>(a);
  else multiply_limb_tiles_of<8>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
