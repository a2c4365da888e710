// The grouped GEMM on fp32 multiply-adds: any device, any dtype, exact packed weights.
#include "atom_fma.cuh"
#include "gemm.cuh"

namespace int4_emu::gpu {
namespace {

template <class Atom>
Status launch_dtype(const GemmArgs& a, Stream stream) {
  if (a.x_dtype == DType::f32) return launch_gemm_kind<Atom, float>(a, stream, "gemm_kernel (fma)");
  if (a.x_dtype == DType::bf16) return launch_gemm_kind<Atom, Bf16>(a, stream, "gemm_kernel (fma)");
  return launch_gemm_kind<Atom, Fp16>(a, stream, "gemm_kernel (fma)");
}

}  // namespace

Status launch_gemm_fma(const GemmArgs& a, int block_rows, Stream stream) {
  if (block_rows == 16) return launch_dtype<FmaAtom<16>>(a, stream);
  if (block_rows == 64) return launch_dtype<FmaAtom<64>>(a, stream);
  return make_error(Code::internal, "fma has no kernel for blocks of %d rows", block_rows);
}

}  // namespace int4_emu::gpu
