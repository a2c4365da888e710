// Products of rows of weights that lie as they are multiplied: dense ones in place, and panels. Included after simd_tile.h.
//
// A step is 2 * kLanes columns. bf16 and fp16 become fp32 in registers, where a step is two vectors: of bf16 the even and the odd columns, a
// shift and a mask away from one load. bf16 times bf16 may stay bf16 (simd_bf16.h). x is packed in the same order once. Every c[i][j] has one vector
// of partial sums, whatever the block's shape, so a result does not depend on how m or n is cut.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kStep = 2 * kLanes;  // and what blocks of columns begin on: x is read in whole steps
// Columns whose sums are added up in registers. The same for every number of rows, so that no result depends on it.
constexpr int64_t kDepth = 1024;
constexpr int kGroupRows = 6;  // rows of x that share a pass over the weights
// Rows of weights that all rows of x meet before the next. Few rows of x ask memory for the weights, which come best in their order; many
// ask the caches for x.
constexpr int64_t strip_rows(int64_t m) { return m > 24 ? 12 : kRegisters > 16 ? 8 : m <= 2 ? 4 : 6; }

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

// How the first pass over some rows fetches others. Row beside row into L2, for those a page apart are of one set of L1; but hardware prefetchers do
// not follow several within a page, so shorter rows are fetched in their order in memory, into L1.
enum class Fetch { none, rows, in_order };
constexpr int64_t kPageBytes = 4096;

// sums += N rows of weights times M rows of x, `steps` steps of them. What is fetched for a row lies `ahead` bytes from it; in order, from the first.
template <class Dot, int M, int N, Fetch kFetch>
inline void add_steps(const char* const (&rows)[N], const typename Dot::Element* x, int64_t steps, int64_t ahead, Vf (&sums)[M][N]) {
  constexpr int64_t kStepBytes = kStep * kBytes<Dot::kWeights>;
  constexpr bool kRegister = M * N + N + 2 < kRegisters;
  for (int64_t p = 0; p < steps * kStepBytes; p += kStepBytes) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      if constexpr (kFetch == Fetch::rows) _mm_prefetch(rows[j] + p + ahead, _MM_HINT_T1);
      if constexpr (kFetch == Fetch::in_order) _mm_prefetch(rows[0] + p * N + ahead + j * kStepBytes, _MM_HINT_T0);
    }
#pragma GCC unroll 2
    for (int h = 0; h < Dot::kVectors; ++h, x += M * kStep / Dot::kVectors) {
      typename Dot::Vector weights[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) weights[j] = Dot::template weights<kRegister>(rows[j] + p, h);
#pragma GCC unroll 6
      for (int i = 0; i < M; ++i) {
        const typename Dot::Vector xi = Dot::load_x(x + i * kStep / Dot::kVectors);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sums[i][j] = Dot::multiply_add(xi, weights[j], sums[i][j]);
      }
    }
  }
}

// Columns k0..k0 + k of n rows of weights, and what to fetch beside.
struct RowStrip {
  const char* row;
  int64_t row_bytes, n, k0, k;
  int64_t ahead;  // bytes to the rows to fetch
};
// Where the rows' products go.
struct RowSums {
  float* c;
  int64_t ldc;
  bool accumulate;
};

// c[0..M)[j..j + N) (+)= rows j..j + N of a strip times M rows of x, which points at column k0. Inlined in a strip's loops, gcc 12 spilled sums of
// sixteen registers: 1.3 times the time of many rows on AVX2.
template <class Dot, int M, int N, Fetch kFetch>
__attribute__((noinline)) void dense_block(const RowStrip& strip, int64_t j, const typename Dot::Element* x, const RowSums& to) {
  constexpr int64_t kBytesOf = kBytes<Dot::kWeights>;
  const char* rows[N];
  Vf sums[M][N];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
    rows[r] = strip.row + (j + r) * strip.row_bytes + strip.k0 * kBytesOf;
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) sums[i][r] = zero();
  }
  const int64_t whole = strip.k / kStep;
  // In order, earlier columns of all N rows are behind.
  add_steps<Dot, M, N, kFetch>(rows, x, whole, strip.ahead + (kFetch == Fetch::in_order ? strip.k0 * kBytesOf * (N - 1) : 0), sums);
  if (const int64_t rest = strip.k - whole * kStep; __builtin_expect(rest > 0, 0)) {
    alignas(64) char copies[N][kStep * kBytesOf] = {};
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      __builtin_memcpy(copies[r], rows[r] + whole * kStep * kBytesOf, rest * kBytesOf);
      rows[r] = copies[r];
    }
    add_steps<Dot, M, N, Fetch::none>(rows, x + whole * kStep * M, 1, 0, sums);
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
    for (int r = 0; r < N; r += 4) {
      const Vf* s = sums[i] + r;
      store_sums(to.c + i * to.ldc + j + r, sum4(s[0], s[N > 1 ? 1 : 0], s[N > 2 ? 2 : 0], s[N > 3 ? 3 : 0]), N - r, to.accumulate);
    }
  }
}

// Rows of weights that meet M rows of x at a time: enough sums to hide their latency, and no more than registers hold. One or two rows of x wait
// for memory, which serves eight rows of weights fetched side by side sooner than four.
template <int M, Fetch kFetch>
constexpr int kBlockRows = kRegisters > 16 ? (M <= 2 && kFetch == Fetch::rows ? 8 : 4) : M <= 2 ? 4 : M == 3 ? 3 : 2;

template <class Dot, int M, Fetch kFetch>
void dense_strip(const RowStrip& strip, const typename Dot::Element* x, const RowSums& to) {
  constexpr int N = kBlockRows<M, kFetch>;
  int64_t j = 0;
  // Four rows left by three are two and two.
  for (; strip.n - j >= N && (N != 3 || strip.n - j != 4); j += N) dense_block<Dot, M, N, kFetch>(strip, j, x, to);
  if constexpr (N > 4) {
    for (; strip.n - j >= 4; j += 4) dense_block<Dot, M, 4, kFetch>(strip, j, x, to);
  }
  for (; strip.n - j >= 2; j += 2) dense_block<Dot, M, 2, kFetch>(strip, j, x, to);
  if (j < strip.n) dense_block<Dot, M, 1, kFetch>(strip, j, x, to);
}

template <class Dot, Fetch kFetch>
void dense_strip(int64_t m, const RowStrip& strip, const typename Dot::Element* x, const RowSums& to) {
  switch (m) {
    case 1: return dense_strip<Dot, 1, kFetch>(strip, x, to);
    case 2: return dense_strip<Dot, 2, kFetch>(strip, x, to);
    case 3: return dense_strip<Dot, 3, kFetch>(strip, x, to);
    case 4: return dense_strip<Dot, 4, kFetch>(strip, x, to);
    case 5: return dense_strip<Dot, 5, kFetch>(strip, x, to);
    default: return dense_strip<Dot, 6, kFetch>(strip, x, to);
  }
}

// A strip, all k columns of it, against all m rows of x, whose columns `x0`.. those are of `width`; the first rows of x fetch.
template <class Dot>
void multiply_strip(RowStrip strip, int64_t k, Fetch fetch, const void* packed_x, int64_t m, int64_t x0, int64_t width, RowSums to) {
  float* const c = to.c;
  for (strip.k0 = 0; strip.k0 < k; strip.k0 += kDepth, to.accumulate = true) {
    strip.k = k - strip.k0 < kDepth ? k - strip.k0 : kDepth;
    for (int64_t g = 0; g < dense_groups(m); ++g) {
      const int64_t i = dense_group_begin(m, g), rows = dense_group_begin(m, g + 1) - i;
      const auto* x = static_cast<const typename Dot::Element*>(packed_x) + i * width + (x0 + strip.k0) * rows;
      to.c = c + i * to.ldc;
      if (g > 0 || fetch == Fetch::none) dense_strip<Dot, Fetch::none>(rows, strip, x, to);
      else if (fetch == Fetch::rows) dense_strip<Dot, Fetch::rows>(rows, strip, x, to);
      else dense_strip<Dot, Fetch::in_order>(rows, strip, x, to);
    }
  }
}

// The panel of GemmArgs.
template <class Dot>
void gemm_rows(const GemmArgs& a) {
  constexpr int64_t kBytesOf = kBytes<Dot::kWeights>, kRows = 8;
  for (int64_t j = 0; j < a.n; j += kRows) {
    const RowStrip strip{static_cast<const char*>(a.w) + j * a.ldw * kBytesOf, a.ldw * kBytesOf, a.n - j < kRows ? a.n - j : kRows, 0, 0, 0};
    multiply_strip<Dot>(strip, a.k, Fetch::none, a.packed_x, a.m, a.k0, round_up_to(a.total_k, kStep), {a.c + j, a.ldc, a.accumulate});
  }
}

template <class Dot>
constexpr ComputeFunctions panels_of = {packed_rows_bytes<Dot>, pack_rows<Dot>, load_panel_as<Dot::kWeights>, gemm_rows<Dot>};

// Dense weights where they lie.
template <class Dot>
void multiply_rows(const ProductArgs& a) {
  const Weight& w = *a.weight;
  constexpr int64_t kBytesOf = kBytes<Dot::kWeights>;
  const int64_t row_bytes = a.step * w.n_stride * kBytesOf, most = strip_rows(a.m);
  const Fetch fetch = a.m <= 2 && row_bytes == w.k * kBytesOf && row_bytes < kPageBytes ? Fetch::in_order : Fetch::rows;
  const auto row = [&](int p, int64_t j) {
    return static_cast<const char*>(w.data) + (a.expert * w.expert_stride + (a.row0[p] + j * a.step) * w.n_stride) * kBytesOf;
  };
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t j = 0; j < a.n; j += most) {
      const int64_t rows = a.n - j < most ? a.n - j : most;
      // The next strip may be the next part's or that of the rows after these.
      const int64_t ahead = (j + rows < a.n ? row(p, j + rows) : p + 1 < a.parts ? row(p + 1, 0) : row(0, a.n)) - row(p, j);
      multiply_strip<Dot>({row(p, j), row_bytes, rows, 0, 0, ahead}, w.k, fetch, a.packed_x, a.m, 0, round_up_to(w.k, kStep),
                          {a.c + p * a.m * a.ldc + j, a.ldc, false});
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
