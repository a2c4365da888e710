// api.h with arguments that ctypes can pass. Workspaces are poisoned; 0 is right, 1 an error whose sentence plain_error() returns.
#include <cstdlib>
#include <cstring>
#include <string>

#include "../../../csrc/gpu/api.h"

namespace {

using namespace int4_emu;

std::string message;

struct Workspace {
  explicit Workspace(size_t bytes) : size(bytes), data(std::aligned_alloc(256, (bytes + 256) / 256 * 256)) { std::memset(data, 0xff, bytes); }
  ~Workspace() { std::free(data); }
  size_t size;
  void* data;
};

int answer(const Status& status) {
  message = status.message;
  return status ? 0 : 1;
}

}  // namespace

extern "C" {

// bits 0: dense, else packed canonical.
struct PlainWeight {
  int64_t experts, n, k, bits, group_size;
  const void *data, *scales, *zeros, *bias;
};

static Weight weight_of(const PlainWeight& p, DType dtype) {
  Weight w;
  w.experts = p.experts, w.n = p.n, w.k = p.k;
  w.data = p.data;
  w.bias = p.bias, w.bias_dtype = DType::f32;
  w.packed = p.bits != 0;
  w.dtype = dtype;
  w.n_stride = w.packed ? (p.k * p.bits + 7) / 8 : p.k;
  w.expert_stride = p.n * w.n_stride;
  if (!w.packed) return w;
  w.bits = static_cast<int>(p.bits);
  w.scales = p.scales, w.scale_dtype = DType::f32;
  w.zeros = static_cast<const uint8_t*>(p.zeros);
  w.group_size = p.group_size, w.groups = (p.k + p.group_size - 1) / p.group_size;
  return w;
}

const char* plain_error() { return message.c_str(); }
int plain_set_device(int device) { return answer(gpu::set_device(device)); }

int plain_grouped_gemm(int atom, int dtype, int64_t rows, const void* x, const PlainWeight* weight, const int64_t* offsets, void* out) {
  GroupedGemmProblem p;
  p.rows = rows, p.x = x, p.x_stride = weight->k, p.dtype = static_cast<DType>(dtype);
  p.weight = weight_of(*weight, p.dtype);
  p.out = out;
  const Workspace w(gpu::grouped_gemm_workspace_bytes(p));
  return answer(gpu::grouped_gemm(p, {offsets, true}, w.data, w.size, nullptr, static_cast<gpu::Atom>(atom)));
}

int plain_fused_moe(int atom, int dtype, int64_t tokens, int64_t topk, const void* x, const PlainWeight* w13, const PlainWeight* w2,
                    const float* topk_weights, const int64_t* topk_ids, int activation, void* out) {
  MoeProblem p;
  p.tokens = tokens, p.hidden = w13->k, p.intermediate = w2->k, p.topk = topk;
  p.x = x, p.x_stride = p.hidden, p.dtype = static_cast<DType>(dtype);
  p.w13 = weight_of(*w13, p.dtype), p.w2 = weight_of(*w2, p.dtype);
  p.topk_weights = topk_weights, p.topk_ids = topk_ids, p.ids_are_int64 = true, p.global_experts = w13->experts;
  p.activation.kind = static_cast<Activation>(activation);
  p.out = out;
  const Workspace w(gpu::moe_workspace_bytes(p));
  return answer(gpu::fused_moe(p, w.data, w.size, nullptr, static_cast<gpu::Atom>(atom)));
}

static PackedMatrix matrix_of(int format, int scale_dtype, const PlainWeight& weight, const int32_t* g_idx) {
  PackedMatrix m;
  m.format = static_cast<Format>(format), m.scale_dtype = static_cast<DType>(scale_dtype);
  m.bits = static_cast<int>(weight.bits);
  m.batch = weight.experts, m.out_features = weight.n, m.in_features = weight.k;
  m.group_size = weight.group_size, m.groups = (m.in_features + m.group_size - 1) / m.group_size;
  m.qweight = weight.data, m.scales = weight.scales, m.qzeros = weight.zeros, m.g_idx = g_idx;
  return m;
}

// A format's matrices to dense.
int plain_dequantize(int out_dtype, int format, int scale_dtype, const PlainWeight* weight, const int32_t* g_idx, void* out) {
  return answer(gpu::dequantize(matrix_of(format, scale_dtype, *weight, g_idx), static_cast<DType>(out_dtype), out, nullptr));
}

int plain_repack(int format, int scale_dtype, const PlainWeight* weight, const int32_t* in_perm, uint8_t* codes, void* scales, uint8_t* zeros) {
  return answer(gpu::repack(matrix_of(format, scale_dtype, *weight, nullptr), in_perm, nullptr, {codes, scales, zeros}, nullptr));
}

int plain_moe_align(int64_t slots, const int64_t* ids, int64_t experts, int64_t block_size, int32_t* sorted, int32_t* blocks, int32_t* offsets,
                    int32_t* total) {
  AlignProblem p;
  p.slots = slots, p.topk_ids = ids, p.ids_are_int64 = true, p.experts = p.global_experts = experts, p.block_size = block_size;
  p.sorted_slots = sorted, p.block_experts = blocks, p.expert_offsets = offsets, p.num_slots = total;
  const Workspace w(gpu::align_workspace_bytes(slots, experts));
  return answer(gpu::moe_align(p, w.data, w.size, nullptr));
}

}  // extern "C"
