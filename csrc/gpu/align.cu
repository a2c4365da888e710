// The stable counting sort of slots by expert. Few slots: one block does it all. Many: chunks of slots are counted side by side, one
// block turns the counts into cursors, and the chunks scatter. Counters live in shared memory where E of them fit, else in the
// workspace: nothing grows faster than linearly in E.
#include "api.h"
#include "route.cuh"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kChunk = 2048;          // slots of a block; also the most that one block alone sorts
constexpr int64_t kSharedExperts = 8192;  // 32 KB of counters

int64_t chunk_count(int64_t slots) { return slots <= kChunk ? 1 : ceil_div(slots, kChunk); }

// In-place exclusive prefix sum over counts [n] of each count rounded up to `block`, by the whole thread block; returns the total.
// `partial` is shared memory of kThreads ints.
__device__ int padded_scan(int32_t* counts, int64_t n, int block, int32_t* partial) {
  const int64_t share = (n + kThreads - 1) / kThreads;
  const int64_t begin = threadIdx.x * share, end = begin + share < n ? begin + share : n;
  int sum = 0;
  for (int64_t e = begin; e < end; ++e) sum += (counts[e] + block - 1) / block * block;
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int add = static_cast<int>(threadIdx.x) >= step ? partial[threadIdx.x - step] : 0;
    __syncthreads();
    partial[threadIdx.x] += add;
    __syncthreads();
  }
  int running = partial[threadIdx.x] - sum;
  const int total = partial[kThreads - 1];
  for (int64_t e = begin; e < end; ++e) {
    const int count = (counts[e] + block - 1) / block * block;
    counts[e] = running;
    running += count;
  }
  __syncthreads();
  return total;
}

// The expert whose padded run holds `row`: the last whose offset is not above it.
__device__ int expert_of_row(const int32_t* offsets, int64_t experts, int row) {
  int64_t low = 0, high = experts;  // offsets[low] <= row < offsets[high], taking offsets[experts] as the total
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

__device__ void write_blocks(const int32_t* offsets, int64_t experts, int total, const SortTarget& t) {
  const int64_t used = total / t.block_rows;
  for (int64_t b = threadIdx.x; b < t.capacity_blocks; b += kThreads) {
    t.block_experts[b] = b < used ? expert_of_row(offsets, experts, static_cast<int>(b * t.block_rows)) : -1;
  }
  if (t.offsets) {
    for (int64_t e = threadIdx.x; e < experts; e += kThreads) t.offsets[e] = offsets[e];
    if (threadIdx.x == 0) t.offsets[experts] = total;
  }
  if (t.total && threadIdx.x == 0) t.total[0] = total;
}

// Slots begin..end in order, by groups of 32: a lane's rank among equal experts of its group, then groups one after another move the
// cursors, which keeps the order stable.
__device__ void scatter(const DeviceRoute& route, int64_t begin, int64_t end, int32_t* cursor, const SortTarget& t) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(threadIdx.x) / 32;
  for (int64_t base = begin; base < end; base += kThreads) {
    const int64_t slot = base + threadIdx.x;
    const int expert = slot < end ? route.local_expert(slot) : -1;
    int before = 0, same = 0, leader = lane;
#pragma unroll 8
    for (int j = 0; j < 32; ++j) {
      const bool equal = shfl_in_32(expert, j) == expert;
      leader = equal && j < leader ? j : leader;
      before += equal && j < lane;
      same += equal;
    }
    const int64_t left = end - base;
    const int groups = static_cast<int>(left < kThreads ? (left + 31) / 32 : kThreads / 32);
    for (int turn = 0; turn < groups; ++turn) {
      if (turn == group) {
        int start = 0;
        if (expert >= 0 && before == 0) start = atomicAdd(&cursor[expert], same);
        start = shfl_in_32(start, leader);
        const int64_t row = static_cast<int64_t>(start) + before;
        if (expert >= 0 && row < t.capacity_blocks * t.block_rows) t.rows[row] = static_cast<int32_t>(slot);
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kThreads) sort_small_kernel(DeviceRoute route, int64_t slots, SortTarget t, int32_t* global_counts) {
  int32_t* shared = dynamic_shared<int32_t>();
  int32_t* partial = shared;
  int32_t* counts = route.experts <= kSharedExperts ? shared + kThreads : global_counts;
  for (int64_t e = threadIdx.x; e < route.experts; e += kThreads) counts[e] = 0;
  const int64_t rows = t.capacity_blocks * t.block_rows;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) t.rows[i] = static_cast<int32_t>(slots);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < slots; i += kThreads) {
    const int expert = route.local_expert(i);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int total = padded_scan(counts, route.experts, static_cast<int>(t.block_rows), partial);
  write_blocks(counts, route.experts, total, t);
  __syncthreads();
  scatter(route, 0, slots, counts, t);
}

// counts [chunks][E] of each chunk; also fills the rows with padding.
__global__ void __launch_bounds__(kThreads) count_kernel(DeviceRoute route, int64_t slots, SortTarget t, int32_t* counts) {
  int32_t* shared = dynamic_shared<int32_t>();
  int32_t* own = counts + blockIdx.x * route.experts;
  int32_t* local = route.experts <= kSharedExperts ? shared : own;
  for (int64_t e = threadIdx.x; e < route.experts; e += kThreads) local[e] = 0;
  const int64_t rows = t.capacity_blocks * t.block_rows;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < rows; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    t.rows[i] = static_cast<int32_t>(slots);
  }
  __syncthreads();
  const int64_t begin = blockIdx.x * kChunk, end = begin + kChunk < slots ? begin + kChunk : slots;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const int expert = route.local_expert(i);
    if (expert >= 0) atomicAdd(&local[expert], 1);
  }
  __syncthreads();
  if (local != own) {
    for (int64_t e = threadIdx.x; e < route.experts; e += kThreads) own[e] = local[e];
  }
}

// counts [chunks][E] become each chunk's first row of each expert; `totals` [E] is scratch.
__global__ void __launch_bounds__(kThreads) cursor_kernel(int64_t experts, int64_t chunks, SortTarget t, int32_t* counts, int32_t* totals) {
  __shared__ int32_t partial[kThreads];
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    int sum = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const int count = counts[c * experts + e];
      counts[c * experts + e] = sum;
      sum += count;
    }
    totals[e] = sum;
  }
  __syncthreads();
  const int total = padded_scan(totals, experts, static_cast<int>(t.block_rows), partial);
  write_blocks(totals, experts, total, t);
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    for (int64_t c = 0; c < chunks; ++c) counts[c * experts + e] += totals[e];
  }
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(DeviceRoute route, int64_t slots, SortTarget t, int32_t* counts) {
  int32_t* shared = dynamic_shared<int32_t>();
  int32_t* cursor = counts + blockIdx.x * route.experts;
  if (route.experts <= kSharedExperts) {
    for (int64_t e = threadIdx.x; e < route.experts; e += kThreads) shared[e] = cursor[e];
    cursor = shared;
  }
  __syncthreads();
  const int64_t begin = blockIdx.x * kChunk;
  scatter(route, begin, begin + kChunk < slots ? begin + kChunk : slots, cursor, t);
}

}  // namespace

size_t align_workspace_bytes(int64_t slots, int64_t experts) { return static_cast<size_t>((chunk_count(slots) + 1) * experts * 4); }

Status launch_sort_by_expert(const DeviceRoute& route, int64_t slots, const SortTarget& target, void* workspace, Stream stream) {
  int32_t* counts = static_cast<int32_t*>(workspace);
  const int64_t chunks = chunk_count(slots);
  const size_t counters = route.experts <= kSharedExperts ? static_cast<size_t>(route.experts) * 4 : 0;
  if (chunks == 1) {
    return launch("sort_small_kernel", sort_small_kernel, 1, kThreads, counters + kThreads * 4, stream, route, slots, target, counts);
  }
  if (Status s = launch("count_kernel", count_kernel, chunks, kThreads, counters, stream, route, slots, target, counts); !s) return s;
  int32_t* totals = counts + chunks * route.experts;
  if (Status s = launch("cursor_kernel", cursor_kernel, 1, kThreads, 0, stream, route.experts, chunks, target, counts, totals); !s) return s;
  return launch("scatter_kernel", scatter_kernel, chunks, kThreads, counters, stream, route, slots, target, counts);
}

Status moe_align(const AlignProblem& p, void* workspace, size_t bytes, void* stream) {
  const int64_t limit = INT32_MAX;
  if (p.block_size < 1) return make_error(Code::invalid_value, "block_size must be at least 1, got %lld", (long long)p.block_size);
  if (p.slots > limit || (p.block_size > 1 && p.experts > (limit - p.slots) / (p.block_size - 1))) {
    return make_error(Code::invalid_value,
                      "topk_ids.numel() + num_experts * (block_size - 1) must be at most 2147483647, got %lld slots (num_experts=%lld, "
                      "block_size=%lld)",
                      (long long)p.slots, (long long)p.experts, (long long)p.block_size);
  }
  const size_t needed = align_workspace_bytes(p.slots, p.experts);
  if (bytes < needed) return make_error(Code::internal, "moe_align needs a workspace of %zu bytes, got %zu", needed, bytes);
  const int64_t capacity = round_up(p.slots + p.experts * (p.block_size - 1), p.block_size);
  const DeviceRoute route{p.topk_ids, p.ids_are_int64, p.expert_map, p.global_experts, p.experts};
  const SortTarget target{p.sorted_slots, p.block_experts, p.expert_offsets, p.num_slots, capacity / p.block_size, p.block_size};
  return launch_sort_by_expert(route, p.slots, target, workspace, as_stream(stream));
}

}  // namespace int4_emu::gpu
