// Part of selfcheck.cpp: what its checks share, and the products that a table takes from the stored weights.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../../csrc/cpu/select.h"
#include "reference.h"

namespace {

using namespace int4_emu;
using cpu::TileTable;
using reference::Array;
using reference::Packed;
using reference::Random;

int failures = 0;

struct Worst {
  double value = 0;
  std::string where = "-";
  void see(double v, const std::string& at) {
    if (std::isnan(v)) v = INFINITY;
    if (v > value) value = v, where = at;
  }
  // Prints the largest error, in units of what is allowed.
  void report(const TileTable& t, const char* what) const {
    const bool ok = value <= 1;
    if (!ok) ++failures;
    std::printf("%-8s %-22s %s  error / allowed %.3g  (%s)\n", t.name, what, ok ? "ok  " : "FAIL", value, where.c_str());
  }
};

template <class T>
T* aligned(std::vector<char>& bytes, size_t size) {
  bytes.assign(size + 64, 0x55);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
}

// A weight of every kind, by number; `values` holds the exact fp32 weights of expert 1.
struct TestWeight {
  Weight w;
  std::vector<double> values;  // [n][k]
  std::vector<Array> dense;
  std::vector<Packed> packed;
  std::string name;
};

// A packed or dense weight of 2 experts, the product of both parts and columns n0.., whatever way the table has for it.
struct WholeCase {
  int64_t m, n, k, group_size;
  int bits;  // 0: dense bf16
  bool zeros;
  DType x, scales;
  int64_t parts, step;
};

// False where the table does not serve it.
bool check_whole_product(const TileTable& t, const WholeCase& s, Worst& worst) {
  Random random(s.m * 7919 + s.n * 104729 + s.k * 31 + s.group_size);
  const int64_t rows = s.parts * s.n + 3;
  TestWeight tw;
  if (s.bits) {
    tw.packed.emplace_back(2, rows, s.k, s.group_size, s.bits, s.zeros, s.scales, Layout::canonical, random);
    tw.w = tw.packed[0].weight(Layout::canonical);
  } else {
    tw.dense.emplace_back(DType::bf16, 2 * rows * s.k);
    tw.dense[0].fill(random, 0.1);
    tw.w.experts = 2, tw.w.n = rows, tw.w.k = s.k, tw.w.dtype = DType::bf16, tw.w.data = tw.dense[0].bytes.data();
    tw.w.n_stride = s.k, tw.w.expert_stride = rows * s.k;
  }
  if (!t.product.serves(tw.w, s.x, s.m)) return false;
  const int64_t x_stride = s.k + 5, x_rows = s.m + 2;
  Array x(s.x, x_rows * x_stride);
  x.fill(random, 1);
  std::vector<int64_t> gather(s.m);
  std::vector<float> row_scale(s.m);
  std::vector<int32_t> perm(s.k);
  for (auto& r : gather) r = random.next() % x_rows;
  for (auto& v : row_scale) v = static_cast<float>(random.uniform());
  for (int64_t j = 0; j < s.k; ++j) perm[j] = static_cast<int32_t>((j * 7 + 3) % s.k);
  const bool permute = s.k % 7 != 0 && s.m % 2 == 1, scale = s.m % 3 == 0;
  std::vector<char> x_bytes, scratch_bytes;
  void* packed = aligned<void>(x_bytes, t.product.packed_x_bytes(tw.w, s.x, s.m));
  void* scratch = aligned<void>(scratch_bytes, s.parts * round_up(s.m, 32) * round_up(s.n, 32) * 4);
  const bool packs = t.product.pack_x(tw.w, {x.bytes.data(), s.x, x_stride, gather.data(), scale ? row_scale.data() : nullptr, permute ? perm.data() : nullptr, s.m, s.k, packed});
  if (!packs) worst.see(INFINITY, "refused");
  const int64_t ldc = s.n + 3, row0[2] = {1, s.step == 2 ? 2 : s.n + 2};
  std::vector<float> c(s.parts * s.m * ldc, 77.f);
  t.product.multiply({&tw.w, 1, packed, s.x, s.m, static_cast<int>(s.parts), {row0[0], row0[1]}, s.step, s.n, c.data(), ldc, scratch});
  char name[160];
  std::snprintf(name, sizeof name, "int%d m%d n%d k%d g%d x%d parts %d step %d%s", s.bits, (int)s.m, (int)s.n, (int)s.k, (int)s.group_size, (int)s.x, (int)s.parts,
                (int)s.step, s.zeros ? " zeros" : "");
  // Only bf16 x may meet weights that were rounded to bf16, and then every weight is.
  double exact_worst = 0, rounded_worst = 0;
  for (int64_t p = 0; p < s.parts; ++p) {
    for (int64_t j = 0; j < s.n; ++j) {
      std::vector<double> weights(s.k);
      for (int64_t q = 0; q < s.k; ++q) {
        const int64_t row = row0[p] + j * s.step;
        weights[q] = s.bits ? tw.packed[0].value(1, row, q) : tw.dense[0].get((rows + row) * s.k + q);
      }
      for (int64_t i = 0; i < s.m; ++i) {
        double exact = 0, rounded = 0, size = 0;
        for (int64_t q = 0; q < s.k; ++q) {
          double v = x.get(gather[i] * x_stride + (permute ? perm[q] : q));
          if (scale) v = reference::round_to(static_cast<float>(v) * row_scale[i], s.x);
          exact += v * weights[q];
          rounded += v * reference::round_to(weights[q], DType::bf16);
          size += std::fabs(v * weights[q]);
        }
        // bf16 and fp16 x may go as 16-bit fixed point.
        const double got = c[(p * s.m + i) * ldc + j];
        const bool fixed_point = s.x != DType::f32;
        const double allowed = size * ((8 + static_cast<double>(s.k) / 8) * 0x1p-24 + (fixed_point ? 0x1p-15 : 0)) + 1e-30;
        exact_worst = std::max(exact_worst, std::isnan(got) ? INFINITY : std::fabs(got - exact) / allowed);
        rounded_worst = std::max(rounded_worst, std::isnan(got) ? INFINITY : std::fabs(got - rounded) / allowed);
      }
    }
  }
  worst.see(s.x == DType::bf16 ? std::min(exact_worst, rounded_worst) : exact_worst, name);
  for (int64_t i = 0; i < s.parts * s.m; ++i)
    for (int64_t j = s.n; j < ldc; ++j)
      if (c[i * ldc + j] != 77.f) worst.see(INFINITY, std::string("written beyond n, ") + name);
  return true;
}

void check_whole_products(const TileTable& t, bool quick) {
  Worst worst;
  static const int64_t m_list[] = {1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 40, 49, 65, 81, 97, 113}, n_list[] = {1, 5, 16, 33, 64}, k_list[] = {32, 96, 128, 352, 640, 1152, 1184};
  static const int64_t group_list[] = {32, 64, 128, 96, 384, 16, 1 << 20};
  int turn = 0, served = 0;
  for (int64_t m : m_list)
    for (int64_t n : n_list)
      for (int64_t k : k_list)
        for (int64_t group : group_list)
          for (int kind = 0; kind < 24; ++kind) {
            if (++turn % (quick ? 211 : 29) != 0) continue;
            const int bits = kind % 4 == 3 ? 8 : kind % 12 == 2 ? 0 : 4;
            const DType x = kind % 3 == 1 ? static_cast<DType>(kind / 3 % 2) : DType::bf16;
            const int64_t parts = 1 + kind / 2 % 2, step = parts == 2 && kind % 8 == 7 ? 2 : 1;
            served += check_whole_product(t, {m, n, k, std::min(group, k), bits, kind / 4 % 2 == 0, x, static_cast<DType>(kind % 3), parts, step}, worst);
          }
  // Rows of weights longer than what goes at once on tiles.
  for (const WholeCase& s : {WholeCase{18, 5, 8544, 32, 4, true, DType::bf16, DType::f16, 2, 1}, WholeCase{66, 2, 8832, 384, 4, false, DType::bf16, DType::f32, 1, 1},
                             WholeCase{17, 6, 8224, 64, 4, true, DType::bf16, DType::bf16, 2, 2}, WholeCase{33, 3, 8320, 128, 8, true, DType::bf16, DType::f16, 1, 1},
                             WholeCase{33, 16, 8224, 1, 0, false, DType::bf16, DType::f32, 1, 1},
                             // Many rows: a strip's blocks decoded once for all of them.
                             WholeCase{150, 40, 1184, 32, 4, true, DType::bf16, DType::f16, 2, 1}, WholeCase{170, 33, 640, 128, 4, false, DType::bf16, DType::bf16, 1, 1},
                             WholeCase{500, 64, 1152, 64, 8, true, DType::bf16, DType::f16, 2, 2}, WholeCase{150, 33, 384, 96, 4, true, DType::bf16, DType::f32, 1, 1},
                             WholeCase{161, 20, 1408, 64, 4, true, DType::bf16, DType::bf16, 2, 1}, WholeCase{150, 16, 32, 32, 4, false, DType::bf16, DType::f16, 1, 1}})
    check_whole_product(t, s, worst);
  if (served < 10) worst.see(INFINITY, "nearly nothing is served");
  worst.report(t, "whole products");
}

}  // namespace
