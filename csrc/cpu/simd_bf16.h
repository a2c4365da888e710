// bf16 times bf16 on vdpbf16ps, as simd_dense.h and simd_dots512.h use it. AVX-512 only; included after simd_tile.h.
#pragma once

namespace int4_emu::cpu {
namespace {

// A step of 32 columns is one vector, x rounded to bf16. For scale: Intel's cores do half as many products a cycle so as in fp32, AMD's twice as many.
struct DotBf16 {
  using Element = uint16_t;
  using Vector = __m512i;
  static constexpr DType kWeights = DType::bf16;
  static constexpr int kVectors = 1;
  template <bool>
  static inline Vector weights(const char* step, int) { return _mm512_loadu_si512(step); }
  static inline Vector load_x(const uint16_t* x) {
    Vf v = _mm512_castsi512_ps(_mm512_loadu_si512(x));
    keep_in_register(v);
    return _mm512_castps_si512(v);
  }
  static inline Vf multiply_add(Vector a, Vector b, Vf sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static inline void store_x(uint16_t* to, int64_t, Vf first, Vf last) {
    store_bf16(to, first);
    store_bf16(to + kLanes, last);
  }
};

}  // namespace
}  // namespace int4_emu::cpu
