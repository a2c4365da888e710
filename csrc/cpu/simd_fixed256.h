// Packed codes times bf16 and fp16 x in integers, 256 bits wide (vpmaddwd): no code is turned into a floating-point number. Included after
// simd_tile.h and simd_transposed.h.
//
// A block is 64 codes of a row, a segment one or two blocks of the same groups. The 8 or 16 columns of x that one lane multiplies in a
// segment are 16-bit fixed-point numbers with a power of two as their unit: exact for bf16 within 2^-7 of the largest of them (fp16: 2^-4),
// off by at most 2^-15 of it below. Sums of a segment with their zero points are exact; scales are applied in fp32.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kFixedBlock = 64;  // codes
constexpr int kBlockVectors = 4;     // of 16 codes
constexpr int64_t kSlot = 32;        // codes of one group in either half of a block's vectors
// Columns that are multiplied at a time by M rows of x, so that x stays in L1; a multiple of any segment.
template <int M>
constexpr int64_t kChunk = M == 1 ? 4096 : M == 2 ? 2048 : 1024;
constexpr int64_t kMostRows = 4;  // rows of x that share a pass over the codes

// kBlocks blocks of one row of x.
template <int kBlocks>
struct alignas(32) FixedSegment {
  float unit[kLanes];
  int32_t offset[kLanes];  // minus the sum of a lane's numbers, times the midpoint where there are no zero points
  int16_t numbers[kBlocks * kBlockVectors][2 * kLanes];
  Vi vector(int block, int t) const { return _mm256_load_si256(reinterpret_cast<const Vi*>(numbers[block * kBlockVectors + t])); }
};

// Whole blocks of a group allow segments of two; else the halves of every block have a scale and zero point of their own.
inline int segment_blocks(const Weight& w) { return w.groups == 1 || w.group_size % (2 * kFixedBlock) == 0 ? 2 : 1; }
inline int64_t segments_of(const Weight& w, int64_t columns) {
  const int64_t codes = segment_blocks(w) * kFixedBlock;
  return (columns + codes - 1) / codes;
}
inline int64_t segment_bytes(const Weight& w) {
  return static_cast<int64_t>(segment_blocks(w) == 2 ? sizeof(FixedSegment<2>) : sizeof(FixedSegment<1>));
}

// A sum of few columns may be asked for what its smallest x adds to the others; such weights are small, and x stays as it is.
bool fixed_fits(const Weight& w, DType x) {
  return x != DType::f32 && w.k >= 2 * kFixedBlock && w.layout == Layout::canonical && (w.groups == 1 || w.group_size % kSlot == 0);
}

// Rows of x in groups of up to kMostRows, evenly cut: [row group][segment][row of the group].
inline int64_t row_groups(int64_t m) { return (m + kMostRows - 1) / kMostRows; }
inline int64_t group_begin(int64_t m, int64_t g) { return m * g / row_groups(m); }

size_t fixed_x_bytes(const Weight& w, int64_t m) { return static_cast<size_t>(m * segments_of(w, w.k) * segment_bytes(w)); }

// Rows of eight columns each, one a lane: those whose codes a lane's vectors hold in either half of their words.
template <int kBits>
inline void lanes_of_block(const float* x, Vi (&columns)[8]) {
  Vi rows[8];
  for (int l = 0; l < 8; ++l) {
    const float* from = x + (kBits == 4 ? 8 * l : l / 4 * 32 + l % 4 * 4);
    rows[l] = _mm256_castps_si256(kBits == 4 ? load(from) : _mm256_set_m128(_mm_loadu_ps(from + 16), _mm_loadu_ps(from)));
  }
  transpose8(rows);
  constexpr int kOrder8[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  for (int i = 0; i < 8; ++i) columns[i] = rows[kBits == 4 ? i : kOrder8[i]];
}

// One segment; returns the bits of each lane's largest magnitude, of which a NaN's are the largest.
template <int kBits, int kBlocks>
inline Vi pack_segment(const float* x, int midpoint, FixedSegment<kBlocks>& to) {
  Vi columns[kBlocks][8], most = _mm256_setzero_si256(), sum = most;
  const Vi magnitude = _mm256_set1_epi32(0x7fffffff), exponent = _mm256_set1_epi32(0x7f800000);
  for (int b = 0; b < kBlocks; ++b) {
    lanes_of_block<kBits>(x + b * kFixedBlock, columns[b]);
    for (int i = 0; i < 8; ++i) most = _mm256_max_epi32(most, _mm256_and_si256(columns[b][i], magnitude));
  }
  // The largest becomes a number of 2^14 to 2^15; neither unit nor factor leaves the normal numbers.
  const Vi top = _mm256_max_epi32(_mm256_and_si256(most, exponent), _mm256_set1_epi32(15 << 23));
  const Vf factor = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(static_cast<int>(268u << 23)), top));
  _mm256_store_si256(reinterpret_cast<Vi*>(to.unit), _mm256_sub_epi32(top, _mm256_set1_epi32(14 << 23)));
  for (int b = 0; b < kBlocks; ++b) {
    for (int i = 0; i < 8; ++i) {
      columns[b][i] = to_int(mul(_mm256_castsi256_ps(columns[b][i]), factor));
      sum = _mm256_add_epi32(sum, columns[b][i]);
    }
    for (int t = 0; t < kBlockVectors; ++t) {
      const Vi pairs = _mm256_blend_epi16(columns[b][t], _mm256_slli_epi32(columns[b][t + 4], 16), 0xaa);
      _mm256_store_si256(reinterpret_cast<Vi*>(to.numbers[b * kBlockVectors + t]), pairs);
    }
  }
  _mm256_store_si256(reinterpret_cast<Vi*>(to.offset), _mm256_mullo_epi32(sum, _mm256_set1_epi32(-midpoint)));
  return most;
}

// False where a row has infinities, NaNs, or numbers so large or small throughout that units and scales might not keep them.
constexpr int32_t kHuge = (127 + 100) << 23, kTiny = (127 - 80) << 23;  // bits of 2^100 and 2^-80
template <DType D, int kBits, int kBlocks>
bool pack_fixed(const Weight& w, const PackXArgs& a, void* out) {
  constexpr int64_t kCodes = kBlocks * kFixedBlock;
  const int64_t segments = segments_of(w, w.k);
  const int midpoint = w.zeros ? 1 : 1 << (kBits - 1);
  for (int64_t g = 0; g < row_groups(a.m); ++g) {
    const int64_t first = group_begin(a.m, g), rows = group_begin(a.m, g + 1) - first;
    FixedSegment<kBlocks>* to = static_cast<FixedSegment<kBlocks>*>(out) + first * segments;
    for (int64_t i = 0; i < rows; ++i) {
      const void* row = x_row(a, first + i, kBytes<D>);
      Vi most = _mm256_setzero_si256();
      for (int64_t s = 0; s < segments; ++s) {
        alignas(32) float x[kCodes];
        for (int64_t j = 0; j < kCodes; j += kLanes)
          store(x + j, s * kCodes + j < a.k ? x_vector<D>(a, row, first + i, s * kCodes + j) : zero());
        most = _mm256_max_epi32(most, pack_segment<kBits, kBlocks>(x, midpoint, to[s * rows + i]));
      }
      alignas(32) int32_t lanes[kLanes];
      int32_t largest = 0;
      _mm256_store_si256(reinterpret_cast<Vi*>(lanes), most);
      for (int l = 0; l < kLanes; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
      if (largest >= kHuge || (largest > 0 && largest < kTiny)) return false;
    }
  }
  return true;
}

template <DType D, int kBits>
bool pack_fixed_of(const Weight& w, const PackXArgs& a, void* out) {
  return segment_blocks(w) == 2 ? pack_fixed<D, kBits, 2>(w, a, out) : pack_fixed<D, kBits, 1>(w, a, out);
}

bool pack_fixed_any(const Weight& w, const PackXArgs& a, void* out) {
  if (a.dtype == DType::f16) return w.bits == 4 ? pack_fixed_of<DType::f16, 4>(w, a, out) : pack_fixed_of<DType::f16, 8>(w, a, out);
  return w.bits == 4 ? pack_fixed_of<DType::bf16, 4>(w, a, out) : pack_fixed_of<DType::bf16, 8>(w, a, out);
}

// A block of codes as four vectors of 16 bits; the 32-bit lane l of all of them holds the columns of lanes_of_block's lane l.
template <int kBits>
inline void block_codes(const uint8_t* codes, Vi (&v)[kBlockVectors]) {
  if constexpr (kBits == 4) {
    const Vi nibble = _mm256_set1_epi16(15), words = _mm256_loadu_si256(reinterpret_cast<const Vi*>(codes));
    v[0] = _mm256_and_si256(words, nibble);
    v[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
    v[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble);
    v[3] = _mm256_srli_epi16(words, 12);
  } else {
    const Vi byte = _mm256_set1_epi16(255);
    for (int h = 0; h < 2; ++h) {
      const __m128i* from = reinterpret_cast<const __m128i*>(codes) + h;
      const Vi words = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(from)), _mm_loadu_si128(from + 2), 1);
      v[2 * h] = _mm256_and_si256(words, byte);
      v[2 * h + 1] = _mm256_srli_epi16(words, 8);
    }
  }
}

// Scales and zero points of a chunk of one row: one a segment of two blocks, two (of its halves) a segment of one.
template <int64_t kColumns>
struct alignas(32) Slots {
  float scales[kColumns / kSlot];
  int32_t zeros[kColumns / kSlot];
};

// Eight values from `first` on, of which `left` lie in memory.
inline Vf scales_at(const Weight& w, const void* scales, int64_t first, int64_t left) {
  if (w.scale_dtype == DType::f32) return left >= kLanes ? load_as<DType::f32>(scales, first) : load_tail<DType::f32>(scales, first, left);
  if (w.scale_dtype == DType::f16) return left >= kLanes ? load_as<DType::f16>(scales, first) : load_tail<DType::f16>(scales, first, left);
  return left >= kLanes ? load_as<DType::bf16>(scales, first) : load_tail<DType::bf16>(scales, first, left);
}
inline Vi zeros_at(const uint8_t* zeros, int64_t first, int64_t left) {
  uint64_t bytes = 0;
  if (left >= kLanes) __builtin_memcpy(&bytes, zeros + first, kLanes);
  else __builtin_memcpy(&bytes, zeros + first, left);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
}

// Of row n, columns k0..k1; those of the row `ahead` rows on are fetched, if any.
template <int64_t kColumns>
inline void load_slots(const Weight& w, int64_t expert, int64_t n, int64_t k0, int64_t k1, int64_t ahead, Slots<kColumns>& to) {
  const int64_t group0 = (expert * w.n + n) * w.groups, size = segment_blocks(w) == 2 ? 2 * kFixedBlock : kSlot;
  const char* scales = static_cast<const char*>(w.scales) + group0 * (w.scale_dtype == DType::f32 ? 4 : 2);
  const uint8_t* zeros = w.zeros ? w.zeros + group0 : nullptr;
  const int64_t left = w.experts * w.n * w.groups - group0;  // of all scales
  const int64_t per_group = w.groups == 1 ? kColumns : w.group_size / size;
  const int64_t slots = (segments_of(w, k1 - k0) * segment_blocks(w) * kFixedBlock) / size;
  const Vi twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const int64_t group = w.groups == 1 ? 0 : k0 / w.group_size;
  if (per_group <= 2) {
    for (int64_t i = 0; i < slots; i += kLanes) {
      const int64_t first = group + i / per_group;
      if (ahead > 0) {
        _mm_prefetch(scales + (first + ahead * w.groups) * (w.scale_dtype == DType::f32 ? 4 : 2), _MM_HINT_T0);
        if (zeros) _mm_prefetch(reinterpret_cast<const char*>(zeros + first + ahead * w.groups), _MM_HINT_T0);
      }
      Vf s = scales_at(w, scales, first, left - first > 0 ? left - first : 0);
      Vi z = zeros ? zeros_at(zeros, first, left - first > 0 ? left - first : 0) : _mm256_setzero_si256();
      if (per_group == 2) s = _mm256_permutevar8x32_ps(s, twice), z = _mm256_permutevar8x32_epi32(z, twice);
      store(to.scales + i, s);
      if (zeros) _mm256_store_si256(reinterpret_cast<Vi*>(to.zeros + i), z);
    }
    // The half of a last block that lies beyond the row: what follows in memory may be no number.
    if (const int64_t real = (k1 - k0 + size - 1) / size; real < slots) to.scales[real] = 0.f;
    return;
  }
  int64_t inside = w.groups == 1 ? 0 : (k0 % w.group_size) / size, g = group;
  float scale = scalar_at(scales, w.scale_dtype, g);
  for (int64_t i = 0; i < slots; ++i) {
    to.scales[i] = scale;
    to.zeros[i] = zeros ? zeros[g] : 0;
    if (++inside < per_group) continue;
    inside = 0;
    if (++g < w.groups) scale = scalar_at(scales, w.scale_dtype, g);
    else --g, inside = per_group - 1;
  }
}

// The value of segment s in every lane, or of its halves.
template <int kBlocks>
inline Vf segment_scales(const float* values, int64_t s) {
  if constexpr (kBlocks == 2) return _mm256_broadcast_ss(values + s);
  return _mm256_set_m128(_mm_broadcast_ss(values + 2 * s + 1), _mm_broadcast_ss(values + 2 * s));
}
template <int kBlocks>
inline Vi segment_zeros(const int32_t* values, int64_t s) {
  return _mm256_castps_si256(segment_scales<kBlocks>(reinterpret_cast<const float*>(values), s));
}

// In this order: compilers turn sums of integers into trees, which takes more registers than there are.
inline void add_product(Vi& sum, Vi a, Vi b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(sum));
}

// totals[r][i] += scale times the sum of segment s.
template <int kBlocks, int R, int M>
inline void add_sums(const Vi (&sums)[R][M], const Vf (&scales)[R], const FixedSegment<kBlocks>* x, Vf (&totals)[R][M]) {
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) {
    const Vf unit = load(x[i].unit);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) totals[r][i] = fma(to_float(sums[r][i]), mul(scales[r], unit), totals[r][i]);
  }
}

// totals += segments first..first + count of R rows times M rows of x. `codes` and `x` point at the first; `ahead` is where those of the next
// pass lie.
template <int kBits, int kBlocks, int R, int M>
void add_segments(const uint8_t* const (&rows)[R], const Slots<kChunk<M>>* slots, bool zeros, int64_t first, int64_t count,
                  const FixedSegment<kBlocks>* x, LinesAhead& ahead, Vf (&into)[R][M]) {
  constexpr int64_t kBytesOfBlock = kFixedBlock * kBits / 8;
  Vf totals[R][M];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) totals[r][i] = into[r][i];
  }
  int64_t at = 0;
  for (int64_t s = first; s < first + count; ++s, x += M) {
    Vi sums[R][M];
    Vf scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) sums[r][i] = _mm256_load_si256(reinterpret_cast<const Vi*>(x[i].offset));
      if (zeros) {
        const Vi z = segment_zeros<kBlocks>(slots[r].zeros, s);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) sums[r][i] = _mm256_mullo_epi32(z, sums[r][i]);
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b, at += kBytesOfBlock) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (at % 64 == 0) ahead.fetch();
        Vi v[kBlockVectors];
        block_codes<kBits>(rows[r] + at, v);
#pragma GCC unroll 4
        for (int t = 0; t < kBlockVectors; ++t) {
#pragma GCC unroll 4
          for (int i = 0; i < M; ++i) add_product(sums[r][i], v[t], x[i].vector(b, t));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) scales[r] = segment_scales<kBlocks>(slots[r].scales, s);
    add_sums<kBlocks, R, M>(sums, scales, x, totals);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) into[r][i] = totals[r][i];
  }
}

// c[i][0..R) (+)= the sums of totals' lanes.
template <int R, int M>
inline void add_totals(const Vf (&totals)[R][M], float* c, int64_t ldc, bool accumulate) {
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) {
    if constexpr (R == 4) {
      store_sums(c + i * ldc, sum4(totals[0][i], totals[1][i], totals[2][i], totals[3][i]), 4, accumulate);
    } else if constexpr (R == 2) {
      if (i % 2 == 1) continue;
      const int next = i + 1 < M ? i + 1 : i;
      __m128 sums = sum4(totals[0][i], totals[1][i], totals[0][next], totals[1][next]);
      __m64 *low = reinterpret_cast<__m64*>(c + i * ldc), *high = reinterpret_cast<__m64*>(c + next * ldc);
      if (accumulate) sums = _mm_add_ps(sums, _mm_loadh_pi(_mm_loadl_pi(_mm_setzero_ps(), low), high));
      _mm_storel_pi(low, sums);
      _mm_storeh_pi(high, sums);
    } else {
      store_sums(c + i * ldc, sum4(totals[0][i], totals[0][i], totals[0][i], totals[0][i]), R, accumulate);
    }
  }
}

inline const uint8_t* row_of_codes(const Weight& w, int64_t expert, int64_t n) {
  return static_cast<const uint8_t*>(w.data) + expert * w.expert_stride + n * w.n_stride;
}

// The codes from column k on to the end of the row, with zeros behind them.
template <int kBits, int64_t kBytes>
inline void copy_codes(const Weight& w, const uint8_t* row, int64_t k, uint8_t (&to)[kBytes]) {
  __builtin_memset(to, 0, kBytes);
  __builtin_memcpy(to, row + k * kBits / 8, ((w.k - k) * kBits + 7) / 8);
}

// Rows of weights first..last of part p, a multiple of R, against one group of M rows of x.
template <int kBits, int kBlocks, int R, int M>
void multiply_rows(const ProductArgs& a, int p, int64_t first, int64_t last, const FixedSegment<kBlocks>* x, float* c) {
  constexpr int64_t kCodes = kBlocks * kFixedBlock;
  const Weight& w = *a.weight;
  const int64_t whole = w.k / kCodes * kCodes;
  // Scales of rows that go in one piece follow each other in memory, as hardware prefetchers want it.
  const int64_t slots_ahead = w.k > kChunk<M> ? R * a.step : 0;
  // One row of x goes through every row of weights at once, so that codes are read in their order; of several, a chunk stays in L1.
  for (int64_t k0 = 0, k1; k0 < w.k; k0 = k1) {
    k1 = k0 + kChunk<M> < w.k ? k0 + kChunk<M> : w.k;
    const int64_t count = ((k1 < whole ? k1 : whole) - k0) / kCodes;
    const FixedSegment<kBlocks>* at = x + k0 / kCodes * M;
    for (int64_t j = first; j < last; j += R) {
      Slots<kChunk<M>> slots[R];
      const uint8_t* codes[R];
      Vf totals[R][M];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int64_t n = a.row0[p] + (j + r) * a.step;
        codes[r] = row_of_codes(w, a.expert, n) + k0 * kBits / 8;
        load_slots(w, a.expert, n, k0, k1, slots_ahead, slots[r]);
        for (int i = 0; i < M; ++i) totals[r][i] = zero();
      }
      LinesAhead ahead(codes[0] + R * a.step * w.n_stride, (k1 - k0) * kBits / 8, a.step * w.n_stride);
      add_segments<kBits, kBlocks, R, M>(codes, slots, w.zeros != nullptr, 0, count, at, ahead, totals);
      if (__builtin_expect(k1 > whole, 0)) {
        alignas(32) uint8_t copies[R][kCodes * kBits / 8];
        for (int r = 0; r < R; ++r) {
          copy_codes<kBits>(w, codes[r] - k0 * kBits / 8, whole, copies[r]);
          codes[r] = copies[r];
        }
        add_segments<kBits, kBlocks, R, M>(codes, slots, w.zeros != nullptr, count, 1, at + count * M, ahead, totals);
      }
      add_totals<R, M>(totals, c + j, a.ldc, k0 > 0);
    }
  }
}

// Several weight rows at once where one row of x leaves sums waiting for each other; the rest one by one.
template <int kBits, int kBlocks, int M>
void multiply_group(const ProductArgs& a, int p, const FixedSegment<kBlocks>* x, float* c) {
  constexpr int kRows = M == 1 ? 4 : 2;
  const int64_t whole = a.n / kRows * kRows;
  multiply_rows<kBits, kBlocks, kRows, M>(a, p, 0, whole, x, c);
  multiply_rows<kBits, kBlocks, 1, M>(a, p, whole, a.n, x, c);
}

template <int kBits, int kBlocks>
void multiply_fixed(const ProductArgs& a, const void* packed_x) {
  const int64_t segments = segments_of(*a.weight, a.weight->k);
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t g = 0; g < row_groups(a.m); ++g) {
      const int64_t first = group_begin(a.m, g);
      const FixedSegment<kBlocks>* x = static_cast<const FixedSegment<kBlocks>*>(packed_x) + first * segments;
      float* c = a.c + (p * a.m + first) * a.ldc;
      switch (group_begin(a.m, g + 1) - first) {
        case 1: multiply_group<kBits, kBlocks, 1>(a, p, x, c); break;
        case 2: multiply_group<kBits, kBlocks, 2>(a, p, x, c); break;
        case 3: multiply_group<kBits, kBlocks, 3>(a, p, x, c); break;
        default: multiply_group<kBits, kBlocks, 4>(a, p, x, c);
      }
    }
  }
}

}  // namespace
}  // namespace int4_emu::cpu
