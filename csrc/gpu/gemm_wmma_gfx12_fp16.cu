// The grouped GEMM on WMMA of gfx12, fp16.
#include "atom_wmma_gfx12.cuh"
#include "stream.cuh"

namespace int4_emu::gpu {

Status launch_gemm_wmma_gfx12_fp16(const GemmArgs& a, int block_rows, Stream stream) {
  return launch_stream<WmmaGfx12<Fp16>, Fp16>(a, block_rows, stream);
}

}  // namespace int4_emu::gpu
