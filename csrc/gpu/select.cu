// The choice of kernels. A build defines INT4_EMU_ATOM_<NAME> for each family of atoms.txt whose kernels it compiled.
#include "select.h"

#include <cstdio>
#include <cstring>

#include "../core/layout.h"
#include "numeric.cuh"

// What the build compiled the kernels for, as the build says it.
#ifndef INT4_EMU_GPU_ARCHS
#define INT4_EMU_GPU_ARCHS "unknown"
#endif

namespace int4_emu::gpu {
namespace {

// Why mma_sm80 does not serve, or an empty text.
void reject_mma_sm80(int device, DType x, char* reason, size_t size) {
  reason[0] = 0;
#ifndef INT4_EMU_ATOM_MMA_SM80
  (void)device;
  (void)x;
  std::snprintf(reason, size, "not used since it was not compiled");
#else
  if (x == DType::f32) {
    std::snprintf(reason, size, "not used since x is float32");
    return;
  }
  DeviceProperties properties;
  const Error error = runtime_properties(&properties, device);
  if (error != INT4_EMU_RUNTIME(Success)) {
    INT4_EMU_RUNTIME(GetLastError)();
    std::snprintf(reason, size, "not used since device %d cannot be asked: %s", device, INT4_EMU_RUNTIME(GetErrorString)(error));
  } else if (properties.major < 8) {
    std::snprintf(reason, size, "not used since it needs sm_80 or newer, and device %d is sm_%d%d", device, properties.major,
                  properties.minor);
  }
#endif
}

#ifndef INT4_EMU_ATOM_MMA_SM80
Status launch_mma(const GemmArgs&, const Plan&, Stream) { return make_error(Code::internal, "mma_sm80 was not compiled"); }
#else
Status launch_mma(const GemmArgs& a, const Plan& plan, Stream stream) {
  const bool bf16 = a.x_dtype == DType::bf16;
  if (plan.decode)
    return bf16 ? launch_decode_mma_sm80_bf16(a, plan.block_rows, stream) : launch_decode_mma_sm80_fp16(a, plan.block_rows, stream);
  return bf16 ? launch_gemm_mma_sm80_bf16(a, plan.block_rows, stream) : launch_gemm_mma_sm80_fp16(a, plan.block_rows, stream);
}
#endif

// The smallest of a family's sizes that holds the average rows of an expert, else its largest.
int rows_for(const int* sizes, int64_t average) {
  int rows = sizes[0];
  for (const int* size = sizes; *size != 0; ++size) {
    rows = *size;
    if (average <= rows) break;
  }
  return rows;
}

}  // namespace

const char* atom_name(Atom atom) {
  switch (atom) {
    case Atom::automatic:
      return "automatic";
    case Atom::fma:
      return "fma";
    case Atom::mma_sm80:
      return "mma_sm80";
  }
  return "unknown";
}

const char* compiled_architectures() { return INT4_EMU_GPU_ARCHS; }

Status set_device(int device) { return runtime_set_device(device); }

AtomChoice select_atom(int device, DType x, Atom forced) {
  AtomChoice choice = {Atom::fma, "exact", {0}};
  char reason[256];
  reject_mma_sm80(device, x, reason, sizeof(reason));
  if (forced == Atom::fma) {
    std::snprintf(choice.rejections, sizeof(choice.rejections), "mma_sm80: not used since fma was asked for");
  } else if (reason[0] == 0) {
    choice.atom = Atom::mma_sm80;
    choice.numerics = "rounded";
  } else {
    std::snprintf(choice.rejections, sizeof(choice.rejections), "mma_sm80: %s", reason);
    if (forced == Atom::mma_sm80) choice.atom = Atom::automatic;
  }
  return choice;
}

void describe_memory(GemmArgs& a) {
  const Weight& w = a.w;
  a.out_pairs = a.out_stride % 2 == 0 && is_aligned(a.out, 2 * dtype_bytes(a.out_dtype));
  a.group_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (w.packed && w.group_size == int64_t{1} << shift) a.group_shift = shift;
  }
  // Kernels that stream weights count the bytes and groups of one expert in 32 bits.
  const int64_t element = w.packed ? 1 : dtype_bytes(w.dtype);
  const bool small = w.k <= INT32_MAX / 2 && w.n * w.n_stride * element <= UINT32_MAX && w.n * w.groups <= UINT32_MAX;
  if (!w.packed) {
    a.w_vector = small && w.dtype == a.x_dtype && w.dtype != DType::f32 && w.k_stride == 1 && w.k % 8 == 0 && w.n_stride % 8 == 0 &&
                 w.expert_stride % 8 == 0 && is_aligned(w.data, 16);
    return;
  }
  const int64_t codes = 128 / w.bits;  // of a 16-byte unit
  a.w_vector = small && w.k % codes == 0 && (w.group_size % codes == 0 || w.groups == 1) && w.n_stride % 16 == 0 &&
               w.expert_stride % 16 == 0 && is_aligned(w.data, 16) && w.group_size <= INT32_MAX;
}

Status make_plan(Atom forced, const GemmArgs* projections, int count, int64_t rows, int64_t experts, Plan* plan) {
  for (int i = 0; i < count; ++i) {
    if (projections[i].w.packed && projections[i].w.layout != Layout::canonical) {
      return make_error(Code::unsupported, "layout must be 0 (canonical) on a GPU, got %d", static_cast<int>(projections[i].w.layout));
    }
  }
  int device = 0;
  if (Status s = check(runtime_get_device(&device), "the current device"); !s) return s;
  const AtomChoice choice = select_atom(device, projections[0].x_dtype, forced);
  if (choice.atom == Atom::automatic) return make_error(Code::unsupported, "%s", choice.rejections);
  const int64_t touched = rows < experts ? rows : experts, average = touched > 0 ? ceil_div(rows, touched) : 0;
  plan->atom = choice.atom;
  plan->decode = false;
  if (choice.atom == Atom::fma) {
    plan->block_rows = rows_for(kFmaRows, average);
    return {};
  }
  plan->decode = average <= kDecodeRows[1];
  for (int i = 0; i < count; ++i) plan->decode = plan->decode && projections[i].w_vector;
  plan->block_rows = rows_for(plan->decode ? kDecodeRows : kMmaRows, average);
  return {};
}

Status launch_gemm(const GemmArgs& a, const Plan& plan, Stream stream) {
  return plan.atom == Atom::fma ? launch_gemm_fma(a, plan.block_rows, stream) : launch_mma(a, plan, stream);
}

}  // namespace int4_emu::gpu
