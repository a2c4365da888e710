// moe_align: the routing of `core/route.h` in the padded form that callers with their own GEMM want.
#include <cstdlib>

#include "../core/layout.h"
#include "../core/route.h"
#include "api.h"

namespace int4_emu::cpu {

Status moe_align(const AlignProblem& p) {
  // Division instead of a product: slots + experts * (block - 1) must fit the int32 outputs.
  const int64_t limit = INT32_MAX;
  if (p.block_size < 1) return make_error(Code::invalid_value, "block_size must be at least 1, got %lld", (long long)p.block_size);
  if (p.slots > limit || (p.block_size > 1 && p.experts > (limit - p.slots) / (p.block_size - 1))) {
    return make_error(Code::invalid_value,
                      "topk_ids.numel() + num_experts * (block_size - 1) must be at most 2147483647, got %lld slots (num_experts=%lld, "
                      "block_size=%lld)",
                      (long long)p.slots, (long long)p.experts, (long long)p.block_size);
  }
  const int64_t capacity = round_up(p.slots + p.experts * (p.block_size - 1), p.block_size);
  const Route route{p.topk_ids, p.ids_are_int64, p.expert_map, p.global_experts, p.experts};
  int64_t* offsets = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * (p.experts + 1)));
  if (!offsets) return make_error(Code::internal, "out of memory: %lld expert counters", (long long)p.experts);

  // The outputs' sizes depend on the shapes alone, so a host can capture them; what the ids leave unused is marked.
  const int64_t total = count_by_expert(route, p.slots, p.block_size, offsets);
  for (int64_t e = 0; e <= p.experts; ++e) p.expert_offsets[e] = static_cast<int32_t>(offsets[e]);
  for (int64_t e = 0; e < p.experts; ++e) {
    for (int64_t b = offsets[e] / p.block_size; b < offsets[e + 1] / p.block_size; ++b) p.block_experts[b] = static_cast<int32_t>(e);
  }
  for (int64_t b = total / p.block_size; b < capacity / p.block_size; ++b) p.block_experts[b] = -1;
  for (int64_t i = 0; i < capacity; ++i) p.sorted_slots[i] = static_cast<int32_t>(p.slots);
  sort_by_expert(route, p.slots, offsets, p.sorted_slots, nullptr);
  p.num_slots[0] = static_cast<int32_t>(total);
  std::free(offsets);
  return {};
}

}  // namespace int4_emu::cpu
