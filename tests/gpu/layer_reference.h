// Host weights of one projection and the layer in double precision.
#pragma once

#include <cmath>
#include <memory>

#include "../../csrc/core/layout.h"
#include "harness.h"

namespace selfcheck {

// One projection on host and device, dense or packed.
struct HostWeight {
  Weight w;                    // device pointers
  std::vector<double> values;  // [E, N, K], exact
  std::vector<int32_t> perm;
  Floats bias;
  std::unique_ptr<Buffer<uint8_t>> data, scales, zeros, bias_data;
  std::unique_ptr<Buffer<int32_t>> perm_data;

  double at(int64_t e, int64_t n, int64_t k) const { return values[(e * w.n + n) * w.k + k]; }

  void add_bias(DType type, Random& random) {
    bias = Floats(type, random_floats(w.experts * w.n, 0.2f, random));
    bias_data = std::make_unique<Buffer<uint8_t>>(bias.data);
    w.bias = bias_data->get(), w.bias_dtype = type;
  }
  void add_perm(Random& random) {
    for (int64_t e = 0; e < w.experts; ++e) {
      std::vector<int32_t> p(w.k);
      for (int64_t i = 0; i < w.k; ++i) p[i] = static_cast<int32_t>(i);
      std::shuffle(p.begin(), p.end(), random);
      perm.insert(perm.end(), p.begin(), p.end());
    }
    perm_data = std::make_unique<Buffer<int32_t>>(perm);
    w.perm = perm_data->get();
  }
  // sum over k of w * x[perm] + bias
  template <class X>
  double dot(int64_t e, int64_t n, const X& x) const {
    double sum = bias.data.empty() ? 0. : bias[e * w.n + n];
    for (int64_t k = 0; k < w.k; ++k) sum += at(e, n, k) * x(perm.empty() ? k : perm[e * w.k + k]);
    return sum;
  }
};

inline HostWeight packed_weight(int64_t e, int64_t n, int64_t k, int bits, int64_t group, DType scale_type, bool zeros, int64_t row_slack,
                                Random& random) {
  HostWeight h;
  Weight& w = h.w;
  w.experts = e, w.n = n, w.k = k, w.packed = true, w.bits = bits, w.group_size = group, w.groups = ceil_div(k, group),
  w.scale_dtype = scale_type;
  w.n_stride = row_bytes(k, bits) + row_slack, w.expert_stride = n * w.n_stride;
  const std::vector<uint8_t> codes = random_bytes(e * w.expert_stride, random);
  std::vector<float> s = random_floats(e * n * w.groups, 0.01f, random);
  if (bits == 8)
    for (float& f : s) f /= 16.f;
  const Floats scales(scale_type, s);
  std::vector<uint8_t> z = random_bytes(e * n * w.groups, random);
  if (bits == 4)
    for (uint8_t& v : z) v &= 15;
  h.values.resize(e * n * k);
  for (int64_t row = 0; row < e * n; ++row) {
    for (int64_t j = 0; j < k; ++j) {
      const uint8_t byte = codes[row * w.n_stride + (bits == 4 ? j / 2 : j)];
      const int code = bits == 8 ? byte : (byte >> (j % 2 * 4)) & 15;
      const int64_t c = row * w.groups + j / group;
      h.values[row * k + j] = static_cast<double>(code - (zeros ? z[c] : (bits == 4 ? 8 : 128))) * scales[c];
    }
  }
  h.data = std::make_unique<Buffer<uint8_t>>(codes);
  h.scales = std::make_unique<Buffer<uint8_t>>(scales.data);
  h.zeros = std::make_unique<Buffer<uint8_t>>(z);
  w.data = h.data->get(), w.scales = h.scales->get(), w.zeros = zeros ? h.zeros->get() : nullptr;
  return h;
}

// `along_n`: the transposed view of a contiguous [E, K, N].
inline HostWeight dense_weight(int64_t e, int64_t n, int64_t k, DType type, bool along_n, Random& random) {
  HostWeight h;
  Weight& w = h.w;
  w.experts = e, w.n = n, w.k = k, w.dtype = type, w.expert_stride = n * k;
  w.n_stride = along_n ? 1 : k, w.k_stride = along_n ? n : 1;
  const Floats values(type, random_floats(e * n * k, 0.05f, random));
  h.values.resize(e * n * k);
  for (int64_t i = 0; i < e; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < k; ++c) h.values[(i * n + j) * k + c] = values[i * w.expert_stride + j * w.n_stride + c * w.k_stride];
    }
  }
  h.data = std::make_unique<Buffer<uint8_t>>(values.data);
  w.data = h.data->get();
  return h;
}

inline double activation_value(const ActivationSpec& spec, double g, double u) {
  const double limit = spec.limit;
  switch (spec.kind) {
    case Activation::silu:
      if (spec.has_limit) g = std::min(g, limit), u = std::max(-limit, std::min(u, limit));
      return g / (1 + std::exp(-g)) * u;
    case Activation::swigluoai:
      g = std::min(g, limit), u = std::max(-limit, std::min(u, limit));
      return g / (1 + std::exp(-spec.alpha * g)) * (u + spec.beta);
    case Activation::gelu:
    case Activation::gelu_no_mul:
      g = 0.5 * g * (1 + std::erf(g / std::sqrt(2.)));
      return spec.kind == Activation::gelu ? g * u : g;
    case Activation::gelu_tanh:
    case Activation::gelu_tanh_no_mul:
      g = 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
      return spec.kind == Activation::gelu_tanh ? g * u : g;
    case Activation::relu2:
    case Activation::relu2_no_mul:
      g = g < 0 ? 0 : g * g;
      return spec.kind == Activation::relu2 ? g * u : g;
    case Activation::silu_no_mul:
      return g / (1 + std::exp(-g));
  }
  return 0;
}

// Relative L2 error; infinite where anything is not finite.
inline double relative_error(const Floats& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double v = got[static_cast<int64_t>(i)];
    if (!std::isfinite(v)) return INFINITY;
    difference += (v - want[i]) * (v - want[i]);
    norm += want[i] * want[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// Rounding of weights, intermediate and result each cost about a third of a unit in the last place. Rounded weights that any zero
// point has shifted partly cancel in a sum, and their rounding does not.
inline double tolerance(DType t, bool shifted) {
  return (t == DType::f32 ? 3e-6 : (t == DType::bf16 ? 4e-3 : 6e-4)) * (shifted ? 2.5 : 1.);
}

}  // namespace selfcheck
