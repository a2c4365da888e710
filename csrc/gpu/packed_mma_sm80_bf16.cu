// Packed weights for many rows per expert on mma.sync, bf16.
#include "packed_mma_sm80.cuh"

namespace int4_emu::gpu {

Status launch_packed_mma_sm80_bf16(const GemmArgs& a, int block_rows, Stream stream) { return launch_packed<Bf16>(a, block_rows, stream); }

}  // namespace int4_emu::gpu
