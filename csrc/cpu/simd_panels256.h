// Products of packed codes, 256 bits wide: x in fixed point meets the codes where they lie (few rows) or panels of them that stay in L1;
// other x and weights meet panels in fp32. Included after simd_fixed256.h and simd_dense.h.
#pragma once

namespace int4_emu::cpu {
namespace {

// Up to this many rows meet the codes where they lie; with more, panels pay, which all rows share.
constexpr int64_t kCodesRows = 8;
// Up to this many rows of x that cannot be in fixed point are left to panels of any set.
constexpr int64_t kFewRows = 8;
constexpr int64_t kPanelRows = 16, kFloatRows = 8, kPanelCodes = 512;

// Codes minus zero points in the order of FixedSegment's numbers.
struct FixedPanel {
  alignas(32) int16_t codes[kPanelRows][kPanelCodes];
  Slots<kPanelCodes> slots[kPanelRows];
};

// Columns k0..k1 of row n to row r of the panel. Its successor in the next panel is row n + `ahead`.
template <int kBits, int kBlocks>
inline void load_fixed_row(const Weight& w, int64_t expert, int64_t n, int64_t k0, int64_t k1, int64_t ahead, FixedPanel& panel,
                           int64_t r) {
  constexpr int64_t kCodes = kBlocks * kFixedBlock;
  load_slots(w, expert, n, k0, k1, ahead, panel.slots[r]);
  const uint8_t* row = row_of_codes(w, expert, n);
  alignas(32) uint8_t copy[kCodes * kBits / 8];
  Vi* to = reinterpret_cast<Vi*>(panel.codes[r]);
  Vi z = _mm256_set1_epi16(1 << (kBits - 1));
  for (int64_t s = 0, k = k0; k < k1; ++s, k += kCodes) {
    const uint8_t* codes = row + k * kBits / 8;
    // Into L2: x passes through L1 before the next panel is due.
    _mm_prefetch(reinterpret_cast<const char*>(codes + ahead * w.n_stride), _MM_HINT_T1);
    if (k + kCodes > w.k) {
      copy_codes<kBits>(w, row, k, copy);
      codes = copy;
    }
    if (w.zeros) {
      const Vi zero_points = segment_zeros<kBlocks>(panel.slots[r].zeros, s);
      z = _mm256_or_si256(zero_points, _mm256_slli_epi32(zero_points, 16));  // in both halves of a lane
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b, to += kBlockVectors) {
      Vi v[kBlockVectors];
      block_codes<kBits>(codes + b * kFixedBlock * kBits / 8, v);
#pragma GCC unroll 4
      for (int t = 0; t < kBlockVectors; ++t) _mm256_store_si256(to + t, _mm256_sub_epi16(v[t], z));
    }
  }
}

// R rows of the panel from r on, times M rows of x over `count` segments.
template <int kBlocks, int R, int M>
inline void multiply_panel(const FixedPanel& panel, int64_t r0, int64_t count, const FixedSegment<kBlocks>* x, Vf (&totals)[R][M]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) totals[r][i] = zero();
  }
  const Vi* codes = reinterpret_cast<const Vi*>(panel.codes[r0]);
  constexpr int64_t kRowVectors = kPanelCodes / (2 * kLanes);
  for (int64_t s = 0; s < count; ++s, x += M) {
    Vi sums[R][M];
    Vf scales[R];
#pragma GCC unroll 8
    for (int v = 0; v < kBlocks * kBlockVectors; ++v, ++codes) {
      Vi code[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) code[r] = _mm256_load_si256(codes + r * kRowVectors);
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) {
        Vi xi = x[i].vector(0, v);
        // In a register: as operands of several products the loads would be the limit.
        if constexpr (R > 1) __asm__("" : "+x"(xi));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          if (v == 0) sums[r][i] = _mm256_madd_epi16(code[r], xi);
          else add_product(sums[r][i], code[r], xi);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) scales[r] = segment_scales<kBlocks>(panel.slots[r0 + r].scales, s);
    add_sums<kBlocks, R, M>(sums, scales, x, totals);
  }
}

template <int kBlocks, int M>
inline void multiply_panel_rows(const FixedPanel& panel, int64_t rows, int64_t count, const FixedSegment<kBlocks>* x, float* c, int64_t ldc,
                                bool accumulate) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    Vf totals[2][M];
    multiply_panel<kBlocks, 2, M>(panel, r, count, x, totals);
    add_totals<2, M>(totals, c + r, ldc, accumulate);
  }
  if (r == rows) return;
  Vf totals[1][M];
  multiply_panel<kBlocks, 1, M>(panel, r, count, x, totals);
  add_totals<1, M>(totals, c + r, ldc, accumulate);
}

template <int kBits, int kBlocks>
void multiply_fixed_panels(const ProductArgs& a, const void* packed_x) {
  constexpr int64_t kCodes = kBlocks * kFixedBlock;
  FixedPanel panel;
  const Weight& w = *a.weight;
  const int64_t segments = segments_of(w, w.k);
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t k0 = 0, k1; k0 < w.k; k0 = k1) {
      k1 = k0 + kPanelCodes < w.k ? k0 + kPanelCodes : w.k;
      const int64_t count = segments_of(w, k1 - k0);
      for (int64_t j = 0; j < a.n; j += kPanelRows) {
        const int64_t rows = a.n - j < kPanelRows ? a.n - j : kPanelRows;
        for (int64_t r = 0; r < rows; ++r)
          load_fixed_row<kBits, kBlocks>(w, a.expert, a.row0[p] + (j + r) * a.step, k0, k1, kPanelRows * a.step, panel, r);
        for (int64_t g = 0; g < row_groups(a.m); ++g) {
          const int64_t first = group_begin(a.m, g), m = group_begin(a.m, g + 1) - first;
          const FixedSegment<kBlocks>* x = static_cast<const FixedSegment<kBlocks>*>(packed_x) + first * segments + k0 / kCodes * m;
          float* c = a.c + (p * a.m + first) * a.ldc + j;
          switch (m) {
            case 1: multiply_panel_rows<kBlocks, 1>(panel, rows, count, x, c, a.ldc, k0 > 0); break;
            case 2: multiply_panel_rows<kBlocks, 2>(panel, rows, count, x, c, a.ldc, k0 > 0); break;
            case 3: multiply_panel_rows<kBlocks, 3>(panel, rows, count, x, c, a.ldc, k0 > 0); break;
            default: multiply_panel_rows<kBlocks, 4>(panel, rows, count, x, c, a.ldc, k0 > 0);
          }
        }
      }
    }
  }
}

// Eight rows of weights at a time, 512 columns of them in fp32.
void multiply_panels(const ProductArgs& a, const void* packed_x) {
  alignas(64) float panel[kFloatRows * kPanelCodes];
  const Weight& w = *a.weight;
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t k0 = 0; k0 < w.k; k0 += kPanelCodes) {
      const int64_t k = w.k - k0 < kPanelCodes ? w.k - k0 : kPanelCodes;
      for (int64_t j = 0; j < a.n; j += kFloatRows) {
        const int64_t rows = a.n - j < kFloatRows ? a.n - j : kFloatRows;
        for (int64_t r = 0; r < rows; ++r)
          decode_weight_row<DType::f32>(w, a.expert, a.row0[p] + (j + r) * a.step, k0, k, panel + r * kPanelCodes);
        gemm_rows<MultiplyAdds<DType::f32>>({packed_x, a.m, w.k, panel, rows, kPanelCodes, k0, k, a.c + p * a.m * a.ldc + j, a.ldc, k0 > 0});
      }
    }
  }
}

// What pack_product_x found x to be; before the packed x itself.
struct alignas(64) PackedHeader {
  bool fixed;
};

bool serves_product(const Weight& w, DType x, int64_t m) { return w.packed && w.k > 0 && (m > kFewRows || fixed_fits(w, x)); }

size_t product_x_bytes(const Weight& w, DType x, int64_t m) {
  const size_t floats = packed_rows_bytes<MultiplyAdds<DType::f32>>(m, w.k), fixed = fixed_fits(w, x) ? fixed_x_bytes(w, m) : 0;
  return sizeof(PackedHeader) + (floats > fixed ? floats : fixed);
}

void pack_product_x(const Weight& w, const PackXArgs& a) {
  PackedHeader* header = static_cast<PackedHeader*>(a.out);
  PackXArgs rest = a;
  rest.out = header + 1;
  header->fixed = fixed_fits(w, a.dtype) && pack_fixed_any(w, a, rest.out);
  if (!header->fixed) pack_rows<MultiplyAdds<DType::f32>>(rest);
}

template <int kBits, int kBlocks>
void multiply_fixed_any(const ProductArgs& a, const void* packed_x) {
  if (a.m <= kCodesRows) multiply_fixed<kBits, kBlocks>(a, packed_x);
  else multiply_fixed_panels<kBits, kBlocks>(a, packed_x);
}

void multiply_product(const ProductArgs& a) {
  const PackedHeader* header = static_cast<const PackedHeader*>(a.packed_x);
  const Weight& w = *a.weight;
  if (!header->fixed) multiply_panels(a, header + 1);
  else if (w.bits == 4) segment_blocks(w) == 2 ? multiply_fixed_any<4, 2>(a, header + 1) : multiply_fixed_any<4, 1>(a, header + 1);
  else segment_blocks(w) == 2 ? multiply_fixed_any<8, 2>(a, header + 1) : multiply_fixed_any<8, 1>(a, header + 1);
}

}  // namespace
}  // namespace int4_emu::cpu
