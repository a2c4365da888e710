// What one grouped GEMM over row blocks is asked for, and the launchers of each instruction family.
#pragma once

#include "../core/problem.h"
#include "api.h"
#include "route.cuh"

namespace int4_emu::gpu {

enum class WeightKind : int { dense = 0, int4 = 1, int8 = 2 };

inline WeightKind kind_of(const Weight& w) { return !w.packed ? WeightKind::dense : (w.bits == 4 ? WeightKind::int4 : WeightKind::int8); }

// Output column c of a gated layer joins two weight rows, gate and up: row(c, part) = c * column_step + part * part_step.
// A tile of weight rows holds them in turn, eight and eight, so that both land in one thread.
struct GemmArgs {
  Weight w;
  RowBlocks blocks;
  const void* x = nullptr;  // row r of the blocks reads row r / row_divisor of x
  int64_t x_stride = 0;
  int row_divisor = 1;
  DType x_dtype = DType::f32;
  const float* row_weight = nullptr;  // [rows] or null: multiplies x in fp32, rounded to x's dtype
                                      // (gone, like w.perm, after launch_gather: 16-bit x then comes in aligned units of eight)
  void* out = nullptr;                // row r of the blocks writes row r of out
  int64_t out_stride = 0;
  DType out_dtype = DType::f32;
  int64_t columns = 0;     // of out
  bool out_pairs = false;  // two neighbouring elements of out may be stored at once
  bool gated = false, activated = false;
  int64_t column_step = 1, part_step = 0;
  ActivationSpec activation;
  bool w_vector = false;  // weights come in 16-byte units inside one group
  int group_shift = -1;   // log2 of the group size where it is a power of two, 31 where there is one group
  DeviceRoute route = {};
  int direct_slots = 0;    // above 0: no sort was run, and so many slots find their experts by `route` (kDirectSlots)
  bool wait_early = true;  // on the decode path: the kernel before must end before weights and routing are read, not only x
};

// Group of column k, without a division where that can be.
__device__ inline uint32_t group_of(const GemmArgs& a, int k) {
  return a.group_shift >= 0 ? static_cast<uint32_t>(k) >> a.group_shift : static_cast<uint32_t>(k) / static_cast<uint32_t>(a.w.group_size);
}

// Rows per block that a family has kernels for, smallest first, 0-terminated.
constexpr int kFmaRows[] = {16, 64, 0};
constexpr int kStreamRows[] = {16, 32, 64, 0};
constexpr int kMmaRows[] = {16, 32, 64, 128, 0};
constexpr int kDenseRows[] = {16, 64, 128, 0};
constexpr int kPackedRows[] = {32, 80, 0}, kPackedZerosRows[] = {32, 64, 0};  // zero points, or scales in another type than x
constexpr int kDecodeRows[] = {8, 0};

// Rows per expert up to which packed weights take the decode path: where groups are at least 128 wide, and where they are narrower.
constexpr int64_t kDecodeAverage = 4, kDecodeAverageNarrow = 3;
constexpr int64_t kDecodeDense = 2;  // rows in all up to which dense ones do, whose own kernels would not fill the device
// Slots up to which row blocks are made without a sort: on the decode path, and by the dense kernels of this block size.
constexpr int64_t kDirectSlots = 32;
constexpr int kDirectRows = 16;

Status launch_gemm_fma(const GemmArgs& a, int block_rows, Stream stream);

// mma.sync m16n8k16 kernels for x in one dtype, in translation units of their own; absent from a build for other vendors.
Status launch_gemm_mma_sm80_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_mma_sm80_fp16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_dense_mma_sm80_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_dense_mma_sm80_fp16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_packed_mma_sm80_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_packed_mma_sm80_fp16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_decode_mma_sm80_bf16(const GemmArgs& a, Stream stream);
Status launch_decode_mma_sm80_fp16(const GemmArgs& a, Stream stream);

// AMD's matrix instructions (stream.cuh), likewise. They take what stream_refuses() in select.cu lets through.
Status launch_gemm_mfma_gfx9_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_mfma_gfx9_fp16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_wmma_gfx11_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_wmma_gfx11_fp16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_wmma_gfx12_bf16(const GemmArgs& a, int block_rows, Stream stream);
Status launch_gemm_wmma_gfx12_fp16(const GemmArgs& a, int block_rows, Stream stream);

}  // namespace int4_emu::gpu
