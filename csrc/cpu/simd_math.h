// Typed loads and stores, and the activations, over the primitives of simd_avx2.h or simd_avx512.h (included before this file).
#pragma once

namespace int4_emu::cpu {
namespace {

// Vector of elements i.. of an array of D, as fp32.
template <DType D>
inline Vf load_as(const void* p, int64_t i) {
  if constexpr (D == DType::f32) return load(static_cast<const float*>(p) + i);
  if constexpr (D == DType::f16) return load_f16(static_cast<const uint16_t*>(p) + i);
  if constexpr (D == DType::bf16) return load_bf16(static_cast<const uint16_t*>(p) + i);
}

template <DType D>
inline void store_as(void* p, int64_t i, Vf v) {
  if constexpr (D == DType::f32) store(static_cast<float*>(p) + i, v);
  if constexpr (D == DType::f16) store_f16(static_cast<uint16_t*>(p) + i, v);
  if constexpr (D == DType::bf16) store_bf16(static_cast<uint16_t*>(p) + i, v);
}

template <DType D>
constexpr int64_t kBytes = D == DType::f32 ? 4 : 2;

// As above for the first count < kLanes elements; the other lanes load as zero and are not stored.
template <DType D>
inline Vf load_tail(const void* p, int64_t i, int64_t count) {
  alignas(64) char buffer[64] = {0};
  __builtin_memcpy(buffer, static_cast<const char*>(p) + i * kBytes<D>, count * kBytes<D>);
  return load_as<D>(buffer, 0);
}

template <DType D>
inline void store_tail(void* p, int64_t i, Vf v, int64_t count) {
  alignas(64) char buffer[64];
  store_as<D>(buffer, 0, v);
  __builtin_memcpy(static_cast<char*>(p) + i * kBytes<D>, buffer, count * kBytes<D>);
}

template <DType D>
inline Vf round_to(Vf v) {
  if constexpr (D == DType::f32) return v;
  alignas(64) char buffer[64];
  store_as<D>(buffer, 0, v);
  return load_as<D>(buffer, 0);
}

inline float scalar_at(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  if (dtype == DType::f16) return _cvtsh_ss(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

// e^x within 1.5 ulp, through subnormal results to 0 and up to infinity. Polynomial: Cephes expf.
inline Vf exponential(Vf x) {
  x = vmin(set1(89.f), vmax(set1(-104.f), x));
  const Vf n = round_even(mul(x, set1(1.44269504f)));
  const Vf r = fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0.693359375f), x));  // x - n ln 2, ln 2 in two parts
  Vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  const Vf y = add(fma(p, mul(r, r), r), set1(1.f));
  const Vi whole = to_int(n), first = half_floor(whole);  // 2^n itself may overflow or be subnormal
  return mul(mul(y, power_of_two(first)), power_of_two(sub(whole, first)));
}

inline Vf divide_by_logistic(Vf x, Vf z) { return div(x, add(set1(1.f), exponential(sub(zero(), z)))); }  // x * sigmoid(z)

// The normal distribution's integral up to x. With t = |x|, the tail is e^(-t^2/2) P((t - 3.5) / (t + 3.5)) / (1 + t); P is a
// least-squares fit of relative error 1.5e-8 over [0, 14.5], where the tail leaves the fp32 range.
inline Vf normal_cdf(Vf x) {
  const Vf t = vmin(set1(20.f), vabs(x));
  const Vf square = mul(t, t);
  const Vf lost = fma(t, t, sub(zero(), square));  // the rounding error of square matters: it is an exponent
  const Vf u = div(sub(t, set1(3.5f)), add(t, set1(3.5f)));
  Vf p = set1(1.464619290e-04f);
  p = fma(p, u, set1(9.322262742e-05f));
  p = fma(p, u, set1(-1.388605663e-03f));
  p = fma(p, u, set1(2.954209066e-04f));
  p = fma(p, u, set1(1.037224687e-02f));
  p = fma(p, u, set1(-3.026333442e-02f));
  p = fma(p, u, set1(3.804837813e-02f));
  p = fma(p, u, set1(7.873862090e-04f));
  p = fma(p, u, set1(-9.771259404e-02f));
  p = fma(p, u, set1(4.785531848e-01f));
  const Vf decay = mul(exponential(mul(square, set1(-0.5f))), fnma(lost, set1(0.5f), set1(1.f)));
  const Vf tail = div(mul(decay, p), add(set1(1.f), t));
  return select_negative(x, tail, sub(set1(1.f), tail));
}

inline Vf clamp_both(Vf x, float limit) { return vmax(set1(-limit), vmin(set1(limit), x)); }

// act(gate, up); `kind` is the gated form, `up` is unused without gate.
inline Vf activation(const ActivationSpec& spec, Activation kind, bool gated, Vf gate, Vf up) {
  if (spec.has_limit) {
    gate = vmin(set1(spec.limit), gate);
    up = clamp_both(up, spec.limit);
  }
  Vf value = gate;
  switch (kind) {
    case Activation::gelu: value = mul(gate, normal_cdf(gate)); break;
    case Activation::gelu_tanh: {
      // (1 + tanh(z)) / 2 = sigmoid(2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
      const Vf z2 = mul(gate, fma(mul(gate, gate), set1(0.0713548163f), set1(1.59576912f)));
      value = divide_by_logistic(gate, z2);
      break;
    }
    case Activation::relu2: {
      const Vf positive = vmax(zero(), gate);
      value = mul(positive, positive);
      break;
    }
    case Activation::swigluoai:
      return mul(divide_by_logistic(gate, mul(gate, set1(spec.alpha))), add(up, set1(spec.beta)));
    default: value = divide_by_logistic(gate, gate);
  }
  return gated ? mul(value, up) : value;
}

template <DType D>
void activate_rows(const ActivationSpec& spec, const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh) {
  const bool gated = static_cast<int>(spec.kind) < 16;
  const Activation kind = static_cast<Activation>(static_cast<int>(spec.kind) & 15);
  for (int64_t i = 0; i < m; ++i) {
    const float* g = gate + i * ld;
    const float* u = gated ? up + i * ld : g;
    char* out = static_cast<char*>(h) + i * ldh * kBytes<D>;
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_as<D>(out, j, activation(spec, kind, gated, load(g + j), load(u + j)));
    if (j < n) {
      const Vf a = load_tail<DType::f32>(g, j, n - j), b = load_tail<DType::f32>(u, j, n - j);
      store_tail<D>(out, j, activation(spec, kind, gated, a, b), n - j);
    }
  }
}

void activate(const ActivationSpec& spec, const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh, DType dtype) {
  if (dtype == DType::f32) activate_rows<DType::f32>(spec, gate, up, ld, m, n, h, ldh);
  else if (dtype == DType::f16) activate_rows<DType::f16>(spec, gate, up, ld, m, n, h, ldh);
  else activate_rows<DType::bf16>(spec, gate, up, ld, m, n, h, ldh);
}

}  // namespace
}  // namespace int4_emu::cpu
