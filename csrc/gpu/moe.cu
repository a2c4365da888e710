// fused_moe: sort slots by expert -> W13 with gather, activation in its epilogue -> W2 into fp32 slots -> weighted sum in slot order.
#include "gather.h"
#include "numeric.cuh"
#include "select.h"
#include "workspace.h"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 256;

bool is_gated(Activation kind) { return static_cast<int32_t>(kind) < 16; }

// out[t] = sum over the routed slots j, in order, of weight * y[t * topk + j]; unrouted slots, whose y nobody wrote, are not read.
// A thread: four neighbouring columns.
__global__ void __launch_bounds__(kThreads) moe_sum_kernel(DeviceRoute route, const float* y, const float* topk_weights, int64_t topk,
                                                           int64_t hidden, int64_t column_blocks, void* out, DType dtype) {
  wait_for_previous();
  const int64_t token = blockIdx.x / column_blocks;
  const int64_t column = (blockIdx.x % column_blocks * kThreads + threadIdx.x) * 4;
  if (column >= hidden) return;
  const int width = hidden - column < 4 ? static_cast<int>(hidden - column) : 4;
  const bool whole = hidden % 4 == 0;
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  // Several slots' loads at a time, added in slot order.
  constexpr int kAtOnce = 8;
  for (int64_t first = 0; first < topk; first += kAtOnce) {
    bool routed[kAtOnce];
    float weight[kAtOnce], v[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) routed[j] = first + j < topk && route.local_expert(token * topk + first + j) >= 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      weight[j] = v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0.f;
      if (!routed[j]) continue;
      const int64_t slot = token * topk + first + j;
      const float* row = y + slot * hidden + column;
      weight[j] = topk_weights ? topk_weights[slot] : 1.f;
      if (whole) {
        const float4 four = *reinterpret_cast<const float4*>(row);
        v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[j][i] = i < width ? row[i] : 0.f;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!routed[j]) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fmaf(weight[j], v[j][i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < width) store_float(out, dtype, token * hidden + column + i, sum[i]);
  }
}

GemmArgs up_args(const MoeProblem& p, void* h, int64_t h_stride) {
  GemmArgs a;
  a.w = p.w13;
  a.x = p.x;
  a.x_stride = p.x_stride;
  a.x_dtype = p.dtype;
  a.row_divisor = static_cast<int>(p.topk);
  a.row_weight = p.weight_on_input ? p.topk_weights : nullptr;
  a.out = h;
  a.out_stride = h_stride;
  a.out_dtype = p.dtype;
  a.columns = p.intermediate;
  a.gated = is_gated(p.activation.kind);
  a.activated = true;
  a.column_step = p.w13_order == W13Order::halves ? 1 : 2;
  a.part_step = p.w13_order == W13Order::halves ? p.intermediate : 1;
  a.activation = p.activation;
  describe_memory(a);
  return a;
}

GemmArgs down_args(const MoeProblem& p, const void* h, int64_t h_stride, float* y) {
  GemmArgs a;
  a.w = p.w2;
  a.x = h;
  a.x_stride = h_stride;
  a.x_dtype = p.dtype;
  a.out = y;
  a.out_stride = p.hidden;
  a.out_dtype = DType::f32;
  a.columns = p.hidden;
  describe_memory(a);
  return a;
}

// The workspace and the two projections in it: one list for moe_workspace_bytes and fused_moe. Every block size is provided for, as the
// choice depends on more than shapes.
struct Layer {
  Layer(const MoeProblem& p, void* base) : slots(p.tokens * p.topk) {
    Arena arena(base);
    rows = arena.take<int32_t>(worst_rows(slots, p.w13.experts));
    block_experts = arena.take<int32_t>(worst_blocks(slots, p.w13.experts, kFewestBlockRows));
    sort = arena.take<char>(static_cast<int64_t>(align_workspace_bytes(slots, p.w13.experts)));
    const int64_t h_stride = round_up(p.intermediate, 8);
    char* h = arena.take<char>(slots * h_stride * dtype_bytes(p.dtype));  // [slots][h_stride] in x's dtype
    y = arena.take<float>(slots * p.hidden);
    up = up_args(p, h, h_stride);
    down = down_args(p, h, h_stride, y);
    const int64_t first = gather_bytes(up, slots), second = gather_bytes(down, slots);
    gathered = arena.take<char>(first > second ? first : second);
    bytes = arena.used();
  }

  int64_t slots;
  int32_t *rows, *block_experts;  // row blocks of slots
  char *sort, *gathered;
  float* y;  // [slots][H]
  GemmArgs up, down;
  size_t bytes;
};

}  // namespace

size_t moe_workspace_bytes(const MoeProblem& p) { return Layer(p, nullptr).bytes; }

Status fused_moe(const MoeProblem& p, void* workspace, size_t bytes, void* stream_pointer, Atom atom) {
  if (p.tokens == 0 || p.hidden == 0) return {};
  const Stream stream = as_stream(stream_pointer);
  const Layer layer(p, workspace);
  if (bytes < layer.bytes) return make_error(Code::internal, "fused_moe needs a workspace of %zu bytes, got %zu", layer.bytes, bytes);
  if (layer.slots > INT32_MAX - kMostBlockRows) {
    return make_error(Code::unsupported, "topk_ids must have fewer than 2^31 - 128 slots, got %lld", (long long)layer.slots);
  }
  const DeviceRoute route = route_of(p);
  if (p.w13.experts > 0 && layer.slots > 0) {
    GemmArgs projections[2] = {layer.up, layer.down};
    Plan plan;
    // The slots spread over all experts, of which other ranks may hold some.
    if (Status s = make_plan(atom, projections, 2, layer.slots, p.global_experts, &plan); !s) return s;
    const int64_t blocks = worst_blocks(layer.slots, p.w13.experts, plan.block_rows);
    const SortTarget target{layer.rows, layer.block_experts, nullptr, nullptr, blocks, plan.block_rows};
    const bool few = layer.slots <= kDirectSlots && !needs_gather(projections[0]) && !needs_gather(projections[1]);
    const bool direct = few && (plan.path == Path::decode || (plan.path == Path::dense && plan.block_rows == kDirectRows));
    if (!direct) {
      if (Status s = launch_sort_by_expert(route, layer.slots, target, layer.sort, stream); !s) return s;
    }
    for (GemmArgs& a : projections) {
      a.blocks = {layer.rows, layer.block_experts, blocks, layer.slots};
      a.route = route;
      a.direct_slots = direct ? static_cast<int>(layer.slots) : 0;
      a.wait_early = &a == projections;
      if (Status s = launch_gather(a, plan.block_rows, layer.gathered, stream); !s) return s;
      if (Status s = launch_gemm(a, plan, stream); !s) return s;
    }
  }
  const int64_t column_blocks = ceil_div(p.hidden, kThreads * 4), sum_blocks = p.tokens * column_blocks;
  return launch_after("moe_sum_kernel", moe_sum_kernel, sum_blocks, kThreads, 0, stream, route, layer.y,
                p.weight_on_input ? nullptr : p.topk_weights, p.topk, p.hidden, column_blocks, p.out,
                p.out_is_f32 ? DType::f32 : p.dtype);
}

}  // namespace int4_emu::gpu
