// Where an op runs. The front end (check.cpp, ops_*.cpp) is compiled into both libraries: device_cpu.cpp completes it to `_C`,
// device_gpu.cpp to `_C_gpu`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <memory>

#include "check.h"

namespace int4_emu::binding {

// Enters the device of an op's first tensor, for the length of the call; every other tensor is held against that one.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& first);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  static const Tensor& first();  // of the innermost scope of this thread

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  const Tensor* outer_;
};

namespace device {

// False on a GPU, where looking at a tensor's values would synchronise.
extern const bool kHostReadsValues;

Status unpack(const PackedMatrix& m, uint8_t* out);
Status unpack_zeros(const PackedMatrix& m, uint8_t* out);
Status dequantize(const PackedMatrix& m, DType out_dtype, void* out);
Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out);
Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout);
Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout);
// These allocate their workspace through torch, on the device of `like`.
Status moe_align(const AlignProblem& p, const Tensor& like);
Status fused_moe(const MoeProblem& p, const Tensor& like);
Status grouped_gemm(GroupedGemmProblem p, const Tensor& offsets, const Tensor& like);

}  // namespace device

// Uninitialised memory on the device of `like`; where there is none, one sentence with the size (`what` is "workspace" or "output").
Tensor allocate(const Tensor& like, const std::vector<int64_t>& dims, ScalarType dtype, const char* what);

// Scratch from torch's allocator, 256-byte aligned, freed (in stream order) when the call returns.
struct Workspace {
  Workspace(const Tensor& like, size_t bytes)
      : tensor(allocate(like, {static_cast<int64_t>(bytes) + 256}, ScalarType::Byte, "workspace")) {}
  void* data() const {
    const auto p = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    return reinterpret_cast<void*>((p + 255) & ~uintptr_t{255});
  }
  Tensor tensor;
};

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline OptionalTensor as_contiguous(const OptionalTensor& t) { return t.has_value() ? OptionalTensor(as_contiguous(*t)) : t; }

}  // namespace int4_emu::binding
