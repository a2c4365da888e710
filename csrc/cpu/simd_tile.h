// What goes into products and comes out of them: vectors of x, panels of weights, sums to c, weighted sums of rows. Included after simd_decode.h.
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
