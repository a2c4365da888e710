// The path for few rows per expert, bound by bandwidth: every weight is read once, in 16-byte loads straight into the registers of
// the A operand; tokens are the N side, 8 or 16 wide; K is split over the warps of a block, which add up at the end.
//
// A lane's 16 bytes hold consecutive k; a sum over k may run in any order, so the mma's k slots are simply filled in the order in
// which the codes come out of a word, and x is paired up to match.
#pragma once

#include "activation.cuh"
#include "mma_sm80.cuh"

namespace int4_emu::gpu {

constexpr int kDecodeWarps = 8;  // at most; K is split over 4 where there are blocks enough

// How scales meet the sums: once per chunk of k in fp32, exactly, where a chunk lies inside one group; else on the weights.
enum class ScaleMode { none, per_chunk, per_lane };

template <WeightKind kKind>
struct DecodeShape {
  static constexpr int kLane = kKind == WeightKind::int4 ? 32 : (kKind == WeightKind::int8 ? 16 : 8);  // k of a lane's 16 bytes
  static constexpr int kChunk = 4 * kLane;                                                             // of the four lanes of a row
};

template <class T, WeightKind kKind, int kTokenTiles, int kRowTiles, ScaleMode kScale, bool kOwnType>
struct DecodeWarp {
  using P = sm80::Pair<T>;
  static constexpr int kLane = DecodeShape<kKind>::kLane, kChunk = DecodeShape<kKind>::kChunk, kHalves = 2 * kRowTiles;

  // One chunk of the lane's rows: row 16 i + g and 16 i + g + 8.
  struct Chunk {
    Vec4 codes[kHalves];
    float scale[kHalves];
    int zero[kHalves];
  };

  const GemmArgs& a;
  const char* data;             // the expert's codes or elements
  int64_t first_group;          // of the expert
  uint32_t row_bytes[kHalves];  // from there to the lane's rows, in bytes and in groups: below 2^32, or w_vector is false
  uint32_t row_groups[kHalves];
  const T* x_data[kTokenTiles];  // the token's row of x at the lane's first k, null: no token
  float sums[kRowTiles][kTokenTiles][4] = {};

  __device__ static int quad() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) % 32 / 4; }

  __device__ DecodeWarp(const GemmArgs& args, int64_t expert, int64_t n0, const int32_t* rows) : a(args) {
    constexpr int64_t kBytes = kKind == WeightKind::dense ? 2 : 1;
    data = static_cast<const char*>(a.w.data) + expert * a.w.expert_stride * kBytes;
    first_group = expert * a.w.n * a.w.groups;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      int64_t row = weight_row(a, n0, h / 2 * 16 + h % 2 * 8 + group());
      if (row < 0) row = 0;  // computed, never stored
      row_bytes[h] = static_cast<uint32_t>(row * a.w.n_stride * kBytes);
      row_groups[h] = static_cast<uint32_t>(row * a.w.groups);
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const int32_t row = rows[t * 8 + group()];
      x_data[t] = row < 0 ? nullptr : static_cast<const T*>(a.x) + static_cast<int64_t>(row / a.row_divisor) * a.x_stride + quad() * kLane;
    }
  }

  __device__ void load(int chunk, Chunk& c) const {
    const int k_lane = chunk * kChunk + quad() * kLane, k = k_lane < a.w.k ? k_lane : 0;  // past K: meets zeros of x
    const int bytes = kKind == WeightKind::dense ? k * 2 : (kKind == WeightKind::int4 ? k / 2 : k);
    // In per-chunk mode the scale is that of the lane's tokens, so a lane past K needs it too.
    const uint32_t g = kKind == WeightKind::dense ? 0 : group_of(a, kScale == ScaleMode::per_chunk ? chunk * kChunk : k);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      c.codes[h] = sm80::load_streaming(data + row_bytes[h] + bytes);
      if constexpr (kKind != WeightKind::dense) {
        const int64_t index = first_group + row_groups[h] + g;
        c.scale[h] = kOwnType ? to_float(static_cast<const T*>(a.w.scales)[index]) : load_float(a.w.scales, a.w.scale_dtype, index);
        c.zero[h] = a.w.zeros ? a.w.zeros[index] : (kKind == WeightKind::int4 ? 8 : 128);
      }
    }
  }

  // x of eight k's, paired as the weights of that octet are.
  __device__ static void load_octet(const T* x, int octet, uint32_t* out) {
    Vec4 v = {{0, 0, 0, 0}};
    if (x != nullptr) v = reinterpret_cast<const Vec4*>(x)[octet];
    if constexpr (kKind == WeightKind::int4) {  // (0, 4), (1, 5), (2, 6), (3, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[2]);
      out[1] = sm80::high_halves(v.w[0], v.w[2]);
      out[2] = sm80::low_halves(v.w[1], v.w[3]);
      out[3] = sm80::high_halves(v.w[1], v.w[3]);
    } else if constexpr (kKind == WeightKind::int8) {  // (0, 2), (1, 3), (4, 6), (5, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[1]);
      out[1] = sm80::high_halves(v.w[0], v.w[1]);
      out[2] = sm80::low_halves(v.w[2], v.w[3]);
      out[3] = sm80::high_halves(v.w[2], v.w[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = v.w[j];
    }
  }

  // Pairs of eight weights: octet q of a lane's codes.
  __device__ void unpack(const Vec4& codes, int q, uint32_t minus, const sm80::Scale<T, kOwnType>& scale, uint32_t* out) const {
    if constexpr (kKind == WeightKind::dense) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = codes.w[j];
    } else {
      if constexpr (kKind == WeightKind::int4) {
        sm80::unpack_int4<T>(codes.w[q], minus, out);
      } else {
        sm80::unpack_int8<T>(codes.w[2 * q], minus, out);
        sm80::unpack_int8<T>(codes.w[2 * q + 1], minus, out + 2);
      }
      if constexpr (kScale == ScaleMode::per_lane) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = scale.times(out[j]);
      }
    }
  }

  __device__ void multiply(int chunk, const Chunk& c) {
    const bool inside = chunk * kChunk + quad() * kLane < a.w.k;
    const T* x_from[kTokenTiles];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) x_from[t] = inside && x_data[t] != nullptr ? x_data[t] + chunk * kChunk : nullptr;
    uint32_t minus[kHalves];
    sm80::Scale<T, kOwnType> scale[kHalves];
    float part[kRowTiles][kTokenTiles][4] = {};
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if constexpr (kKind == WeightKind::int4) minus[h] = sm80::minus_int4<T>(c.zero[h]);
      if constexpr (kKind == WeightKind::int8) minus[h] = sm80::minus_int8<T>(c.zero[h]);
      if constexpr (kKind == WeightKind::dense) minus[h] = 0;
      if constexpr (kKind != WeightKind::dense) scale[h] = sm80::Scale<T, kOwnType>(c.scale[h]);
    }
#pragma unroll
    for (int q = 0; q < kLane / 8; ++q) {
      uint32_t x[kTokenTiles][4];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) load_octet(x_from[t], q, x[t]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t top[4], bottom[4];
        unpack(c.codes[2 * i], q, minus[2 * i], scale[2 * i], top);
        unpack(c.codes[2 * i + 1], q, minus[2 * i + 1], scale[2 * i + 1], bottom);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          float* to = kScale == ScaleMode::per_chunk ? part[i][t] : sums[i][t];
          P::mma(to, top[0], bottom[0], top[1], bottom[1], x[t][0], x[t][1]);
          P::mma(to, top[2], bottom[2], top[3], bottom[3], x[t][2], x[t][3]);
        }
      }
    }
    if constexpr (kScale == ScaleMode::per_chunk) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][t][j] = fmaf(c.scale[2 * i + j / 2], part[i][t][j], sums[i][t][j]);
        }
      }
    }
  }
};

template <class T, WeightKind kKind, int kTokenTiles, int kRowTiles, ScaleMode kScale, bool kOwnType>
__global__ void __launch_bounds__(32 * kDecodeWarps, 2) decode_kernel(GemmArgs a, uint32_t column_tiles) {
  using Warp = DecodeWarp<T, kKind, kTokenTiles, kRowTiles, kScale, kOwnType>;
  constexpr int kTokens = 8 * kTokenTiles, kRows = 16 * kRowTiles;
  __shared__ float partial[kDecodeWarps][kTokens][kRows + 1];
  __shared__ int32_t rows[kTokens];
  const int64_t row_block = blockIdx.x / column_tiles, column_tile = blockIdx.x % column_tiles;
  const int64_t expert = a.blocks.experts[row_block];
  if (expert < 0) return;
  if (threadIdx.x < kTokens) {
    const int32_t row = a.blocks.rows[row_block * kTokens + threadIdx.x];
    rows[threadIdx.x] = row >= 0 && row < a.blocks.row_count ? row : -1;
  }
  __syncthreads();
  const int64_t n0 = column_tile * (a.gated ? kRows / 2 : kRows);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;

  const int chunks = static_cast<int>((a.w.k + Warp::kChunk - 1) / Warp::kChunk), share = (chunks + warps - 1) / warps;
  const int begin = warp * share, end = begin + share < chunks ? begin + share : chunks;
  Warp w(a, expert, n0, rows);
  // Chunks in flight per warp.
  constexpr int kAhead = 2;
  typename Warp::Chunk ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) w.load(begin + i, ring[i]);
  }
  for (int chunk = begin; chunk < end; chunk += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (chunk + i >= end) continue;
      const typename Warp::Chunk current = ring[i];
      if (chunk + i + kAhead < end) w.load(chunk + i + kAhead, ring[i]);
      w.multiply(chunk + i, current);
    }
  }
  // c[0..1]: weight row g, tokens 2q and 2q + 1; c[2..3]: weight row g + 8.
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) partial[warp][t * 8 + Warp::quad() * 2 + j % 2][i * 16 + j / 2 * 8 + Warp::group()] = w.sums[i][t][j];
    }
  }
  __syncthreads();
  // A thread: one token, weight rows r, r + 1, r + 8, r + 9.
  for (int i = threadIdx.x; i < kTokens * kRowTiles * 4; i += static_cast<int>(blockDim.x)) {
    const int token = i / (kRowTiles * 4), r = i % (kRowTiles * 4) / 4 * 16 + i % 4 * 2;
    if (rows[token] < 0) continue;
    float v[4] = {};
    for (int p = 0; p < warps; ++p) {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] += partial[p][token][r + j % 2 + j / 2 * 8];
    }
    finish(a, expert, rows[token], n0, r, v[0], v[1], v[2], v[3]);
  }
}

template <class T, WeightKind kKind, int kTokenTiles, int kRowTiles, ScaleMode kScale, bool kOwnType>
Status launch_decode_kernel(const GemmArgs& a, Stream stream) {
  const int64_t width = a.gated ? 8 * kRowTiles : 16 * kRowTiles, tiles = ceil_div(a.columns, width), blocks = a.blocks.blocks * tiles;
  const int warps = blocks * 4 < 16 * multiprocessors() ? kDecodeWarps : kDecodeWarps / 2;
  return launch("decode_kernel", decode_kernel<T, kKind, kTokenTiles, kRowTiles, kScale, kOwnType>, blocks, 32 * warps, 0, stream, a,
                static_cast<uint32_t>(tiles));
}

template <class T, WeightKind kKind, ScaleMode kScale, bool kOwnType>
Status launch_decode_rows(const GemmArgs& a, int block_rows, Stream stream) {
  // Narrow tiles where wide ones would leave multiprocessors idle.
  const bool narrow = a.blocks.blocks * ceil_div(a.columns, a.gated ? 16 : 32) < multiprocessors();
  if (block_rows == 8) {
    return narrow ? launch_decode_kernel<T, kKind, 1, 1, kScale, kOwnType>(a, stream)
                  : launch_decode_kernel<T, kKind, 1, 2, kScale, kOwnType>(a, stream);
  }
  if (block_rows == 16) {
    return narrow ? launch_decode_kernel<T, kKind, 2, 1, kScale, kOwnType>(a, stream)
                  : launch_decode_kernel<T, kKind, 2, 2, kScale, kOwnType>(a, stream);
  }
  return make_error(Code::internal, "decode_kernel has no form for blocks of %d rows", block_rows);
}

template <class T, WeightKind kKind, bool kOwnType>
Status launch_decode_scales(const GemmArgs& a, int block_rows, Stream stream) {
  if (a.w.group_size % DecodeShape<kKind>::kChunk == 0 || a.w.groups == 1) {
    return launch_decode_rows<T, kKind, ScaleMode::per_chunk, kOwnType>(a, block_rows, stream);
  }
  return launch_decode_rows<T, kKind, ScaleMode::per_lane, kOwnType>(a, block_rows, stream);
}

template <class T, WeightKind kKind>
Status launch_decode_packed(const GemmArgs& a, int block_rows, Stream stream) {
  return sm80::is_type<T>(a.w.scale_dtype) ? launch_decode_scales<T, kKind, true>(a, block_rows, stream)
                                           : launch_decode_scales<T, kKind, false>(a, block_rows, stream);
}

template <class T>
Status launch_decode(const GemmArgs& a, int block_rows, Stream stream) {
  switch (kind_of(a.w)) {
    case WeightKind::dense:
      return launch_decode_rows<T, WeightKind::dense, ScaleMode::none, true>(a, block_rows, stream);
    case WeightKind::int4:
      return launch_decode_packed<T, WeightKind::int4>(a, block_rows, stream);
    case WeightKind::int8:
      return launch_decode_packed<T, WeightKind::int8>(a, block_rows, stream);
  }
  return {};
}

}  // namespace int4_emu::gpu
