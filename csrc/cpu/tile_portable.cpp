// The tile functions in plain C++ for any CPU: fp32 compute, loops that the compiler vectorises for its baseline.
//
// Four-lane vectors of the compiler's own kind, which every baseline has (SSE2, NEON) and which need no intrinsics. With few rows of x
// the lanes run along k, with more they are rows, so the order of a sum depends on the number of rows (in the wider sets it never does).
#include <math.h>

#include "../core/layout.h"
#include "convert.h"
#include "portable_math.h"
#include "tile.h"

namespace int4_emu::cpu {

// tile_portable_load.cpp
void portable_load_panel(const LoadPanelArgs& a);
void portable_dequantize_row(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k,
                             int64_t group_size, void* out, DType out_dtype, void* staged);

namespace {

typedef float Float4 __attribute__((vector_size(16)));

constexpr int64_t kMultiple = 16;
// Below this many rows x stays row-major and products run along k; from here on, rows are vector lanes.
constexpr int64_t kLaneRows = 4;
constexpr int64_t kLanes = 8;

// packed x: m < 4: [m][round_up(k, 16)]; else blocks of 8 rows, [ceil(m / 8)][round_up(k, 16)][8]. Padding is zero.
size_t packed_x_bytes(int64_t m, int64_t k) {
  const int64_t rows = m < kLaneRows ? m : round_up(m, kLanes);
  return static_cast<size_t>(rows * round_up(k, kMultiple)) * sizeof(float);
}

// One row of x in fp32, with its scale and its permutation.
template <class Store>
void read_row(const PackXArgs& a, int64_t i, const Store& store) {
  const void* row = element(a.x, a.dtype, (a.rows ? a.rows[i] : i) * a.x_stride);
  const bool scaled = a.row_scale != nullptr;
  for (int64_t j = 0; j < a.k; ++j) {
    float value = load_float(row, a.dtype, a.perm ? a.perm[j] : j);
    if (scaled) {
      value *= a.row_scale[i];
      // The router weight multiplies in x's own dtype: the result must be what the host would have passed.
      if (a.dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
      if (a.dtype == DType::f16) value = f16_to_float(float_to_f16(value));
    }
    store(j, value);
  }
}

void pack_x(const PackXArgs& a) {
  float* out = static_cast<float*>(a.out);
  const int64_t width = round_up(a.k, kMultiple);
  const bool lanes = a.m >= kLaneRows;
  // Row i of the lane form is a column of its block, 8 floats between elements; padding rows are zero, so that they multiply to nothing.
  for (int64_t i = 0; i < (lanes ? round_up(a.m, kLanes) : a.m); ++i) {
    const int64_t step = lanes ? kLanes : 1;
    float* to = lanes ? out + i / kLanes * width * kLanes + i % kLanes : out + i * width;
    int64_t filled = 0;
    if (i < a.m) {
      if (!lanes && !a.perm && !a.row_scale) {
        load_floats(element(a.x, a.dtype, (a.rows ? a.rows[i] : i) * a.x_stride), a.dtype, a.k, to);
      } else {
        read_row(a, i, [&](int64_t j, float value) { to[j * step] = value; });
      }
      filled = a.k;
    }
    for (int64_t j = filled; j < width; ++j) to[j * step] = 0.f;
  }
}

// c[j] of one row of x against N panel rows, both contiguous along k (a multiple of 16, zero padded).
template <int N>
void dot_rows(const float* x, const float* w, int64_t ldw, int64_t k, float* c, bool accumulate) {
  Float4 sum[N][2] = {};  // two chains a row hide the latency of the additions
  for (int64_t i = 0; i < k; i += 8) {
    Float4 x0, x1;
    __builtin_memcpy(&x0, x + i, 16);
    __builtin_memcpy(&x1, x + i + 4, 16);
    for (int j = 0; j < N; ++j) {
      Float4 w0, w1;
      __builtin_memcpy(&w0, w + j * ldw + i, 16);
      __builtin_memcpy(&w1, w + j * ldw + i + 4, 16);
      sum[j][0] += x0 * w0;
      sum[j][1] += x1 * w1;
    }
  }
  for (int j = 0; j < N; ++j) {
    const Float4 s = sum[j][0] + sum[j][1];
    const float total = (s[0] + s[2]) + (s[1] + s[3]);
    c[j] = accumulate ? c[j] + total : total;
  }
}

// Eight rows of x, [k][8], against N panel rows; `rows` of the eight are stored.
template <int N>
void lane_block(const float* x, const float* w, int64_t ldw, int64_t k, int64_t rows, float* c, int64_t ldc, bool accumulate) {
  Float4 sum[N][2] = {};
  for (int64_t i = 0; i < k; ++i) {
    Float4 x0, x1;
    __builtin_memcpy(&x0, x + i * kLanes, 16);
    __builtin_memcpy(&x1, x + i * kLanes + 4, 16);
    for (int j = 0; j < N; ++j) {
      const float value = w[j * ldw + i];
      const Float4 wide = {value, value, value, value};
      sum[j][0] += x0 * wide;
      sum[j][1] += x1 * wide;
    }
  }
  for (int j = 0; j < N; ++j) {
    for (int64_t r = 0; r < rows; ++r) {
      float* to = c + r * ldc + j;
      const float total = sum[j][r / 4][r % 4];
      *to = accumulate ? *to + total : total;
    }
  }
}

// Runs block<4>(j) over the panel rows and block<1>(j) over what is left.
template <class Four, class One>
void for_panel_rows(int64_t n, const Four& four, const One& one) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) four(j);
  for (; j < n; ++j) one(j);
}

void gemm(const GemmArgs& a) {
  const float* x = static_cast<const float*>(a.packed_x);
  const float* w = static_cast<const float*>(a.w);
  const int64_t width = round_up(a.total_k, kMultiple);
  if (a.m < kLaneRows) {
    const int64_t k = round_up(a.k, kMultiple);
    for (int64_t i = 0; i < a.m; ++i) {
      const float* row = x + i * width + a.k0;
      float* c = a.c + i * a.ldc;
      for_panel_rows(
          a.n, [&](int64_t j) { dot_rows<4>(row, w + j * a.ldw, a.ldw, k, c + j, a.accumulate); },
          [&](int64_t j) { dot_rows<1>(row, w + j * a.ldw, a.ldw, k, c + j, a.accumulate); });
    }
    return;
  }
  for (int64_t i = 0; i < a.m; i += kLanes) {
    const float* block = x + (i * width) + a.k0 * kLanes;
    const int64_t rows = a.m - i < kLanes ? a.m - i : kLanes;
    float* c = a.c + i * a.ldc;
    for_panel_rows(
        a.n, [&](int64_t j) { lane_block<4>(block, w + j * a.ldw, a.ldw, a.k, rows, c + j, a.ldc, a.accumulate); },
        [&](int64_t j) { lane_block<1>(block, w + j * a.ldw, a.ldw, a.k, rows, c + j, a.ldc, a.accumulate); });
  }
}

// The largest run that goes through a buffer on the stack.
constexpr int64_t kRun = 256;

// h = f(gate) * up, or f(gate) without up.
template <class Function>
void activate_rows(const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh, DType dtype,
                   const Function& f) {
  float buffer[kRun];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j0 = 0; j0 < n; j0 += kRun) {
      const int64_t length = n - j0 < kRun ? n - j0 : kRun;
      const float* g = gate + i * ld + j0;
      const float* u = up ? up + i * ld + j0 : nullptr;
      for (int64_t j = 0; j < length; ++j) buffer[j] = f(g[j]);
      if (u) {
        for (int64_t j = 0; j < length; ++j) buffer[j] *= u[j];
      }
      store_floats(buffer, dtype, length, element(h, dtype, i * ldh + j0));
    }
  }
}

// The clamped forms touch `up` as well.
template <class Function>
void activate_pairs(const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh, DType dtype,
                    const Function& f) {
  float buffer[kRun];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j0 = 0; j0 < n; j0 += kRun) {
      const int64_t length = n - j0 < kRun ? n - j0 : kRun;
      const float *g = gate + i * ld + j0, *u = up + i * ld + j0;
      for (int64_t j = 0; j < length; ++j) buffer[j] = f(g[j], u[j]);
      store_floats(buffer, dtype, length, element(h, dtype, i * ldh + j0));
    }
  }
}

void activate(const ActivationSpec& spec, const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh,
              DType dtype) {
  const float limit = spec.limit, alpha = spec.alpha, beta = spec.beta;
  const auto rows = [&](const auto& f) { activate_rows(gate, up, ld, m, n, h, ldh, dtype, f); };
  switch (spec.kind) {
    case Activation::silu:
      // With a limit: the gate is held from above, up on both sides.
      if (spec.has_limit) {
        return activate_pairs(gate, up, ld, m, n, h, ldh, dtype,
                              [=](float g, float u) { return silu(cap(g, limit)) * clamp(u, limit); });
      }
      return rows([](float g) { return silu(g); });
    case Activation::swigluoai:
      return activate_pairs(gate, up, ld, m, n, h, ldh, dtype, [=](float g, float u) {
        const float capped = cap(g, limit);
        return capped * sigmoid(alpha * capped) * (clamp(u, limit) + beta);
      });
    case Activation::silu_no_mul:
      return rows([](float g) { return silu(g); });
    case Activation::gelu:
    case Activation::gelu_no_mul:
      return rows([](float g) { return 0.5f * g * (1.f + ::erff(g * 0.70710678118654752f)); });
    case Activation::gelu_tanh:
    case Activation::gelu_tanh_no_mul:
      return rows([](float g) { return gelu_tanh(g); });
    case Activation::relu2:
    case Activation::relu2_no_mul:
      return rows([](float g) { return g < 0.f ? 0.f : g * g; });
  }
}

// Runs of columns outermost: the sum of a run stays in L1 while the rows pass.
void combine(const float* y, int64_t ldy, const int64_t* rows, const float* weight, int64_t count, int64_t n, void* out, DType dtype) {
  float buffer[kRun];
  for (int64_t j0 = 0; j0 < n; j0 += kRun) {
    const int64_t length = n - j0 < kRun ? n - j0 : kRun;
    for (int64_t j = 0; j < length; ++j) buffer[j] = 0.f;
    for (int64_t i = 0; i < count; ++i) {
      const float* row = y + rows[i] * ldy + j0;
      const float scale = weight[i];
      for (int64_t j = 0; j < length; ++j) buffer[j] += scale * row[j];
    }
    store_floats(buffer, dtype, length, element(out, dtype, j0));
  }
}

}  // namespace

const TileTable* portable_table() {
  static const TileTable table = {"portable",
                                  kMultiple,
                                  {packed_x_bytes, pack_x, portable_load_panel, gemm},
                                  {nullptr, nullptr, nullptr, nullptr},
                                  {nullptr, nullptr, nullptr, nullptr, 0},
                                  activate,
                                  combine,
                                  portable_dequantize_row,
                                  nullptr,
                                  nullptr,
                                  nullptr};
  return &table;
}

}  // namespace int4_emu::cpu
