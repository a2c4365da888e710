// The main loop of AMD's matrix instructions: weights stream from global memory to registers, each read once, and are the
// instruction's M side; x of the row block goes through shared memory and is its N side, 16 tokens a tile.
//
// Packed codes are never subtracted from or scaled one by one. A pair of codes becomes a pair of exact numbers q + kOffset (the codes
// in the mantissa of a power of two), a slot of k's is summed by the matrix instruction, and per slot
//   sum += scale * (sum of (q + offset) * x) - scale * (offset + zero) * (sum of x),
// with scales, the second factor and the sums of x worked out once per block, in fp32, beside x in shared memory.
//
// An octet is eight neighbouring k of a row. Any order of k suits a sum as long as weights and x agree: a lane takes the octets that
// its loads bring, and x of int4 weights lies in shared memory in the order in which codes come out of a word (0 4 1 5 2 6 3 7).
// A chunk is four octets of every part of a wave. Form::whole: one scale per chunk, 16 bytes a load. Form::pieces: one per 32 k, so that
// the octets of a matrix instruction must come from one such piece, and loads are as short as that makes them.
//
// An atom has:
//   kWave; kWaves of a block; kOccupancy, the least waves per SIMD that registers shall leave room for;
//   kWideRowTiles, the tiles of weight rows of a wave, which share what it reads of x, where there are many tokens;
//   kSplit, the waves that share out k where there is little work;
//   kParts, the sets of lanes that hold different k of one row (lane / 16 where there are several);
//   kStepOctets a lane feeds to mma(a, b, sums);
//   Sums, a vector of a lane's results: weight rows lane / 16 * kSums + i of the tile, token lane % 16, given that the lane fed
//   row(lane % 16) of the tile;
//   correct(minus, minus_pitch, x_sum, x_pitch, lane, sums), which adds minus[slot][row] * x_sum[slot][token] for kCorrectSlots slots.
#pragma once

#include "stream_fill.cuh"

namespace int4_emu::gpu {

// A wave's part of the block: kRowTiles * 16 weight rows by all tokens.
template <class Shape, class Atom, class T, WeightKind kKind, int kTokenTiles, int kRowTiles>
struct StreamWave {
  using Codes = StreamCodes<T, kKind>;
  using Stage = StreamStage<Shape, T>;
  using Sums = typename Atom::Sums;
  static constexpr int kWords = Codes::kOctetWords;

  // Four octets of a lane, as they come and as the instruction takes them.
  struct Chunk {
    uint32_t words[4 * kWords];
  };
  struct Operand {
    Vec4 octets[4];
  };
  template <int kBytes>
  struct alignas(kBytes) Load {
    uint32_t w[kBytes / 4];
  };

  const uint8_t* data;
  uint32_t lane_bytes[kRowTiles];  // from data to the lane's row and part
  int lane, part, first_column, share;  // share: which steps of a stage are this wave's
  Sums sums[kRowTiles][kTokenTiles];

  __device__ __forceinline__ StreamWave(const GemmArgs& a, int64_t expert, int64_t n0) {
    lane = static_cast<int>(threadIdx.x) % Atom::kWave;
    part = Atom::kParts == 1 ? 0 : lane / 16;
    const int wave = amd::uniform(static_cast<int>(threadIdx.x) / Atom::kWave);
    first_column = wave / Shape::kSplit * kRowTiles * 16;
    share = wave % Shape::kSplit;
    const int64_t element = kKind == WeightKind::dense ? 2 : 1;
    data = static_cast<const uint8_t*>(a.w.data) + expert * a.w.expert_stride * element;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int64_t row = weight_row(a, n0, first_column + r * 16 + Atom::row(lane % 16));
      lane_bytes[r] = static_cast<uint32_t>((row < 0 ? 0 : row) * a.w.n_stride * element) + part * (Shape::kRun * Shape::kOctetBytes);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) sums[r][t] = Sums{};
    }
  }

  // Chunk number `chunk` of the row, all of whose k's exist.
  __device__ __forceinline__ void load(uint32_t chunk, int r, Chunk& out) const {
    constexpr int kBytes = Shape::kRun * Shape::kOctetBytes;
    const uint8_t* from = data + chunk * static_cast<uint32_t>(Shape::kChunk / 8 * Shape::kOctetBytes);
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      const auto v = *reinterpret_cast<const Load<kBytes>*>(from + i * (Atom::kParts * kBytes) + lane_bytes[r]);
#pragma unroll
      for (int j = 0; j < kBytes / 4; ++j) out.words[i * (kBytes / 4) + j] = v.w[j];
    }
  }

  // The same where a row may end: octets past it come from its start if packed (x is zero there), and are zero if dense.
  __device__ __forceinline__ void load_edge(uint32_t chunk, int r, int k_count, Chunk& out) const {
    constexpr int kBytes = Shape::kRun * Shape::kOctetBytes;
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      const int octet = static_cast<int>(chunk) * (Shape::kChunk / 8) + (i * Atom::kParts + part) * Shape::kRun;
      const bool inside = octet * 8 < k_count;
      const uint32_t back = inside ? static_cast<uint32_t>(octet - part * Shape::kRun) * Shape::kOctetBytes : 0u - part * kBytes;
      const auto v = *reinterpret_cast<const Load<kBytes>*>(data + static_cast<uint32_t>(lane_bytes[r] + back));
#pragma unroll
      for (int j = 0; j < kBytes / 4; ++j) out.words[i * (kBytes / 4) + j] = Shape::kPacked || inside ? v.w[j] : 0u;
    }
  }

  __device__ static __forceinline__ void unpack(const Chunk& codes, Operand& out) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out.octets[j] = Codes::unpack(codes.words + j * kWords);
  }

  // The next load of row tile r may take over the registers of codes that were unpacked.
  __device__ __forceinline__ void release(int r, const Operand& w) {
#pragma unroll
    for (int j = 0; j < 4; ++j) lane_bytes[r] = amd::after(lane_bytes[r], w.octets[j]);
  }

  // One chunk, the `c`-th of the stage.
  __device__ __forceinline__ void multiply(const Stage& stage, int c, const Operand (&operands)[kRowTiles]) {
    const T* x = stage.x + lane % 16 * Shape::kPitch + part * (Shape::kRun * 8) + c * Shape::kChunk;
    const float* scale = &stage.scale[0][0] + c * (Shape::kChunkSlots * Shape::kColumns) + first_column + lane / 16 * Shape::kSums;
#pragma unroll
    for (int slot = 0; slot < Shape::kChunkSlots; ++slot) {
      Sums parts[kRowTiles][kTokenTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) parts[r][t] = Sums{};
      }
#pragma unroll
      for (int s = 0; s < Shape::kLaneSlotOctets; s += Atom::kStepOctets) {
        const int j = slot * Shape::kLaneSlotOctets + s;
        Vec4 w[kRowTiles][Atom::kStepOctets];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = 0; i < Atom::kStepOctets; ++i) w[r][i] = operands[r].octets[j + i];
        }
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          Vec4 v[Atom::kStepOctets];
#pragma unroll
          for (int i = 0; i < Atom::kStepOctets; ++i) {
            v[i] = *reinterpret_cast<const Vec4*>(x + t * (16 * Shape::kPitch) + Shape::octet(j + i) * 8);
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) Atom::mma(w[r], v, Shape::kPacked ? parts[r][t] : sums[r][t]);
        }
      }
      if constexpr (Shape::kPacked) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const Sums factor = *reinterpret_cast<const Sums*>(scale + slot * Shape::kColumns + r * 16);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) sums[r][t] += factor * parts[r][t];
        }
      }
    }
  }

  // What the offsets of codes added to the sums of a whole stage.
  __device__ __forceinline__ void correct(const Stage& stage) {
#pragma unroll
    for (int slot = 0; slot < Shape::kPaddedSlots; slot += Atom::kCorrectSlots) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          Atom::correct(&stage.minus[slot][first_column + r * 16], Shape::kColumns, &stage.x_sum[slot][t * 16], Shape::kTokens, lane,
                        sums[r][t]);
        }
      }
    }
  }

  // Through shared memory, so that gate and up rows meet in a thread and the epilogue is there once.
  __device__ __forceinline__ void store(const GemmArgs& a, Stage& stage, int64_t expert, int64_t n0) const {
    constexpr int kQuads = Shape::kColumns / 4;
#pragma unroll 1
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      __syncthreads();  // x, or the results of the tile before, are no longer read
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        if (t != tile) continue;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          *reinterpret_cast<Sums*>(&stage.results[share][lane % 16][first_column + r * 16 + lane / 16 * Shape::kSums]) = sums[r][t];
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < 16 * kQuads; i += Shape::kThreads) {
        const int token = i / kQuads, r = i % kQuads / 4 * 16 + i % 4 * 2, row = stage.rows[tile * 16 + token];
        if (row < 0) continue;
        float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int p = 0; p < Shape::kSplit; ++p) {
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j] += stage.results[p][token][r + j % 2 + j / 2 * 8];
        }
        finish(a, expert, row, n0, r, v[0], v[1], v[2], v[3]);
      }
    }
  }
};

template <class Atom, class T, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles, int kSplit>
__global__ void __launch_bounds__(Atom::kWave* Atom::kWaves, Atom::kOccupancy) stream_kernel(GemmArgs a, uint32_t column_tiles) {
  using Shape = StreamShape<Atom, kKind, kForm, kTokenTiles, kRowTiles, kSplit>;
  __shared__ StreamStage<Shape, T> stage;
  const int64_t row_block = blockIdx.x / column_tiles, column_tile = blockIdx.x % column_tiles;
  const int64_t expert = a.blocks.experts[row_block];
  if (expert < 0) return;
  const int64_t n0 = column_tile * (a.gated ? Shape::kColumns / 2 : Shape::kColumns);
  for (int i = threadIdx.x; i < Shape::kTokens; i += Shape::kThreads) {
    const int32_t row = a.blocks.rows[row_block * Shape::kTokens + i];
    const bool there = row >= 0 && row < a.blocks.row_count;
    stage.rows[i] = there ? row : -1;
    stage.x_rows[i] = there ? row / a.row_divisor : -1;
  }
  // Slots that correct() reads beyond those of a stage.
  for (int slot = Shape::kSlots; slot < Shape::kPaddedSlots; ++slot) {
    for (int i = threadIdx.x; i < Shape::kColumns; i += Shape::kThreads) stage.minus[slot][i] = 0.f;
    for (int i = threadIdx.x; i < Shape::kTokens; i += Shape::kThreads) stage.x_sum[slot][i] = 0.f;
  }
  __syncthreads();

  const int k_count = static_cast<int>(a.w.k), whole_steps = k_count / Shape::kStep;
  using Wave = StreamWave<Shape, Atom, T, kKind, kTokenTiles, kRowTiles>;
  Wave wave(a, expert, n0);
  typename Wave::Chunk ring[Shape::kUnroll][kRowTiles];
  if (wave.share < whole_steps) {
#pragma unroll
    for (int u = 0; u < Shape::kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) wave.load(static_cast<uint32_t>(wave.share * Shape::kUnroll + u), r, ring[u][r]);
    }
  }
  StreamFill<Shape, Atom, T, kKind> fill;
  fill.begin(a, n0);
  fill.load(a, stage, expert, 0);
  const int stride = kSplit == 1 ? 1 : amd::hidden(kSplit);
  int first_step = 0;  // of the stage
  for (int k0 = 0; k0 < k_count; k0 += Shape::kDepth, first_step += Shape::kSteps) {
    __syncthreads();  // nobody reads the stage before any more
    fill.store(stage);
    if (k0 + Shape::kDepth < k_count) fill.load(a, stage, expert, k0 + Shape::kDepth);
    __syncthreads();
    const int left = whole_steps - first_step, steps = left < Shape::kSteps ? left : Shape::kSteps;
    // The main loop: chunks of this step are in registers, those of the wave's next one on their way.
#pragma unroll 1
    for (int i = wave.share; i < steps; i += stride) {
      const int step = first_step + i, next = step + Shape::kSplit < whole_steps ? step + Shape::kSplit : step;
#pragma unroll
      for (int u = 0; u < Shape::kUnroll; ++u) {
        typename Wave::Operand now[kRowTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Wave::unpack(ring[u][r], now[r]);
          if constexpr (Shape::kPacked) wave.release(r, now[r]);
          wave.load(static_cast<uint32_t>(next * Shape::kUnroll + u), r, ring[u][r]);
        }
        wave.multiply(stage, i * Shape::kUnroll + u, now);
      }
    }
    if (steps < Shape::kSteps && k_count % Shape::kStep != 0 && steps % Shape::kSplit == wave.share) {
#pragma unroll 1
      for (int u = 0; u < Shape::kUnroll; ++u) {
        typename Wave::Operand now[kRowTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          typename Wave::Chunk codes;
          wave.load_edge(static_cast<uint32_t>(whole_steps * Shape::kUnroll + u), r, k_count, codes);
          Wave::unpack(codes, now[r]);
        }
        wave.multiply(stage, steps * Shape::kUnroll + u, now);
      }
    }
    if constexpr (Shape::kPacked) {
      if (wave.share == 0) wave.correct(stage);
    }
  }
  wave.store(a, stage, expert, n0);
}

template <class Atom, class T, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles, int kSplit = 1>
Status launch_stream_kernel(const GemmArgs& a, Stream stream) {
  using Shape = StreamShape<Atom, kKind, kForm, kTokenTiles, kRowTiles, kSplit>;
  const int64_t tiles = ceil_div(a.columns, a.gated ? Shape::kColumns / 2 : Shape::kColumns);
  return launch("stream_kernel", stream_kernel<Atom, T, kKind, kForm, kTokenTiles, kRowTiles, kSplit>, a.blocks.blocks * tiles,
                Shape::kThreads, 0, stream, a, static_cast<uint32_t>(tiles));
}

template <class Atom, class T, WeightKind kKind, Form kForm>
Status launch_stream_rows(const GemmArgs& a, int block_rows, Stream stream) {
  if (block_rows == 16) {
    // Blocks of few weight rows, whose waves share out k, where wide ones would not fill the device twice.
    const bool narrow = a.blocks.blocks * ceil_div(a.columns, 8 * Atom::kWaves) < 2 * multiprocessors();
    return narrow ? launch_stream_kernel<Atom, T, kKind, kForm, 1, 1, Atom::kSplit>(a, stream)
                  : launch_stream_kernel<Atom, T, kKind, kForm, 1, 1>(a, stream);
  }
  if (block_rows == 32) return launch_stream_kernel<Atom, T, kKind, kForm, 2, 1>(a, stream);
  if (block_rows == 64) return launch_stream_kernel<Atom, T, kKind, kForm, 4, Atom::kWideRowTiles>(a, stream);
  return make_error(Code::internal, "stream_kernel has no form for blocks of %d rows", block_rows);
}

template <class Atom, class T, WeightKind kKind>
Status launch_stream_packed(const GemmArgs& a, int block_rows, Stream stream) {
  constexpr int kChunk = 32 * Atom::kParts;
  if (kChunk == 32 || a.w.groups == 1 || a.w.group_size % kChunk == 0) {
    return launch_stream_rows<Atom, T, kKind, Form::whole>(a, block_rows, stream);
  }
  // A chunk of one part is a piece.
  if constexpr (kChunk != 32) return launch_stream_rows<Atom, T, kKind, Form::pieces>(a, block_rows, stream);
  return {};
}

template <class Atom, class T>
Status launch_stream(const GemmArgs& a, int block_rows, Stream stream) {
  switch (kind_of(a.w)) {
    case WeightKind::dense:
      return launch_stream_rows<Atom, T, WeightKind::dense, Form::whole>(a, block_rows, stream);
    case WeightKind::int4:
      return launch_stream_packed<Atom, T, WeightKind::int4>(a, block_rows, stream);
    case WeightKind::int8:
      return launch_stream_packed<Atom, T, WeightKind::int8>(a, block_rows, stream);
  }
  return {};
}

}  // namespace int4_emu::gpu
