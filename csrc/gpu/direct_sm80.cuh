// Row blocks without a sort, where slots are few.
#pragma once

#include "gemm_args.h"

namespace int4_emu::gpu {

// The row blocks that are in use: those of the sort, or made here from at most 32 ids, in the order of the experts' first slots.
struct UsedBlocks {
  const int32_t *rows, *experts;  // as in RowBlocks; a row below 0 pads a block too
  int used;
};

// For the whole thread block.
template <int kTokens, int kThreads>
__device__ inline UsedBlocks used_blocks(const GemmArgs& a) {
  __shared__ int32_t rows[kDirectSlots * kTokens], experts[kDirectSlots];
  __shared__ int used;
  const int thread = static_cast<int>(threadIdx.x);
  if (a.direct_slots == 0) {
    int count = 0;
    for (int64_t base = 0; base < a.blocks.blocks; base += kThreads) {
      count += __syncthreads_count(base + thread < a.blocks.blocks && a.blocks.experts[base + thread] >= 0);
    }
    return {a.blocks.rows, a.blocks.experts, count};
  }
  if (thread < 32) {
    const int expert = thread < a.direct_slots ? a.route.local_expert(thread) : -1;
    for (int i = thread; i < kDirectSlots * kTokens; i += 32) rows[i] = -1;
    __syncwarp();
    uint32_t same = __match_any_sync(0xffffffffu, expert);
    const int rank = __popc(same & ((1u << thread) - 1));
    const bool leads = expert >= 0 && rank % kTokens == 0;
    const uint32_t leaders = __ballot_sync(0xffffffffu, leads);
    if (expert >= 0) {
      for (int i = rank / kTokens * kTokens; i > 0; --i) same &= same - 1;
      const int block = __popc(leaders & ((same & -same) - 1));  // of the slot that leads this one's block
      rows[block * kTokens + rank % kTokens] = thread;
      if (leads) experts[block] = expert;
    }
    if (thread == 0) used = __popc(leaders);
  }
  __syncthreads();
  return {rows, experts, used};
}

}  // namespace int4_emu::gpu
