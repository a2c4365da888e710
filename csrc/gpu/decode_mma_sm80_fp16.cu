// The decode path on mma.sync, fp16.
#include "decode_mma_sm80.cuh"

namespace int4_emu::gpu {

Status launch_decode_mma_sm80_fp16(const GemmArgs& a, Stream stream) { return launch_decode<Fp16>(a, stream); }

}  // namespace int4_emu::gpu
