// Brings x into the one form that the GEMM kernels read: rows in 16-byte units, columns in the weight's order.
#pragma once

#include "gemm_args.h"

namespace int4_emu::gpu {

bool needs_gather(const GemmArgs& a);

// Bytes of launch_gather's buffer for `rows` rows, 0 where x is read in place.
int64_t gather_bytes(const GemmArgs& a, int64_t rows);

// Where needed, copies the rows of a.blocks to `buffer` and points `a` there.
Status launch_gather(GemmArgs& a, int64_t block_rows, void* buffer, Stream stream);

}  // namespace int4_emu::gpu
