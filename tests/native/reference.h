// Plain double-precision references of the tile functions, and test data. Shares no code with the kernels but the structs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../../csrc/core/layout.h"
#include "../../csrc/cpu/tile.h"

namespace reference {

using namespace int4_emu;

struct Random {  // xorshift: the same data on every machine
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
  double uniform() { return next() / 2147483648.0 - 1.0; }
};

// To `digits` significant bits, nearest even, with the least exponent and the largest value of an IEEE-like type.
inline double round_binary(double v, int digits, int least_exponent, double largest) {
  if (v == 0 || std::isnan(v) || std::isinf(v)) return v;
  int exponent;
  std::frexp(v, &exponent);
  if (exponent - 1 < least_exponent) exponent = least_exponent + 1;
  const double unit = std::ldexp(1.0, exponent - digits);
  const double rounded = std::nearbyint(v / unit) * unit;
  return std::fabs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), v) : rounded;
}

inline double round_to(double v, DType t) {
  if (t == DType::f32) return static_cast<double>(static_cast<float>(v));
  if (t == DType::bf16) return round_binary(v, 8, -126, 3.3895313892515355e38);
  return round_binary(v, 11, -14, 65504.0);
}

inline double unit_roundoff(DType t) { return t == DType::f32 ? 0x1p-24 : t == DType::bf16 ? 0x1p-8 : 0x1p-11; }

inline double read(const void* p, DType t, int64_t i) {
  if (t == DType::f32) return static_cast<const float*>(p)[i];
  const uint16_t h = static_cast<const uint16_t*>(p)[i];
  if (t == DType::bf16) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  double v = exponent == 31 ? (mantissa ? std::nan("") : std::numeric_limits<double>::infinity())
             : exponent == 0 ? std::ldexp(mantissa, -24)
                             : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -v : v;
}

// v must be representable in t (see round_to).
inline void write(void* p, DType t, int64_t i, double v) {
  if (t == DType::f32) {
    static_cast<float*>(p)[i] = static_cast<float>(v);
    return;
  }
  uint16_t h;
  if (t == DType::bf16) {
    const float f = static_cast<float>(v);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    h = static_cast<uint16_t>(bits >> 16);
  } else {
    const double a = std::fabs(v);
    int exponent = 0;
    if (a != 0) std::frexp(a, &exponent);
    const int biased = exponent + 14;
    h = std::isinf(a) ? 0x7c00 : static_cast<uint16_t>(a < 0x1p-14 ? std::ldexp(a, 24) : biased * 1024 + std::ldexp(a, 11 - exponent) - 1024);
    if (std::signbit(v)) h |= 0x8000;
  }
  static_cast<uint16_t*>(p)[i] = h;
}

struct Array {
  DType dtype;
  std::vector<char> bytes;
  Array(DType t, int64_t n) : dtype(t), bytes(n * dtype_bytes(t)) {}
  double get(int64_t i) const { return read(bytes.data(), dtype, i); }
  void set(int64_t i, double v) { write(bytes.data(), dtype, i, round_to(v, dtype)); }
  void fill(Random& random, double scale, double offset = 0) {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()) / dtype_bytes(dtype); ++i) set(i, offset + scale * random.uniform());
  }
};

// A packed matrix of [experts, n, k] in one of the layouts, with its codes kept apart.
struct Packed {
  int64_t experts, n, k, groups, group_size;
  int bits;
  std::vector<uint8_t> codes, data, zeros;
  Array scales;
  Packed(int64_t experts_, int64_t n_, int64_t k_, int64_t group_size_, int bits_, bool with_zeros, DType scale_dtype, Layout layout, Random& random)
      : experts(experts_), n(n_), k(k_), groups(ceil_div(k_, group_size_)), group_size(group_size_), bits(bits_), codes(experts * n * k),
        data(experts * n * row_bytes(k, bits)), zeros(with_zeros ? experts * n * groups : 0), scales(scale_dtype, experts * n * groups) {
    scales.fill(random, 0.01, 0.02);
    for (auto& c : codes) c = random.next() & (bits == 4 ? 15 : 255);
    for (auto& z : zeros) z = random.next() & (bits == 4 ? 15 : 255);
    static const int slot_list[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of code k % 8 in a cpu_n16 word
    for (int64_t r = 0; r < experts * n; ++r) {
      for (int64_t j = 0; j < k; ++j) {
        const uint8_t c = codes[r * k + j];
        const int64_t word_codes = 32 / bits;
        const int64_t word = ((r / 16) * (k / word_codes) + j / word_codes) * 64 + r % 16 * 4;  // n % 16 == 0 in this layout
        if (layout == Layout::canonical && bits == 8) data[r * k + j] = c;
        else if (layout == Layout::canonical) data[r * row_bytes(k, 4) + j / 2] |= c << (4 * (j & 1));
        else if (bits == 8) data[word + j % 4] = c;
        else data[word + slot_list[j % 8] / 2] |= c << (4 * (slot_list[j % 8] & 1));
      }
    }
  }
  // The exact fp32 product, as a double.
  double value(int64_t expert, int64_t row, int64_t j) const {
    const int64_t r = expert * n + row, g = r * groups + j / group_size;
    const float z = zeros.empty() ? (bits == 4 ? 8.f : 128.f) : static_cast<float>(zeros[g]);
    return static_cast<float>((static_cast<float>(codes[r * k + j]) - z) * static_cast<float>(scales.get(g)));
  }
  Weight weight(Layout layout) const {
    Weight w;
    w.experts = experts, w.n = n, w.k = k;
    w.data = data.data();
    w.packed = true;
    w.n_stride = row_bytes(k, bits), w.expert_stride = n * w.n_stride;
    w.bits = bits, w.layout = layout;
    w.scales = scales.bytes.data(), w.scale_dtype = scales.dtype;
    w.zeros = zeros.empty() ? nullptr : zeros.data();
    w.groups = groups, w.group_size = group_size;
    return w;
  }
};

inline double activation(const ActivationSpec& s, double g, double u) {
  const int kind = static_cast<int>(s.kind) & 15;
  const bool gated = static_cast<int>(s.kind) < 16;
  if (s.has_limit) {
    const double limit = static_cast<double>(s.limit);  // comparisons, not fmin: NaN stays NaN
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
  }
  double a = g / (1 + std::exp(-g));
  if (kind == 1) a = g * 0.5 * std::erfc(-g / std::sqrt(2.0));
  if (kind == 2) a = g / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
  if (kind == 3) a = g < 0 ? 0 : g * g;
  if (kind == 4) return g / (1 + std::exp(-static_cast<double>(s.alpha) * g)) * (u + static_cast<double>(s.beta));
  return gated ? a * u : a;
}

}  // namespace reference
