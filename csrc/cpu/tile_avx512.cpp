// The AVX-512 tile table: fp32 compute, and bf16 compute on vdpbf16ps. Needs AVX-512 F, BW, DQ, VL, BF16 and VNNI.
#include "tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include "simd_avx512.h"
// (order matters: each builds on the one before)
#include "simd_math.h"
#include "simd_decode.h"
#include "simd_transposed.h"
#include "simd_tile.h"
#include "simd_bf16.h"
#include "simd_split512.h"
#include "simd_codes512.h"
#include "simd_dots512.h"
#include "simd_limbs512.h"
#include "simd_dense.h"

namespace int4_emu::cpu {
namespace {

// Which way m rows go. Packed weights meet rows of bf16 and fp16 in integers, one of fp32 as a sum of bf16 numbers; dense ones meet rows where
// they lie, in fp32 or, with bf16 on both sides, by vdpbf16ps. kFastDots: whether that does twice as much a cycle as multiply-adds in fp32 (AMD), and
// not half as much (Intel). Then only a few rows, for which panels of bf16 are not worth decoding, go in integers (docs/performance-avx.md).
template <bool kFastDots>
struct Ways {
  static constexpr int64_t kLimbsMost = kFastDots ? 16 : int64_t{1} << 40, kDenseMost = kFastDots ? 0 : 32;

  static bool dots(const Weight& w, DType x, int64_t m) { return x == DType::bf16 && w.dtype == DType::bf16 && m > kDenseMost; }

  static bool serves(const Weight& w, DType x, int64_t m) {
    if (!w.packed) return serves_dense(w);
    return serves_dots(w, x, m) || (serves_limbs(w, x) && (x != DType::bf16 || m <= kLimbsMost));
  }

  static size_t packed_x_bytes(const Weight& w, DType x, int64_t m) {
    if (w.packed) return x != DType::f32 ? packed_x_bytes_limbs(w, m) : packed_x_bytes_dots(w);
    return dots(w, x, m) ? packed_rows_bytes<DotBf16>(m, w.k) : packed_dense_x_bytes(w, m);
  }

  static bool pack_x(const Weight& w, const PackXArgs& a) {
    if (w.packed && a.dtype != DType::f32) return pack_x_limbs(w, a);
    if (w.packed) pack_x_dots(w, a);
    else if (dots(w, a.dtype, a.m)) pack_rows<DotBf16>(a);
    else pack_dense_x(w, a);
    return true;
  }

  static void multiply(const ProductArgs& a) {
    const Weight& w = *a.weight;
    if (w.packed) a.dtype != DType::f32 ? multiply_limbs(a) : multiply_dots(a);
    else dots(w, a.dtype, a.m) ? multiply_rows<DotBf16>(a) : multiply_dense(a);
  }
};

template <bool kFastDots>
constexpr TileTable table = {"avx512",
                             kStep,
                             panels_of<MultiplyAdds<DType::f32>>,
                             panels_of<DotBf16>,
                             {Ways<kFastDots>::serves, Ways<kFastDots>::packed_x_bytes, Ways<kFastDots>::pack_x, Ways<kFastDots>::multiply, 0},
                             activate,
                             combine,
                             dequantize_row,
                             dequantize_transposed,
                             nullptr,
                             nullptr};

}  // namespace

const TileTable* avx512_table(bool fast_dots) { return fast_dots ? &table<true> : &table<false>; }

}  // namespace int4_emu::cpu

#else

const int4_emu::cpu::TileTable* int4_emu::cpu::avx512_table(bool) { return nullptr; }

#endif
