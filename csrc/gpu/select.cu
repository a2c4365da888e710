// The choice of kernels. A build defines INT4_EMU_ATOM_<NAME> for each family of atoms.txt whose kernels it compiled.
#include "select.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "../core/layout.h"
#include "architecture.h"
#include "numeric.cuh"

// What the build compiled the kernels for, as the build says it.
#ifndef INT4_EMU_GPU_ARCHS
#define INT4_EMU_GPU_ARCHS "unknown"
#endif

namespace int4_emu::gpu {
namespace {

// A device's architecture, asked for once: the question may take the runtime longer than a kernel runs.
struct Device {
  char architecture[256] = {0};
  char error[256] = {0};
};

Device ask_device(int device) {
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  Device answer;
  DeviceProperties properties;
  const Error error = runtime_properties(&properties, device);
  if (error == INT4_EMU_RUNTIME(Success)) {
    architecture_of(properties, answer.architecture, sizeof(answer.architecture));
    known[device] = answer;
  } else {
    (void)INT4_EMU_RUNTIME(GetLastError)();
    std::snprintf(answer.error, sizeof(answer.error), "device %d cannot be asked: %s", device, INT4_EMU_RUNTIME(GetErrorString)(error));
  }
  return answer;
}

// "built for X, this is Y", or an empty text.
void reject_device(int device, const Device& d, char* reason, size_t size) {
  reason[0] = 0;
  if (d.error[0] == 0 && !arch_is_served(INT4_EMU_GPU_ARCHS, d.architecture)) {
    std::snprintf(reason, size, "the GPU kernels were built for %s, and device %d is %s", INT4_EMU_GPU_ARCHS, device, d.architecture);
  }
}

// The families that are better than fma. Launchers are null where the build left them out.
using Launcher = Status (*)(const GemmArgs&, int, Stream);
struct Family {
  Atom atom;
  const char* needs;
  Launcher bf16, fp16;
};
const Family kFamilies[] = {
#ifdef INT4_EMU_ATOM_MMA_SM80
    {Atom::mma_sm80, "sm_80 or newer", launch_gemm_mma_sm80_bf16, launch_gemm_mma_sm80_fp16},
#else
    {Atom::mma_sm80, "sm_80 or newer", nullptr, nullptr},
#endif
#ifdef INT4_EMU_ATOM_MFMA_GFX9
    {Atom::mfma_gfx9, "gfx90a, gfx942 or gfx950", launch_gemm_mfma_gfx9_bf16, launch_gemm_mfma_gfx9_fp16},
#else
    {Atom::mfma_gfx9, "gfx90a, gfx942 or gfx950", nullptr, nullptr},
#endif
#ifdef INT4_EMU_ATOM_WMMA_GFX11
    {Atom::wmma_gfx11, "gfx11xx", launch_gemm_wmma_gfx11_bf16, launch_gemm_wmma_gfx11_fp16},
#else
    {Atom::wmma_gfx11, "gfx11xx", nullptr, nullptr},
#endif
#ifdef INT4_EMU_ATOM_WMMA_GFX12
    {Atom::wmma_gfx12, "gfx120x", launch_gemm_wmma_gfx12_bf16, launch_gemm_wmma_gfx12_fp16},
#else
    {Atom::wmma_gfx12, "gfx120x", nullptr, nullptr},
#endif
};

const Family& family_of(Atom atom) {
  for (const Family& family : kFamilies) {
    if (family.atom == atom) return family;
  }
  return kFamilies[0];
}

// Why a family does not serve, or an empty text.
void reject_family(const Family& family, int device, const Device& d, DType x, char* reason, size_t size) {
  reason[0] = 0;
  if (family.bf16 == nullptr) {
    std::snprintf(reason, size, "not used since it was not compiled");
  } else if (x == DType::f32) {
    std::snprintf(reason, size, "not used since x is float32");
  } else if (d.error[0] != 0) {
    std::snprintf(reason, size, "not used since %s", d.error);
  } else {
    const char* name = family_for(d.architecture);
    if (name == nullptr || std::strcmp(name, atom_name(family.atom)) != 0) {
      std::snprintf(reason, size, "not used since it needs %s, and device %d is %s", family.needs, device, d.architecture);
    }
  }
}

Status launch_family(const GemmArgs& a, const Plan& plan, Stream stream) {
  const bool bf16 = a.x_dtype == DType::bf16;
#ifdef INT4_EMU_ATOM_MMA_SM80
  if (plan.path == Path::decode) return bf16 ? launch_decode_mma_sm80_bf16(a, stream) : launch_decode_mma_sm80_fp16(a, stream);
  if (plan.path == Path::dense) {
    return bf16 ? launch_dense_mma_sm80_bf16(a, plan.block_rows, stream) : launch_dense_mma_sm80_fp16(a, plan.block_rows, stream);
  }
  if (plan.path == Path::packed) {
    return bf16 ? launch_packed_mma_sm80_bf16(a, plan.block_rows, stream) : launch_packed_mma_sm80_fp16(a, plan.block_rows, stream);
  }
#endif
  const Family& family = family_of(plan.atom);
  const Launcher run = bf16 ? family.bf16 : family.fp16;
  if (run == nullptr) return make_error(Code::internal, "%s was not compiled", atom_name(plan.atom));
  return run(a, plan.block_rows, stream);
}

// Why the kernels that stream weights into registers (stream.cuh) leave a projection to fma; null where they take it.
const char* stream_refuses(const GemmArgs& a) {
  if (!a.w_vector) {
    return a.w.packed ? "packed rows or groups do not come in aligned 16-byte units"
                      : "dense weights are not of x's dtype in aligned 16-byte units along k";
  }
  return a.w.packed && a.w.groups > 1 && a.w.group_size % 32 != 0 ? "groups are no multiple of 32" : nullptr;
}

// Whether scales and zero points may be read by aligned words of four bytes, and groups are found by a shift, as the decode and the packed path do.
bool groups_in_words(const GemmArgs& a) {
  const Weight& w = a.w;
  const int64_t count = w.experts * w.n * w.groups;
  if (!w.packed) return true;
  const bool scales = a.group_shift >= 0 && is_aligned(w.scales, 4) && (w.scale_dtype == DType::f32 || count % 2 == 0);
  return scales && (w.zeros == nullptr || (is_aligned(w.zeros, 4) && count % 4 == 0));
}

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
    case Atom::mfma_gfx9:
      return "mfma_gfx9";
    case Atom::wmma_gfx11:
      return "wmma_gfx11";
    case Atom::wmma_gfx12:
      return "wmma_gfx12";
  }
  return "unknown";
}

const char* compiled_architectures() { return INT4_EMU_GPU_ARCHS; }

Status set_device(int device) {
  if (Status s = runtime_set_device(device); !s) return s;
  char reason[384];
  reject_device(device, ask_device(device), reason, sizeof(reason));
  return reason[0] == 0 ? Status{} : make_error(Code::unsupported, "%s", reason);
}

AtomChoice select_atom(int device, DType x, Atom forced) {
  AtomChoice choice = {Atom::fma, "exact", {0}};
  const Device d = ask_device(device);
  reject_device(device, d, choice.rejections, sizeof(choice.rejections));
  if (choice.rejections[0] != 0) {
    choice.atom = Atom::automatic;
    return choice;
  }
  size_t used = 0;
  for (const Family& family : kFamilies) {
    if (forced != Atom::automatic && forced != Atom::fma && forced != family.atom) continue;
    char reason[384];
    reject_family(family, device, d, x, reason, sizeof(reason));
    if (reason[0] == 0 && forced != Atom::fma) {
      choice.atom = family.atom;
      // mma_sm80 takes packed weights rounded to x's dtype; the others take exact codes and scale sums in fp32.
      if (family.atom == Atom::mma_sm80) choice.numerics = "rounded";
      return choice;
    }
    if (reason[0] == 0) std::snprintf(reason, sizeof(reason), "not used since fma was asked for");
    std::snprintf(choice.rejections + used, sizeof(choice.rejections) - used, "%s%s: %s", used ? "; " : "", atom_name(family.atom), reason);
    used = std::strlen(choice.rejections);
    if (forced == family.atom) choice.atom = Atom::automatic;
  }
  return choice;
}

void describe_memory(GemmArgs& a) {
  const Weight& w = a.w;
  a.out_pairs = a.out_stride % 2 == 0 && is_aligned(a.out, 2 * dtype_bytes(a.out_dtype));
  a.group_shift = w.packed && w.groups == 1 ? 31 : -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (w.packed && w.groups > 1 && w.group_size == int64_t{1} << shift) a.group_shift = shift;
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
  plan->path = Path::tiles;
  plan->fallback = nullptr;
  if (plan->atom == Atom::fma) {
    plan->block_rows = rows_for(kFmaRows, average);
    return {};
  }
  if (plan->atom != Atom::mma_sm80) {
    for (int i = 0; i < count && plan->fallback == nullptr; ++i) plan->fallback = stream_refuses(projections[i]);
    plan->block_rows = rows_for(plan->fallback ? kFmaRows : kStreamRows, average);
    return {};
  }
  bool vector = true, dense = true, packed = true, words = true, plain = true;
  int64_t decode_average = kDecodeAverage;
  for (int i = 0; i < count; ++i) {
    vector = vector && projections[i].w_vector;
    words = words && groups_in_words(projections[i]);
    // Where rows of x start, in units of 16 bytes.
    const bool near = rows / projections[i].row_divisor * (projections[i].x_stride / 8) < UINT32_MAX;
    dense = dense && near && !projections[i].w.packed;
    packed = packed && near && projections[i].w.packed;
    plain = plain && projections[i].w.zeros == nullptr && projections[i].w.scale_dtype == projections[i].x_dtype;
    if (projections[i].group_shift < 7) decode_average = kDecodeAverageNarrow;
  }
  if (vector && words && (dense ? rows <= kDecodeDense : average <= decode_average)) {
    plan->path = Path::decode;
    plan->block_rows = rows_for(kDecodeRows, average);
  } else if (vector && dense) {
    // Sizes that hold most experts: a second block of an expert would read its weights again.
    plan->path = Path::dense;
    plan->block_rows = rows_for(kDenseRows, average + average / 4);
  } else if (vector && packed && words) {
    plan->path = Path::packed;
    plan->block_rows = rows_for(plain ? kPackedRows : kPackedZerosRows, average);
  } else {
    plan->block_rows = rows_for(kMmaRows, average);
  }
  return {};
}

Status launch_gemm(const GemmArgs& a, const Plan& plan, Stream stream) {
  const bool fma = plan.atom == Atom::fma || (plan.fallback && stream_refuses(a));
  return fma ? launch_gemm_fma(a, plan.block_rows, stream) : launch_family(a, plan, stream);
}

}  // namespace int4_emu::gpu
