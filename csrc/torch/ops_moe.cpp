// The MoE ops: routing, grouped GEMM and the whole layer.

#include "../core/layout.h"
#include "device.h"
#include "ops.h"

namespace int4_emu::binding {
namespace {

// The quantisation arguments of one packed projection.
struct Quantization {
  const Tensor& scales;
  const OptionalTensor& qzeros;
  const OptionalTensor& perm;
  int64_t group_size, bits, layout;
};

// A checked weight; holds the contiguous copies that `w` points into.
struct WeightArgument {
  Weight w;
  std::vector<Tensor> held;

  template <class T>
  const T* hold(const Tensor& t) {
    held.push_back(as_contiguous(t));
    return static_cast<const T*>(held.back().const_data_ptr());
  }
};

void check_dense_dtype(const Tensor& w, const std::string& name, ScalarType x, const char* x_name) {
  check_float(w, name.c_str());
  if (w.scalar_type() != x && x != ScalarType::Float)
    fail(name, " must be ", dtype_name(x), " like ", x_name, " (float32 ", x_name, " take any), got ", dtype_name(w.scalar_type()));
}

// weight [E, N, K]; N rows are known from elsewhere or n = -1. `name` is the argument's, e.g. "w13"; x_name that of the activations.
WeightArgument dense_weight(const Tensor& t, const std::string& name, int64_t experts, int64_t n, int64_t k, const char* formula, const Tensor& x,
                            const char* x_name) {
  check_dim(t, name.c_str(), {3}, formula);
  check_dense_dtype(t, name, x.scalar_type(), x_name);
  const std::string context = "E=" + std::to_string(experts) + ", " + std::string(x_name) + " " + shape_text(x);
  check_shape(t, name.c_str(), {experts, n, k}, formula, context);
  if (t.numel() > 0 && t.stride(2) != 1 && t.stride(1) != 1)
    fail(name, " must be contiguous ", formula, " or the transposed view of a contiguous [E, K, N], never copied: stride 1 in one of the last two",
         " dimensions, got strides [", t.stride(0), ", ", t.stride(1), ", ", t.stride(2), "]");
  WeightArgument a;
  a.w.experts = experts, a.w.n = n, a.w.k = k;
  a.w.data = t.const_data_ptr();
  a.w.dtype = to_dtype(t.scalar_type());
  a.w.expert_stride = t.stride(0), a.w.n_stride = t.stride(1), a.w.k_stride = t.stride(2);
  return a;
}

WeightArgument packed_weight(const Tensor& t, const std::string& prefix, const std::string& name, int64_t experts, int64_t n, int64_t k,
                             const char* n_name, const char* k_name, const Quantization& q) {
  const std::string e_n = std::string("[E, ") + n_name + ", ";
  const std::string context = std::string(n_name) + "=" + std::to_string(n) + ", " + k_name + "=" + std::to_string(k) + ", " + prefix +
                              "group_size=" + std::to_string(q.group_size) + ", " + prefix + "bits=" + std::to_string(q.bits);
  check_bits(q.bits, (prefix + "bits").c_str());
  check_dtype(t, name.c_str(), {ScalarType::Byte});
  const int bits = static_cast<int>(q.bits);
  check_shape(t, name.c_str(), {experts, n, row_bytes(k, bits)}, (e_n + k_name + " * bits / 8]").c_str(), context);
  check_group_size(q.group_size, k, (prefix + "group_size").c_str(), k_name);
  const int64_t groups = ceil_div(k, q.group_size);
  const std::string scale_name = prefix + "scales", zero_name = prefix + "qzeros", perm_name = prefix + "perm";
  const std::string group_formula = e_n + k_name + "/group_size]";
  check_float(q.scales, scale_name.c_str());
  check_shape(q.scales, scale_name.c_str(), {experts, n, groups}, group_formula.c_str(), context);
  WeightArgument a;
  a.w.packed = true;
  a.w.experts = experts, a.w.n = n, a.w.k = k;
  a.w.bits = bits;
  a.w.layout = check_layout(q.layout, n, k, bits, name.c_str());
  // Rows of codes may be strided (an expert subset, say); a tile order and anything stranger is read from a contiguous copy.
  const bool rows_ok = a.w.layout == Layout::canonical && t.size(2) > 0 && t.stride(2) == 1 && t.stride(1) >= t.size(2);
  if (rows_ok) {
    a.w.data = t.const_data_ptr();
    a.w.expert_stride = t.stride(0), a.w.n_stride = t.stride(1);
  } else {
    a.w.data = a.hold<uint8_t>(t);
    a.w.n_stride = t.size(2), a.w.expert_stride = n * t.size(2);
  }
  a.w.scales = a.hold<char>(q.scales);
  a.w.scale_dtype = to_dtype(q.scales.scalar_type());
  a.w.groups = groups, a.w.group_size = q.group_size;
  if (q.qzeros) {
    check_dtype(*q.qzeros, zero_name.c_str(), {ScalarType::Byte});
    check_shape(*q.qzeros, zero_name.c_str(), {experts, n, groups}, group_formula.c_str(), context);
    a.w.zeros = a.hold<uint8_t>(*q.qzeros);
  }
  if (q.perm) {
    check_dtype(*q.perm, perm_name.c_str(), {ScalarType::Int});
    check_shape(*q.perm, perm_name.c_str(), {experts, k}, (std::string("[E, ") + k_name + "]").c_str(), context);
    a.w.perm = a.hold<int32_t>(*q.perm);
    // One pass over E * K integers, a few microseconds beside the GEMM: no unvalidated index may reach the gather.
    check_index_range(a.held.back(), perm_name.c_str(), k, k_name);
  }
  return a;
}

void add_bias(WeightArgument& a, const OptionalTensor& bias, const char* name, const char* formula) {
  if (!bias) return;
  check_float(*bias, name);
  check_shape(*bias, name, {a.w.experts, a.w.n}, formula, "");
  a.w.bias = a.hold<char>(*bias);
  a.w.bias_dtype = to_dtype(bias->scalar_type());
}

// x with unit last stride, whatever its row stride.
Tensor row_major(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1 ? x : torch::stable::contiguous(x); }

struct Routing {
  const Tensor &weights, &ids;
  const OptionalTensor& expert_map;
  int64_t global_num_experts;
};

struct Options {
  int64_t activation;
  Float limit, alpha, beta;
  int64_t w13_order;
  bool weight_on_input;
};

// The checked problem of one layer, without `out`.
struct Layer {
  MoeProblem p;
  WeightArgument w13, w2;
  std::vector<Tensor> held;

  void run(Tensor& out, const char* op) {
    p.w13 = w13.w;
    p.w2 = w2.w;
    p.out = out.mutable_data_ptr();
    p.out_is_f32 = out.scalar_type() == ScalarType::Float;
    if (p.tokens == 0 || p.hidden == 0) return;
    raise_if_error(device::fused_moe(p, held[0]), op);
  }
};

int64_t gate_factor(int64_t activation) { return is_gated(static_cast<Activation>(activation)) ? 2 : 1; }

Layer layer_of(const Tensor& x, const Routing& r, const Options& o, int64_t experts) {
  Layer layer;
  MoeProblem& p = layer.p;
  check_dim(x, "hidden_states", {2}, "[M, H]");
  check_float(x, "hidden_states");
  p.tokens = x.size(0), p.hidden = x.size(1);
  p.dtype = to_dtype(x.scalar_type());
  p.activation = check_activation(o.activation, o.limit, o.alpha, o.beta);
  if (o.w13_order != 0 && o.w13_order != 1) fail("w13_order must be halves (0) or interleaved (1), got ", o.w13_order);
  p.w13_order = static_cast<W13Order>(o.w13_order);
  check_dim(r.ids, "topk_ids", {2}, "[M, k]");
  check_dtype(r.ids, "topk_ids", {ScalarType::Int, ScalarType::Long});
  p.topk = r.ids.size(1);
  const std::string context = "hidden_states " + shape_text(x);
  check_shape(r.ids, "topk_ids", {p.tokens, p.topk}, "[M, k]", context);
  check_dtype(r.weights, "topk_weights", {ScalarType::Float});
  check_shape(r.weights, "topk_weights", {p.tokens, p.topk}, "[M, k]", "topk_ids " + shape_text(r.ids));
  p.weight_on_input = o.weight_on_input;
  if (o.weight_on_input && p.topk != 1) fail("apply_router_weight_on_input needs k = 1, got k = ", p.topk);
  p.global_experts = experts;
  if (r.expert_map) {
    check_dtype(*r.expert_map, "expert_map", {ScalarType::Int});
    check_dim(*r.expert_map, "expert_map", {1}, "[global E]");
    p.global_experts = r.expert_map->size(0);
  }
  if (r.global_num_experts != -1 && r.global_num_experts != p.global_experts)
    fail("global_num_experts must be -1 or ", r.expert_map ? "len(expert_map)" : "E", " = ", p.global_experts, ", got ", r.global_num_experts);
  layer.held.push_back(row_major(x));
  p.x = layer.held.back().const_data_ptr();
  p.x_stride = layer.held.back().stride(0);
  layer.held.push_back(as_contiguous(r.weights));
  p.topk_weights = static_cast<const float*>(layer.held.back().const_data_ptr());
  layer.held.push_back(as_contiguous(r.ids));
  check_ids(layer.held.back(), p.global_experts);
  p.topk_ids = layer.held.back().const_data_ptr();
  p.ids_are_int64 = r.ids.scalar_type() == ScalarType::Long;
  if (r.expert_map) {
    layer.held.push_back(as_contiguous(*r.expert_map));
    p.expert_map = static_cast<const int32_t*>(layer.held.back().const_data_ptr());
  }
  return layer;
}

void check_layer_out(const Tensor& out, const Tensor& x, std::initializer_list<NamedTensor> weights, const Routing& r) {
  if (x.scalar_type() == ScalarType::Float)
    check_dtype(out, "out", {ScalarType::Float});
  else
    check_dtype(out, "out", {x.scalar_type(), ScalarType::Float});
  check_out(out, {x.size(0), x.size(1)}, "[M, H]", "hidden_states " + shape_text(x));
  check_disjoint(out, {{x, "hidden_states"}, {r.weights, "topk_weights"}, {r.ids, "topk_ids"}, {r.expert_map, "expert_map"}});
  check_disjoint(out, weights);
}

Layer dense_layer(const Tensor& x, const Tensor& w13, const Tensor& w2, const Routing& r, const OptionalTensor& w13_bias,
                  const OptionalTensor& w2_bias, const Options& o) {
  check_dim(w13, "w13", {3}, "[E, 2I, H]");
  Layer layer = layer_of(x, r, o, w13.size(0));
  MoeProblem& p = layer.p;
  const int64_t factor = gate_factor(o.activation), rows = w13.size(1), experts = w13.size(0);
  if (rows % factor != 0) fail("w13 must have 2I rows (gate and up), got ", rows, " in ", shape_text(w13));
  p.intermediate = rows / factor;
  layer.w13 = dense_weight(w13, "w13", experts, rows, p.hidden, factor == 2 ? "[E, 2I, H]" : "[E, I, H]", x, "hidden_states");
  layer.w2 = dense_weight(w2, "w2", experts, p.hidden, p.intermediate, "[E, H, I]", x, "hidden_states");
  add_bias(layer.w13, w13_bias, "w13_bias", factor == 2 ? "[E, 2I]" : "[E, I]");
  add_bias(layer.w2, w2_bias, "w2_bias", "[E, H]");
  return layer;
}

Layer packed_layer(const Tensor& x, const Tensor& w13, const Tensor& w2, const Routing& r, const Quantization& q13, const Quantization& q2,
                   int64_t intermediate, const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const Options& o) {
  check_dim(w13, "w13", {3}, "[E, 2I, H * bits / 8]");
  check_dim(w2, "w2", {3}, "[E, H, I * bits / 8]");
  Layer layer = layer_of(x, r, o, w13.size(0));
  MoeProblem& p = layer.p;
  const int64_t factor = gate_factor(o.activation), experts = w13.size(0);
  if (w13.size(1) % factor != 0) fail("w13 must have 2I rows (gate and up), got ", w13.size(1), " in ", shape_text(w13));
  p.intermediate = w13.size(1) / factor;
  if (intermediate != -1 && intermediate != p.intermediate)
    fail("intermediate_size must be -1 or I = ", p.intermediate, " as w13 ", shape_text(w13), " says, got ", intermediate);
  layer.w13 = packed_weight(w13, "w13_", "w13", experts, p.intermediate * factor, p.hidden, factor == 2 ? "2I" : "I", "H", q13);
  layer.w2 = packed_weight(w2, "w2_", "w2", experts, p.hidden, p.intermediate, "H", "I", q2);
  add_bias(layer.w13, w13_bias, "w13_bias", factor == 2 ? "[E, 2I]" : "[E, I]");
  add_bias(layer.w2, w2_bias, "w2_bias", "[E, H]");
  return layer;
}

Tensor run_new(Layer layer, const Tensor& x, const char* op) {
  Tensor out = allocate(x, {x.size(0), x.size(1)}, x.scalar_type(), "output");
  layer.run(out, op);
  return out;
}

struct Grouped {
  GroupedGemmProblem p;
  WeightArgument weight;
  Tensor x;
  Tensor offsets;

  void run(Tensor& out, const char* op) {
    p.weight = weight.w;
    p.out = out.mutable_data_ptr();
    if (p.rows == 0 || p.weight.n == 0) return;
    raise_if_error(device::grouped_gemm(p, offsets, x), op);
  }
};

Grouped grouped_of(const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const OptionalTensor& scales, const OptionalTensor& qzeros,
                   const OptionalTensor& perm, const OptionalTensor& bias, int64_t group_size, int64_t bits, int64_t layout) {
  check_dim(x, "x", {2}, "[R, K]");
  check_float(x, "x");
  check_dim(weight, "weight", {3}, scales ? "[E, N, K * bits / 8]" : "[E, N, K]");
  const int64_t experts = weight.size(0), n = weight.size(1), k = x.size(1);
  Grouped g{{}, {}, row_major(x), expert_offsets};
  if (scales) {
    const Quantization q{*scales, qzeros, perm, group_size, bits, layout};
    g.weight = packed_weight(weight, "", "weight", experts, n, k, "N", "K", q);
  } else {
    if (qzeros || perm) fail("qzeros and perm belong to packed weights: scales must be given with them");
    g.weight = dense_weight(weight, "weight", experts, n, k, "[E, N, K]", x, "x");
  }
  add_bias(g.weight, bias, "bias", "[E, N]");
  check_dtype(expert_offsets, "expert_offsets", {ScalarType::Int, ScalarType::Long});
  check_shape(expert_offsets, "expert_offsets", {experts + 1}, "[E + 1]", "weight " + shape_text(weight));
  g.offsets = as_contiguous(expert_offsets);
  check_offsets(g.offsets, x.size(0));
  g.p.rows = x.size(0);
  g.p.x = g.x.const_data_ptr();
  g.p.x_stride = g.x.stride(0);
  g.p.dtype = to_dtype(x.scalar_type());
  return g;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_align(const Tensor& topk_ids, int64_t num_experts, int64_t block_size,
                                                     const OptionalTensor& expert_map) {
  const DeviceScope scope(topk_ids);
  check_dim(topk_ids, "topk_ids", {2}, "[M, k]");
  check_dtype(topk_ids, "topk_ids", {ScalarType::Int, ScalarType::Long});
  if (num_experts < 0) fail("num_experts must be >= 0, got ", num_experts);
  if (block_size < 1) fail("block_size must be >= 1, got ", block_size);
  AlignProblem p;
  p.global_experts = p.experts = num_experts;
  OptionalTensor map;
  if (expert_map) {
    check_dtype(*expert_map, "expert_map", {ScalarType::Int});
    check_dim(*expert_map, "expert_map", {1}, "[global E]");
    map = as_contiguous(expert_map);
    p.expert_map = static_cast<const int32_t*>(map->const_data_ptr());
    p.global_experts = map->size(0);
  }
  const Tensor ids = as_contiguous(topk_ids);
  check_ids(ids, p.global_experts);
  p.slots = ids.numel();
  if (p.slots + num_experts * block_size > INT32_MAX)
    fail("topk_ids must leave M * k + E * block_size below 2^31, got ", p.slots + num_experts * block_size);
  p.topk_ids = ids.const_data_ptr();
  p.ids_are_int64 = ids.scalar_type() == ScalarType::Long;
  p.block_size = block_size;
  const int64_t capacity = round_up(p.slots + num_experts * (block_size - 1), block_size);
  const auto make = [&](int64_t n) { return allocate(ids, {n}, ScalarType::Int, "output"); };
  std::tuple<Tensor, Tensor, Tensor, Tensor> out{make(capacity), make(capacity / block_size), make(num_experts + 1), make(1)};
  p.sorted_slots = static_cast<int32_t*>(std::get<0>(out).mutable_data_ptr());
  p.block_experts = static_cast<int32_t*>(std::get<1>(out).mutable_data_ptr());
  p.expert_offsets = static_cast<int32_t*>(std::get<2>(out).mutable_data_ptr());
  p.num_slots = static_cast<int32_t*>(std::get<3>(out).mutable_data_ptr());
  raise_if_error(device::moe_align(p, ids), "moe_align");
  return out;
}

Tensor grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const OptionalTensor& scales, const OptionalTensor& qzeros,
                    const OptionalTensor& perm, const OptionalTensor& bias, int64_t group_size, int64_t bits, int64_t layout) {
  const DeviceScope scope(x);
  Grouped g = grouped_of(x, weight, expert_offsets, scales, qzeros, perm, bias, group_size, bits, layout);
  Tensor out = allocate(x, {x.size(0), weight.size(1)}, x.scalar_type(), "output");
  g.run(out, "grouped_gemm");
  return out;
}

void grouped_gemm_out(const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const OptionalTensor& scales, const OptionalTensor& qzeros,
                      const OptionalTensor& perm, const OptionalTensor& bias, int64_t group_size, int64_t bits, int64_t layout, Tensor out) {
  const DeviceScope scope(x);
  Grouped g = grouped_of(x, weight, expert_offsets, scales, qzeros, perm, bias, group_size, bits, layout);
  check_dtype(out, "out", {x.scalar_type()});
  check_out(out, {x.size(0), weight.size(1)}, "[R, N]", "x " + shape_text(x) + ", weight " + shape_text(weight));
  check_disjoint(out, {{x, "x"}, {weight, "weight"}, {expert_offsets, "expert_offsets"}, {scales, "scales"}, {qzeros, "qzeros"}, {perm, "perm"},
                       {bias, "bias"}});
  g.run(out, "grouped_gemm_out");
}

Tensor fused_moe(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                 const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                 int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input) {
  const DeviceScope scope(hidden_states);
  return run_new(dense_layer(hidden_states, w13, w2, {topk_weights, topk_ids, expert_map, global_num_experts}, w13_bias, w2_bias,
                             {activation, limit, alpha, beta, w13_order, apply_router_weight_on_input}),
                 hidden_states, "fused_moe");
}

void fused_moe_out(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                   const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                   int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input, Tensor out) {
  const DeviceScope scope(hidden_states);
  const Routing routing{topk_weights, topk_ids, expert_map, global_num_experts};
  Layer layer = dense_layer(hidden_states, w13, w2, routing, w13_bias, w2_bias,
                            {activation, limit, alpha, beta, w13_order, apply_router_weight_on_input});
  check_layer_out(out, hidden_states, {{w13, "w13"}, {w2, "w2"}, {w13_bias, "w13_bias"}, {w2_bias, "w2_bias"}}, routing);
  layer.run(out, "fused_moe_out");
}

Tensor fused_moe_packed(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                        const Tensor& w13_scales, const Tensor& w2_scales, int64_t w13_group_size, int64_t w2_group_size,
                        const OptionalTensor& w13_qzeros, const OptionalTensor& w2_qzeros, const OptionalTensor& w13_perm,
                        const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                        int64_t intermediate_size, int64_t w13_bits, int64_t w2_bits, int64_t layout, int64_t activation, Float limit, Float alpha,
                        Float beta, int64_t w13_order, bool apply_router_weight_on_input) {
  const DeviceScope scope(hidden_states);
  return run_new(packed_layer(hidden_states, w13, w2, {topk_weights, topk_ids, expert_map, global_num_experts},
                              {w13_scales, w13_qzeros, w13_perm, w13_group_size, w13_bits, layout},
                              {w2_scales, w2_qzeros, OptionalTensor{}, w2_group_size, w2_bits, layout}, intermediate_size, w13_bias, w2_bias,
                              {activation, limit, alpha, beta, w13_order, apply_router_weight_on_input}),
                 hidden_states, "fused_moe_packed");
}

void fused_moe_packed_out(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                          const Tensor& w13_scales, const Tensor& w2_scales, int64_t w13_group_size, int64_t w2_group_size,
                          const OptionalTensor& w13_qzeros, const OptionalTensor& w2_qzeros, const OptionalTensor& w13_perm,
                          const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map,
                          int64_t global_num_experts, int64_t intermediate_size, int64_t w13_bits, int64_t w2_bits, int64_t layout,
                          int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input, Tensor out) {
  const DeviceScope scope(hidden_states);
  const Routing routing{topk_weights, topk_ids, expert_map, global_num_experts};
  Layer layer = packed_layer(hidden_states, w13, w2, routing, {w13_scales, w13_qzeros, w13_perm, w13_group_size, w13_bits, layout},
                             {w2_scales, w2_qzeros, OptionalTensor{}, w2_group_size, w2_bits, layout}, intermediate_size, w13_bias, w2_bias,
                             {activation, limit, alpha, beta, w13_order, apply_router_weight_on_input});
  check_layer_out(out, hidden_states,
                  {{w13, "w13"}, {w2, "w2"}, {w13_scales, "w13_scales"}, {w2_scales, "w2_scales"}, {w13_qzeros, "w13_qzeros"},
                   {w2_qzeros, "w2_qzeros"}, {w13_perm, "w13_perm"}, {w13_bias, "w13_bias"}, {w2_bias, "w2_bias"}},
                  routing);
  layer.run(out, "fused_moe_packed_out");
}

}  // namespace int4_emu::binding
