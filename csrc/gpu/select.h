// Which instruction family serves a problem, and how many rows its blocks take.
#pragma once

#include "gemm_args.h"

namespace int4_emu::gpu {

// Fills what follows from pointers, strides and dtypes: out_pairs, w_vector.
void describe_memory(GemmArgs& a);

// mma_sm80 has kernels of its own for weights that come in 16-byte units along k: for few rows per expert (decode), and for more of them
// by dense or packed weights.
enum class Path : int { tiles = 0, dense = 1, decode = 2, packed = 3 };

// The kernels of one call, fixed before the row blocks are made, since these depend on them.
struct Plan {
  Atom atom = Atom::fma;
  int block_rows = 16;
  Path path = Path::tiles;
  const char* fallback = nullptr;  // why fma takes a projection in place of `atom`; null where it takes none
};

// `projections` share their row blocks: `rows` rows over `experts` experts.
Status make_plan(Atom forced, const GemmArgs* projections, int count, int64_t rows, int64_t experts, Plan* plan);

Status launch_gemm(const GemmArgs& a, const Plan& plan, Stream stream);

}  // namespace int4_emu::gpu
