// The grouped GEMM on mma.sync, fp16.
#include "atom_mma_sm80.cuh"

namespace int4_emu::gpu {

Status launch_gemm_mma_sm80_fp16(const GemmArgs& a, int block_rows, Stream stream) { return launch_mma_sm80<Fp16>(a, block_rows, stream); }

}  // namespace int4_emu::gpu
