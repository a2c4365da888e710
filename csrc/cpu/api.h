// Everything the binding and the native tests call on a CPU. Arguments are validated by the caller; workspace comes from it.
#pragma once

#include <cstddef>

#include "../core/parallel.h"
#include "../core/problem.h"
#include "../core/status.h"

namespace int4_emu::cpu {

// Codes as unsigned bytes [batch, O, I] (two's complement becomes +8 / +128).
Status unpack(const PackedMatrix& m, uint8_t* out, const Parallel& parallel);
// True zero points [batch, O, C] from m.qzeros.
Status unpack_zeros(const PackedMatrix& m, uint8_t* out, const Parallel& parallel);
// (q - z) * s, the product in fp32, one rounding to out_dtype; out [batch, O, I] contiguous.
Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, const Parallel& parallel);

// Any format to canonical. Canonical column j is source column in_perm[j], row i is source row out_perm[i] (null = identity).
Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out, const Parallel& parallel);

// canonical [batch, N, row_bytes(K)] <-> layout, same bytes in another order.
Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, const Parallel& parallel);
Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, const Parallel& parallel);

// Slots (token * topk + j) sorted by local expert, stable; each expert's run padded to block_size with the value tokens * topk.
Status moe_align(const AlignProblem& p);

size_t moe_workspace_bytes(const MoeProblem& p, int threads);
Status fused_moe(const MoeProblem& p, void* workspace, size_t bytes, const Parallel& parallel);

size_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p, int threads);
Status grouped_gemm(const GroupedGemmProblem& p, void* workspace, size_t bytes, const Parallel& parallel);

// The instruction set that the last three use: "portable", "avx2", "avx512" or "amx". INT4_EMU_CPU_ISA overrides the choice;
// a name this machine or build lacks is an error that says why.
struct IsaChoice {
  const char* name;          // null when the override cannot be served
  char rejections[512];      // "amx: the CPU has no AMX-BF16; avx512: ...", why better sets were not taken, or why the override failed
};
IsaChoice select_isa();
// "exact" or "rounded": whether packed weights meet x of this dtype in fp32 or after one rounding to it.
const char* packed_numerics(DType x);

}  // namespace int4_emu::cpu
