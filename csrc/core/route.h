// Which local expert each (token, slot) goes to, and the stable counting sort of slots by expert.
#pragma once

#include "types.h"

namespace int4_emu {

// Ids of a run of slots, as the router wrote them. An id outside [0, global_experts) is unrouted, tested at its full width.
struct Route {
  const void* ids = nullptr;            // [count] int32 or int64
  bool ids_are_int64 = false;
  const int32_t* expert_map = nullptr;  // [global_experts] or null: global id -> local expert, outside [0, experts) = elsewhere
  int64_t global_experts = 0, experts = 0;

  // The local expert of slot i, or -1.
  int64_t local_expert(int64_t i) const {
    const int64_t id = ids_are_int64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
    if (id < 0 || id >= global_experts) return -1;
    const int64_t local = expert_map ? expert_map[id] : id;
    return local >= 0 && local < experts ? local : -1;
  }
};

// Fills offsets [experts + 1] with where each expert's run begins when every run is padded to a multiple of `block`;
// offsets[experts] is the padded total, which is returned.
int64_t count_by_expert(const Route& route, int64_t count, int64_t block, int64_t* offsets);

// Stable: sorted[cursor[e]++] = i over the slots in order. `cursor` [experts] begins as a copy of the offsets and ends one
// past each expert's last slot. `position` [count], where given, gets the row of slot i, or -1.
void sort_by_expert(const Route& route, int64_t count, int64_t* cursor, int64_t* sorted, int64_t* position);
void sort_by_expert(const Route& route, int64_t count, int64_t* cursor, int32_t* sorted, int64_t* position);

}  // namespace int4_emu
