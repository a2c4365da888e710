// The fp32 tile functions: x and weights both row-major, each output one dot product along k. Included after simd_decode.h.
//
// Every c[i][j] has one vector of partial sums, whatever the block shape, so a result does not depend on how m or n is cut.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t round_up_to(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Elements first..first + kLanes of a row of x (zeros beyond k), permuted and scaled as PackXArgs says.
template <DType D>
inline Vf x_vector(const PackXArgs& a, const void* row, int64_t i, int64_t first) {
  const int64_t count = a.k - first < kLanes ? a.k - first : kLanes;
  Vf v;
  if (a.perm != nullptr) {
    alignas(64) char buffer[64] = {0};
    for (int64_t j = 0; j < count; ++j)
      __builtin_memcpy(buffer + j * kBytes<D>, static_cast<const char*>(row) + a.perm[first + j] * kBytes<D>, kBytes<D>);
    v = load_as<D>(buffer, 0);
  } else {
    v = count == kLanes ? load_as<D>(row, first) : load_tail<D>(row, first, count);
  }
  return a.row_scale ? round_to<D>(mul(v, set1(a.row_scale[i]))) : v;
}

inline const void* x_row(const PackXArgs& a, int64_t i, int64_t element_bytes) {
  return static_cast<const char*>(a.x) + (a.rows ? a.rows[i] : i) * a.x_stride * element_bytes;
}

// Rows of x as fp32 [m][ld], zero beyond k.
template <DType D>
void pack_rows_f32(const PackXArgs& a, int64_t ld) {
  for (int64_t i = 0; i < a.m; ++i) {
    const void* row = x_row(a, i, kBytes<D>);
    float* out = static_cast<float*>(a.out) + i * ld;
    int64_t j = 0;
    for (; j < a.k; j += kLanes) store(out + j, x_vector<D>(a, row, i, j));
    for (; j < ld; j += kLanes) store(out + j, zero());
  }
}

// [m][round_up(k, k_multiple)] fp32.
template <int64_t K_MULTIPLE>
size_t packed_x_bytes_f32(int64_t m, int64_t k) { return static_cast<size_t>(m * round_up_to(k, K_MULTIPLE)) * 4; }

template <int64_t K_MULTIPLE>
void pack_x_f32(const PackXArgs& a) {
  const int64_t ld = round_up_to(a.k, K_MULTIPLE);
  if (a.dtype == DType::f32) pack_rows_f32<DType::f32>(a, ld);
  else if (a.dtype == DType::f16) pack_rows_f32<DType::f16>(a, ld);
  else pack_rows_f32<DType::bf16>(a, ld);
}

// Dense weights of dtype D to a panel of dtype O (fp32 or bf16).
template <DType D, DType O>
void load_dense(const LoadPanelArgs& a) {
  const Weight& w = *a.weight;
  const char* base = static_cast<const char*>(w.data) + (a.expert * w.expert_stride + a.n0 * w.n_stride + a.k0 * w.k_stride) * kBytes<D>;
  char* out = static_cast<char*>(a.out);
  if (w.k_stride == 1) {
    for (int64_t r = 0; r < a.n; ++r) {
      const char* row = base + r * w.n_stride * kBytes<D>;
      char* to = out + r * a.ld * kBytes<O>;
      int64_t j = 0;
      if constexpr (D == O) {
        __builtin_memcpy(to, row, a.k * kBytes<O>);
        continue;
      }
      for (; j + kLanes <= a.k; j += kLanes) store_as<O>(to, j, load_as<D>(row, j));
      if (j < a.k) store_tail<O>(to, j, load_tail<D>(row, j, a.k - j), a.k - j);
    }
    return;
  }
  // Blocks of kLanes rows by 16 columns, read along whichever axis is contiguous and turned in a buffer that stays in L1.
  constexpr int64_t kColumns = 16;
  alignas(64) char block[kColumns * kLanes * 4];
  for (int64_t r0 = 0; r0 < a.n; r0 += kLanes) {
    const int64_t rows = a.n - r0 < kLanes ? a.n - r0 : kLanes;
    for (int64_t j0 = 0; j0 < a.k; j0 += kColumns) {
      const int64_t columns = a.k - j0 < kColumns ? a.k - j0 : kColumns;
      for (int64_t j = 0; j < columns; ++j) {
        const char* from = base + (r0 * w.n_stride + (j0 + j) * w.k_stride) * kBytes<D>;
        Vf v;
        if (w.n_stride == 1) {
          v = rows == kLanes ? load_as<D>(from, 0) : load_tail<D>(from, 0, rows);
        } else {
          alignas(64) char lane[64] = {0};
          for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(lane + r * kBytes<D>, from + r * w.n_stride * kBytes<D>, kBytes<D>);
          v = load_as<D>(lane, 0);
        }
        store_as<O>(block, j * kLanes, v);
      }
      for (int64_t r = 0; r < rows; ++r) {
        char* to = out + ((r0 + r) * a.ld + j0) * kBytes<O>;
        for (int64_t j = 0; j < columns; ++j) __builtin_memcpy(to + j * kBytes<O>, block + (j * kLanes + r) * kBytes<O>, kBytes<O>);
      }
    }
  }
}

// Rows a.n0.. of any weight to a panel [a.n][a.ld] of O, zero beyond a.k.
template <DType O>
void load_panel_as(const LoadPanelArgs& a) {
  const Weight& w = *a.weight;
  char* out = static_cast<char*>(a.out);
  if (w.packed) {
    // Whole canonical rows of whole groups follow each other in every array: one long row.
    const bool joined = w.layout == Layout::canonical && a.k == w.k && a.ld == a.k && w.k % w.group_size == 0 && w.n_stride * 8 == w.k * w.bits;
    if (joined) decode_weight_row<O>(w, a.expert, a.n0, 0, a.n * a.k, out);
    for (int64_t r = joined ? a.n : 0; r < a.n; ++r) decode_weight_row<O>(w, a.expert, a.n0 + r, a.k0, a.k, out + r * a.ld * kBytes<O>);
  } else if (w.dtype == DType::f32) {
    load_dense<DType::f32, O>(a);
  } else if (w.dtype == DType::f16) {
    load_dense<DType::f16, O>(a);
  } else {
    load_dense<DType::bf16, O>(a);
  }
  if (a.k == a.ld) return;
  for (int64_t r = 0; r < a.n; ++r) __builtin_memset(out + (r * a.ld + a.k) * kBytes<O>, 0, (a.ld - a.k) * kBytes<O>);
}

// How two vectors of the compute type are multiplied into a vector of fp32 sums.
struct DotF32 {
  using Element = float;
  using Vector = Vf;
  static constexpr int64_t kStep = kLanes;  // elements a vector
  static inline Vector load_vector(const Element* p) { return load(p); }
  static inline Vf multiply_add(Vector a, Vector b, Vf sum) { return fma(a, b, sum); }
};

// The first `count` <= 4 of four sums to c.
inline void store_sums(float* c, __m128 sum, int64_t count, bool accumulate) {
  if (count >= 4) {
    _mm_storeu_ps(c, accumulate ? _mm_add_ps(_mm_loadu_ps(c), sum) : sum);
    return;
  }
  alignas(16) float part[4];
  _mm_store_ps(part, sum);
  for (int64_t t = 0; t < count; ++t) c[t] = accumulate ? c[t] + part[t] : part[t];
}

// c[0..M][0..columns] (+)= x rows times N weight rows, N = 4 or 8. Weight rows from `columns` on repeat the last and are dropped.
// Every loop over i and j is unrolled: an index that is not a constant would put the sums in memory.
template <class Dot, int M, int N>
inline void dot_block(const typename Dot::Element* x, int64_t ldx, const typename Dot::Element* w, int64_t ldw, int64_t columns, int64_t k,
                      float* c, int64_t ldc, bool accumulate) {
  const typename Dot::Element* rows[N];
  Vf sums[M][N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    rows[j] = w + (j < columns ? j : columns - 1) * ldw;
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i][j] = zero();
  }
  for (int64_t p = 0; p < k; p += Dot::kStep) {
    typename Dot::Vector xs[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) xs[i] = Dot::load_vector(x + i * ldx + p);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const typename Dot::Vector wj = Dot::load_vector(rows[j] + p);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) sums[i][j] = Dot::multiply_add(xs[i], wj, sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < N; j += 4)
      store_sums(c + i * ldc + j, sum4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]), columns - j, accumulate);
  }
}

// Rows i.. of x, M at a time and the rest by smaller blocks, against up to four weight rows.
template <class Dot, int M>
inline void dot_rows(const typename Dot::Element* x, int64_t ldx, int64_t m, const typename Dot::Element* w, int64_t ldw, int64_t columns,
                     int64_t k, float* c, int64_t ldc, bool accumulate) {
  for (; m >= M; m -= M, x += M * ldx, c += M * ldc) dot_block<Dot, M, 4>(x, ldx, w, ldw, columns, k, c, ldc, accumulate);
  if constexpr (M > 1) {
    if (m > 0) dot_rows<Dot, M - 1>(x, ldx, m, w, ldw, columns, k, c, ldc, accumulate);
  }
}

// GemmArgs over blocks of weight rows, each against all rows of x: a block of weights is read from memory once.
template <class Dot, int64_t K_MULTIPLE>
void gemm_dot(const GemmArgs& a) {
  using Element = typename Dot::Element;
  const int64_t ldx = round_up_to(a.total_k, K_MULTIPLE), k = round_up_to(a.k, Dot::kStep);
  const Element* x = static_cast<const Element*>(a.packed_x) + a.k0;
  const Element* w = static_cast<const Element*>(a.w);
  const int64_t step = a.m == 1 ? 8 : 4;  // one row of x needs more weight rows to hide the latency of its sums
  for (int64_t j = 0; j < a.n; j += step) {
    const int64_t columns = a.n - j < step ? a.n - j : step;
    if (a.m == 1) dot_block<Dot, 1, 8>(x, ldx, w + j * a.ldw, a.ldw, columns, k, a.c + j, a.ldc, a.accumulate);
    else dot_rows<Dot, kRowsPerBlock>(x, ldx, a.m, w + j * a.ldw, a.ldw, columns, k, a.c + j, a.ldc, a.accumulate);
  }
}

// The sum of each vector of columns stays in a register while the rows pass, in their order.
template <DType D>
void combine_rows(const float* y, int64_t ldy, const int64_t* rows, const float* weight, int64_t count, int64_t n, void* out) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t lanes = n - j < kLanes ? n - j : kLanes;
    Vf sum = zero();
    for (int64_t i = 0; i < count; ++i) {
      const float* row = y + rows[i] * ldy;
      sum = fma(set1(weight[i]), lanes == kLanes ? load(row + j) : load_tail<DType::f32>(row, j, lanes), sum);
    }
    if (lanes == kLanes) store_as<D>(out, j, sum);
    else store_tail<D>(out, j, sum, lanes);
  }
}

void combine(const float* y, int64_t ldy, const int64_t* rows, const float* weight, int64_t count, int64_t n, void* out, DType dtype) {
  if (dtype == DType::f32) combine_rows<DType::f32>(y, ldy, rows, weight, count, n, out);
  else if (dtype == DType::f16) combine_rows<DType::f16>(y, ldy, rows, weight, count, n, out);
  else combine_rows<DType::bf16>(y, ldy, rows, weight, count, n, out);
}

}  // namespace
}  // namespace int4_emu::cpu
