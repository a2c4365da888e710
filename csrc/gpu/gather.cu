// Copies rows of x as a projection sees them, where they cannot be read in place: columns permuted per expert, router weight applied,
// rows that 16-byte units do not fit. The GEMM kernels then know one form of x only.
#include "gather.h"

#include "numeric.cuh"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 256;

// One block a row: out [rows][stride], zero from K to the stride.
template <class T>
__global__ void __launch_bounds__(kThreads) gather_kernel(GemmArgs a, int64_t block_rows, T* out, int64_t stride) {
  const int64_t position = blockIdx.x, expert = a.blocks.experts[position / block_rows];
  if (expert < 0) return;
  const int32_t row = a.blocks.rows[position];
  if (row < 0 || row >= a.blocks.row_count) return;
  const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(row / a.row_divisor) * a.x_stride;
  const int32_t* perm = a.w.perm ? a.w.perm + expert * a.w.k : nullptr;
  for (int64_t k = threadIdx.x; k < stride; k += kThreads) {
    float value = 0.f;
    if (k < a.w.k) {
      const int64_t column = perm ? perm[k] : k;
      if (column >= 0 && column < a.w.k) value = to_float(x[column]);
      if (a.row_weight) value *= a.row_weight[row];
    }
    out[row * stride + k] = rounded<T>(value);
  }
}

template <class T>
Status launch_gather_kernel(const GemmArgs& a, int64_t block_rows, void* out, int64_t stride, Stream stream) {
  const int64_t positions = a.blocks.blocks * block_rows;
  return launch("gather_kernel", gather_kernel<T>, positions, kThreads, 0, stream, a, block_rows, static_cast<T*>(out), stride);
}

int64_t stride_of(const GemmArgs& a) { return round_up(a.w.k, 8); }

}  // namespace

bool needs_gather(const GemmArgs& a) {
  if (a.w.perm || a.row_weight) return true;
  return a.x_dtype != DType::f32 && !(a.w.k % 8 == 0 && a.x_stride % 8 == 0 && is_aligned(a.x, 16));
}

int64_t gather_bytes(const GemmArgs& a, int64_t rows) { return needs_gather(a) ? rows * stride_of(a) * dtype_bytes(a.x_dtype) : 0; }

Status launch_gather(GemmArgs& a, int64_t block_rows, void* buffer, Stream stream) {
  if (!needs_gather(a)) return {};
  const int64_t stride = stride_of(a);
  const Status status = a.x_dtype == DType::f32    ? launch_gather_kernel<float>(a, block_rows, buffer, stride, stream)
                        : a.x_dtype == DType::bf16 ? launch_gather_kernel<Bf16>(a, block_rows, buffer, stride, stream)
                                                   : launch_gather_kernel<Fp16>(a, block_rows, buffer, stride, stream);
  a.x = buffer;
  a.x_stride = stride;
  a.row_divisor = 1;
  a.row_weight = nullptr;
  a.w.perm = nullptr;
  return status;
}

}  // namespace int4_emu::gpu
