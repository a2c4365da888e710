// Dense weights on mma.sync, fp16.
#include "dense_mma_sm80.cuh"

namespace int4_emu::gpu {

Status launch_dense_mma_sm80_fp16(const GemmArgs& a, int block_rows, Stream stream) { return launch_dense<Fp16>(a, block_rows, stream); }

}  // namespace int4_emu::gpu
