// A few rows of bf16 or fp16 x times canonical int4 codes in integers, on tdpbusd. Included after simd_codes512.h and simd_amx_tiles.h.
//
// Weights are the A operand: a vector of codes is two rows of bytes, even and odd codes, by a mask and a shift. x is the B operand in fixed
// point of 16 bits, two signed bytes: exact within 2^-7 (fp16: 2^-4) of the largest of its group, and off by at most 2^-16 of it below. A
// block is 128 columns of one group, and a row of x takes two columns of a tile. (Smaller groups would each need columns of their own, with zeros
// outside of the group: measured slower than simd_limbs512.h and simd_amx_codes.h.) Steps are in flight as in simd_amx_codes.h.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kLimbTileRows = 8;   // rows of x: one tile of sums
constexpr int64_t kLimbGroups = 512;   // groups of a row: bounds the scratch on the stack

bool serves_limb_tiles(const Weight& w, DType x, int64_t m) {
  return x != DType::f32 && w.packed && w.bits == 4 && w.layout == Layout::canonical && w.k % kCodesBlock == 0 && w.k > 0 &&
         w.k <= kCodesMost && w.groups <= kLimbGroups && groups_are_whole(w, kCodesBlock) && m <= kLimbTileRows;
}

// Of 128 columns. Row p of a tile has the columns of lane p of a vector of codes.
struct alignas(64) LimbTile {
  int8_t bytes[2][kTile * 64];  // even and odd columns
  float scale[16];              // of a lane's numbers
  float shift[16];              // the sum of a lane's numbers times its scale: for a zero point; times -8 where that is the zero point
};

size_t packed_x_bytes_limb_tiles(const Weight& w) { return static_cast<size_t>(w.k / kCodesBlock) * sizeof(LimbTile); }

inline Vf largest_lane(Vf v) {
  for (int i = 1; i < kLanes; i *= 2) {
    alignas(64) uint32_t other[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) other[lane] = static_cast<uint32_t>(lane ^ i);
    v = vmax(v, _mm512_permutexvar_ps(_mm512_load_si512(other), v));
  }
  return v;
}

// 128 columns of row i of x into lanes `first` (high bytes) and `first` + 1 (low) of a tile.
template <DType D>
inline void pack_limb_row(const PackXArgs& a, const void* row, int64_t i, int64_t k0, int64_t first, bool zeros, LimbTile& tile) {
  const Vf infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
  const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  constexpr int64_t kVectors = kCodesBlock / kLanes;
  Vf v[kVectors], largest = zero();
  for (int64_t j = 0; j < kVectors; ++j) {
    v[j] = x_vector<D>(a, row, i, k0 + j * kLanes);
    // A lane of 0 * infinity is NaN.
    largest = vmax(largest, _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v[j], v[j], _CMP_UNORD_Q), vabs(v[j]), infinity));
  }
  largest = vmax(set1(1e-33f), largest_lane(largest));
  const Vf factor = div(set1(kLimbLargest), largest);
  Vi sum_low = _mm512_setzero_si512(), sum_high = sum_low;
  for (int64_t j = 0; j < kVectors; ++j) {
    const Vi number = to_int(mul(v[j], factor));
    const Vi low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24), high = _mm512_srai_epi32(sub(number, low), 8);
    sum_low = _mm512_add_epi32(sum_low, low);
    sum_high = _mm512_add_epi32(sum_high, high);
    for (int64_t limb = 0; limb < 2; ++limb) {
      alignas(16) uint32_t quads[4];  // even and odd columns of the first eight, then of the second
      _mm_store_si128(reinterpret_cast<__m128i*>(quads), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(limb ? low : high), even_first));
      for (int64_t at = 0; at < 4; ++at)
        __builtin_memcpy(tile.bytes[at % 2] + (j * 2 + at / 2) * 64 + (first + limb) * 4, &quads[at], 4);
    }
  }
  alignas(64) float scale[kLanes];
  alignas(64) int32_t low[kLanes], high[kLanes];
  store(scale, mul(largest, set1(1.f / kLimbLargest)));
  _mm512_store_si512(low, sum_low);
  _mm512_store_si512(high, sum_high);
  int32_t sums[2] = {0, 0};
  for (int64_t lane = 0; lane < kLanes; ++lane) sums[0] += high[lane], sums[1] += low[lane];
  for (int64_t limb = 0; limb < 2; ++limb) {
    tile.scale[first + limb] = limb ? scale[0] : scale[0] * 256.f;
    tile.shift[first + limb] = static_cast<float>(zeros ? sums[limb] : -8 * sums[limb]) * tile.scale[first + limb];
  }
}

template <DType D>
void pack_x_limb_tiles_as(const Weight& w, const PackXArgs& a) {
  const int64_t blocks = w.k / kCodesBlock;
  LimbTile* tiles = static_cast<LimbTile*>(a.out);
  __builtin_memset(a.out, 0, packed_x_bytes_limb_tiles(w));
  for (int64_t i = 0; i < a.m; ++i) {
    const void* row = x_row(a, i, 2);
    for (int64_t b = 0; b < blocks; ++b)
      pack_limb_row<D>(a, row, i, b * kCodesBlock, 2 * i, w.zeros != nullptr, tiles[b]);
  }
}

void pack_x_limb_tiles(const Weight& w, const PackXArgs& a) {
  if (a.dtype == DType::bf16) pack_x_limb_tiles_as<DType::bf16>(w, a);
  else pack_x_limb_tiles_as<DType::f16>(w, a);
}

struct LimbState {
  alignas(4096) uint8_t weights[2][2][kTileBytes];    // even and odd codes of a block
  alignas(4096) int32_t products[2][kTile * kTile];
  alignas(64) float sums[kTile * kTile];              // [weight row][lane]
  alignas(64) float scales[kTile * kLimbGroups + kLanes], zeros[kTile * kLimbGroups + kLanes];  // [weight row][group]
};

// Sixteen rows of weights: where they lie, those to fetch, and what they share.
struct LimbRows {
  const uint8_t* codes[kTile];
  CodesAhead ahead;
  int64_t blocks, groups;           // of a row
  const uint16_t* group_of;         // [blocks]
  const LimbTile* x;
};

inline void split_codes(const LimbRows& t, int64_t block, LimbState& state) {
  const Vi nibbles = _mm512_set1_epi32(0x0f0f0f0f);
  uint8_t* out = state.weights[block & 1][0];
#pragma GCC unroll 4
  for (int64_t r = 0; r < kTile; ++r) {
    fetch_codes(t.codes[0], t.ahead, r, block);
    const Vi words = _mm512_loadu_si512(t.codes[r] + block * 64);
    _mm512_store_si512(out + r * 64, _mm512_and_si512(words, nibbles));
    _mm512_store_si512(out + kTileBytes + r * 64, _mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles));
  }
}

// A block of weights times x.
inline void multiply_limb_tiles(const LimbRows& t, int64_t block, LimbState& state) {
  const uint8_t* w = state.weights[block & 1][0];
  const LimbTile& x = t.x[block];
  _tile_zero(0);
  _tile_loadd(4, w, 64);
  _tile_loadd(6, x.bytes[0], 64);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(5, w + kTileBytes, 64);
  _tile_loadd(7, x.bytes[1], 64);
  _tile_dpbusd(0, 5, 7);
  _tile_stored(0, state.products[block & 1], 64);
}

template <bool kZeros>
inline void scale_limb_tile(const LimbRows& t, int64_t block, LimbState& state) {
  const LimbTile& x = t.x[block];
  const int32_t* products = state.products[block & 1];
  const Vf x_scale = _mm512_load_ps(x.scale), shift = _mm512_load_ps(x.shift);
  const float* scales = state.scales + t.group_of[block];
  const float* zeros = state.zeros + t.group_of[block];
  float* sums = state.sums;
#pragma GCC unroll 4
  for (int64_t r = 0; r < kTile; ++r, scales += t.groups, zeros += t.groups) {
    const Vf product = to_float(_mm512_load_si512(products + r * kTile));
    Vf part;
    if constexpr (kZeros) part = fnma(set1(*zeros), shift, mul(product, x_scale));
    else part = fma(product, x_scale, shift);
    _mm512_store_ps(sums + r * kTile, fma(part, set1(*scales), _mm512_load_ps(sums + r * kTile)));
  }
}

// Sums of all K for sixteen rows of weights.
template <bool kZeros>
inline void limb_rows_of(const LimbRows& t, LimbState& state) {
  __builtin_memset(state.sums, 0, sizeof state.sums);
  split_codes(t, 0, state);
  for (int64_t b = 0; b < t.blocks; ++b) {
    if (b + 1 < t.blocks) split_codes(t, b + 1, state);
    finish_stores(state.weights);
    multiply_limb_tiles(t, b, state);
    if (b > 0) scale_limb_tile<kZeros>(t, b - 1, state);
  }
  finish_stores(state.products);
  scale_limb_tile<kZeros>(t, t.blocks - 1, state);
}

template <bool kZeros>
void multiply_limb_tiles_as(const ProductArgs& a) {
  const Weight& w = *a.weight;
  LimbState state;
  LimbRows t;
  uint16_t group_of[kCodesMost / kCodesBlock];
  t.x = static_cast<const LimbTile*>(a.packed_x);
  t.blocks = w.k / kCodesBlock;
  t.groups = w.groups;
  t.group_of = group_of;
  const int64_t blocks_per_group = (w.group_size < w.k ? w.group_size : w.k) / kCodesBlock;
  for (int64_t b = 0, inside = 0, group = 0; b < t.blocks; ++b) {
    group_of[b] = static_cast<uint16_t>(group);
    if (++inside == blocks_per_group) inside = 0, ++group;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + a.expert * w.expert_stride;
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t j = 0; j < a.n; j += kTile) {
      const int64_t count = a.n - j < kTile ? a.n - j : kTile, row = a.row0[p] + j * a.step;
      for (int64_t r = 0; r < kTile; ++r) t.codes[r] = codes + (row + (r < count ? r : count - 1) * a.step) * w.n_stride;
      t.ahead = tile_ahead(a, p, j, 1024);
      for (int64_t r = 0; r < count; r += a.step == 1 ? count : 1) {
        const int64_t run = a.step == 1 ? count : 1, values = run * w.groups;
        const char* scales = scales_of(w, a.expert, row + r * a.step);
        const uint8_t* zeros = kZeros ? zeros_of(w, a.expert, row + r * a.step) : nullptr;
        for (int64_t i = 0; i < values; i += kLanes) {
          const int64_t lanes = values - i < kLanes ? values - i : kLanes;
          store(state.scales + r * w.groups + i, load_first(scales, w.scale_dtype, i, lanes));
          if (kZeros) store(state.zeros + r * w.groups + i, to_float(load_first_bytes(zeros + i, lanes)));
        }
      }
      limb_rows_of<kZeros>(t, state);
      const __mmask16 mask = static_cast<__mmask16>(0xffffu >> (kTile - count));
      Vi v[kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) v[i] = _mm512_castps_si512(_mm512_load_ps(state.sums + i * kTile));
      transpose16(v);
      alignas(64) float lanes[kTile * kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_store_ps(lanes + i * kTile, _mm512_castsi512_ps(v[i]));
      for (int64_t i = 0; i < a.m; ++i) {
        const Vf total = add(_mm512_load_ps(lanes + 2 * i * kTile), _mm512_load_ps(lanes + (2 * i + 1) * kTile));
        _mm512_mask_storeu_ps(a.c + (p * a.m + i) * a.ldc + j, mask, total);
      }
    }
  }
}

void multiply_limb_tiles(const ProductArgs& a) {
  if (a.weight->zeros != nullptr) multiply_limb_tiles_as<true>(a);
  else multiply_limb_tiles_as<false>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
