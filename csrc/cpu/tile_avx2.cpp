// The AVX2 tile table: fp32 compute for every dtype. Needs AVX2, FMA and F16C.
#include "tile.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "simd_avx2.h"
// (order matters: each builds on the one before)
#include "simd_math.h"
#include "simd_decode.h"
#include "simd_transposed.h"
#include "simd_tile.h"
#include "simd_dense.h"
#include "simd_fixed256.h"
#include "simd_panels256.h"

namespace int4_emu::cpu {
namespace {

// Packed weights and dense ones each have a product of their own.
bool serves(const Weight& w, DType x, int64_t m) { return w.packed ? serves_product(w, x, m) : serves_dense(w); }
size_t packed_bytes(const Weight& w, DType x, int64_t m) { return w.packed ? product_x_bytes(w, x, m) : packed_dense_x_bytes(w, m); }
bool pack_x(const Weight& w, const PackXArgs& a) {
  w.packed ? pack_product_x(w, a) : pack_dense_x(w, a);
  return true;
}
void multiply(const ProductArgs& a) { a.weight->packed ? multiply_product(a) : multiply_dense(a); }

const TileTable kTable = {"avx2",
                          kStep,
                          panels_of<MultiplyAdds<DType::f32>>,
                          {nullptr, nullptr, nullptr, nullptr},
                          {serves, packed_bytes, pack_x, multiply, 0},
                          activate,
                          combine,
                          dequantize_row,
                          dequantize_transposed,
                          nullptr,
                          nullptr};

}  // namespace

const TileTable* avx2_table() { return &kTable; }

}  // namespace int4_emu::cpu

#else

const int4_emu::cpu::TileTable* int4_emu::cpu::avx2_table() { return nullptr; }

#endif
