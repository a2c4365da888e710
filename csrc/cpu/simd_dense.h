// Products of rows of weights that lie as they are multiplied: dense ones in place, and panels. Included after simd_tile.h.
//
// A step is 2 * kLanes columns. bf16 and fp16 become fp32 in registers, where a step is two vectors: of bf16 the even and the odd columns, a
// shift and a mask away from one load. bf16 times bf16 may stay bf16 (simd_bf16.h). x is packed in the same order once. Every c[i][j] has one vector
// of partial sums, whatever the block's shape, so a result does not depend on how m or n is cut.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kStep = 2 * kLanes;
// Columns whose sums are added up in registers. The same for every number of rows, so that no result depends on it.
constexpr int64_t kDepth = 1024;
constexpr int kGroupRows = 6;  // rows of x that share a pass over the weights
// Rows of weights that all rows of x meet before the next. Few rows of x ask memory for the weights, which come best in their order; many
// ask the caches for x.
constexpr int64_t strip_rows(int64_t m) { return m <= 2 ? 4 : m <= 24 ? (kRegisters == 16 ? 6 : 8) : 12; }

// How a step of weights of one type meets a step of x: in fp32.
template <DType W>
struct MultiplyAdds {
  using Element = float;
  using Vector = Vf;
  static constexpr DType kWeights = W;
  static constexpr int kVectors = 2;  // a step
  // Vector `h` of a step of weights. kRegister: whether there is one for a mask; else it takes two shifts.
  template <bool kRegister>
  static inline Vf weights(const char* step, int h) {
    if constexpr (W != DType::bf16) return load_as<W>(step, h * kLanes);
    if (h == 0) return even_bf16(step);
    return odd_bf16<kRegister>(step);
  }
  static inline Vf load_x(const float* x) {
    Vf v = load(x);
    keep_in_register(v);  // as an operand of several multiply-adds it would be loaded as many times
    return v;
  }
  static inline Vf multiply_add(Vf x, Vf w, Vf sum) { return fma(x, w, sum); }
  // A step of x, whose vectors lie `apart` elements apart.
  static inline void store_x(float* to, int64_t apart, Vf first, Vf last) {
    store(to, W == DType::bf16 ? even_lanes(first, last) : first);
    store(to + apart, W == DType::bf16 ? odd_lanes(first, last) : last);
  }
};

bool serves_dense(const Weight& w) { return !w.packed && w.k_stride == 1 && w.k > 0; }
// And fp32 is their compute type, on sets that multiply bf16 by bf16.
inline bool serves_dense_f32(const Weight& w, DType x) { return serves_dense(w) && (x != DType::bf16 || w.dtype != DType::bf16); }

// Rows of x in even groups of up to kGroupRows.
inline int64_t dense_groups(int64_t m) { return (m + kGroupRows - 1) / kGroupRows; }
inline int64_t dense_group_begin(int64_t m, int64_t g) { return m * g / dense_groups(m); }

template <class Dot>
size_t packed_rows_bytes(int64_t m, int64_t k) { return static_cast<size_t>(m * round_up_to(k, kStep)) * sizeof(typename Dot::Element); }

// [group][step][vector][row of the group][lanes], zeros beyond k: a pass reads one run. Rows a power of two apart would fight for the same sets of L1.
template <class Dot, DType D>
void pack_rows_of(const PackXArgs& a) {
  using Element = typename Dot::Element;
  constexpr int64_t kVector = kStep / Dot::kVectors;
  const int64_t width = round_up_to(a.k, kStep);
  for (int64_t g = 0; g < dense_groups(a.m); ++g) {
    const int64_t first = dense_group_begin(a.m, g), rows = dense_group_begin(a.m, g + 1) - first;
    Element* out = static_cast<Element*>(a.out) + first * width;
    for (int64_t i = 0; i < rows; ++i) {
      const void* row = x_row(a, first + i, kBytes<D>);
      for (int64_t p = 0; p < width; p += kStep) {
        Dot::store_x(out + p * rows + i * kVector, rows * kVector, x_vector<D>(a, row, first + i, p),
                     p + kLanes < a.k ? x_vector<D>(a, row, first + i, p + kLanes) : zero());
      }
    }
  }
}

template <class Dot>
void pack_rows(const PackXArgs& a) {
  if (a.dtype == DType::f32) pack_rows_of<Dot, DType::f32>(a);
  else if (a.dtype == DType::f16) pack_rows_of<Dot, DType::f16>(a);
  else pack_rows_of<Dot, DType::bf16>(a);
}

// sums += N rows of weights times M rows of x, `steps` steps of them. With kAhead each step fetches what lies `ahead` bytes from it. Into L2: rows
// a page apart are of one set of L1.
template <class Dot, int M, int N, bool kAhead>
inline void add_steps(const char* const (&rows)[N], const typename Dot::Element* x, int64_t steps, int64_t ahead, Vf (&sums)[M][N]) {
  constexpr int64_t kStepBytes = kStep * kBytes<Dot::kWeights>;
  constexpr bool kRegister = M * N + N + 2 < kRegisters;
  for (int64_t p = 0; p < steps * kStepBytes; p += kStepBytes) {
    if constexpr (kAhead) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) _mm_prefetch(rows[j] + p + ahead, _MM_HINT_T1);
    }
#pragma GCC unroll 2
    for (int h = 0; h < Dot::kVectors; ++h, x += M * kStep / Dot::kVectors) {
      typename Dot::Vector weights[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) weights[j] = Dot::template weights<kRegister>(rows[j] + p, h);
#pragma GCC unroll 6
      for (int i = 0; i < M; ++i) {
        const typename Dot::Vector xi = Dot::load_x(x + i * kStep / Dot::kVectors);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) sums[i][j] = Dot::multiply_add(xi, weights[j], sums[i][j]);
      }
    }
  }
}

// c[0..M)[0..N) (+)= N rows of weights, columns k0..k0 + k of them, times M rows of x. `x` points at column k0.
template <class Dot, int M, int N, bool kAhead>
void dense_block(const char* row, int64_t row_bytes, const typename Dot::Element* x, int64_t k, int64_t ahead, float* c, int64_t ldc, bool accumulate) {
  const char* rows[N];
  Vf sums[M][N];
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    rows[j] = row + j * row_bytes;
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) sums[i][j] = zero();
  }
  const int64_t whole = k / kStep;
  add_steps<Dot, M, N, kAhead>(rows, x, whole, ahead, sums);
  if (const int64_t rest = k - whole * kStep; __builtin_expect(rest > 0, 0)) {
    alignas(64) char copies[N][kStep * kBytes<Dot::kWeights>] = {};
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      __builtin_memcpy(copies[j], rows[j] + whole * kStep * kBytes<Dot::kWeights>, rest * kBytes<Dot::kWeights>);
      rows[j] = copies[j];
    }
    add_steps<Dot, M, N, false>(rows, x + whole * kStep * M, 1, 0, sums);
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
    const Vf* s = sums[i];
    store_sums(c + i * ldc, sum4(s[0], s[N > 1 ? 1 : 0], s[N > 2 ? 2 : 0], s[N > 3 ? 3 : 0]), N, accumulate);
  }
}

// Rows of weights that meet M rows of x at a time: enough sums to hide their latency, and no more than registers hold.
template <int M>
constexpr int kBlockRows = M <= 2 || kRegisters > 16 ? 4 : M == 3 ? 3 : 2;

// What a strip of n rows of weights needs: c[0..M)[0..n) (+)= their product, as above.
template <class Dot, int M, bool kAhead>
void dense_strip(const char* row, int64_t row_bytes, int64_t n, const typename Dot::Element* x, int64_t k, int64_t ahead, float* c, int64_t ldc, bool accumulate) {
  constexpr int N = kBlockRows<M>;
  int64_t j = 0;
  // Four rows left by three are two and two.
  for (; n - j >= N && (N != 3 || n - j != 4); j += N) dense_block<Dot, M, N, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
  for (; n - j >= 2; j += 2) dense_block<Dot, M, 2, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
  if (j < n) dense_block<Dot, M, 1, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
}

template <class Dot, bool kAhead>
void dense_strip(int64_t m, const char* row, int64_t row_bytes, int64_t n, const typename Dot::Element* x, int64_t k, int64_t ahead, float* c, int64_t ldc,
                 bool accumulate) {
  switch (m) {
    case 1: return dense_strip<Dot, 1, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 2: return dense_strip<Dot, 2, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 3: return dense_strip<Dot, 3, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 4: return dense_strip<Dot, 4, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 5: return dense_strip<Dot, 5, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    default: return dense_strip<Dot, 6, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
  }
}

// The panel of GemmArgs, strips of rows against all rows of x.
template <class Dot>
void gemm_rows(const GemmArgs& a) {
  constexpr int64_t kBytesOf = kBytes<Dot::kWeights>, kRows = 8;
  const int64_t width = round_up_to(a.total_k, kStep);
  for (int64_t j = 0; j < a.n; j += kRows) {
    const int64_t rows = a.n - j < kRows ? a.n - j : kRows;
    for (int64_t k0 = 0; k0 < a.k; k0 += kDepth) {
      const int64_t k = a.k - k0 < kDepth ? a.k - k0 : kDepth;
      const char* from = static_cast<const char*>(a.w) + (j * a.ldw + k0) * kBytesOf;
      for (int64_t g = 0; g < dense_groups(a.m); ++g) {
        const int64_t i = dense_group_begin(a.m, g), m = dense_group_begin(a.m, g + 1) - i;
        const auto* x = static_cast<const typename Dot::Element*>(a.packed_x) + i * width + (a.k0 + k0) * m;
        dense_strip<Dot, false>(m, from, a.ldw * kBytesOf, rows, x, k, 0, a.c + i * a.ldc + j, a.ldc, a.accumulate || k0 > 0);
      }
    }
  }
}

template <class Dot>
constexpr ComputeFunctions panels_of = {packed_rows_bytes<Dot>, pack_rows<Dot>, load_panel_as<Dot::kWeights>, gemm_rows<Dot>};

// Dense weights where they lie.
template <class Dot>
void multiply_rows(const ProductArgs& a) {
  const Weight& w = *a.weight;
  constexpr int64_t kBytesOf = kBytes<Dot::kWeights>;
  const int64_t width = round_up_to(w.k, kStep), row_bytes = a.step * w.n_stride * kBytesOf;
  const int64_t strip = strip_rows(a.m);
  const auto row = [&](int p, int64_t j) {
    return static_cast<const char*>(w.data) + (a.expert * w.expert_stride + (a.row0[p] + j * a.step) * w.n_stride) * kBytesOf;
  };
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t j = 0; j < a.n; j += strip) {
      const int64_t rows = a.n - j < strip ? a.n - j : strip;
      // The first pass over a strip fetches the next one, which may be the next part's or that of the rows after these.
      const int64_t ahead = (j + rows < a.n ? row(p, j + rows) : p + 1 < a.parts ? row(p + 1, 0) : row(0, a.n)) - row(p, j);
      for (int64_t k0 = 0; k0 < w.k; k0 += kDepth) {
        const int64_t k = w.k - k0 < kDepth ? w.k - k0 : kDepth;
        const char* from = row(p, j) + k0 * kBytesOf;
        for (int64_t g = 0; g < dense_groups(a.m); ++g) {
          const int64_t i = dense_group_begin(a.m, g), m = dense_group_begin(a.m, g + 1) - i;
          const auto* x = static_cast<const typename Dot::Element*>(a.packed_x) + i * width + k0 * m;
          float* c = a.c + (p * a.m + i) * a.ldc + j;
          if (g == 0) dense_strip<Dot, true>(m, from, row_bytes, rows, x, k, ahead, c, a.ldc, k0 > 0);
          else dense_strip<Dot, false>(m, from, row_bytes, rows, x, k, 0, c, a.ldc, k0 > 0);
        }
      }
    }
  }
}

// In fp32, whatever their type.
size_t packed_dense_x_bytes(const Weight& w, int64_t m) { return packed_rows_bytes<MultiplyAdds<DType::f32>>(m, w.k); }

void pack_dense_x(const Weight& w, const PackXArgs& a) {
  if (w.dtype == DType::bf16) pack_rows<MultiplyAdds<DType::bf16>>(a);
  else pack_rows<MultiplyAdds<DType::f32>>(a);
}

void multiply_dense(const ProductArgs& a) {
  if (a.weight->dtype == DType::f32) multiply_rows<MultiplyAdds<DType::f32>>(a);
  else if (a.weight->dtype == DType::f16) multiply_rows<MultiplyAdds<DType::f16>>(a);
  else multiply_rows<MultiplyAdds<DType::bf16>>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
