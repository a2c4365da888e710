// Counting sort in two passes over the ids: M * k is small beside the GEMMs, and the order must be stable, so neither pass is parallel.
#include "route.h"

#include "layout.h"

namespace int4_emu {
namespace {

template <class Slot>
void sort_slots(const Route& route, int64_t count, int64_t* cursor, Slot* sorted, int64_t* position) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t expert = route.local_expert(i);
    const int64_t row = expert < 0 ? -1 : cursor[expert]++;
    if (row >= 0) sorted[row] = static_cast<Slot>(i);
    if (position) position[i] = row;
  }
}

}  // namespace

int64_t count_by_expert(const Route& route, int64_t count, int64_t block, int64_t* offsets) {
  for (int64_t e = 0; e <= route.experts; ++e) offsets[e] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t expert = route.local_expert(i);
    if (expert >= 0) ++offsets[expert + 1];  // one up: the sum below then turns counts into where each run begins
  }
  for (int64_t e = 0; e < route.experts; ++e) offsets[e + 1] = offsets[e] + round_up(offsets[e + 1], block);
  return offsets[route.experts];
}

void sort_by_expert(const Route& route, int64_t count, int64_t* cursor, int64_t* sorted, int64_t* position) {
  sort_slots(route, count, cursor, sorted, position);
}

void sort_by_expert(const Route& route, int64_t count, int64_t* cursor, int32_t* sorted, int64_t* position) {
  sort_slots(route, count, cursor, sorted, position);
}

}  // namespace int4_emu
