// mma.sync m16n8k16 on bf16 or fp16 tiles in shared memory; packed weights become (q - z) * s, rounded once, on their way there.
#pragma once

#include "gemm.cuh"
#include "mma_sm80.cuh"

namespace int4_emu::gpu {

// kWarpsM x kWarpsN warps share the tile of kRowCount rows by 128 weight rows.
template <class T, int kRowCount, int kWarpsM, int kWarpsN>
struct MmaSm80Atom {
  using Element = T;
  static constexpr int kRows = kRowCount, kColumns = 128, kDepth = 64, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kStages = kRowCount <= 32 ? 4 : 3, kBlocks = 2;
  static constexpr bool kAsync = true;
  static constexpr int kM = kRows / kWarpsM / 16, kN = kColumns / kWarpsN / 8;  // mma tiles of a warp
  static_assert(kM >= 1 && kN >= 2 && kN % 2 == 0, "a warp holds whole pairs of gate and up");

  __host__ __device__ static constexpr int tile_elements(int rows) { return rows * kDepth; }

  // Rows of 128 bytes; 16-byte units are swapped about by row, so that eight rows of one unit lie in eight bank groups.
  __device__ static Vec4* unit_at(Element* tile, int row, int unit) {
    return reinterpret_cast<Vec4*>(tile + row * kDepth) + (unit ^ (row & 7));
  }

  __device__ static void put(Element* tile, int row, int unit, const float* v) {
    using P = sm80::Pair<T>;
    *unit_at(tile, row, unit) = {{P::pack(v[0], v[1]), P::pack(v[2], v[3]), P::pack(v[4], v[5]), P::pack(v[6], v[7])}};
  }
  __device__ static void copy_async(Element* tile, int row, int unit, const T* source, bool inside) {
    sm80::copy_async_16(unit_at(tile, row, unit), source, inside);
  }
  __device__ static void commit() { sm80::commit_async(); }
  __device__ static void wait() { sm80::wait_async<kStages - 2>(); }

  struct Sums {
    float c[kM][kN][4];
  };

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ static void multiply(Element* x, Element* w, Sums& sums) {
    const int m0 = warp() / kWarpsN * (kM * 16), r0 = warp() % kWarpsN * (kN * 8);
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      uint32_t a[kM][4], b[kN / 2][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) sm80::load_matrices(a[i], unit_at(x, m0 + i * 16 + lane() % 16, step * 2 + lane() / 16));
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) {
        sm80::load_matrices(b[j], unit_at(w, r0 + j * 16 + lane() % 8 + lane() / 16 * 8, step * 2 + lane() / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          sm80::Pair<T>::mma(sums.c[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  template <class F>
  __device__ static void for_each(const Sums& sums, const F& f) {
    const int m0 = warp() / kWarpsN * (kM * 16) + lane() / 4, r0 = warp() % kWarpsN * (kN * 8) + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        const float *gate = sums.c[i][j], *up = sums.c[i][j + 1];
        f(m0 + i * 16, r0 + j * 8, gate[0], gate[1], up[0], up[1]);
        f(m0 + i * 16 + 8, r0 + j * 8, gate[2], gate[3], up[2], up[3]);
      }
    }
  }
};

template <class T>
Status launch_mma_sm80(const GemmArgs& a, int block_rows, Stream stream) {
  const char* name = "gemm_kernel (mma_sm80)";
  switch (block_rows) {
    case 16:
      return launch_gemm_kind<MmaSm80Atom<T, 16, 1, 8>, T>(a, stream, name);
    case 32:
      return launch_gemm_kind<MmaSm80Atom<T, 32, 2, 4>, T>(a, stream, name);
    case 64:
      return launch_gemm_kind<MmaSm80Atom<T, 64, 2, 4>, T>(a, stream, name);
    case 128:
      return launch_gemm_kind<MmaSm80Atom<T, 128, 2, 4>, T>(a, stream, name);
    default:
      return make_error(Code::internal, "mma_sm80 has no kernel for blocks of %d rows", block_rows);
  }
}

}  // namespace int4_emu::gpu
