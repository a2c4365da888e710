// Products of dense weights where they lie: bf16 and fp16 become fp32 in registers. Included after simd_tile.h.
//
// A step is two vectors of fp32. Of bf16 they are the even and the odd columns, a shift and a mask away from one load; x is packed in the same
// order once.
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

bool serves_dense(const Weight& w) { return !w.packed && w.k_stride == 1 && w.k > 0; }
// And fp32 is their compute type, on sets that multiply bf16 by bf16.
inline bool serves_dense_f32(const Weight& w, DType x) { return serves_dense(w) && (x != DType::bf16 || w.dtype != DType::bf16); }

// Rows of x in even groups of up to kGroupRows.
inline int64_t dense_groups(int64_t m) { return (m + kGroupRows - 1) / kGroupRows; }
inline int64_t dense_group_begin(int64_t m, int64_t g) { return m * g / dense_groups(m); }

size_t packed_dense_x_bytes(const Weight& w, int64_t m) { return static_cast<size_t>(m * round_up_to(w.k, kStep)) * 4; }

// [group][step][2][row of the group][kLanes], zeros beyond k: a pass reads one run. Rows a power of two apart would fight for the same sets of L1.
template <DType D>
void pack_dense_x_of(const Weight& w, const PackXArgs& a) {
  const int64_t width = round_up_to(a.k, kStep);
  for (int64_t g = 0; g < dense_groups(a.m); ++g) {
    const int64_t first = dense_group_begin(a.m, g), rows = dense_group_begin(a.m, g + 1) - first;
    float* out = static_cast<float*>(a.out) + first * width;
    for (int64_t i = 0; i < rows; ++i) {
      const void* row = x_row(a, first + i, kBytes<D>);
      for (int64_t p = 0; p < width; p += kStep) {
        Vf low = x_vector<D>(a, row, first + i, p), high = p + kLanes < a.k ? x_vector<D>(a, row, first + i, p + kLanes) : zero();
        if (w.dtype == DType::bf16) {
          const Vf even = even_lanes(low, high);
          high = odd_lanes(low, high);
          low = even;
        }
        float* to = out + p * rows + i * kLanes;
        store(to, low);
        store(to + rows * kLanes, high);
      }
    }
  }
}

void pack_dense_x(const Weight& w, const PackXArgs& a) {
  if (a.dtype == DType::f32) pack_dense_x_of<DType::f32>(w, a);
  else if (a.dtype == DType::f16) pack_dense_x_of<DType::f16>(w, a);
  else pack_dense_x_of<DType::bf16>(w, a);
}

// Half `h` of a step of weights. kRegister: whether there is one for a mask; else it takes two shifts.
template <DType W, bool kRegister>
inline Vf dense_half(const char* step, int h) {
  if constexpr (W != DType::bf16) return load_as<W>(step, h * kLanes);
  if (h == 0) return even_bf16(step);
  return odd_bf16<kRegister>(step);
}

// sums += N rows of weights times M rows of x, `steps` steps of them. With kAhead each step fetches what lies `ahead` bytes from it.
template <DType W, int M, int N, bool kAhead>
inline void add_steps(const char* const (&rows)[N], const float* x, int64_t steps, int64_t ahead, Vf (&sums)[M][N]) {
  constexpr int64_t kStepBytes = kStep * kBytes<W>;
  constexpr bool kRegister = M * N + N + 2 < kRegisters;
  for (int64_t p = 0; p < steps * kStepBytes; p += kStepBytes) {
    if constexpr (kAhead) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) _mm_prefetch(rows[j] + p + ahead, _MM_HINT_T1);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h, x += M * kLanes) {
      Vf weights[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) weights[j] = dense_half<W, kRegister>(rows[j] + p, h);
#pragma GCC unroll 6
      for (int i = 0; i < M; ++i) {
        Vf xi = load(x + i * kLanes);
        keep_in_register(xi);  // as an operand of several multiply-adds it would be loaded as many times
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) sums[i][j] = fma(xi, weights[j], sums[i][j]);
      }
    }
  }
}

// c[0..M)[0..N) (+)= N rows of weights, columns k0..k0 + k of them, times M rows of x. `x` points at column k0.
template <DType W, int M, int N, bool kAhead>
void dense_block(const char* row, int64_t row_bytes, const float* x, int64_t k, int64_t ahead, float* c, int64_t ldc, bool accumulate) {
  const char* rows[N];
  Vf sums[M][N];
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    rows[j] = row + j * row_bytes;
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) sums[i][j] = zero();
  }
  const int64_t whole = k / kStep;
  add_steps<W, M, N, kAhead>(rows, x, whole, ahead, sums);
  if (const int64_t rest = k - whole * kStep; __builtin_expect(rest > 0, 0)) {
    alignas(64) char copies[N][kStep * kBytes<W>] = {};
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      __builtin_memcpy(copies[j], rows[j] + whole * kStep * kBytes<W>, rest * kBytes<W>);
      rows[j] = copies[j];
    }
    add_steps<W, M, N, false>(rows, x + whole * kStep * M, 1, 0, sums);
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
template <DType W, int M, bool kAhead>
void dense_strip(const char* row, int64_t row_bytes, int64_t n, const float* x, int64_t k, int64_t ahead, float* c, int64_t ldc, bool accumulate) {
  constexpr int N = kBlockRows<M>;
  int64_t j = 0;
  // Four rows left by three are two and two.
  for (; n - j >= N && (N != 3 || n - j != 4); j += N) dense_block<W, M, N, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
  for (; n - j >= 2; j += 2) dense_block<W, M, 2, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
  if (j < n) dense_block<W, M, 1, kAhead>(row + j * row_bytes, row_bytes, x, k, ahead, c + j, ldc, accumulate);
}

template <DType W, bool kAhead>
void dense_strip(int64_t m, const char* row, int64_t row_bytes, int64_t n, const float* x, int64_t k, int64_t ahead, float* c, int64_t ldc,
                 bool accumulate) {
  switch (m) {
    case 1: return dense_strip<W, 1, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 2: return dense_strip<W, 2, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 3: return dense_strip<W, 3, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 4: return dense_strip<W, 4, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    case 5: return dense_strip<W, 5, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
    default: return dense_strip<W, 6, kAhead>(row, row_bytes, n, x, k, ahead, c, ldc, accumulate);
  }
}

template <DType W>
void multiply_dense_of(const ProductArgs& a) {
  const Weight& w = *a.weight;
  const int64_t width = round_up_to(w.k, kStep), row_bytes = a.step * w.n_stride * kBytes<W>;
  const int64_t strip = strip_rows(a.m);
  const auto row = [&](int p, int64_t j) {
    return static_cast<const char*>(w.data) + (a.expert * w.expert_stride + (a.row0[p] + j * a.step) * w.n_stride) * kBytes<W>;
  };
  for (int p = 0; p < a.parts; ++p) {
    for (int64_t j = 0; j < a.n; j += strip) {
      const int64_t rows = a.n - j < strip ? a.n - j : strip;
      // The first pass over a strip fetches the next one, which may be the next part's or that of the rows after these.
      const int64_t ahead = (j + rows < a.n ? row(p, j + rows) : p + 1 < a.parts ? row(p + 1, 0) : row(0, a.n)) - row(p, j);
      for (int64_t k0 = 0; k0 < w.k; k0 += kDepth) {
        const int64_t k = w.k - k0 < kDepth ? w.k - k0 : kDepth;
        const char* from = row(p, j) + k0 * kBytes<W>;
        for (int64_t g = 0; g < dense_groups(a.m); ++g) {
          const int64_t i = dense_group_begin(a.m, g), m = dense_group_begin(a.m, g + 1) - i;
          const float* x = static_cast<const float*>(a.packed_x) + i * width + k0 * m;
          float* c = a.c + (p * a.m + i) * a.ldc + j;
          if (g == 0) dense_strip<W, true>(m, from, row_bytes, rows, x, k, ahead, c, a.ldc, k0 > 0);
          else dense_strip<W, false>(m, from, row_bytes, rows, x, k, 0, c, a.ldc, k0 > 0);
        }
      }
    }
  }
}

void multiply_dense(const ProductArgs& a) {
  if (a.weight->dtype == DType::f32) multiply_dense_of<DType::f32>(a);
  else if (a.weight->dtype == DType::f16) multiply_dense_of<DType::f16>(a);
  else multiply_dense_of<DType::bf16>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
