// bf16 x bf16 tile functions on vdpbf16ps: both operands row-major, as in simd_tile.h. AVX-512 only; included after simd_tile.h.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kKMultiple = 32;  // bf16 elements of a 64-byte vector

struct DotBf16 {
  using Element = uint16_t;
  using Vector = __m512i;
  static constexpr int64_t kStep = 32;
  static inline Vector load_vector(const Element* p) { return _mm512_loadu_si512(p); }
  static inline Vf multiply_add(Vector a, Vector b, Vf sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

// Rows of x as bf16 [m][ld], zero-padded. The driver uses bf16 compute for bf16 x; other dtypes are rounded.
template <DType D>
void pack_rows_bf16(const PackXArgs& a, int64_t ld, uint16_t* out) {
  for (int64_t i = 0; i < a.m; ++i, out += ld) {
    const void* row = x_row(a, i, kBytes<D>);
    int64_t j = 0;
    if (D == DType::bf16 && a.perm == nullptr && a.row_scale == nullptr) {
      __builtin_memcpy(out, row, a.k * 2);
      __builtin_memset(out + a.k, 0, (ld - a.k) * 2);
      continue;
    }
    for (; j < a.k; j += kLanes) store_bf16(out + j, x_vector<D>(a, row, i, j));
    for (; j < ld; j += kLanes) store_bf16(out + j, zero());
  }
}

inline void pack_rows_bf16(const PackXArgs& a, int64_t ld, uint16_t* out) {
  if (a.dtype == DType::f32) pack_rows_bf16<DType::f32>(a, ld, out);
  else if (a.dtype == DType::f16) pack_rows_bf16<DType::f16>(a, ld, out);
  else pack_rows_bf16<DType::bf16>(a, ld, out);
}

}  // namespace
}  // namespace int4_emu::cpu
