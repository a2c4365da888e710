// The grouped GEMM on MFMA, fp16.
#include "atom_mfma_gfx9.cuh"
#include "stream.cuh"

namespace int4_emu::gpu {

Status launch_gemm_mfma_gfx9_fp16(const GemmArgs& a, int block_rows, Stream stream) {
  return launch_stream<MfmaGfx9<Fp16>, Fp16>(a, block_rows, stream);
}

}  // namespace int4_emu::gpu
