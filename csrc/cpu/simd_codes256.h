// Products from the codes as they are stored, 256 bits wide: no weight is written to memory. Included after simd_tile.h.
//
// A block is 32 bytes of one row: 64 codes of four bits or 32 of eight. Codes are exact in fp32; what their zero points add to a block's
// sum is known from x alone, so the sums start with its opposite. Every group's sum is multiplied by its scale in fp32, so weights meet
// x exactly.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kBlockBytes = 32;
// Codes of a row that are multiplied at a time by M rows of x, a multiple of a block.
template <int M>
constexpr int64_t kChunk = M == 1 ? 2048 : M == 2 ? 1024 : 512;
// Up to this many rows meet the codes; from there on it pays to write a panel of weights, which stays in L1, for all of them.
constexpr int64_t kCodesRows = 8;
constexpr int64_t kPanelRows = 8, kPanelCodes = 512;
constexpr int64_t kMostRows = 4;  // rows of x that share a pass over the codes

template <int kBits>
struct CodeBlock {
  static constexpr int64_t kCodes = kBlockBytes * 8 / kBits;
  static constexpr int kVectors = kCodes / kLanes;
  // In packed x, a row's vectors of a block, then what to add to the sum of each lane: once, and once per unit of the zero point.
  static constexpr int64_t kFloats = (kVectors + 2) * kLanes;
  // Codes of one group that fill whole lanes: int4 has 32 codes in either half of a vector.
  static constexpr int64_t kSpan = 32;
};

// Column of the block that lane `lane` of vector `v` multiplies.
template <int kBits>
inline int64_t block_column(int v, int lane) {
  if constexpr (kBits == 8) return v * kLanes + lane;
  else return lane / 4 * 32 + (v / 2 % 2) * 16 + lane % 4 * 4 + (v % 2) * 2 + v / 4;
}

// Rows of x in groups of kMostRows, the last perhaps of fewer.
inline int64_t row_groups(int64_t m) { return (m + kMostRows - 1) / kMostRows; }
inline int64_t group_begin(int64_t m, int64_t g) { return g * kMostRows < m ? g * kMostRows : m; }

inline int64_t code_blocks(const Weight& w) {
  const int64_t codes = kBlockBytes * 8 / w.bits;
  return (w.k + codes - 1) / codes;
}

// fp32 x may ask for more than the difference of a sum of codes and one of zero points leaves of its precision: it meets panels alone.
bool serves_codes(const Weight& w, DType x, int64_t m) {
  if (!w.packed || w.k == 0) return false;
  const bool whole_spans = w.groups == 1 || w.group_size % CodeBlock<4>::kSpan == 0;
  return m > kCodesRows || (x != DType::f32 && w.layout == Layout::canonical && whole_spans);
}

size_t packed_codes_x_bytes(const Weight& w, DType, int64_t m) {
  if (m > kCodesRows) return packed_x_bytes_f32<kLanes>(m, w.k);
  return static_cast<size_t>(m * code_blocks(w) * (w.bits == 4 ? CodeBlock<4>::kFloats : CodeBlock<8>::kFloats)) * 4;
}

// [row group][block][vector][row of the group][8]: what a pass reads lies in one run.
template <DType D, int kBits>
void pack_codes_x(const Weight& w, const PackXArgs& a) {
  using Block = CodeBlock<kBits>;
  const int64_t blocks = code_blocks(w);
  for (int64_t g = 0; g < row_groups(a.m); ++g) {
    const int64_t first = group_begin(a.m, g), rows = group_begin(a.m, g + 1) - first;
    float* out = static_cast<float*>(a.out) + first * blocks * Block::kFloats;
    for (int64_t i = 0; i < rows; ++i) {
      const void* row = x_row(a, first + i, kBytes<D>);
      for (int64_t b = 0; b < blocks; ++b) {
        alignas(32) float x[Block::kCodes];
        for (int64_t j = 0; j < Block::kCodes; j += kLanes) {
          const int64_t column = b * Block::kCodes + j;
          store(x + j, column < a.k ? x_vector<D>(a, row, first + i, column) : zero());
        }
        float* to = out + b * rows * Block::kFloats + i * kLanes;
        Vf values[Block::kVectors], sum = zero(), offset = zero();
        for (int v = 0; v < Block::kVectors; ++v) {
          alignas(32) float lanes[kLanes];
          for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[block_column<kBits>(v, lane)];
          values[v] = load(lanes);
          sum = add(sum, values[v]);
        }
        // A symmetric weight's zero points are all the midpoint.
        if (w.zeros == nullptr) offset = fnma(set1(kBits == 4 ? 8.f : 128.f), sum, offset);
        for (int v = 0; v < Block::kVectors; ++v) store(to + v * rows * kLanes, values[v]);
        store(to + Block::kVectors * rows * kLanes, offset);
        store(to + (Block::kVectors + 1) * rows * kLanes, sum);
      }
    }
  }
}

template <DType D>
void pack_codes_x_of(const Weight& w, const PackXArgs& a) {
  if (w.bits == 4) pack_codes_x<D, 4>(w, a);
  else pack_codes_x<D, 8>(w, a);
}

void pack_codes_x_any(const Weight& w, const PackXArgs& a) {
  if (a.m > kCodesRows) return pack_x_f32<kLanes>(a);
  if (a.dtype == DType::f32) pack_codes_x_of<DType::f32>(w, a);
  else if (a.dtype == DType::f16) pack_codes_x_of<DType::f16>(w, a);
  else pack_codes_x_of<DType::bf16>(w, a);
}

// Sums of one row of weights: its vectors of even and odd number have sums of their own where one row of x keeps too few in flight.
template <int M>
constexpr int kChains = M == 1 ? 2 : 1;
template <int M>
using Sums = Vf[M * kChains<M>];

// sums[s] += codes of S rows times M rows of x; `x` points at the block's vectors. The S rows share what is loaded of x.
template <int kBits, int S, int M>
inline void add_block(const uint8_t* const* codes, const float* x, Sums<M>* sums) {
  const auto multiply = [&](int v, const Vf (&code)[S]) {
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) {
      Vf xi = load(x + (v * M + i) * kLanes);
      // In a register: as operands of two multiply-adds the loads would be the limit.
      if constexpr (S > 1) __asm__("" : "+x"(xi));
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        Vf& sum = sums[s][i * kChains<M> + v % kChains<M>];
        sum = fma(code[s], xi, sum);
      }
    }
  };
  Vf code[S];
  if constexpr (kBits == 8) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) code[s] = codes8(codes[s] + v * kLanes);
      multiply(v, code);
    }
    return;
  }
  const __m256i nibble = _mm256_set1_epi8(15), low_half = _mm256_set1_epi32(0xffff);
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    __m256i low[S], pair[S];
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[s]));
      low[s] = _mm256_and_si256(n == 0 ? bytes : _mm256_srli_epi16(bytes, 4), nibble);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        pair[s] = h == 0 ? _mm256_unpacklo_epi8(low[s], _mm256_setzero_si256()) : _mm256_unpackhi_epi8(low[s], _mm256_setzero_si256());
        code[s] = _mm256_cvtepi32_ps(_mm256_and_si256(pair[s], low_half));
      }
      multiply(n * 4 + h * 2, code);
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) code[s] = _mm256_cvtepi32_ps(_mm256_srli_epi32(pair[s], 16));
      multiply(n * 4 + h * 2 + 1, code);
    }
  }
}

// One row of codes with its scales and zero points.
struct CodesOfRow {
  const uint8_t* codes;
  const void* scales;
  const uint8_t* zeros;
  int64_t left;  // scales from here to the end of all of them
};

inline CodesOfRow codes_of_row(const Weight& w, int64_t expert, int64_t n) {
  const int64_t group0 = (expert * w.n + n) * w.groups;
  return {static_cast<const uint8_t*>(w.data) + expert * w.expert_stride + n * w.n_stride,
          static_cast<const char*>(w.scales) + group0 * (w.scale_dtype == DType::f32 ? 4 : 2), w.zeros ? w.zeros + group0 : nullptr,
          w.experts * w.n * w.groups - group0};
}

// The value of one group in every lane, or that of another in the upper half.
inline Vf group_lanes(const float* values, int64_t other) {
  return other == 0 ? _mm256_broadcast_ss(values) : _mm256_set_m128(_mm_broadcast_ss(values + other), _mm_broadcast_ss(values));
}

// What multiply_chunk needs of the groups of one row, in fp32.
constexpr int64_t kChunkGroups = kChunk<1> / CodeBlock<4>::kSpan;
struct ChunkGroups {
  alignas(32) float scales[kChunkGroups], zeros[kChunkGroups];
};

// `count` groups from `first` on, of which `left` more lie in memory: whole vectors are read as long as there are.
template <DType D>
inline void load_groups(const void* from, int64_t first, int64_t count, int64_t left, float* out) {
  for (int64_t i = 0; i < count; i += kLanes)
    store(out + i, left - i >= kLanes ? load_as<D>(from, first + i) : load_tail<D>(from, first + i, left - i));
}

inline void load_groups(const Weight& w, const CodesOfRow& row, int64_t first, int64_t count, ChunkGroups& out) {
  const int64_t left = row.left - first;
  if (w.scale_dtype == DType::f32) load_groups<DType::f32>(row.scales, first, count, left, out.scales);
  else if (w.scale_dtype == DType::f16) load_groups<DType::f16>(row.scales, first, count, left, out.scales);
  else load_groups<DType::bf16>(row.scales, first, count, left, out.scales);
  if (!w.zeros) return;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (left - i >= kLanes) {
      store(out.zeros + i, codes8(row.zeros + first + i));
    } else {
      for (int64_t j = i; j < count; ++j) out.zeros[j] = static_cast<float>(row.zeros[first + j]);
    }
  }
}

// sums[r] += `bytes` bytes of codes of R rows, whole blocks, times M rows of x.
template <int kBits, int R, int M>
inline void add_blocks(const uint8_t* const (&rows)[R], int64_t bytes, const float* x, int64_t ahead, Sums<M> (&sums)[R]) {
  constexpr int S = R > 1 ? 2 : 1;
  for (int64_t b = 0; b < bytes; b += kBlockBytes, x += M * CodeBlock<kBits>::kFloats) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r += S) {
      const uint8_t* codes[S];
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        codes[s] = rows[r + s] + b;
        _mm_prefetch(reinterpret_cast<const char*>(codes[s] + ahead), _MM_HINT_T0);
      }
      add_block<kBits, S, M>(codes, x, sums + r);
    }
  }
}

// Columns k0..k1 of R rows, of one chunk, against M rows of x: totals[r][i] over lanes. `x` points at the chunk's first block; each row's
// successor in the next pass lies `ahead` bytes from it.
template <int kBits, int R, int M>
inline void multiply_chunk(const Weight& w, const CodesOfRow (&rows)[R], int64_t k0, int64_t k1, const float* x, int64_t ahead,
                           Vf (&totals)[R][M]) {
  using Block = CodeBlock<kBits>;
  const bool halves = kBits == 4 && w.groups > 1 && w.group_size % Block::kCodes != 0;
  const int64_t group_size = w.groups == 1 ? k1 : w.group_size;
  const int64_t group0 = w.groups == 1 ? 0 : k0 / group_size, groups_end = w.groups == 1 ? 1 : (k1 + group_size - 1) / group_size;
  ChunkGroups groups[R];
  for (int r = 0; r < R; ++r) load_groups(w, rows[r], group0, groups_end - group0, groups[r]);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) totals[r][i] = zero();
  }
  // Codes of whole blocks; a row's last block may be cut off.
  const int64_t whole = w.k / Block::kCodes * Block::kCodes;
  int64_t group_end = (group0 + 1) * group_size, g = 0;
  for (int64_t k = k0; k < k1;) {
    // Blocks that share their groups: one group, or two halves whose groups may differ.
    int64_t end = halves ? k + Block::kCodes : group_end, other = 0;
    if (halves && k + Block::kSpan >= group_end && group_end < w.k) other = 1;
    if (end > k1) end = k1;
    if (k < whole && end > whole) end = whole;
    const int64_t blocks = (end - k + Block::kCodes - 1) / Block::kCodes;
    // What the offsets of codes and their zero points add is known: the sums start with its opposite.
    Sums<M> sums[R];
    Vf offsets[M], units[M];
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) {
      const float* at = x + (Block::kVectors * M + i) * kLanes;
      offsets[i] = load(at), units[i] = load(at + M * kLanes);
      for (int64_t b = 1; b < blocks; ++b) {
        at += M * Block::kFloats;
        offsets[i] = add(offsets[i], load(at));
        if (w.zeros) units[i] = add(units[i], load(at + M * kLanes));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < M * kChains<M>; ++i) sums[r][i] = i % kChains<M> == 0 ? offsets[i / kChains<M>] : zero();
      if (w.zeros) {
        const Vf zero_points = group_lanes(groups[r].zeros + g, other);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) sums[r][i * kChains<M>] = fnma(zero_points, units[i], sums[r][i * kChains<M>]);
      }
    }
    const uint8_t* codes[R];
    alignas(32) uint8_t copies[R][kBlockBytes];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) codes[r] = rows[r].codes + k * kBits / 8;
    if (__builtin_expect(k >= whole, 0)) {
      for (int r = 0; r < R; ++r) {
        __builtin_memset(copies[r], 0, kBlockBytes);
        __builtin_memcpy(copies[r], codes[r], ((end - k) * kBits + 7) / 8);
        codes[r] = copies[r];
      }
    }
    add_blocks<kBits, R, M>(codes, blocks * kBlockBytes, x, ahead, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vf scale = group_lanes(groups[r].scales + g, other);
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) {
        Vf sum = sums[r][i * kChains<M>];
        if constexpr (kChains<M> == 2) sum = add(sum, sums[r][i * 2 + 1]);
        totals[r][i] = fma(scale, sum, totals[r][i]);
      }
    }
    x += blocks * M * Block::kFloats;
    k = end;
    for (; k >= group_end && k < k1; ++g) group_end += group_size;
  }
}

// c[i][0..R) (+)= the sums of totals' lanes.
template <int R, int M>
inline void add_totals(const Vf (&totals)[R][M], float* c, int64_t ldc, bool accumulate) {
  for (int i = 0; i < M; ++i) {
    if constexpr (R == 4) store_sums(c + i * ldc, sum4(totals[0][i], totals[1][i], totals[2][i], totals[3][i]), 4, accumulate);
    else store_sums(c + i * ldc, sum4(totals[0][i], totals[R - 1][i], totals[0][i], totals[R - 1][i]), R, accumulate);
  }
}

// Rows of weights first..last of part p, a multiple of R, against one group of M rows of x.
template <int kBits, int R, int M>
void multiply_rows(const ProductArgs& a, int p, int64_t first, int64_t last, const float* x, float* c) {
  constexpr int64_t kRowFloats = M * CodeBlock<kBits>::kFloats;
  const Weight& w = *a.weight;
  // One row of x goes through every row of weights at once, so that codes are read in their order; of several, a chunk stays in L1.
  for (int64_t k0 = 0, k1; k0 < w.k; k0 = k1) {
    k1 = k0 + kChunk<M> < w.k ? k0 + kChunk<M> : w.k;
    const float* at = x + k0 / CodeBlock<kBits>::kCodes * kRowFloats;
    for (int64_t j = first; j < last; j += R) {
      CodesOfRow rows[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) rows[r] = codes_of_row(w, a.expert, a.row0[p] + (j + r) * a.step);
      Vf totals[R][M];
      multiply_chunk<kBits, R, M>(w, rows, k0, k1, at, R * a.step * w.n_stride, totals);
      add_totals<R, M>(totals, c + j, a.ldc, k0 > 0);
    }
  }
}

// As many weight rows at once as keep about eight sums in registers; the rest one by one.
template <int kBits, int M>
void multiply_group(const ProductArgs& a, int p, const float* x, float* c) {
  constexpr int kRows = M <= 2 ? 4 : 2;
  const int64_t whole = a.n / kRows * kRows;
  multiply_rows<kBits, kRows, M>(a, p, 0, whole, x, c);
  multiply_rows<kBits, 1, M>(a, p, whole, a.n, x, c);
}

template <int kBits>
void multiply_bits(const ProductArgs& a) {
  const int64_t blocks = code_blocks(*a.weight);
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t g = 0; g < row_groups(a.m); ++g) {
      const int64_t first = group_begin(a.m, g);
      const float* x = static_cast<const float*>(a.packed_x) + first * blocks * CodeBlock<kBits>::kFloats;
      float* c = a.c + (p * a.m + first) * a.ldc;
      switch (group_begin(a.m, g + 1) - first) {
        case 1: multiply_group<kBits, 1>(a, p, x, c); break;
        case 2: multiply_group<kBits, 2>(a, p, x, c); break;
        case 3: multiply_group<kBits, 3>(a, p, x, c); break;
        default: multiply_group<kBits, 4>(a, p, x, c);
      }
    }
  }
}

// Eight rows of weights at a time, 512 columns of them in fp32.
void multiply_panels(const ProductArgs& a) {
  alignas(64) float panel[kPanelRows * kPanelCodes];
  const Weight& w = *a.weight;
  const int64_t ldx = round_up_to(w.k, kLanes);
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t k0 = 0; k0 < w.k; k0 += kPanelCodes) {
      const int64_t k = w.k - k0 < kPanelCodes ? w.k - k0 : kPanelCodes, padded = round_up_to(k, kLanes);
      const float* x = static_cast<const float*>(a.packed_x) + k0;
      for (int64_t j = 0; j < a.n; j += kPanelRows) {
        const int64_t rows = a.n - j < kPanelRows ? a.n - j : kPanelRows;
        for (int64_t r = 0; r < rows; ++r) {
          decode_weight_row<DType::f32>(w, a.expert, a.row0[p] + (j + r) * a.step, k0, k, panel + r * kPanelCodes);
          for (int64_t i = k; i < padded; ++i) panel[r * kPanelCodes + i] = 0.f;
        }
        for (int64_t r = 0; r < rows; r += 4) {
          float* c = a.c + p * a.m * a.ldc + j + r;
          const int64_t columns = rows - r < 4 ? rows - r : 4;
          dot_rows<DotF32, kRowsPerBlock>(x, ldx, a.m, panel + r * kPanelCodes, kPanelCodes, columns, padded, c, a.ldc, k0 > 0);
        }
      }
    }
  }
}

void multiply_codes(const ProductArgs& a) {
  if (a.m > kCodesRows) return multiply_panels(a);
  if (a.weight->bits == 4) multiply_bits<4>(a);
  else multiply_bits<8>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
