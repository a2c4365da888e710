// Checks every tile table that this machine can run against double precision, then times it.
//   g++ -std=c++17 tests/native/selfcheck.cpp + the kernel library; exit status 1 if anything is wrong.
//   selfcheck [--quick] [table ...]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../csrc/cpu/select.h"
#include "reference.h"
#include "whole_products.h"

namespace {

using namespace int4_emu;
using cpu::ComputeFunctions;
using cpu::TileTable;
using reference::Array;
using reference::Packed;
using reference::Random;

struct Shape {
  int64_t m, n, k;
};

constexpr int kWeightKinds = 17;

bool make_weight(TestWeight& t, int kind, const Shape& s, Random& random) {
  static const DType dtype_list[3] = {DType::f32, DType::f16, DType::bf16};
  t.values.resize(s.n * s.k);
  if (kind < 9) {  // dense: rows, columns, or every second element
    const DType dtype = dtype_list[kind % 3];
    const int order = kind / 3;
    const int64_t ld = order == 1 ? s.n : s.k;
    t.w.experts = 2, t.w.n = s.n, t.w.k = s.k, t.w.dtype = dtype;
    t.w.n_stride = order == 0 ? ld : order == 1 ? 1 : 2 * s.k;
    t.w.k_stride = order == 0 ? 1 : order == 1 ? ld : 2;
    t.w.expert_stride = s.n * s.k * (order == 2 ? 2 : 1);
    t.dense.emplace_back(dtype, 2 * t.w.expert_stride);
    t.dense[0].fill(random, 0.1);
    t.w.data = t.dense[0].bytes.data();
    for (int64_t r = 0; r < s.n; ++r)
      for (int64_t j = 0; j < s.k; ++j) t.values[r * s.k + j] = t.dense[0].get(t.w.expert_stride + r * t.w.n_stride + j * t.w.k_stride);
    t.name = "dense " + std::to_string(kind);
    return true;
  }
  const int bits = kind % 2 ? 4 : 8;
  static const int64_t group_list[4] = {32, 128, 5, 1 << 20};
  const int64_t group_size = std::min(group_list[(kind - 9) / 2 % 4], s.k);
  const Layout layout = (kind + s.n) % 3 == 0 ? Layout::cpu_n16 : Layout::canonical;
  if (!layout_fits(layout, s.n, s.k, bits)) return false;
  t.packed.emplace_back(2, s.n, s.k, group_size, bits, kind % 3 != 0, dtype_list[kind % 3], layout, random);
  t.w = t.packed[0].weight(layout);
  for (int64_t r = 0; r < s.n; ++r)
    for (int64_t j = 0; j < s.k; ++j) t.values[r * s.k + j] = t.packed[0].value(1, r, j);
  t.name = std::string(layout == Layout::canonical ? "canonical" : "n16") + " int" + std::to_string(bits) + " g" + std::to_string(group_size);
  return true;
}

// x [m][k] through pack_x, the weight through load_panel in two blocks along k, both through gemm.
void check_product(const TileTable& t, const ComputeFunctions& f, DType compute, const Shape& s, int kind, Worst& worst) {
  Random random(s.m * 7919 + s.n * 104729 + s.k * 31 + kind);
  TestWeight tw;
  if (!make_weight(tw, kind, s, random)) return;
  const DType dtype = compute == DType::bf16 ? DType::bf16 : static_cast<DType>(kind % 3);
  const int64_t x_stride = s.k + 3, x_rows = s.m + 2;
  Array x(dtype, x_rows * x_stride);
  x.fill(random, 1);
  std::vector<int64_t> rows(s.m);
  std::vector<float> row_scale(s.m);
  std::vector<int32_t> perm(s.k);
  for (auto& r : rows) r = random.next() % x_rows;
  for (auto& v : row_scale) v = static_cast<float>(random.uniform());
  for (int64_t j = 0; j < s.k; ++j) perm[j] = static_cast<int32_t>(j);
  for (int64_t j = s.k - 1; j > 0; --j) std::swap(perm[j], perm[random.next() % (j + 1)]);
  const bool use_rows = kind % 2, use_scale = kind % 5 == 1, use_perm = kind % 4 == 2;

  std::vector<char> x_bytes, panel_bytes;
  void* packed_x = aligned<void>(x_bytes, f.packed_x_bytes(s.m, s.k));
  f.pack_x({x.bytes.data(), dtype, x_stride, use_rows ? rows.data() : nullptr, use_scale ? row_scale.data() : nullptr,
            use_perm ? perm.data() : nullptr, s.m, s.k, packed_x});
  const int64_t ldc = s.n + 5, half = s.k / 2 / t.k_multiple * t.k_multiple;
  std::vector<float> c(s.m * ldc, 77.f);
  for (int block = half > 0 ? 0 : 1; block < 2; ++block) {
    const int64_t k0 = block ? half : 0, k = block ? s.k - half : half, ld = round_up(k, t.k_multiple);
    void* panel = aligned<void>(panel_bytes, s.n * ld * dtype_bytes(compute));
    const int64_t cut = s.n > 20 && kind % 3 == 0 ? 16 : 0;  // the panel may come in pieces
    if (cut) f.load_panel({&tw.w, 1, 0, cut, k0, k, panel, ld});
    f.load_panel({&tw.w, 1, cut, s.n - cut, k0, k, static_cast<char*>(panel) + cut * ld * dtype_bytes(compute), ld});
    f.gemm({packed_x, s.m, s.k, panel, s.n, ld, k0, k, c.data(), ldc, block == 1 && half > 0});
  }
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t r = 0; r < s.n; ++r) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < s.k; ++j) {
        double v = x.get((use_rows ? rows[i] : i) * x_stride + (use_perm ? perm[j] : j));
        if (use_scale) v = reference::round_to(static_cast<float>(v) * row_scale[i], dtype);
        const double p = v * reference::round_to(tw.values[r * s.k + j], compute);
        sum += p;
        size += std::fabs(p);
      }
      const double allowed = size * (8 + static_cast<double>(s.k) / 8) * 0x1p-24 + 1e-30;
      worst.see(std::fabs(c[i * ldc + r] - sum) / allowed,
                tw.name + " m" + std::to_string(s.m) + " n" + std::to_string(s.n) + " k" + std::to_string(s.k));
    }
    for (int64_t r = s.n; r < ldc; ++r)
      if (c[i * ldc + r] != 77.f) worst.see(INFINITY, "written beyond n, " + tw.name);
  }
}

void check_products(const TileTable& t, const ComputeFunctions& f, DType compute, bool quick) {
  Worst worst;
  static const int64_t m_list[] = {1, 2, 3, 4, 5, 7, 15, 16, 17, 32, 33, 50}, n_list[] = {1, 3, 4, 16, 17, 31, 32, 48, 70}, k_list[] = {8, 31, 64, 100, 256, 330};
  int turn = 0;
  for (int64_t m : m_list)
    for (int64_t n : n_list)
      for (int64_t k : k_list)
        for (int kind = 0; kind < kWeightKinds; ++kind)
          if (++turn % (quick ? 37 : 5) == 0 || (m == 17 && n == 48 && k == 256)) check_product(t, f, compute, {m, n, k}, kind, worst);
  worst.report(t, compute == DType::f32 ? "product fp32" : "product bf16");
}

// One column must not depend on where n is cut, nor one row on how many others there are (portable: only the former).
void check_invariance(const TileTable& t, const ComputeFunctions& f, DType compute) {
  constexpr int64_t kM = 37, kN = 53, kK = 320;
  Random random(5);
  Array x(DType::bf16, kM * kK), w(DType::bf16, kN * kK);
  x.fill(random, 1);
  w.fill(random, 1);
  Weight weight;
  weight.experts = 1, weight.n = kN, weight.k = kK, weight.data = w.bytes.data(), weight.dtype = DType::bf16, weight.n_stride = kK;
  std::vector<char> x_bytes, panel_bytes;
  char* panel = aligned<char>(panel_bytes, kN * kK * dtype_bytes(compute));
  f.load_panel({&weight, 0, 0, kN, 0, kK, panel, kK});
  const auto product = [&](int64_t m0, int64_t m, int64_t n_step, std::vector<float>& c) {
    void* packed = aligned<void>(x_bytes, f.packed_x_bytes(m, kK));
    f.pack_x({x.bytes.data() + m0 * kK * 2, DType::bf16, kK, nullptr, nullptr, nullptr, m, kK, packed});
    for (int64_t n0 = 0; n0 < kN; n0 += n_step)
      f.gemm({packed, m, kK, panel + n0 * kK * dtype_bytes(compute), std::min(n_step, kN - n0), kK, 0, kK, c.data() + m0 * kN + n0, kN, false});
  };
  std::vector<float> whole(kM * kN), part(kM * kN);
  product(0, kM, kN, whole);
  Worst worst;
  for (int64_t n_step = 1; n_step < kN; n_step += 3) {
    product(0, kM, n_step, part);
    worst.see(std::memcmp(whole.data(), part.data(), whole.size() * 4) == 0 ? 0 : 2, "n in steps of " + std::to_string(n_step));
  }
  for (int64_t m0 = 0, step = 1; m0 < kM && std::string(t.name) != "portable"; m0 += step++) product(m0, std::min(step, kM - m0), kN, part);
  worst.see(std::memcmp(whole.data(), part.data(), whole.size() * 4) == 0 ? 0 : 2, "m in growing steps");
  worst.report(t, compute == DType::f32 ? "cuts fp32" : "cuts bf16");
}

void check_activations(const TileTable& t) {
  Worst worst;
  static const Activation kind_list[] = {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu2, Activation::swigluoai,
                                         Activation::silu_no_mul, Activation::gelu_no_mul, Activation::gelu_tanh_no_mul, Activation::relu2_no_mul};
  constexpr int64_t kM = 3, kN = 1003, kLd = 1010;
  for (Activation kind : kind_list) {
    for (int d = 0; d < 3; ++d) {
      const DType dtype = static_cast<DType>(d);
      ActivationSpec spec;
      spec.kind = kind;
      spec.has_limit = kind == Activation::swigluoai || (kind == Activation::silu && d == 1);
      if (spec.has_limit) spec.limit = 7, spec.alpha = 1.702f, spec.beta = 1;
      std::vector<float> gate(kM * kLd), up(kM * kLd);
      Random random(d);
      for (auto& g : gate) g = static_cast<float>(std::ldexp(random.uniform(), static_cast<int>(random.next() % 9) - 4));
      for (auto& u : up) u = static_cast<float>(4 * random.uniform());
      gate[0] = 0, gate[1] = -0.f, gate[2] = 100, gate[3] = -100, gate[4] = 1e20f, gate[5] = -1e20f, gate[6] = NAN, gate[7] = 1e-30f;
      Array h(dtype, kM * kN);
      t.activate(spec, gate.data(), static_cast<int>(kind) < 16 ? up.data() : nullptr, kLd, kM, kN, h.bytes.data(), kN, dtype);
      for (int64_t i = 0; i < kM; ++i)
        for (int64_t j = 0; j < kN; ++j) {
          const double exact = reference::activation(spec, gate[i * kLd + j], up[i * kLd + j]), got = h.get(i * kN + j);
          const std::string at = "kind " + std::to_string(static_cast<int>(kind)) + " dtype " + std::to_string(d) + " gate " + std::to_string(gate[i * kLd + j]);
          if (std::isnan(gate[i * kLd + j]) || std::isinf(reference::round_to(exact, dtype))) {
            const bool same = std::isnan(exact) ? std::isnan(got) : got == reference::round_to(exact, dtype);
            worst.see(same ? 0 : 2, at);
            continue;
          }
          // Where the argument of the exponential is itself rounded, the error grows with it.
          const double g = gate[i * kLd + j], argument = kind == Activation::swigluoai ? 2 * g : (static_cast<int>(kind) & 15) == 2 ? 2 * g + 0.1 * g * g * g : 0;
          const double relative = 1e-6 + reference::unit_roundoff(dtype) + std::fabs(argument) * 0x1p-23;
          double tiny = dtype == DType::f16 ? 0x1p-24 : 1e-36 * (1 + std::fabs(g));
          if ((static_cast<int>(kind) & 15) == 1) tiny += 1e-7 * std::fabs(g) * (1 + std::fabs(static_cast<double>(up[i * kLd + j])));  // 1 + erf may cancel
          worst.see(std::fabs(got - exact) / (std::fabs(exact) * relative + tiny), at);
        }
    }
  }
  worst.report(t, "activations");
}

void check_combine(const TileTable& t) {
  Worst worst;
  for (int64_t n : {1, 7, 16, 53}) {
    for (int64_t count : {0, 1, 8}) {
      for (int d = 0; d < 3; ++d) {
        Random random(n + count);
        const int64_t ld = n + 3;
        std::vector<float> y(10 * ld), weight(count);
        std::vector<int64_t> rows(count);
        for (auto& v : y) v = static_cast<float>(random.uniform());
        for (auto& v : weight) v = static_cast<float>(random.uniform());
        for (auto& r : rows) r = random.next() % 10;
        Array out(static_cast<DType>(d), n);
        t.combine(y.data(), ld, rows.data(), weight.data(), count, n, out.bytes.data(), out.dtype);
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0, size = 0;
          for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(weight[i]) * y[rows[i] * ld + j], size += std::fabs(static_cast<double>(weight[i]) * y[rows[i] * ld + j]);
          const double allowed = size * 10 * 0x1p-24 + std::fabs(sum) * reference::unit_roundoff(out.dtype) + 1e-30;
          worst.see(std::fabs(out.get(j) - sum) / allowed, "n " + std::to_string(n) + " dtype " + std::to_string(d));
        }
      }
    }
  }
  worst.report(t, "combine");
}

// Bit for bit, with scales that overflow, underflow and are not numbers.
void check_dequantize(const TileTable& t) {
  Worst worst;
  for (int bits : {4, 8}) {
    for (int64_t k : {1, 33, 64, 331, 1024}) {
      for (int64_t group_size : {1, 5, 8, 32, 64, 1024}) {
        for (int s = 0; s < 9; ++s) {
          const DType scale_dtype = static_cast<DType>(s % 3), out_dtype = static_cast<DType>(s / 3);
          Random random(k + group_size + s);
          Packed p(1, 1, k, group_size, bits, s % 2, scale_dtype, Layout::canonical, random);
          const double odd_list[4] = {3e4, 1e-7, INFINITY, NAN};
          if (group_size == 32)
            for (int64_t g = 0; g < p.groups && g < 4; ++g)
              if (!std::isnan(odd_list[g])) p.scales.set(g, odd_list[g]);
          Array out(out_dtype, k);
          t.dequantize_row(p.data.data(), bits, p.scales.bytes.data(), scale_dtype, p.zeros.empty() ? nullptr : p.zeros.data(), k, group_size, out.bytes.data(), out_dtype, nullptr);
          for (int64_t j = 0; j < k; ++j) {
            const double expected = reference::round_to(p.value(0, 0, j), out_dtype), got = out.get(j);
            const bool same = std::isnan(expected) ? std::isnan(got) : expected == got && std::signbit(expected) == std::signbit(got);
            worst.see(same ? 0 : 2, "int" + std::to_string(bits) + " k " + std::to_string(k) + " group " + std::to_string(group_size) + " dtypes " + std::to_string(s));
          }
        }
      }
    }
  }
  worst.report(t, "dequantize, bits");
}

template <class Body>
double seconds(Body&& body) {
  double best = 1e9;
  for (int turn = 0; turn < 3; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// A gate/up matrix of Qwen3-30B-A3B on one thread, panels of 32 rows: decoding and product together.
void time_table(const TileTable& t) {
  constexpr int64_t kN = 1536, kK = 2048, kPanel = 32, kExperts = 8;
  Random random(3);
  const Packed int4(1, kN, kK, 128, 4, true, DType::bf16, Layout::canonical, random);
  std::vector<uint16_t> dense(kExperts * kN * kK);
  for (auto& v : dense) v = static_cast<uint16_t>(0x3c00 + (random.next() & 0x81ff));
  Weight dense_weight;
  dense_weight.experts = kExperts, dense_weight.n = kN, dense_weight.k = kK, dense_weight.data = dense.data(), dense_weight.dtype = DType::bf16;
  dense_weight.n_stride = kK, dense_weight.expert_stride = kN * kK;
  const Weight int4_weight = int4.weight(Layout::canonical);
  for (int c = 0; c < 2; ++c) {
    const ComputeFunctions& f = c ? t.bf16 : t.f32;
    if (f.gemm == nullptr) continue;
    for (const Weight* w : {static_cast<const Weight*>(&dense_weight), &int4_weight}) {
      for (int64_t m : {1, 4, 16, 64}) {
        Array x(DType::bf16, m * kK);
        x.fill(random, 1);
        std::vector<char> x_bytes, panel_bytes;
        void* packed = aligned<void>(x_bytes, f.packed_x_bytes(m, kK));
        f.pack_x({x.bytes.data(), DType::bf16, kK, nullptr, nullptr, nullptr, m, kK, packed});
        void* panel = aligned<void>(panel_bytes, kPanel * kK * 4);
        std::vector<float> out(m * kN);
        int64_t expert = 0;
        double product = 0;
        const double whole = seconds([&] {
          expert = (expert + 1) % w->experts;
          for (int64_t n0 = 0; n0 < kN; n0 += kPanel) {
            f.load_panel({w, expert, n0, kPanel, 0, kK, panel, kK});
            f.gemm({packed, m, kK, panel, kPanel, kK, 0, kK, out.data() + n0, kN, false});
          }
        });
        product = seconds([&] {
          for (int64_t n0 = 0; n0 < kN; n0 += kPanel) f.gemm({packed, m, kK, panel, kPanel, kK, 0, kK, out.data() + n0, kN, false});
        });
        const double operations = 2.0 * m * kN * kK;
        std::printf("%-8s %s x %s  m %3d: %7.1f GFLOP/s, product alone %7.1f, weights %.1f GB/s\n", t.name, c ? "bf16" : "fp32", w->packed ? "int4" : "bf16",
                    static_cast<int>(m), operations / whole / 1e9, operations / product / 1e9, kN * kK * (w->packed ? 0.5 : 2.0) / whole / 1e9);
      }
    }
  }
  for (int64_t group_size : {32, 128}) {
    const Packed p(1, kN, kK, group_size, 4, true, DType::bf16, Layout::canonical, random);
    std::vector<uint16_t> out(kN * kK);
    const double time = seconds([&] {
      for (int64_t r = 0; r < kN; ++r)
        t.dequantize_row(p.data.data() + r * kK / 2, 4, p.scales.bytes.data() + r * p.groups * 2, DType::bf16, p.zeros.data() + r * p.groups, kK, group_size, out.data() + r * kK, DType::bf16, nullptr);
    });
    std::printf("%-8s dequantize int4 g%d to bf16: %.1f GB/s written\n", t.name, static_cast<int>(group_size), kN * kK * 2.0 / time / 1e9);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--quick") quick = true;
    else names.emplace_back(argv[i]);
  }
  const bool all = names.empty();
  if (all) names = {"portable", "avx2", "avx512", "avx512-other", "amx"};
  for (const std::string& name : names) {
    const char* why = nullptr;
    const TileTable* t = cpu::find_table(name.c_str(), &why);
    if (t == nullptr) {
      std::printf("%-8s not used since %s\n", name.c_str(), why);
      if (!all) ++failures;
      continue;
    }
    if (t->begin_thread) t->begin_thread();
    check_products(*t, t->f32, DType::f32, quick);
    check_invariance(*t, t->f32, DType::f32);
    if (t->bf16.gemm != nullptr) {
      check_products(*t, t->bf16, DType::bf16, quick);
      check_invariance(*t, t->bf16, DType::bf16);
    }
    if (t->product.serves != nullptr) check_whole_products(*t, quick);
    check_activations(*t);
    check_combine(*t);
    check_dequantize(*t);
    if (!quick) time_table(*t);
    if (t->end_thread) t->end_thread();
    std::fflush(stdout);
  }
  return failures ? 1 : 0;
}
