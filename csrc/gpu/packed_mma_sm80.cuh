// Packed weights for many rows per expert: weights are the mma's A operand, dequantised in registers by the one warp that owns their
// rows, and each fragment meets every token of the block. Codes, scales and x come through shared memory in stages.
//
// As in decode_mma_sm80.cuh a lane's 16 bytes hold consecutive k, whose codes fill the k slots in the order in which they come out of a
// word; x is paired up to match.
#pragma once

#include "gemm.cuh"
#include "mma_sm80.cuh"

namespace int4_emu::gpu {

// kTokenTiles x 8 rows of x by kWarps x kRowTiles x 16 weight rows. kOwnScale: scales are in x's type. kZeros: there may be zero points.
template <class T, WeightKind kKind, bool kOwnScale, bool kZeros, int kTokenTiles, int kWarps, int kRowTiles, int kStageCount,
          int kBlockCount>
struct PackedTile {
  using P = sm80::Pair<T>;
  static constexpr int kThreads = 32 * kWarps, kStages = kStageCount, kBlocks = kBlockCount;
  static constexpr int kTokens = 8 * kTokenTiles, kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows, kHalves = 2 * kRowTiles;
  static constexpr int kLane = kKind == WeightKind::int4 ? 32 : 16;  // k of a lane's 16 bytes
  static constexpr int kOctets = kLane / 8, kUnits = 4 * kOctets;    // of x: 16-byte units, of a lane and of a row
  static constexpr int kDepth = 4 * kLane;                           // k of a stage
  static constexpr int kCopyRows = kThreads / 4;                     // weight rows that are copied at once
  static constexpr int kMidpoint = kKind == WeightKind::int4 ? 8 : 128;
  static constexpr int kStageVectors = kRows * 4 + kTokens * kUnits + kRows;  // codes, x, a word for each lane's scale
  static constexpr int kSumStride = kRows + 4;  // of a token's sums; two tokens lie eight banks apart
  static constexpr size_t kStageBytes = sizeof(Vec4) * kStages * kStageVectors, kSumBytes = sizeof(float) * kTokens * kSumStride;
  static constexpr size_t kSharedBytes = kStageBytes > kSumBytes ? kStageBytes : kSumBytes;
  static constexpr uint32_t kNoRow = 0xffffffffu;
  static_assert(kSharedBytes + 1024 <= 99 * 1024, "what the smallest multiprocessors give a block");
  static_assert(kCopyRows % 16 == 0 && kThreads % (2 * kUnits) == 0, "what a thread copies repeats in the same place of a tile");

  const GemmArgs& a;
  Vec4* stages;
  const uint32_t* x_units;  // [kTokens]: where a row of x starts, in 16-byte units; kNoRow: no row

  // A thread copies a 16-byte unit of codes and a scale of every kCopyRows-th row.
  const uint8_t* codes_from;
  int64_t scales_from;  // element
  int copy_count;       // rows inside the matrix
  // A lane multiplies rows h = 2 i (row g of its tile i) and 2 i + 1 (row g + 8).
  uint32_t upper;      // bit h % 2: in group 0, the scale is the upper half of its aligned word
  int64_t zeros_from;  // element of row 0
  int zeros_count;     // rows inside the matrix

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int quad() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ static int lane_row() { return static_cast<int>(threadIdx.x) % 32 / 4; }

  __device__ PackedTile(const GemmArgs& args, int64_t expert, int64_t n0, Vec4* shared, const uint32_t* x)
      : a(args), stages(shared), x_units(x) {
    const int r = static_cast<int>(threadIdx.x) / 4, first = warp() * kWarpRows + lane_row();
    const int64_t copied = weight_row(a, n0, r), own = weight_row(a, n0, first), base = expert * a.w.n * a.w.groups;
    codes_from = static_cast<const uint8_t*>(a.w.data) + expert * a.w.expert_stride + quad() * 16;
    if (copied >= 0) codes_from += copied * a.w.n_stride;
    scales_from = base + (copied < 0 ? 0 : copied) * a.w.groups;
    copy_count = copied < 0 ? 0 : parts(a.columns - column_of(n0, r), a.gated ? kCopyRows / 2 : kCopyRows);
    zeros_from = base + (own < 0 ? 0 : own) * a.w.groups;
    zeros_count = own < 0 ? 0 : parts(a.columns - column_of(n0, first), 8) * (a.gated ? 2 : 1);
    const uint32_t even = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(a.w.scales) / 2 + zeros_from) & 1;
    upper = even | ((even + static_cast<uint32_t>(half_step())) & 1) << 1;
  }

  __device__ static int parts(int64_t n, int step) { return static_cast<int>((n + step - 1) / step); }
  __device__ int64_t column_of(int64_t n0, int r) const { return a.gated ? n0 + (r >> 4) * 8 + (r & 7) : n0 + r; }
  __device__ int64_t copy_step() const { return a.gated ? kCopyRows / 2 * a.column_step : kCopyRows; }  // in rows
  __device__ int64_t half_step() const { return (a.gated ? a.part_step : 8) * a.w.groups; }             // in elements
  __device__ int64_t tile_step() const { return (a.gated ? 8 * a.column_step : 16) * a.w.groups; }
  // Of the lane's codes in a step; K or more: they meet zeros of x.
  __device__ static int lane_k(int step) { return step * kDepth + quad() * kLane; }
  __device__ uint32_t lane_group(int step) const { return static_cast<uint32_t>(lane_k(step)) >> a.group_shift; }

  // Half of the copies of a stage; what lies past K becomes zeros.
  template <int kTiles>
  __device__ void fill(int slot, int step, int half) const {
    Vec4* to = stages + slot * kStageVectors + threadIdx.x;
    constexpr int kRowShare = kRows / kCopyRows / 2;
    static_assert(kRows % (2 * kCopyRows) == 0, "both halves copy as many rows");
    constexpr int kXCopies = (kTiles * 8 * kUnits + kThreads - 1) / kThreads, kXShare = (kXCopies + 1) / 2;
    const int rows = (lane_k(step) < a.w.k ? copy_count : 0) - half * kRowShare;
    const int64_t codes_step = copy_step() * a.w.n_stride;
    const uint8_t* codes = codes_from + static_cast<int64_t>(step) * 64 + half * (kRowShare * codes_step);
#pragma unroll
    for (int i = 0; i < kRowShare; ++i) {
      sm80::copy_async_16(to + (half * kRowShare + i) * kThreads, codes, i < rows);
      codes += codes_step;
    }
    to += kRows * 4;
    const int first = static_cast<int>(threadIdx.x) / kUnits, k = step * kDepth + x_column(static_cast<int>(threadIdx.x) % kUnits, first);
    const T* x = static_cast<const T*>(a.x) + k;
    uint32_t units[kXShare];
#pragma unroll
    for (int i = 0; i < kXShare; ++i) {
      const int token = first + (half * kXShare + i) * (kThreads / kUnits);
      units[i] = token < kTiles * 8 ? x_units[token] : kNoRow;
    }
#pragma unroll
    for (int i = 0; i < kXShare; ++i) {
      const int token = first + (half * kXShare + i) * (kThreads / kUnits);
      if (kTiles * 8 * kUnits % (2 * kThreads) != 0 && token >= kTiles * 8) break;
      sm80::copy_async_16(to + (half * kXShare + i) * kThreads, x + static_cast<uint64_t>(units[i]) * 8, units[i] != kNoRow && k < a.w.k);
    }
    // The aligned word that holds a scale.
    uint32_t* words = reinterpret_cast<uint32_t*>(to - threadIdx.x + kTokens * kUnits) + threadIdx.x;
    const bool wide = !kOwnScale && a.w.scale_dtype == DType::f32;
    const int64_t scales_step = copy_step() * a.w.groups * (wide ? 4 : 2);
    uintptr_t from = reinterpret_cast<uintptr_t>(a.w.scales) + (scales_from + lane_group(step)) * (wide ? 4 : 2);
    from = (from & ~uintptr_t{3}) + half * (kRowShare * scales_step);  // scales_step is a multiple of four
#pragma unroll
    for (int i = 0; i < kRowShare; ++i) {
      sm80::copy_async_4(words + (half * kRowShare + i) * kThreads, reinterpret_cast<const void*>(from), i < rows);
      from += scales_step;
    }
  }

  // Place p of a token's units holds octet o of the quad's lane q: eight lanes that read at once (two tokens, one octet) and eight
  // units that one line of global memory brings both meet eight bank groups.
  __device__ static int x_column(int p, int token) {
    const int upper = p / 8, o = upper * 2 + (p / 4 % 2 ^ token % 2), q = p % 4 ^ upper * 2;
    return q * kLane + o * 8;
  }

  __device__ void load_zeros(int step, int* zero) const {
    if (!kZeros || a.w.zeros == nullptr) return;
    const int count = lane_k(step) < a.w.k ? zeros_count : 0;
    const uint8_t *even = a.w.zeros + zeros_from + lane_group(step), *odd = even + half_step();
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const uint8_t*& from = h % 2 ? odd : even;
      if (h < count) zero[h] = *from;
      from += tile_step();
    }
  }

  // x of eight k's, paired as the weights of that octet are.
  __device__ static void pair_up(const Vec4& v, uint32_t* out) {
    if constexpr (kKind == WeightKind::int4) {  // (0, 4), (1, 5), (2, 6), (3, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[2]);
      out[1] = sm80::high_halves(v.w[0], v.w[2]);
      out[2] = sm80::low_halves(v.w[1], v.w[3]);
      out[3] = sm80::high_halves(v.w[1], v.w[3]);
    } else {  // (0, 2), (1, 3), (4, 6), (5, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[1]);
      out[1] = sm80::high_halves(v.w[0], v.w[1]);
      out[2] = sm80::low_halves(v.w[2], v.w[3]);
      out[3] = sm80::high_halves(v.w[2], v.w[3]);
    }
  }

  struct alignas(8) Codes {  // half of a lane's
    uint32_t w[2];
  };

  // Weights of octet o.
  __device__ static void unpack(const Codes& codes, int o, uint32_t minus, const sm80::Scale<T, kOwnScale>& scale, uint32_t* out) {
    if constexpr (kKind == WeightKind::int4) {
      sm80::unpack_int4<T>(codes.w[o % 2], minus, out);
    } else {
      sm80::unpack_int8<T>(codes.w[0], minus, out);
      sm80::unpack_int8<T>(codes.w[1], minus, out + 2);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = scale.times(out[j]);
  }

  // The scale in `word`; `half`: its 16 bits, where it has no more.
  __device__ sm80::Scale<T, kOwnScale> scale_of(const uint32_t* word, const uint16_t* half) const {
    if constexpr (kOwnScale) {
      sm80::Scale<T, true> scale;
      scale.pair = *half * 0x10001u;
      return scale;
    } else {
      const DType type = a.w.scale_dtype;
      if (type == DType::f32) return sm80::Scale<T, false>(as_float(*word));
      return sm80::Scale<T, false>(type == DType::bf16 ? to_float(Bf16{*half}) : to_float(Fp16{*half}));
    }
  }

  template <int kTiles>
  __device__ void multiply(int slot, int step, int* zero, float (&sums)[kRowTiles][kTiles][4]) const {
    const Vec4* stage = stages + slot * kStageVectors;
    const int row = warp() * kWarpRows + lane_row();
    const Codes* w = reinterpret_cast<const Codes*>(stage + row * 4 + quad());
    const Vec4* x = stage + kRows * 4;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x + kTokens * kUnits) + row * 4 + quad();
    const uint32_t halves = upper ^ (0u - (lane_group(step) & 1));
    const uint16_t *even_scales = reinterpret_cast<const uint16_t*>(words) + (halves & 1),
                   *odd_scales = reinterpret_cast<const uint16_t*>(words) + (halves >> 1 & 1);
    Codes codes[kHalves];
    uint32_t minus[kRowTiles];  // of the upper and the lower row, one half each
    sm80::Scale<T, kOwnScale> scale[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      scale[h] = scale_of(words + h * 32, (h % 2 ? odd_scales : even_scales) + h * 64);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int z0 = zero[2 * i], z1 = zero[2 * i + 1];
      minus[i] = kKind == WeightKind::int4 ? (P::kMagic | 0x80008000u) + static_cast<uint32_t>(z0 + z1 * 0x10000)
                                           : P::pack(-static_cast<float>(z0), -static_cast<float>(z1));
    }
    // Octets 0 and 1 of the lane's tokens; the two that may follow lie upper_octets units on.
    const Vec4 *even = x + lane_row() * kUnits + quad() + lane_row() % 2 * 4, *odd = even + 4 - lane_row() % 2 * 8;
    const int upper_octets = 8 + (quad() ^ 2) - quad();
    constexpr int kHalfOctets = kOctets / 2;
    // Sums that take half of the registers leave none for a second half in flight.
    constexpr int kUnroll = kRowTiles * kTiles * 8 * kThreads * kBlocks < 65536 ? 2 : 1;
#pragma unroll kUnroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) codes[h] = w[h * 64 + half];
      const int shift = kOctets == 4 ? half * upper_octets : 0;
      const Vec4* from[2] = {(kOctets == 4 || half == 0 ? even : odd) + shift, odd + shift};
#pragma unroll
      for (int o = 0; o < kHalfOctets; ++o) {
        uint32_t top[kRowTiles][4], bottom[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const uint32_t middle = kKind == WeightKind::int4 ? sm80::minus_int4<T>(kMidpoint) : sm80::minus_int8<T>(kMidpoint);
          unpack(codes[2 * i], o, kZeros ? sm80::low_halves(minus[i], minus[i]) : middle, scale[2 * i], top[i]);
          unpack(codes[2 * i + 1], o, kZeros ? sm80::high_halves(minus[i], minus[i]) : middle, scale[2 * i + 1], bottom[i]);
        }
        // On their way during these products: half of a later stage, and, where registers are free for them, the next step's zeros.
        if (o == 0) fill<kTiles>(slot == 0 ? kStages - 1 : slot - 1, step + kStages - 1, half);
        if (half == 1 && o == kHalfOctets - 1) load_zeros(step + 1, zero);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint32_t b[4];
          pair_up(from[o][t * 8 * kUnits], b);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) P::mma(sums[i][t], top[i][0], bottom[i][0], top[i][1], bottom[i][1], b[0], b[1]);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) P::mma(sums[i][t], top[i][2], bottom[i][2], top[i][3], bottom[i][3], b[2], b[3]);
        }
      }
    }
  }

  // The first kTiles tiles of tokens, all of k; leaves [token][row] in shared memory.
  template <int kTiles>
  __device__ void run() const {
    float sums[kRowTiles][kTiles][4] = {};
    int zero[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) zero[h] = kMidpoint;
    const int steps = static_cast<int>((a.w.k + kDepth - 1) / kDepth);
    for (int step = 0; step < kStages - 1; ++step) {
      fill<kTiles>(step, step, 0);
      fill<kTiles>(step, step, 1);
      sm80::commit_async();
    }
    load_zeros(0, zero);
    for (int step = 0, slot = 0; step < steps; ++step) {
      sm80::wait_async<kStages - 2>();
      __syncthreads();  // step's stage is there, and nobody reads the one that multiply fills
      multiply<kTiles>(slot, step, zero, sums);
      sm80::commit_async();
      slot = slot == kStages - 1 ? 0 : slot + 1;
    }
    sm80::wait_async<0>();
    __syncthreads();
    // c[0..1]: weight row g, tokens 2q and 2q + 1; c[2..3]: weight row g + 8.
    float* out = reinterpret_cast<float*>(stages) + warp() * kWarpRows + lane_row();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[(t * 8 + quad() * 2 + j % 2) * kSumStride + i * 16 + j / 2 * 8] = sums[i][t][j];
      }
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) packed_kernel(GemmArgs a, int64_t column_tiles) {
  constexpr int kTokens = Tile::kTokens, kRows = Tile::kRows;
  __shared__ uint32_t x_units[kTokens];
  __shared__ int32_t rows[kTokens];
  int64_t row_block, column_tile;
  tile_of_block(a.blocks.blocks, column_tiles, &row_block, &column_tile);
  const int64_t expert = a.blocks.experts[row_block];
  if (expert < 0) return;
  const int64_t n0 = column_tile * (a.gated ? kRows / 2 : kRows);
  for (int i = threadIdx.x; i < kTokens; i += Tile::kThreads) {
    const int32_t row = a.blocks.rows[row_block * kTokens + i];
    const bool there = row >= 0 && row < a.blocks.row_count;
    rows[i] = there ? row : -1;
    x_units[i] = there ? static_cast<uint32_t>(row / a.row_divisor * (a.x_stride / 8)) : Tile::kNoRow;
  }
  __syncthreads();
  float* sums = dynamic_shared<float>();
  {
    const Tile tile(a, expert, n0, reinterpret_cast<Vec4*>(sums), x_units);
    // Rows that pad a block are its last ones: work is done for the tiles before them alone.
    constexpr int kTiles = kTokens / 8;
    const auto fewer = [&](int tiles) { return tiles < kTiles && rows[tiles * 8 % kTokens] < 0; };
    if (fewer(2)) {
      tile.template run<2>();
    } else if (fewer(4)) {
      tile.template run<(kTiles < 4 ? kTiles : 4)>();
    } else if (fewer(8)) {
      tile.template run<(kTiles < 8 ? kTiles : 8)>();
    } else {
      tile.template run<kTiles>();
    }
  }
  __syncthreads();
  // A thread: weight rows r, r + 1, r + 8, r + 9 of every so many tokens, several at a time.
  constexpr int kPerToken = kRows / 4, kStep = Tile::kThreads / kPerToken, kBatch = 4;
  static_assert(Tile::kThreads % kPerToken == 0 && kTokens % (kStep * kBatch) == 0, "a thread keeps its rows");
  const int within = static_cast<int>(threadIdx.x) % kPerToken, r = within / 4 * 16 + within % 4 * 2;
  const Outputs outputs(a, expert, n0, r);
  for (int token = static_cast<int>(threadIdx.x) / kPerToken; token < kTokens && rows[token] >= 0; token += kStep * kBatch) {
    float2 v[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float2* from = reinterpret_cast<const float2*>(sums + (token + i * kStep) * Tile::kSumStride + r);
      v[i][0] = from[0], v[i][1] = from[4];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t row = rows[token + i * kStep];
      if (row >= 0) outputs.store(row, v[i][0].x, v[i][0].y, v[i][1].x, v[i][1].y);
    }
  }
}

template <class Tile>
Status launch_packed_tile(const GemmArgs& a, Stream stream) {
  const int64_t tiles = ceil_div(a.columns, a.gated ? Tile::kRows / 2 : Tile::kRows);
  return launch("packed_kernel", packed_kernel<Tile>, a.blocks.blocks * tiles, Tile::kThreads, Tile::kSharedBytes, stream, a, tiles);
}

template <class T, WeightKind kKind, bool kOwnScale, bool kZeros>
Status launch_packed_rows(const GemmArgs& a, int block_rows, Stream stream) {
  // Zero points take registers that the sums of the last two tiles would need.
  constexpr int kTiles = kZeros ? 8 : 10;
  if (block_rows == 32) return launch_packed_tile<PackedTile<T, kKind, kOwnScale, kZeros, 4, 4, 4, 3, 2>>(a, stream);
  if (block_rows == 8 * kTiles) {
    // Tiles half as wide where wide ones would come in so few rounds that the last one counts.
    const bool narrow = a.blocks.blocks * ceil_div(a.columns, a.gated ? 128 : 256) < 3 * multiprocessors();
    return narrow ? launch_packed_tile<PackedTile<T, kKind, kOwnScale, kZeros, kTiles, 4, 2, 2, 3>>(a, stream)
                  : launch_packed_tile<PackedTile<T, kKind, kOwnScale, kZeros, kTiles, 4, 4, 2, 2>>(a, stream);
  }
  return make_error(Code::internal, "packed_kernel has no form for blocks of %d rows", block_rows);
}

template <class T, WeightKind kKind>
Status launch_packed_kind(const GemmArgs& a, int block_rows, Stream stream) {
  if (!sm80::is_type<T>(a.w.scale_dtype)) return launch_packed_rows<T, kKind, false, true>(a, block_rows, stream);
  return a.w.zeros || block_rows == 64 ? launch_packed_rows<T, kKind, true, true>(a, block_rows, stream)
                   : launch_packed_rows<T, kKind, true, false>(a, block_rows, stream);
}

template <class T>
Status launch_packed(const GemmArgs& a, int block_rows, Stream stream) {
  return a.w.bits == 4 ? launch_packed_kind<T, WeightKind::int4>(a, block_rows, stream)
                       : launch_packed_kind<T, WeightKind::int8>(a, block_rows, stream);
}

}  // namespace int4_emu::gpu
