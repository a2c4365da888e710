// The matrix instructions, as meetings of a wave. Operands are taken by their bits, so that any vector type of the right size does.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine.h"

namespace simt {

enum class Number { bf16, f16, f32 };

// Where the elements of a 16 x 16 x kDepth product D = A B + C lie. Lane l holds kInputs elements of a row of A and of a column of B,
// kOutputs of C and D.
struct MfmaLayout16 {  // gfx90a on: A[l % 16][4 (l / 16) + i], B[4 (l / 16) + i][l % 16], D[4 (l / 16) + r][l % 16]
  static constexpr int kWave = 64, kDepth = 16, kInputs = 4, kOutputs = 4;
  static constexpr bool kDoubled = false;
  static int k(int lane, int i) { return 4 * (lane / 16) + i; }
  static int row(int lane, int r) { return 4 * (lane / 16) + r; }
};
struct MfmaLayout32 {  // gfx950: eight of k a lane
  static constexpr int kWave = 64, kDepth = 32, kInputs = 8, kOutputs = 4;
  static constexpr bool kDoubled = false;
  static int k(int lane, int i) { return 8 * (lane / 16) + i; }
  static int row(int lane, int r) { return 4 * (lane / 16) + r; }
};
struct MfmaLayout4 {  // fp32 operands: one of k a lane
  static constexpr int kWave = 64, kDepth = 4, kInputs = 1, kOutputs = 4;
  static constexpr bool kDoubled = false;
  static int k(int lane, int) { return lane / 16; }
  static int row(int lane, int r) { return 4 * (lane / 16) + r; }
};
struct WmmaLayoutGfx11 {  // the whole k in each lane, lanes 16-31 repeating lanes 0-15; D[2 r + l / 16][l % 16]
  static constexpr int kWave = 32, kDepth = 16, kInputs = 16, kOutputs = 8;
  static constexpr bool kDoubled = true;
  static int k(int, int i) { return i; }
  static int row(int lane, int r) { return 2 * r + lane / 16; }
};
struct WmmaLayoutGfx12 {  // A[l % 16][8 (l / 16) + i]; D[8 (l / 16) + r][l % 16]
  static constexpr int kWave = 32, kDepth = 16, kInputs = 8, kOutputs = 8;
  static constexpr bool kDoubled = false;
  static int k(int lane, int i) { return 8 * (lane / 16) + i; }
  static int row(int lane, int r) { return 8 * (lane / 16) + r; }
};

struct MatrixOperands {
  const void *a, *b;
  float* c;
};

// Defined in matrix.cpp for every layout and type.
template <class Layout, Number kNumber>
void multiply_wave(void* const* lanes, int wave);

template <class Layout, Number kNumber, class Input, class Output>
inline Output matrix(const char* what, const Input& a, const Input& b, const Output& c, Site site) {
  static_assert(sizeof(Input) == (kNumber == Number::f32 ? 4 : 2) * Layout::kInputs, "operands of another size");
  static_assert(sizeof(Output) == 4 * Layout::kOutputs, "sums of another size");
  float sums[Layout::kOutputs];
  std::memcpy(sums, &c, sizeof(c));
  MatrixOperands mine{&a, &b, sums};
  meet(what, multiply_wave<Layout, kNumber>, &mine, true, site);
  Output out;
  std::memcpy(&out, sums, sizeof(out));
  return out;
}

inline void plain_only(int cbsz, int abid, int blgp) {
  if (cbsz || abid || blgp) fail("an MFMA with cbsz, abid or blgp other than 0 is not imitated");
}

}  // namespace simt

#define SIMT_MFMA(name, layout, number)                                                                                   \
  template <class Input, class Output>                                                                                  \
  inline Output __builtin_amdgcn_##name(Input a, Input b, Output c, int x, int y, int z, simt::Site site = simt::here()) { \
    simt::plain_only(x, y, z);                                                                                          \
    return simt::matrix<simt::layout, simt::Number::number>(#name, a, b, c, site);                                          \
  }
#define SIMT_WMMA(name, layout, number)                                                              \
  template <class Input, class Output>                                                             \
  inline Output __builtin_amdgcn_##name(Input a, Input b, Output c, simt::Site site = simt::here()) { \
    return simt::matrix<simt::layout, simt::Number::number>(#name, a, b, c, site);                     \
  }

SIMT_MFMA(mfma_f32_16x16x16bf16_1k, MfmaLayout16, bf16)
SIMT_MFMA(mfma_f32_16x16x16f16, MfmaLayout16, f16)
SIMT_MFMA(mfma_f32_16x16x32_bf16, MfmaLayout32, bf16)
SIMT_MFMA(mfma_f32_16x16x32_f16, MfmaLayout32, f16)
SIMT_MFMA(mfma_f32_16x16x4f32, MfmaLayout4, f32)
SIMT_WMMA(wmma_f32_16x16x16_bf16_w32, WmmaLayoutGfx11, bf16)
SIMT_WMMA(wmma_f32_16x16x16_f16_w32, WmmaLayoutGfx11, f16)
SIMT_WMMA(wmma_f32_16x16x16_bf16_w32_gfx12, WmmaLayoutGfx12, bf16)
SIMT_WMMA(wmma_f32_16x16x16_f16_w32_gfx12, WmmaLayoutGfx12, f16)
#undef SIMT_MFMA
#undef SIMT_WMMA
