// Dense weights in x's dtype on mma.sync m16n8k16: both operands by asynchronous copies through shared memory. A block has as many
// tiles of 16 rows as it has rows, not as many as fit: a small remainder of an expert costs little.
#pragma once

#include "direct_sm80.cuh"
#include "gemm.cuh"
#include "wgmma_sm80.cuh"

namespace int4_emu::gpu {

// kWarpsM x kWarpsN warps share kRowCount rows by 128 weight rows; warp m takes row tiles m, m + kWarpsM, ...
template <class T, int kRowCount, int kWarpsM, int kWarpsN, int kStageCount>
struct DenseTile {
  static constexpr int kRows = kRowCount, kColumns = 128, kDepth = 64, kStages = kStageCount;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kWarpsDown = kWarpsM, kBlocks = 2;
  static constexpr int kM = kRows / kWarpsM / 16, kN = kColumns / kWarpsN / 8;  // mma tiles of a warp
  static constexpr int kUnits = kDepth / 8, kRowStep = kThreads / kUnits;       // a thread copies one column of units
  static constexpr int kStageElements = (kRows + kColumns) * kDepth;            // x, then weights
  static constexpr int kSumStride = kColumns + 8;                               // floats: sums leave through shared memory
  static constexpr size_t kSharedBytes = static_cast<size_t>(kStages) * kStageElements * sizeof(T) + 1024;
  static_assert(kRowStep == 16 && kRows <= kThreads && kN % 2 == 0, "copies go by row tiles");
  static_assert(kSharedBytes >= static_cast<size_t>(kRows) * kSumStride * sizeof(float), "the stages hold the sums");

  struct Sums {
    float c[kM][kN][4];
  };

  __device__ static int warp_m() { return static_cast<int>(threadIdx.x) / 32 / kWarpsN; }
  __device__ static int warp_n() { return static_cast<int>(threadIdx.x) / 32 % kWarpsN; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Rows of 128 bytes; 16-byte units are swapped about by row, so that eight rows of one unit lie in eight bank groups.
  __device__ static T* unit_at(T* tile, int row, int unit) { return tile + row * kDepth + (unit ^ (row & 7)) * 8; }

  // What step `step` of a stage multiplies, for the warp's first kActive row tiles.
  template <int kActive>
  struct Operands {
    uint32_t x[kActive][4], w[kN / 2][4];

    __device__ void load(T* stage, int step) {
#pragma unroll
      for (int i = 0; i < kActive; ++i) {
        sm80::load_matrices(x[i], unit_at(stage, (i * kWarpsM + warp_m()) * 16 + lane() % 16, step * 2 + lane() / 16));
      }
      T* weights = stage + kRows * kDepth;
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) {
        const int row = (warp_n() * (kN / 2) + j) * 16 + lane() % 8 + lane() / 16 * 8;
        sm80::load_matrices(w[j], unit_at(weights, row, step * 2 + lane() / 8 % 2));
      }
    }
    __device__ void multiply(Sums& sums) const {
#pragma unroll
      for (int i = 0; i < kActive; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          sm80::Pair<T>::mma(sums.c[i][j], x[i][0], x[i][1], x[i][2], x[i][3], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  };

  __device__ static void put(const Sums& sums, float* to) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const int row = (i * kWarpsM + warp_m()) * 16 + lane() / 4;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        float* at = to + row * kSumStride + (warp_n() * kN + j) * 8 + lane() % 4 * 2;
        *reinterpret_cast<float2*>(at) = float2{sums.c[i][j][0], sums.c[i][j][1]};
        *reinterpret_cast<float2*>(at + 8 * kSumStride) = float2{sums.c[i][j][2], sums.c[i][j][3]};
      }
    }
  }
};

// Copies stage after stage. A thread's units: rows first_row + 16 i of x and of the weights, one column of units.
template <class Tile, class T>
struct DenseLoader {
  static constexpr int kXUnits = Tile::kRows / 16, kWUnits = Tile::kColumns / 16;
  T* to;                         // the thread's first unit of x in stage 0
  const char *x, *w;             // where the next stage comes from
  uint32_t x_units[kXUnits];     // rows of x: from `x`, in units of 16 bytes
  uint32_t w_step;               // bytes between the weight rows
  int w_there, row_tiles;        // weight rows inside the matrix; row tiles in use
  int k, left;                   // k that the thread still has to copy, its own unit's onwards
  int stage = 0;

  __device__ DenseLoader(const GemmArgs& a, int64_t expert, int64_t n0, const int32_t* rows, int tiles, T* stages) : row_tiles(tiles) {
    const int unit = static_cast<int>(threadIdx.x) % Tile::kUnits, first_row = static_cast<int>(threadIdx.x) / Tile::kUnits;
    to = Tile::unit_at(stages, first_row, unit);
    const int64_t first = weight_row(a, n0, first_row), columns = a.columns - n0 - (a.gated ? first_row & 7 : first_row);
    w_there = first < 0 ? 0 : static_cast<int>(columns > 128 ? kWUnits : (columns + (a.gated ? 7 : 15)) / (a.gated ? 8 : 16));
    w_step = static_cast<uint32_t>((a.gated ? 8 * a.column_step : 16) * a.w.n_stride * 2);
    w = static_cast<const char*>(a.w.data) + (expert * a.w.expert_stride + (first < 0 ? 0 : first) * a.w.n_stride + unit * 8) * 2;
    x = static_cast<const char*>(a.x);
#pragma unroll
    for (int i = 0; i < kXUnits; ++i) {
      const int32_t row = rows[first_row + i * 16];
      x_units[i] = static_cast<uint32_t>(static_cast<uint32_t>((row < 0 ? rows[0] : row) / a.row_divisor) * (a.x_stride / 8)) + unit;
    }
    left = static_cast<int>(a.w.k) - unit * 8;
  }

  // The part-th fourth of the next stage.
  __device__ void copy(int part) {
    const bool inside = left > 0;
    T* at = to + stage * Tile::kStageElements;
#pragma unroll
    for (int i = 0; i < kXUnits; ++i) {
      if (i % 4 == part && i < row_tiles) {
        sm80::copy_async_16(at + i * 16 * Tile::kDepth, x + static_cast<uint64_t>(x_units[i]) * 16, inside);
      }
    }
    at += Tile::kRows * Tile::kDepth;
#pragma unroll
    for (int i = 0; i < kWUnits; ++i) {
      if (i % 4 == part && i < w_there) {
        sm80::copy_async_16_line(at + i * 16 * Tile::kDepth, w + static_cast<uint64_t>(w_step) * i, inside);
      }
    }
  }
  __device__ void next() {
    left -= Tile::kDepth;
    if (left > 0) x += Tile::kDepth * 2, w += Tile::kDepth * 2;
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
};

// The first stages.
template <class Tile, class T>
__device__ __forceinline__ void dense_begin(DenseLoader<Tile, T>& loader, int steps) {
#pragma unroll
  for (int i = 0; i < Tile::kStages - 1; ++i) {
    if (i < steps) {
#pragma unroll
      for (int part = 0; part < 4; ++part) loader.copy(part);
      loader.next();
    }
    sm80::commit_async();
  }
}

// All of k; leaves the sums at the start of `stages`, [row][Tile::kSumStride].
template <class Tile, class T, int kActive>
__device__ __forceinline__ void dense_run(DenseLoader<Tile, T>& loader, T* stages, int steps) {
  constexpr int kParts = Tile::kDepth / 16;
  static_assert(kParts == 4, "a stage is copied in fourths");
  typename Tile::Sums sums = {};
  dense_begin(loader, steps);
  sm80::wait_async<Tile::kStages - 2>();
  __syncthreads();
  typename Tile::template Operands<kActive> operands[2];
  operands[0].load(stages, 0);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    T* current = stages + stage * Tile::kStageElements;
    const bool more = step + Tile::kStages - 1 < steps;
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (more) loader.copy(part);
      if (part + 1 < kParts) {
        operands[(part + 1) % 2].load(current, part + 1);
      } else {
        if (more) loader.next();
        sm80::commit_async();
        sm80::wait_async<Tile::kStages - 2>();
        __syncthreads();  // the next stage is there, and nobody reads the one that is filled next
        if (step + 1 < steps) operands[0].load(stages + stage * Tile::kStageElements, 0);
      }
      operands[part % 2].multiply(sums);
    }
  }
  sm80::wait_async<0>();
  __syncthreads();
  Tile::put(sums, reinterpret_cast<float*>(stages));
}

#ifdef INT4_EMU_WGMMA
// The same on wgmma: one warpgroup, weights are its rows, 64 at a time, and rows of x its columns, 32 kActive.
template <class Tile, class T, int kActive>
__device__ __forceinline__ void dense_run_wgmma(DenseLoader<Tile, T>& loader, T* stages, int steps) {
  constexpr int kHalves = Tile::kColumns / 64, kPerHalf = 16 * kActive;
  float sums[kHalves][kPerHalf];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < kPerHalf; ++i) sums[h][i] = 0.f;
  }
  dense_begin(loader, steps);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    sm80::wait_async<Tile::kStages - 2>();
    sm80::wgmma_publish();
    sm80::wgmma_wait();
    __syncthreads();  // this step's tiles are there, and nobody reads the stage that is filled next
    const uint64_t x = sm80::wgmma_tile(stages + stage * Tile::kStageElements);
    const uint64_t w = sm80::wgmma_tile(stages + stage * Tile::kStageElements + Tile::kRows * Tile::kDepth);
    sm80::wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tile::kDepth / 16; ++part) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) sm80::Wgmma<T, 32 * kActive>::run(sums[h], w + h * (64 * 128 / 16) + part * 2, x + part * 2);
    }
    sm80::wgmma_commit();
    if (step + Tile::kStages - 1 < steps) {
#pragma unroll
      for (int part = 0; part < 4; ++part) loader.copy(part);
      loader.next();
    }
    sm80::commit_async();
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  sm80::wgmma_wait();
  sm80::wait_async<0>();
  __syncthreads();
  float* to = reinterpret_cast<float*>(stages) + Tile::lane() % 4 * 2 * Tile::kSumStride + threadIdx.x / 32 * 16 + Tile::lane() / 4;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < kPerHalf; ++i) to[(i / 4 * 8 + i % 2) * Tile::kSumStride + h * 64 + i % 4 / 2 * 8] = sums[h][i];
  }
}
#endif

template <class Tile, class T, int kActive>
__device__ __forceinline__ void dense_all(DenseLoader<Tile, T>& loader, T* stages, int steps) {
#ifdef INT4_EMU_WGMMA
  if constexpr (Tile::kRows == 128) return dense_run_wgmma<Tile, T, kActive>(loader, stages, steps);
#endif
  if constexpr (kActive <= Tile::kM) dense_run<Tile, T, kActive>(loader, stages, steps);
}

template <class Tile, class T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) dense_kernel(GemmArgs a, int64_t column_tiles) {
  __shared__ int32_t rows[Tile::kRows];
  // From a multiple of 1024 bytes on, as wgmma wants it.
  char* shared = dynamic_shared<char>();
  T* stages = reinterpret_cast<T*>(shared + (1024 - static_cast<uint32_t>(__cvta_generic_to_shared(shared)) % 1024) % 1024);
  int64_t row_block, column_tile;
  tile_of_block(a.blocks.blocks, column_tiles, &row_block, &column_tile);
  wait_for_previous();
  let_next_start();
  const int32_t *block_rows = a.blocks.rows, *block_experts = a.blocks.experts;
  if constexpr (Tile::kRows == kDirectRows) {
    if (a.direct_slots > 0) {
      const UsedBlocks direct = used_blocks<Tile::kRows, Tile::kThreads>(a);
      if (row_block >= direct.used) return;
      block_rows = direct.rows, block_experts = direct.experts;
    }
  }
  const int64_t expert = block_experts[row_block];
  if (expert < 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t own = thread < Tile::kRows ? block_rows[row_block * Tile::kRows + thread] : -1;
  const bool valid = own >= 0 && own < a.blocks.row_count;
  if (thread < Tile::kRows) rows[thread] = valid ? own : -1;
  const int count = __syncthreads_count(valid), row_tiles = (count + 15) / 16;  // padding follows the rows
  if (count == 0) return;

  const int64_t n0 = column_tile * (a.gated ? Tile::kColumns / 2 : Tile::kColumns);
  DenseLoader<Tile, T> loader(a, expert, n0, rows, row_tiles, stages);
  const int steps = static_cast<int>((a.w.k + Tile::kDepth - 1) / Tile::kDepth);
  const int active = (row_tiles + Tile::kWarpsDown - 1) / Tile::kWarpsDown;
  if (Tile::kM == 1 || active == 1) {
    dense_all<Tile, T, 1>(loader, stages, steps);
  } else if (Tile::kM == 2 || active == 2) {
    dense_all<Tile, T, Tile::kM < 2 ? 1 : 2>(loader, stages, steps);
  } else if (active == 3) {
    dense_all<Tile, T, Tile::kM < 3 ? 1 : 3>(loader, stages, steps);
  } else {
    dense_all<Tile, T, Tile::kM>(loader, stages, steps);
  }
  __syncthreads();
  const float* all = reinterpret_cast<const float*>(stages);
  // A thread: weight rows r, r + 1, r + 8, r + 9 of one row.
  for (int i = thread; i < count * 32; i += Tile::kThreads) {
    const int row = i / 32, r = i % 32 / 4 * 16 + i % 4 * 2;
    const float* from = all + row * Tile::kSumStride + r;
    finish(a, expert, rows[row], n0, r, from[0], from[1], from[8], from[9]);
  }
}

template <class Tile, class T>
Status launch_dense_tile(const GemmArgs& a, Stream stream) {
  const int64_t width = a.gated ? Tile::kColumns / 2 : Tile::kColumns, tiles = ceil_div(a.columns, width), blocks = a.blocks.blocks * tiles;
  return launch_after("dense_kernel", dense_kernel<Tile, T>, blocks, Tile::kThreads, Tile::kSharedBytes, stream, a, tiles);
}

template <class T>
Status launch_dense(const GemmArgs& a, int block_rows, Stream stream) {
  switch (block_rows) {
    case 16:
      return launch_dense_tile<DenseTile<T, 16, 1, 4, 5>, T>(a, stream);
    case 64:
      return launch_dense_tile<DenseTile<T, 64, 2, 2, 4>, T>(a, stream);
    case 128:
      return launch_dense_tile<DenseTile<T, 128, 2, 2, 3>, T>(a, stream);
    default:
      return make_error(Code::internal, "dense_kernel has no form for blocks of %d rows", block_rows);
  }
}

}  // namespace int4_emu::gpu
