// grouped_gemm: ragged groups of rows, each by its expert's weight; the groups' bounds live on the device.
#include "gather.h"
#include "numeric.cuh"
#include "select.h"
#include "workspace.h"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 1024;

struct Bounds {
  DeviceOffsets offsets;
  int64_t experts, rows;

  // Clamped to [0, R]: a host cannot look at them.
  __device__ int64_t at(int64_t e) const {
    const int64_t v = offsets.are_int64 ? static_cast<const int64_t*>(offsets.data)[e] : static_cast<const int32_t*>(offsets.data)[e];
    return v < 0 ? 0 : (v > rows ? rows : v);
  }
  __device__ int64_t count(int64_t e) const {
    const int64_t n = at(e + 1) - at(e);
    return n < 0 ? 0 : n;
  }
};

// Blocks of the groups in order: their experts and first rows. One thread block.
__global__ void __launch_bounds__(kThreads)
    group_blocks_kernel(Bounds bounds, int64_t block_rows, int64_t capacity, int32_t* block_experts, int64_t* first_rows) {
  __shared__ int64_t partial[kThreads];
  const int64_t share = (bounds.experts + kThreads - 1) / kThreads, begin = threadIdx.x * share;
  const int64_t end = begin + share < bounds.experts ? begin + share : bounds.experts;
  for (int64_t b = threadIdx.x; b < capacity; b += kThreads) block_experts[b] = -1;
  int64_t sum = 0;
  for (int64_t e = begin; e < end; ++e) sum += (bounds.count(e) + block_rows - 1) / block_rows;
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t add = static_cast<int>(threadIdx.x) >= step ? partial[threadIdx.x - step] : 0;
    __syncthreads();
    partial[threadIdx.x] += add;
    __syncthreads();
  }
  int64_t block = partial[threadIdx.x] - sum;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t count = bounds.count(e);
    // Offsets that do not ascend could ask for more blocks than there are.
    for (int64_t done = 0; done < count && block < capacity; done += block_rows, ++block) {
      block_experts[block] = static_cast<int32_t>(e);
      first_rows[block] = bounds.at(e) + done;
    }
  }
}

// rows [capacity * block_rows]: the row of each position, or R; and zeros to the rows of `out` outside every group.
__global__ void __launch_bounds__(kThreads)
    group_rows_kernel(Bounds bounds, int64_t block_rows, int64_t capacity, const int32_t* block_experts, const int64_t* first_rows,
                      int32_t* rows, void* out, DType dtype, int64_t columns) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads, start = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = start; i < capacity * block_rows; i += stride) {
    const int64_t block = i / block_rows, expert = block_experts[block];
    int64_t row = bounds.rows;
    if (expert >= 0) {
      const int64_t candidate = first_rows[block] + i % block_rows;
      row = candidate < bounds.at(expert + 1) ? candidate : bounds.rows;
    }
    rows[i] = static_cast<int32_t>(row);
  }
  const int64_t before = bounds.experts > 0 ? bounds.at(0) : bounds.rows,
                after = bounds.experts > 0 ? bounds.at(bounds.experts) : bounds.rows;
  for (int64_t i = start; i < before * columns; i += stride) store_float(out, dtype, i, 0.f);
  for (int64_t i = after * columns + start; i < bounds.rows * columns; i += stride) store_float(out, dtype, i, 0.f);
}

struct Groups {
  Groups(const GroupedGemmProblem& p, void* base) {
    gemm.w = p.weight;
    gemm.x = p.x;
    gemm.x_stride = p.x_stride;
    gemm.x_dtype = p.dtype;
    gemm.out = p.out;
    gemm.out_stride = p.weight.n;
    gemm.out_dtype = p.dtype;
    gemm.columns = p.weight.n;
    describe_memory(gemm);
    Arena arena(base);
    rows = arena.take<int32_t>(worst_rows(p.rows, p.weight.experts));
    block_experts = arena.take<int32_t>(worst_blocks(p.rows, p.weight.experts, kFewestBlockRows));
    first_rows = arena.take<int64_t>(worst_blocks(p.rows, p.weight.experts, kFewestBlockRows));
    gathered = arena.take<char>(gather_bytes(gemm, p.rows));
    bytes = arena.used();
  }

  GemmArgs gemm;
  int32_t *rows, *block_experts;
  int64_t* first_rows;
  char* gathered;
  size_t bytes;
};

}  // namespace

size_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p) { return Groups(p, nullptr).bytes; }

Status grouped_gemm(const GroupedGemmProblem& p, const DeviceOffsets& offsets, void* workspace, size_t bytes, void* stream_pointer,
                    Atom atom) {
  if (p.rows == 0 || p.weight.n == 0) return {};
  const Stream stream = as_stream(stream_pointer);
  const Groups groups(p, workspace);
  if (bytes < groups.bytes) return make_error(Code::internal, "grouped_gemm needs a workspace of %zu bytes, got %zu", groups.bytes, bytes);
  if (p.rows > INT32_MAX - kMostBlockRows)
    return make_error(Code::unsupported, "x must have fewer than 2^31 - 128 rows, got %lld", (long long)p.rows);

  GemmArgs a = groups.gemm;
  Plan plan;
  if (Status s = make_plan(atom, &a, 1, p.rows, p.weight.experts, &plan); !s) return s;
  const int64_t blocks = worst_blocks(p.rows, p.weight.experts, plan.block_rows);
  const Bounds bounds{offsets, p.weight.experts, p.rows};
  Status status = launch("group_blocks_kernel", group_blocks_kernel, 1, kThreads, 0, stream, bounds, plan.block_rows, blocks,
                         groups.block_experts, groups.first_rows);
  if (!status) return status;
  const int64_t work = ceil_div(blocks * plan.block_rows, kThreads);
  const int64_t grid = work < 1 ? 32 : (work > 1024 ? 1024 : work);
  status = launch("group_rows_kernel", group_rows_kernel, grid, kThreads, 0, stream, bounds, plan.block_rows, blocks, groups.block_experts,
                  groups.first_rows, groups.rows, p.out, p.dtype, p.weight.n);
  if (!status) return status;
  a.blocks = {groups.rows, groups.block_experts, blocks, p.rows};
  if (Status s = launch_gather(a, plan.block_rows, groups.gathered, stream); !s) return s;
  return launch_gemm(a, plan, stream);
}

}  // namespace int4_emu::gpu
