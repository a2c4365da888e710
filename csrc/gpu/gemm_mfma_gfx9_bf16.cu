// The grouped GEMM on MFMA, bf16.
#include "atom_mfma_gfx9.cuh"
#include "stream.cuh"

namespace int4_emu::gpu {

Status launch_gemm_mfma_gfx9_bf16(const GemmArgs& a, int block_rows, Stream stream) {
  return launch_stream<MfmaGfx9<Bf16>, Bf16>(a, block_rows, stream);
}

}  // namespace int4_emu::gpu
