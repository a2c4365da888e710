// moe_align bit for bit against the CPU's: few and many slots, any E, ids out of range, maps.
#include "../../csrc/core/layout.h"
#include "../../csrc/cpu/api.h"
#include "harness.h"

namespace selfcheck {
namespace {

void check_case(int64_t slots, int64_t experts, int64_t block, bool wide, bool mapped, Random& random) {
  const int64_t global = mapped ? experts * 2 + 1 : experts;
  std::vector<int64_t> ids(slots);
  for (int64_t& id : ids) {
    const unsigned kind = random() % 16;
    id = kind == 0 ? -1
                   : (kind == 1 ? global : (kind == 2 && wide ? (int64_t{1} << 32) : static_cast<int64_t>(global ? random() % global : 3)));
  }
  std::vector<int32_t> narrow(ids.begin(), ids.end()), map(global);
  for (int32_t& local : map) local = random() % 3 == 0 ? -1 : static_cast<int32_t>(random() % (experts + 1));
  const int64_t capacity = round_up(slots + experts * (block - 1), block), blocks = capacity / block;

  std::vector<int32_t> rows(capacity), owners(blocks), offsets(experts + 1), total(1);
  AlignProblem c;
  c.slots = slots, c.topk_ids = wide ? static_cast<const void*>(ids.data()) : narrow.data(), c.ids_are_int64 = wide;
  c.expert_map = mapped ? map.data() : nullptr, c.global_experts = global, c.experts = experts, c.block_size = block;
  c.sorted_slots = rows.data(), c.block_experts = owners.data(), c.expert_offsets = offsets.data(), c.num_slots = total.data();
  must(cpu::moe_align(c), "cpu moe_align");

  const Buffer<int64_t> device_ids(ids);
  const Buffer<int32_t> device_narrow(narrow), device_map(map);
  Buffer<int32_t> g_rows(capacity), g_owners(blocks), g_offsets(experts + 1), g_total(1);
  Buffer<uint8_t> workspace(gpu::align_workspace_bytes(slots, experts));
  AlignProblem g;
  g.slots = slots, g.topk_ids = wide ? static_cast<const void*>(device_ids.get()) : device_narrow.get(), g.ids_are_int64 = wide;
  g.expert_map = mapped ? device_map.get() : nullptr, g.global_experts = global, g.experts = experts, g.block_size = block;
  g.sorted_slots = g_rows.get(), g.block_experts = g_owners.get(), g.expert_offsets = g_offsets.get(), g.num_slots = g_total.get();
  must(gpu::moe_align(g, workspace.get(), workspace.bytes(), nullptr), "moe_align");
  const bool ok = g_rows.host() == rows && g_owners.host() == owners && g_offsets.host() == offsets && g_total.host() == total &&
                  g_rows.guarded() && g_owners.guarded() && g_offsets.guarded() && g_total.guarded() && workspace.guarded();
  expect(ok, "moe_align slots=" + std::to_string(slots) + " E=" + std::to_string(experts) + " block=" + std::to_string(block) +
                 (wide ? " int64" : "") + (mapped ? " map" : ""));
}

}  // namespace

void check_align() {
  Random random(11);
  for (int64_t slots : {0, 1, 7, 64, 1999, 2048, 2049, 20011}) {
    for (int64_t experts : {1, 3, 8, 128, 1500}) {
      if (kernels_only && experts != 8 && experts != 1500) continue;
      if (quick && (slots > 3000 ? experts != 8 : experts == 3)) continue;
      check_case(slots, experts, experts == 3 ? 1 : 16, slots % 2 == 1, experts != 8, random);
    }
  }
  check_case(65, 0, 4, false, false, random);
  if (!quick) {
    check_case(300, 65600, 4, false, false, random);
    check_case(5000, 9001, 1, true, true, random);
  }
}

}  // namespace selfcheck
