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

  // One step's packed weights of a thread: 16-byte chunks of one row and one group each.
  template <WeightKind kKind>
  struct Raw {
    static constexpr int kCodes = kKind == WeightKind::int4 ? 32 : 16;
    static constexpr int kRowChunks = kDepth / kCodes, kChunks = kColumns * kRowChunks / kThreads;
    Vec4 codes[kChunks];
    float scale[kChunks];
    int zero[kChunks];

    const uint8_t* from[kChunks];  // null outside the matrix
    int64_t groups[kChunks];       // first group of the chunk's row

    __device__ void begin(const GemmArgs& a, int64_t expert, int64_t n0) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int64_t row = weight_row(a, n0, (static_cast<int>(threadIdx.x) + i * kThreads) / kRowChunks);
        from[i] = row < 0 ? nullptr : static_cast<const uint8_t*>(a.w.data) + expert * a.w.expert_stride + row * a.w.n_stride;
        groups[i] = (expert * a.w.n + (row < 0 ? 0 : row)) * a.w.groups;
      }
    }

    __device__ void load(const GemmArgs& a, int64_t step) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int k = static_cast<int>(step) * kDepth + (static_cast<int>(threadIdx.x) + i * kThreads) % kRowChunks * kCodes;
        codes[i] = {{0, 0, 0, 0}};
        scale[i] = 0.f;
        zero[i] = 0;
        if (from[i] == nullptr || k >= a.w.k) continue;
        codes[i] = sm80::load_streaming(from[i] + (kKind == WeightKind::int4 ? k / 2 : k));
        const int64_t c = groups[i] + group_of(a, k);
        scale[i] =
            sm80::is_type<T>(a.w.scale_dtype) ? to_float(static_cast<const T*>(a.w.scales)[c]) : load_float(a.w.scales, a.w.scale_dtype, c);
        zero[i] = a.w.zeros ? a.w.zeros[c] : (kKind == WeightKind::int4 ? 8 : 128);
      }
    }

    __device__ void store(const GemmArgs& a, Element* tile) const {
      if (sm80::is_type<T>(a.w.scale_dtype)) {
        store_scaled<true>(tile);
      } else {
        store_scaled<false>(tile);
      }
    }

    template <bool kOwnType>
    __device__ void store_scaled(Element* tile) const {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int u = static_cast<int>(threadIdx.x) + i * kThreads, r = u / kRowChunks, first = u % kRowChunks * (kCodes / 8);
        const sm80::Scale<T, kOwnType> s(scale[i]);
        if constexpr (kKind == WeightKind::int4) {
          const uint32_t minus = sm80::minus_int4<T>(zero[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t p[4];
            sm80::unpack_int4<T>(codes[i].w[j], minus, p);
#pragma unroll
            for (int q = 0; q < 4; ++q) p[q] = s.times(p[q]);
            *unit_at(tile, r, first + j) = {
                {sm80::low_halves(p[0], p[1]), sm80::low_halves(p[2], p[3]), sm80::high_halves(p[0], p[1]), sm80::high_halves(p[2], p[3])}};
          }
        } else {
          const uint32_t minus = sm80::minus_int8<T>(zero[i]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            uint32_t p[4];
            sm80::unpack_int8<T>(codes[i].w[2 * j], minus, p);
            sm80::unpack_int8<T>(codes[i].w[2 * j + 1], minus, p + 2);
#pragma unroll
            for (int q = 0; q < 4; ++q) p[q] = s.times(p[q]);
            *unit_at(tile, r, first + j) = {
                {sm80::low_halves(p[0], p[1]), sm80::high_halves(p[0], p[1]), sm80::low_halves(p[2], p[3]), sm80::high_halves(p[2], p[3])}};
          }
        }
      }
    }
  };

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
