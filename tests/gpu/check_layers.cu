// fused_moe against the double-precision layer: every option, odd sizes, ids out of range, both atoms, the decode and tile paths.
#include <algorithm>

#include "layer_reference.h"

namespace selfcheck {
namespace {

struct Case {
  const char* name;
  int64_t tokens, hidden, intermediate, experts, topk;
  DType dtype = DType::bf16;
  int bits = 4;  // 0: dense
  int64_t group = 32;
  DType scale_dtype = DType::bf16;
  bool zeros = true, perm = false, bias = false, along_n = false, mapped = false, wide_ids = false, bad_ids = true, weight_on_input = false;
  int64_t x_slack = 0, row_slack = 0;  // elements beyond a row of x, bytes beyond a row of codes
  ActivationSpec activation = {};
  W13Order order = W13Order::halves;
  gpu::Atom atom = gpu::Atom::automatic;
};

HostWeight projection(const Case& c, int64_t n, int64_t k, bool first, Random& random) {
  HostWeight h = c.bits ? packed_weight(c.experts, n, k, c.bits, c.group < 0 ? k : c.group, c.scale_dtype, c.zeros, c.row_slack, random)
                        : dense_weight(c.experts, n, k, c.dtype, c.along_n, random);
  if (c.bias) h.add_bias(c.dtype, random);
  if (c.perm && first) h.add_perm(random);
  return h;
}

void check_case(const Case& c) {
  if (!next_case(c.dtype, c.bits)) return;
  Random random(static_cast<unsigned>(c.tokens * 31 + c.hidden));
  const bool gated = static_cast<int>(c.activation.kind) < 16;
  HostWeight w13 = projection(c, c.intermediate * (gated ? 2 : 1), c.hidden, true, random);
  HostWeight w2 = projection(c, c.hidden, c.intermediate, false, random);
  const int64_t slots = c.tokens * c.topk, global = c.mapped ? 2 * c.experts : c.experts, x_stride = c.hidden + c.x_slack;

  const Floats x(c.dtype, random_floats(c.tokens * x_stride, 1.f, random));
  std::vector<float> weights = random_floats(slots, 0.5f, random);
  std::vector<int64_t> ids(slots);
  for (int64_t& id : ids) {
    const unsigned kind = c.bad_ids ? random() % 12 : 99;
    id = kind == 0 ? -1
                   : (kind == 1 ? global : (kind == 2 && c.wide_ids ? (int64_t{1} << 32) + 1 : static_cast<int64_t>(random() % global)));
  }
  if (c.bad_ids && c.tokens > 1) std::fill(ids.begin(), ids.begin() + c.topk, -1);  // a token without any expert
  std::vector<int32_t> narrow(ids.begin(), ids.end()), map;
  for (int64_t i = 0; i < global; ++i) map.push_back(i % 2 ? static_cast<int32_t>(i / 2) : -1);
  // An unrouted slot's weight must be masked, not multiplied.
  const auto local = [&](int64_t slot) {
    const int64_t id = ids[slot];
    if (id < 0 || id >= global) return int64_t{-1};
    return c.mapped ? static_cast<int64_t>(map[id]) : id;
  };
  for (int64_t i = 0; i < slots; ++i) {
    if (local(i) < 0) weights[i] = NAN;
  }

  std::vector<double> want(c.tokens * c.hidden, 0.);
#pragma omp parallel for schedule(dynamic)
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t j = 0; j < c.topk; ++j) {
      const int64_t slot = t * c.topk + j, e = local(slot);
      if (e < 0) continue;
      std::vector<double> row(c.hidden), h(c.intermediate);
      for (int64_t i = 0; i < c.hidden; ++i) {
        row[i] = x[t * x_stride + i];
        if (c.weight_on_input) row[i] = round_to(c.dtype, static_cast<float>(row[i]) * weights[slot]);
      }
      const auto read_x = [&](int64_t k) { return row[k]; };
      for (int64_t i = 0; i < c.intermediate; ++i) {
        const bool halves = c.order == W13Order::halves;
        const int64_t gate = !gated || halves ? i : 2 * i, up = halves ? c.intermediate + i : 2 * i + 1;
        const double g = w13.dot(e, gate, read_x), u = gated ? w13.dot(e, up, read_x) : 0;
        h[i] = round_to(c.dtype, static_cast<float>(activation_value(c.activation, g, u)));
      }
      for (int64_t n = 0; n < c.hidden; ++n) {
        want[t * c.hidden + n] += (c.weight_on_input ? 1. : weights[slot]) * w2.dot(e, n, [&](int64_t k) { return h[k]; });
      }
    }
  }

  const Buffer<uint8_t> device_x(x.data);
  const Buffer<float> device_weights(weights);
  const Buffer<int64_t> device_ids(ids);
  const Buffer<int32_t> device_narrow(narrow), device_map(map);
  Buffer<uint8_t> out(c.tokens * c.hidden * dtype_bytes(c.dtype));
  MoeProblem p;
  p.tokens = c.tokens, p.hidden = c.hidden, p.intermediate = c.intermediate, p.topk = c.topk, p.x = device_x.get(), p.x_stride = x_stride;
  p.dtype = c.dtype, p.w13 = w13.w, p.w2 = w2.w, p.topk_weights = device_weights.get();
  p.topk_ids = c.wide_ids ? static_cast<const void*>(device_ids.get()) : device_narrow.get(), p.ids_are_int64 = c.wide_ids;
  p.expert_map = c.mapped ? device_map.get() : nullptr, p.global_experts = global, p.activation = c.activation, p.w13_order = c.order;
  p.weight_on_input = c.weight_on_input, p.out = out.get();
  Buffer<uint8_t> workspace(gpu::moe_workspace_bytes(p));
  must(gpu::fused_moe(p, workspace.get(), workspace.bytes(), nullptr, c.atom), c.name);

  Floats got;
  got.type = c.dtype, got.data = out.host();
  double error = relative_error(got, want);
  for (int64_t t = 0; t < c.tokens; ++t) {
    bool routed = false;
    for (int64_t j = 0; j < c.topk; ++j) routed = routed || local(t * c.topk + j) >= 0;
    for (int64_t n = 0; n < c.hidden && !routed; ++n) error += got[t * c.hidden + n] == 0.f ? 0. : 1.;
  }
  char detail[200];
  std::snprintf(detail, sizeof(detail), "%s M=%lld H=%lld I=%lld E=%lld k=%lld %s%s%d: error %.2e", gpu::atom_name(c.atom),
                (long long)c.tokens, (long long)c.hidden, (long long)c.intermediate, (long long)c.experts, (long long)c.topk,
                dtype_text(c.dtype), c.bits ? " int" : " dense ", c.bits, error);
  expect(error < tolerance(c.dtype, c.bits > 0 && c.zeros && c.atom != gpu::Atom::fma) && out.guarded() && workspace.guarded(),
         std::string("fused_moe ") + c.name, detail);
}

ActivationSpec activation(Activation kind, bool limited = false) {
  ActivationSpec a;
  a.kind = kind, a.has_limit = limited, a.limit = limited ? 0.7f : 0.f;
  if (kind == Activation::swigluoai) a.alpha = 1.702f, a.beta = 1.f;
  return a;
}

}  // namespace

void check_layers() {
  const DType types[] = {DType::bf16, DType::f16, DType::f32};
  const int64_t big = quick ? 40 : 300;
  for (DType type : types) {
    for (gpu::Atom atom : atoms_for(type)) {
      const auto run = [&](Case c) {
        c.atom = atom, c.dtype = type;
        check_case(c);
      };
      for (int bits : {0, 4, 8}) {
        Case c{"rows per expert", 1, 128, 64, 4, 2};
        c.bits = bits;
        for (int64_t tokens : {int64_t{1}, int64_t{5}, int64_t{23}, int64_t{60}, big}) c.tokens = tokens, run(c);
        if (kernels_only) continue;
        Case odd{"odd sizes", 9, 69, 37, 3, 2};
        odd.bits = bits, odd.group = 16, odd.scale_dtype = type, odd.bias = true;
        run(odd);
        odd.tokens = big / 2, odd.group = 5;
        run(odd);
        Case tail{"k past a chunk", 4, 224, 160, 4, 2};
        tail.bits = bits, tail.scale_dtype = DType::f32, tail.bias = true;
        run(tail);
        tail.tokens = 90, tail.scale_dtype = type, tail.zeros = false;
        run(tail);
      }
      if (kernels_only) continue;
      Case chunked{"scales per chunk", 6, 480, 256, 3, 2};
      chunked.group = 128, run(chunked);
      chunked.group = -1, chunked.tokens = 2, run(chunked);
      chunked.bits = 8, run(chunked);
      for (int bits : {4, 8}) {  // ... for every number of rows per block
        chunked.bits = bits, chunked.group = 128;
        for (int64_t tokens : {int64_t{36}, int64_t{60}}) chunked.tokens = tokens, run(chunked);
        // Blocks that are not full, several of an expert, k past a stage, scales of each type.
        Case many{"many rows per expert", 45, 288, 160, 5, 2};
        many.bits = bits, many.bias = true, many.scale_dtype = type;
        for (int64_t tokens : {int64_t{45}, int64_t{100}, int64_t{170}, quick ? int64_t{200} : int64_t{400}}) {
          many.tokens = tokens, many.zeros = !many.zeros, run(many);
        }
        many.zeros = false, run(many);
        many.zeros = true, many.tokens = 110, many.group = 64, many.scale_dtype = DType::f16, run(many);
        many.scale_dtype = DType::f32, many.order = W13Order::interleaved, run(many);
        many.scale_dtype = type, many.group = -1, run(many);
        many.activation = activation(Activation::relu2_no_mul), run(many);
      }
      Case narrow{"long rows, few of them", 3, 800, 64, 2, 1};
      for (int bits : {0, 4, 8}) {
        narrow.bits = bits;
        for (int64_t group : {-1, 32}) narrow.group = group, run(narrow);
      }
    }
  }
  if (kernels_only) return;
  for (gpu::Atom atom : atoms_for(DType::bf16)) {
    Case options{"options", 20, 96, 64, 4, 2};
    options.atom = atom;
    for (int64_t tokens : {int64_t{3}, int64_t{70}}) {
      options.tokens = tokens;
      for (int bits : {0, 4}) {
        const auto run = [&](Case c, const char* name) {
          c.name = name, c.bits = bits, c.bias = true;
          check_case(c);
        };
        for (Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu2, Activation::silu_no_mul,
                                Activation::gelu_no_mul, Activation::gelu_tanh_no_mul, Activation::relu2_no_mul}) {
          Case c = options;
          c.activation = activation(kind);
          run(c, "activation");
        }
        Case c = options;
        c.activation = activation(Activation::silu, true), run(c, "limit");
        c.activation = activation(Activation::swigluoai, true), c.order = W13Order::interleaved, run(c, "swigluoai interleaved");
        c = options, c.mapped = c.wide_ids = true, run(c, "map and int64 ids");
        c = options, c.topk = 1, c.weight_on_input = true, run(c, "weight on input");
        c = options, c.perm = bits > 0, run(c, "act-order");
        c = options, c.x_slack = 3, run(c, "x rows unaligned");
        c = options, c.row_slack = 5, run(c, "code rows unaligned");
        c = options, c.along_n = true, run(c, "unit n stride");
        c = options, c.experts = 1, run(c, "one expert");
        c = options, c.experts = quick ? 70 : 1500, c.hidden = 32, c.intermediate = 32, run(c, "many experts");
      }
    }
  }
}

}  // namespace selfcheck
