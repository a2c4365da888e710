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

// [m][round_up(k, 32)] bf16.
size_t packed_x_bytes_bf16(int64_t m, int64_t k) { return static_cast<size_t>(m * round_up_to(k, kKMultiple)) * 2; }

void pack_x_bf16(const PackXArgs& a) { pack_rows_bf16(a, round_up_to(a.k, kKMultiple), static_cast<uint16_t*>(a.out)); }

// Packed weights meet rows of bf16 and fp16 in integers, one of fp32 as a sum of bf16 numbers; dense ones meet a few rows in fp32, and any number
// where that is the compute type. On Intel vdpbf16ps does half as much as fp32's multiply-adds; few rows wait for memory anywhere.
constexpr int64_t kDenseRows = 32;

bool serves(const Weight& w, DType x, int64_t m) {
  if (w.packed) return serves_limbs(w, x) || serves_dots(w, x, m);
  return m <= kDenseRows ? serves_dense(w) : serves_dense_f32(w, x);
}

size_t packed_x_bytes(const Weight& w, DType x, int64_t m) {
  if (!w.packed) return packed_dense_x_bytes(w, m);
  return x != DType::f32 ? packed_x_bytes_limbs(w, m) : packed_x_bytes_dots(w);
}

bool pack_x(const Weight& w, const PackXArgs& a) {
  if (w.packed && a.dtype != DType::f32) return pack_x_limbs(w, a);
  w.packed ? pack_x_dots(w, a) : pack_dense_x(w, a);
  return true;
}

void multiply(const ProductArgs& a) {
  if (!a.weight->packed) multiply_dense(a);
  else if (a.dtype != DType::f32) multiply_limbs(a);
  else multiply_dots(a);
}

const TileTable kTable = {"avx512",
                          kKMultiple,
                          {packed_x_bytes_f32<kKMultiple>, pack_x_f32<kKMultiple>, load_panel_as<DType::f32>, gemm_dot<DotF32, kKMultiple>},
                          {packed_x_bytes_bf16, pack_x_bf16, load_panel_as<DType::bf16>, gemm_dot<DotBf16, kKMultiple>},
                          {serves, packed_x_bytes, pack_x, multiply, 0},
                          activate,
                          combine,
                          dequantize_row,
                          dequantize_transposed,
                          nullptr,
                          nullptr};

}  // namespace

const TileTable* avx512_table() { return &kTable; }

}  // namespace int4_emu::cpu

#else

const int4_emu::cpu::TileTable* int4_emu::cpu::avx512_table() { return nullptr; }

#endif
