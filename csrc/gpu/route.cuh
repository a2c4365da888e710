// Which local expert a slot goes to: core/route.h's rule on the device, and the row blocks that the GEMM kernels work through.
#pragma once

#include "../core/layout.h"
#include "../core/problem.h"
#include "compat.cuh"

namespace int4_emu::gpu {

// Ids as the router wrote them; an id outside [0, global_experts) is unrouted, tested at its full width before any look-up.
struct DeviceRoute {
  const void* ids;  // [count] int32 or int64
  bool ids_are_int64;
  const int32_t* expert_map;  // [global_experts] or null
  int64_t global_experts, experts;

  __device__ int local_expert(int64_t i) const {
    const int64_t id = ids_are_int64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
    if (id < 0 || id >= global_experts) return -1;
    const int64_t local = expert_map ? expert_map[id] : id;
    return local >= 0 && local < experts ? static_cast<int>(local) : -1;
  }
};

inline DeviceRoute route_of(const MoeProblem& p) { return {p.topk_ids, p.ids_are_int64, p.expert_map, p.global_experts, p.w13.experts}; }

// Row blocks: position i of `rows` belongs to block i / block_rows, whose expert is experts[i / block_rows], -1 where unused.
// A row of `row_count` or more pads a block.
struct RowBlocks {
  const int32_t* rows;     // [blocks * block_rows]
  const int32_t* experts;  // [blocks]
  int64_t blocks, row_count;
};

// Blocks of `block` rows that any distribution of `rows` over `experts` can need.
inline int64_t worst_blocks(int64_t rows, int64_t experts, int64_t block) {
  const int64_t touched = rows < experts ? rows : experts, bound = rows / block + touched;
  return rows < bound ? rows : bound;
}

// Rows per block lie within these; an array of row positions that suits any choice.
constexpr int64_t kFewestBlockRows = 8, kMostBlockRows = 128;
inline int64_t worst_rows(int64_t rows, int64_t experts) {
  const int64_t touched = rows < experts ? rows : experts, bound = rows + touched * kMostBlockRows, each = rows * kMostBlockRows;
  return each < bound ? each : bound;
}

// Sorts `slots` slots by expert into blocks of block_rows (align.cu). `rows` [capacity_blocks * block_rows], `block_experts`
// [capacity_blocks], `offsets` [experts + 1] and `total` [1] or null, workspace of align_workspace_bytes.
struct SortTarget {
  int32_t *rows, *block_experts, *offsets, *total;
  int64_t capacity_blocks, block_rows;
};
Status launch_sort_by_expert(const DeviceRoute& route, int64_t slots, const SortTarget& target, void* workspace, Stream stream);

}  // namespace int4_emu::gpu
