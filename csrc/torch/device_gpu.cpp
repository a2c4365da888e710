// The GPU kernels on the current stream of the tensors' device. Compiled by the host compiler, without any vendor header.

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "../gpu/api.h"
#include "device.h"

namespace int4_emu::binding {

struct DeviceScope::Guard {
  explicit Guard(int32_t index) : torch_guard(index) {}
  torch::stable::accelerator::DeviceGuard torch_guard;
};

namespace device {

const bool kHostReadsValues = false;

namespace {

// torch's current stream. The symbol lives in torch's GPU library, which this one must not need: it also loads beside a CPU torch.
void* current_stream(int32_t index) {
  using Get = int32_t (*)(int32_t, void**);
  static const Get get = [] {
    for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) {
        if (void* symbol = dlsym(library, "aoti_torch_get_current_cuda_stream")) return reinterpret_cast<Get>(symbol);
      }
    }
    return static_cast<Get>(nullptr);
  }();
  void* stream = nullptr;
  if (get == nullptr || get(index, &stream) != 0) throw std::runtime_error("torch did not tell the current stream of the GPU");
  return stream;
}

// Read per call, never kept.
void* stream() { return current_stream(DeviceScope::first().get_device_index()); }

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out) { return gpu::unpack(m, out, stream()); }
Status unpack_zeros(const PackedMatrix& m, uint8_t* out) { return gpu::unpack_zeros(m, out, stream()); }
Status dequantize(const PackedMatrix& m, DType out_dtype, void* out) { return gpu::dequantize(m, out_dtype, out, stream()); }
Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out) {
  return gpu::repack(m, in_perm, out_perm, out, stream());
}
Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout) {
  return gpu::prepack(in, out, batch, n, k, bits, layout, stream());
}
Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout) {
  return gpu::unprepack(in, out, batch, n, k, bits, layout, stream());
}

Status moe_align(const AlignProblem& p, const Tensor& like) {
  const size_t bytes = gpu::align_workspace_bytes(p.slots, p.experts);
  const Workspace workspace(like, bytes);
  return gpu::moe_align(p, workspace.data(), bytes, stream());
}

Status fused_moe(const MoeProblem& p, const Tensor& like) {
  const size_t bytes = gpu::moe_workspace_bytes(p);
  const Workspace workspace(like, bytes);
  return gpu::fused_moe(p, workspace.data(), bytes, stream());
}

Status grouped_gemm(GroupedGemmProblem p, const Tensor& offsets, const Tensor& like) {
  const size_t bytes = gpu::grouped_gemm_workspace_bytes(p);
  const Workspace workspace(like, bytes);
  const gpu::DeviceOffsets bounds{offsets.const_data_ptr(), offsets.scalar_type() == ScalarType::Long};
  return gpu::grouped_gemm(p, bounds, workspace.data(), bytes, stream());
}

}  // namespace device

namespace {
thread_local const Tensor* innermost = nullptr;
}

DeviceScope::DeviceScope(const Tensor& first) : outer_(innermost) {
  // A first argument on the CPU gets here when another is on the GPU: the checks will name both.
  if (first.is_cuda()) {
    guard_ = std::make_unique<Guard>(first.get_device_index());
    // A statically linked runtime has a current device of its own.
    raise_if_error(gpu::set_device(first.get_device_index()), "device");
  }
  innermost = &first;
}
DeviceScope::~DeviceScope() { innermost = outer_; }
const Tensor& DeviceScope::first() { return *innermost; }

}  // namespace int4_emu::binding
