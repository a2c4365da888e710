// Products of whole waves, from the operands that the lanes brought.
#include "matrix.h"

#include <cmath>

namespace simt {
namespace {

float widen_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa), (exponent ? exponent : 1) - 25);
}

// Element i of a lane's operand.
template <Number kNumber>
float element(const void* operand, int i) {
  float f;
  uint16_t bits;
  if (kNumber == Number::f32) {
    std::memcpy(&f, static_cast<const char*>(operand) + 4 * i, sizeof(f));
    return f;
  }
  std::memcpy(&bits, static_cast<const char*>(operand) + 2 * i, sizeof(bits));
  if (kNumber == Number::f16) return widen_f16(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  std::memcpy(&f, &wide, sizeof(f));
  return f;
}

}  // namespace

template <class Layout, Number kNumber>
void multiply_wave(void* const* lanes, int wave) {
  if (wave != Layout::kWave) fail("a matrix instruction for waves of %d lanes ran in a wave of %d", Layout::kWave, wave);
  float a[16][Layout::kDepth], b[Layout::kDepth][16], d[16][16];
  const auto operands = [&](int lane) { return static_cast<const MatrixOperands*>(lanes[lane]); };
  for (int lane = 0; lane < wave; ++lane) {
    const MatrixOperands &mine = *operands(lane), &twin = *operands(lane % 16);
    constexpr size_t kBytes = Layout::kInputs * (kNumber == Number::f32 ? 4 : 2);
    if (Layout::kDoubled && (std::memcmp(mine.a, twin.a, kBytes) != 0 || std::memcmp(mine.b, twin.b, kBytes) != 0)) {
      fail("operands of lane %d differ from lane %d's, which they must repeat", lane, lane % 16);
    }
    for (int i = 0; i < Layout::kInputs; ++i) {
      a[lane % 16][Layout::k(lane, i)] = element<kNumber>(mine.a, i);
      b[Layout::k(lane, i)][lane % 16] = element<kNumber>(mine.b, i);
    }
    for (int r = 0; r < Layout::kOutputs; ++r) d[Layout::row(lane, r)][lane % 16] = mine.c[r];
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < Layout::kDepth; ++k) {
      for (int j = 0; j < 16; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < wave; ++lane) {
    for (int r = 0; r < Layout::kOutputs; ++r) operands(lane)->c[r] = d[Layout::row(lane, r)][lane % 16];
  }
}

template void multiply_wave<MfmaLayout4, Number::f32>(void* const*, int);
#define SIMT_BOTH(layout)                                              \
  template void multiply_wave<layout, Number::bf16>(void* const*, int); \
  template void multiply_wave<layout, Number::f16>(void* const*, int);
SIMT_BOTH(MfmaLayout16)
SIMT_BOTH(MfmaLayout32)
SIMT_BOTH(WmmaLayoutGfx11)
SIMT_BOTH(WmmaLayoutGfx12)
#undef SIMT_BOTH

}  // namespace simt
