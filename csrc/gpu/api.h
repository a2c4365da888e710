// Everything the binding and the tests call on a GPU. The structs are the CPU's, with device pointers in them; shapes are
// validated by the caller, the values of ids, permutations, g_idx and offsets (which a host cannot look at) in the kernels.
// Nothing here synchronises or allocates, so that a stream may be capturing. `stream` is a cudaStream_t or hipStream_t; the
// tensors' device must be the thread's current one (set_device). Workspaces: 64-byte aligned, sized from shapes alone.
#pragma once

#include <cstddef>

#include "../core/problem.h"
#include "../core/status.h"

namespace int4_emu::gpu {

// Makes `device` current for this library's own runtime (a statically linked one does not share torch's); an error where the kernels
// were built for other architectures.
Status set_device(int device);

// Codes as unsigned bytes [batch, O, I] (two's complement becomes +8 / +128).
Status unpack(const PackedMatrix& m, uint8_t* out, void* stream);
// True zero points [batch, O, C] from m.qzeros.
Status unpack_zeros(const PackedMatrix& m, uint8_t* out, void* stream);
// (q - z) * s, the product in fp32, one rounding to out_dtype; out [batch, O, I] contiguous. A g_idx outside [0, C) reads as zero weight.
Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, void* stream);

// Any format to canonical. Canonical column j is source column in_perm[j], row i is source row out_perm[i] (null = identity);
// a permutation value out of range gives zero codes and scales.
Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out, void* stream);

// canonical [batch, N, row_bytes(K)] <-> layout, same bytes in another order.
Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, void* stream);
Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, void* stream);

// Slots (token * topk + j) sorted by local expert, stable; each expert's run padded to block_size with the value tokens * topk.
size_t align_workspace_bytes(int64_t slots, int64_t experts);
Status moe_align(const AlignProblem& p, void* workspace, size_t bytes, void* stream);

// Instruction families. `automatic` lets select_atom choose; naming another forces it, or is an error that says why not. Projections whose
// weights AMD's families cannot take (strides, groups) are left to fma either way.
enum class Atom : int32_t { automatic = 0, fma = 1, mma_sm80 = 2, mfma_gfx9 = 3, wmma_gfx11 = 4, wmma_gfx12 = 5 };
const char* atom_name(Atom atom);

struct AtomChoice {
  Atom atom;             // automatic when a forced atom cannot serve, or nothing was built for the device
  const char* numerics;  // of packed weights: "exact" (codes meet x in fp32) or "rounded" (once, to x's dtype)
  char rejections[512];  // "mma_sm80: not used since x is float32; ...", empty when nothing better was passed over
};
// For `device` and an x of this dtype; asks the runtime for the device's properties, launches nothing.
AtomChoice select_atom(int device, DType x, Atom forced = Atom::automatic);

// "sm_80, sm_90a" or "gfx90a, ...": what this library's kernels were compiled for (INT4_EMU_GPU_ARCHS at build time).
const char* compiled_architectures();

size_t moe_workspace_bytes(const MoeProblem& p);
Status fused_moe(const MoeProblem& p, void* workspace, size_t bytes, void* stream, Atom atom = Atom::automatic);

// Group bounds that live on the device; p.offsets is not read. They are clamped to [0, R] in the kernel.
struct DeviceOffsets {
  const void* data = nullptr;  // [E + 1], ascending
  bool are_int64 = false;
};
size_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p);
Status grouped_gemm(const GroupedGemmProblem& p, const DeviceOffsets& offsets, void* workspace, size_t bytes, void* stream,
                    Atom atom = Atom::automatic);

}  // namespace int4_emu::gpu
