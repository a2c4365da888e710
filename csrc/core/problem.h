// The problems that kernels solve, as plain structs: shapes, pointers, strides. Filled and checked by the binding.
#pragma once

#include "types.h"

namespace int4_emu {

// One projection of all local experts: out[n] = sum_k w[e, n, k] * x[k] + bias[e, n].
struct Weight {
  int64_t experts = 0, n = 0, k = 0;
  const void* data = nullptr;  // dense: elements [E, N, K]; packed: bytes [E, N, K * bits / 8]
  bool packed = false;
  DType dtype = DType::f32;                                  // dense only
  int64_t expert_stride = 0, n_stride = 0, k_stride = 1;     // dense: elements; packed: bytes (k_stride unused)
  int bits = 4;                                              // packed only, from here on
  Layout layout = Layout::canonical;
  const void* scales = nullptr;                              // [E, N, C]
  DType scale_dtype = DType::f32;
  const uint8_t* zeros = nullptr;                            // [E, N, C]; null = midpoint 8 or 128
  int64_t groups = 0, group_size = 0;                        // C = ceil(K / group_size)
  const int32_t* perm = nullptr;                             // [E, K] or null: canonical column j reads x[perm[e, j]]
  const void* bias = nullptr;                                // [E, N] or null
  DType bias_dtype = DType::f32;
};

struct ActivationSpec {
  Activation kind = Activation::silu;
  bool has_limit = false;
  float limit = 0.f, alpha = 0.f, beta = 0.f;
};

struct MoeProblem {
  int64_t tokens = 0, hidden = 0, intermediate = 0, topk = 0;
  const void* x = nullptr;  // [M, H], last stride 1
  int64_t x_stride = 0;     // elements between rows
  DType dtype = DType::f32; // of x and out
  Weight w13;               // [E, 2I or I, H]
  Weight w2;                // [E, H, I]
  const float* topk_weights = nullptr;  // [M, k]
  const void* topk_ids = nullptr;       // [M, k] int32 or int64, global ids; outside [0, global_experts) = unrouted
  bool ids_are_int64 = false;
  const int32_t* expert_map = nullptr;  // [global_experts] or null: global id -> local slot, -1 = elsewhere
  int64_t global_experts = 0;
  ActivationSpec activation;
  W13Order w13_order = W13Order::halves;
  bool weight_on_input = false;         // topk == 1 only
  void* out = nullptr;                  // [M, H] contiguous
  bool out_is_f32 = false;              // out is fp32, whatever dtype says
};

// Ragged groups of rows: rows offsets[e]..offsets[e + 1] of x times weight[e]^T. Rows outside every group become zero.
struct GroupedGemmProblem {
  int64_t rows = 0;
  const void* x = nullptr;  // [R, K], last stride 1
  int64_t x_stride = 0;
  DType dtype = DType::f32;
  Weight weight;
  const int64_t* offsets = nullptr;  // [E + 1], ascending, within [0, R]: checked by the binding
  void* out = nullptr;               // [R, N] contiguous
};

// Checkpoint tensors of a batch of matrices [batch, O, I] in any format.
struct PackedMatrix {
  Format format = Format::canonical;
  int bits = 4;
  int64_t batch = 1, out_features = 0, in_features = 0, groups = 0, group_size = 0;
  const void* qweight = nullptr;  // contiguous
  const void* scales = nullptr;   // contiguous; null where only codes are wanted
  DType scale_dtype = DType::f32;
  const void* qzeros = nullptr;   // contiguous; null = midpoint
  const int32_t* g_idx = nullptr; // [batch, I] or null; values within [0, groups): checked by the binding
};

// Where `repack` writes canonical tensors; each matrix of the batch is contiguous.
struct RepackOut {
  uint8_t* qweight;  // [batch, O, row_bytes(I)]
  void* scales;      // [batch, O, C], the source's dtype
  uint8_t* zeros;    // [batch, O, C] or null
};

// Slots (token * topk + j) to sort by local expert.
struct AlignProblem {
  int64_t slots = 0;  // tokens * topk
  const void* topk_ids = nullptr;
  bool ids_are_int64 = false;
  const int32_t* expert_map = nullptr;
  int64_t global_experts = 0, experts = 0, block_size = 1;
  int32_t* sorted_slots = nullptr;    // [round_up(slots + experts * (block_size - 1), block_size)]
  int32_t* block_experts = nullptr;   // [capacity / block_size], -1 where unused
  int32_t* expert_offsets = nullptr;  // [experts + 1], in padded rows
  int32_t* num_slots = nullptr;       // [1] = expert_offsets[experts]
};

}  // namespace int4_emu
