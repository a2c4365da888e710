// The main loop over an atom: one block, one tile of rows of an expert by weight rows, k in stages through shared memory.
#pragma once

#include "activation.cuh"
#include "load.cuh"

namespace int4_emu::gpu {

template <class Atom>
constexpr size_t gemm_shared_bytes() {
  return static_cast<size_t>(Atom::kStages) * (Atom::tile_elements(Atom::kRows) + Atom::tile_elements(Atom::kColumns)) *
         sizeof(typename Atom::Element);
}

// Tiles in groups of eight row blocks by all columns: weights and x of a group stay in L2.
__device__ inline void tile_of_block(int64_t blocks, int64_t tiles, int64_t* row_block, int64_t* column_tile) {
  constexpr int64_t kGroup = 8;
  const int64_t group = blockIdx.x / (kGroup * tiles), within = blockIdx.x % (kGroup * tiles), first = group * kGroup;
  const int64_t height = blocks - first < kGroup ? blocks - first : kGroup;
  *row_block = first + within % height;
  *column_tile = within / height;
}

template <class Atom, class T, WeightKind kKind>
__global__ void __launch_bounds__(Atom::kThreads, Atom::kBlocks) gemm_kernel(GemmArgs a, int64_t column_tiles) {
  using Element = typename Atom::Element;
  constexpr int kUnits = Atom::kDepth / 8;
  constexpr int kXTile = Atom::tile_elements(Atom::kRows), kWTile = Atom::tile_elements(Atom::kColumns);
  __shared__ int32_t rows[Atom::kRows];
  Element* x_tiles = dynamic_shared<Element>();
  Element* w_tiles = x_tiles + Atom::kStages * kXTile;

  int64_t row_block, column_tile;
  tile_of_block(a.blocks.blocks, column_tiles, &row_block, &column_tile);
  const int64_t expert = a.blocks.experts[row_block];
  if (expert < 0) return;
  const int64_t n0 = column_tile * (a.gated ? Atom::kColumns / 2 : Atom::kColumns);
  for (int i = threadIdx.x; i < Atom::kRows; i += Atom::kThreads) {
    const int32_t row = a.blocks.rows[row_block * Atom::kRows + i];
    rows[i] = row >= 0 && row < a.blocks.row_count ? row : -1;
  }
  __syncthreads();

  // A thread's units lie in one column of units, kRowStep rows apart; where they may be copied whole, from these.
  constexpr int kRowStep = Atom::kThreads / kUnits;
  constexpr int kXUnits = (Atom::kRows + kRowStep - 1) / kRowStep, kWUnits = (Atom::kColumns + kRowStep - 1) / kRowStep;
  const int unit = static_cast<int>(threadIdx.x) % kUnits, first_row = static_cast<int>(threadIdx.x) / kUnits;
  const bool copy_w = Atom::kAsync && kKind == WeightKind::dense && a.w_vector;
  const T *x_from[kXUnits], *w_from[kWUnits];
  if constexpr (Atom::kAsync) {
#pragma unroll
    for (int i = 0; i < kXUnits; ++i) {
      const int row = first_row + i * kRowStep;
      const bool there = row < Atom::kRows && rows[row] >= 0;
      x_from[i] = there ? static_cast<const T*>(a.x) + static_cast<int64_t>(rows[row] / a.row_divisor) * a.x_stride + unit * 8 : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kWUnits; ++i) {
      const int r = first_row + i * kRowStep;
      const int64_t row = copy_w && r < Atom::kColumns ? weight_row(a, n0, r) : -1;
      w_from[i] = row >= 0 ? static_cast<const T*>(a.w.data) + expert * a.w.expert_stride + row * a.w.n_stride + unit * 8 : nullptr;
    }
  }

  const auto fill_x = [&](int64_t step) {
    Element* tile = x_tiles + step % Atom::kStages * kXTile;
    const int64_t k0 = step * Atom::kDepth;
#pragma unroll
    for (int i = 0; i < kXUnits; ++i) {
      const int row = first_row + i * kRowStep;
      if (Atom::kRows % kRowStep != 0 && row >= Atom::kRows) continue;
      if constexpr (Atom::kAsync) {
        const bool inside = x_from[i] != nullptr && k0 + unit * 8 < a.w.k;
        Atom::copy_async(tile, row, unit, inside ? x_from[i] + k0 : static_cast<const T*>(a.x), inside);
      } else {
        float v[8];
        load_x<T>(a, rows[row], k0 + unit * 8, v);
        Atom::put(tile, row, unit, v);
      }
    }
  };
  // Dense weights along n: neighbouring threads take neighbouring rows.
  const bool along_n = kKind == WeightKind::dense && a.w.k_stride != 1;
  const auto fill_w = [&](int64_t step) {
    Element* tile = w_tiles + step % Atom::kStages * kWTile;
    const int64_t k0 = step * Atom::kDepth;
    if constexpr (Atom::kAsync) {
      if (copy_w) {
#pragma unroll
        for (int i = 0; i < kWUnits; ++i) {
          const bool inside = w_from[i] != nullptr && k0 + unit * 8 < a.w.k;
          Atom::copy_async(tile, first_row + i * kRowStep, unit, inside ? w_from[i] + k0 : static_cast<const T*>(a.w.data), inside);
        }
        return;
      }
    }
    for (int u = threadIdx.x; u < Atom::kColumns * kUnits; u += Atom::kThreads) {
      const int r = along_n ? u % Atom::kColumns : u / kUnits, column = along_n ? u / Atom::kColumns : u % kUnits;
      float v[8];
      load_w<kKind>(a, expert, weight_row(a, n0, r), k0 + column * 8, v);
      Atom::put(tile, r, column, v);
    }
  };

  typename Atom::Sums sums = {};
  const int64_t steps = (a.w.k + Atom::kDepth - 1) / Atom::kDepth;
  for (int64_t step = 0; step < Atom::kStages - 1; ++step) {
    if (step < steps) {
      fill_x(step);
      fill_w(step);
    }
    Atom::commit();
  }
  for (int64_t step = 0; step < steps; ++step) {
    Atom::wait();
    __syncthreads();  // step's tiles are there, and nobody reads the stage that is filled next
    const int64_t next = step + Atom::kStages - 1;
    if (next < steps) {
      fill_x(next);
      fill_w(next);
    }
    Atom::commit();
    Atom::multiply(x_tiles + step % Atom::kStages * kXTile, w_tiles + step % Atom::kStages * kWTile, sums);
  }
  Atom::for_each(sums, [&](int row, int r, float a0, float a1, float b0, float b1) {
    if (rows[row] >= 0) finish(a, expert, rows[row], n0, r, a0, a1, b0, b1);
  });
}

template <class Atom, class T, WeightKind kKind>
Status launch_gemm(const GemmArgs& a, Stream stream, const char* name) {
  const int64_t width = a.gated ? Atom::kColumns / 2 : Atom::kColumns, tiles = ceil_div(a.columns, width), blocks = a.blocks.blocks * tiles;
  return launch(name, gemm_kernel<Atom, T, kKind>, blocks, Atom::kThreads, gemm_shared_bytes<Atom>(), stream, a, tiles);
}

template <class Atom, class T>
Status launch_gemm_kind(const GemmArgs& a, Stream stream, const char* name) {
  switch (kind_of(a.w)) {
    case WeightKind::dense:
      return launch_gemm<Atom, T, WeightKind::dense>(a, stream, name);
    case WeightKind::int4:
      return launch_gemm<Atom, T, WeightKind::int4>(a, stream, name);
    case WeightKind::int8:
      return launch_gemm<Atom, T, WeightKind::int8>(a, stream, name);
  }
  return {};
}

}  // namespace int4_emu::gpu
