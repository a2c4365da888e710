// One int4 MoE layer on the CPU, and on the GPU whose kernels the package holds; both are compared with plain loops in double precision.
#include <int4_emu/cpu/api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device.h"

namespace {

using namespace int4_emu;

constexpr int64_t kTokens = 5, kHidden = 64, kIntermediate = 96, kExperts = 4, kTopk = 2, kGroup = 32;

// Codes [E, N, K / 2], two a byte with the even column low, and a scale for each 32 columns. No zero points: code 8 is zero.
struct Int4 {
  int64_t n, k;
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  Int4(int64_t n, int64_t k, unsigned seed) : n(n), k(k), codes(kExperts * n * k / 2), scales(kExperts * n * k / kGroup) {
    std::srand(seed);
    for (uint8_t& c : codes) c = static_cast<uint8_t>(std::rand());
    for (float& s : scales) s = 0.01f + 0.001f * static_cast<float>(std::rand() % 10);
  }
  double at(int64_t e, int64_t row, int64_t column) const {
    const int64_t i = (e * n + row) * k + column;
    return ((codes[i / 2] >> (i % 2 * 4) & 15) - 8) * static_cast<double>(scales[i / kGroup]);
  }
  Weight weight(const uint8_t* codes_at, const float* scales_at) const {
    Weight w;
    w.experts = kExperts, w.n = n, w.k = k, w.packed = true;
    w.data = codes_at, w.n_stride = k / 2, w.expert_stride = n * k / 2;
    w.scales = scales_at, w.groups = k / kGroup, w.group_size = kGroup;
    return w;
  }
};

struct Layer {
  Int4 w13{2 * kIntermediate, kHidden, 1}, w2{kHidden, kIntermediate, 2};
  std::vector<float> x, topk_weights;
  std::vector<int32_t> topk_ids;

  Layer() : x(kTokens * kHidden), topk_weights(kTokens * kTopk), topk_ids(kTokens * kTopk) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i));
    for (size_t i = 0; i < topk_ids.size(); ++i) topk_ids[i] = static_cast<int32_t>(i * 3 % kExperts), topk_weights[i] = 0.25f + 0.05f * i;
    topk_ids[3] = -1;  // a slot that goes nowhere
  }
  // Everything but the pointers.
  MoeProblem problem() const {
    MoeProblem p;
    p.tokens = kTokens, p.hidden = kHidden, p.intermediate = kIntermediate, p.topk = kTopk;
    p.x_stride = kHidden, p.global_experts = kExperts;
    return p;
  }
  std::vector<double> reference() const {
    std::vector<double> out(kTokens * kHidden), middle(kIntermediate);
    for (int64_t slot = 0; slot < kTokens * kTopk; ++slot) {
      const int32_t e = topk_ids[slot];
      if (e < 0) continue;
      const float* row = &x[slot / kTopk * kHidden];
      for (int64_t i = 0; i < kIntermediate; ++i) {
        double gate = 0, up = 0;
        for (int64_t k = 0; k < kHidden; ++k) gate += w13.at(e, i, k) * row[k], up += w13.at(e, kIntermediate + i, k) * row[k];
        middle[i] = gate / (1 + std::exp(-gate)) * up;
      }
      for (int64_t n = 0; n < kHidden; ++n) {
        double sum = 0;
        for (int64_t i = 0; i < kIntermediate; ++i) sum += w2.at(e, n, i) * middle[i];
        out[slot / kTopk * kHidden + n] += topk_weights[slot] * sum;
      }
    }
    return out;
  }
};

// Prints how far `got` is from the reference; false past 1e-5 of its norm.
bool compare(const char* where, const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) error += std::pow(got[i] - want[i], 2), norm += want[i] * want[i];
  const double relative = std::sqrt(error / norm);
  std::printf("%s: out[0] = %.6f, relative error %.2g\n", where, got[0], relative);
  return relative < 1e-5;  // NaN fails too
}

bool check(const Status& status) {
  if (!status) std::fprintf(stderr, "error: %s\n", status.message);
  return static_cast<bool>(status);
}

bool run_on_cpu(const Layer& layer, const std::vector<double>& want) {
  std::vector<float> out(want.size(), NAN);
  MoeProblem p = layer.problem();
  p.x = layer.x.data(), p.topk_weights = layer.topk_weights.data(), p.topk_ids = layer.topk_ids.data(), p.out = out.data();
  p.w13 = layer.w13.weight(layer.w13.codes.data(), layer.w13.scales.data());
  p.w2 = layer.w2.weight(layer.w2.codes.data(), layer.w2.scales.data());
  const size_t bytes = cpu::moe_workspace_bytes(p, 1);
  std::vector<char> workspace(bytes + 64);
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  return check(cpu::fused_moe(p, aligned, bytes, Parallel{})) && compare(cpu::select_isa().name, out, want);
}

#ifdef EXAMPLE_HAS_GPU
bool run_on_gpu(const Layer& layer, const std::vector<double>& want) {
  if (const char* reason = device::why_not()) {
    std::printf("GPU: built for %s; not run: %s\n", gpu::compiled_architectures(), reason);
    return true;
  }
  const device::Copy x(layer.x), ids(layer.topk_ids), weights(layer.topk_weights), out(std::vector<float>(want.size(), NAN));
  const device::Copy codes13(layer.w13.codes), scales13(layer.w13.scales), codes2(layer.w2.codes), scales2(layer.w2.scales);
  MoeProblem p = layer.problem();
  p.x = x.data, p.topk_weights = static_cast<const float*>(weights.data), p.topk_ids = ids.data, p.out = out.data;
  p.w13 = layer.w13.weight(static_cast<const uint8_t*>(codes13.data), static_cast<const float*>(scales13.data));
  p.w2 = layer.w2.weight(static_cast<const uint8_t*>(codes2.data), static_cast<const float*>(scales2.data));
  const size_t bytes = gpu::moe_workspace_bytes(p);
  const device::Copy workspace(std::vector<char>(bytes, 0x55));
  if (!check(gpu::set_device(0)) || !check(gpu::fused_moe(p, workspace.data, bytes, nullptr))) return false;
  return compare(gpu::atom_name(gpu::select_atom(0, p.dtype).atom), out.read<float>(want.size()), want);
}
#endif

}  // namespace

int main() {
  const Layer layer;
  const std::vector<double> want = layer.reference();
  bool right = run_on_cpu(layer, want);
#ifdef EXAMPLE_HAS_GPU
  right = run_on_gpu(layer, want) && right;
#endif
  std::puts(right ? "right" : "WRONG");
  return right ? 0 : 1;
}
