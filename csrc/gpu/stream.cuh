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
// An atom has: kWave; kWaves of a block; kParts, the sets of lanes that hold different k of one row (lane / 16 where there are several);
// kStepOctets a lane feeds to mma(a, b, sums); Sums, a vector of a lane's results: weight rows lane / 16 * kSums + i of the tile, token
// lane % 16, given that the lane fed row(lane % 16) of the tile; correct(minus, minus_pitch, x_sum, x_pitch, lane, sums), which adds
// minus[slot][row] * x_sum[slot][token] for kCorrectSlots slots.
#pragma once

#include "activation.cuh"
#include "mma_amd.cuh"

namespace int4_emu::gpu {

enum class Form : int { whole = 0, pieces = 1 };

template <class T, WeightKind kKind>
struct StreamCodes {
  static constexpr bool kBf16 = std::is_same<T, Bf16>::value;
  static constexpr int kOctetWords = kKind == WeightKind::int4 ? 1 : kKind == WeightKind::int8 ? 2 : 4;
  // Eight bits fit bf16's mantissa only without an offset.
  static constexpr float kOffset = kKind == WeightKind::int4 ? (kBf16 ? 128.f : 64.f) : (kBf16 ? 0.f : 1024.f);
  static constexpr int kMidpoint = kKind == WeightKind::int4 ? 8 : 128;

  __device__ static __forceinline__ Vec4 unpack(const uint32_t* words) {
    if constexpr (kKind == WeightKind::int4) {
      const uint32_t w = words[0];
      if constexpr (kBf16) {  // 128 + q, the code in the last bits of the mantissa
        constexpr uint32_t kMask = 0x000f000fu, kMagic = 0x43004300u;
        return {{amd::and_or(w, kMask, kMagic), amd::and_or(w >> 4, kMask, kMagic), amd::and_or(w >> 8, kMask, kMagic),
                 amd::and_or(w >> 12, kMask, kMagic)}};
      }
      // 64 + q, four bits further up: as many operations, and sixteen times less to cancel than with 1024 + q.
      constexpr uint32_t kMask = 0x00f000f0u, kMagic = 0x54005400u;
      return {{amd::and_or(w << 4, kMask, kMagic), amd::and_or(w, kMask, kMagic), amd::and_or(w >> 4, kMask, kMagic),
               amd::and_or(w >> 8, kMask, kMagic)}};
    } else if constexpr (kKind == WeightKind::int8) {
      Vec4 out;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t w = words[i / 2];
        if constexpr (kBf16) {
          const int shift = i % 2 * 16;
          const float low = static_cast<float>((w >> shift) & 0xffu), high = static_cast<float>((w >> (shift + 8)) & 0xffu);
          out.w[i] = amd::high_halves(as_bits(low), as_bits(high));
        } else {
          out.w[i] = amd::permute(w, 0x64646464u, i % 2 ? 0x04030402u : 0x04010400u);
        }
      }
      return out;
    } else {
      return {{words[0], words[1], words[2], words[3]}};
    }
  }

  // x in the order of unpack().
  __device__ static __forceinline__ Vec4 ordered(const Vec4& v) {
    if constexpr (kKind != WeightKind::int4) return v;
    return {{amd::low_halves(v.w[0], v.w[2]), amd::high_halves(v.w[0], v.w[2]), amd::low_halves(v.w[1], v.w[3]),
             amd::high_halves(v.w[1], v.w[3])}};
  }

  __device__ static __forceinline__ float sum(const Vec4& v) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total += to_float(T{static_cast<uint16_t>(v.w[i])}) + to_float(T{static_cast<uint16_t>(v.w[i] >> 16)});
    }
    return total;
  }
};

template <class Atom, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles>
struct StreamShape {
  static constexpr bool kPacked = kKind != WeightKind::dense;
  static constexpr int kThreads = Atom::kWave * Atom::kWaves;
  static constexpr int kTokens = 16 * kTokenTiles, kColumns = 16 * kRowTiles * Atom::kWaves;
  static constexpr int kChunk = 32 * Atom::kParts;                       // k
  static constexpr int kDepth = 512 / kTokenTiles;                       // k of x in shared memory
  static constexpr int kUnroll = kTokenTiles <= 2 ? 2 : 1;               // chunks an iteration of the main loop
  static constexpr int kStep = kUnroll * kChunk, kSteps = kDepth / kStep;
  static constexpr int kSums = sizeof(typename Atom::Sums) / sizeof(float);

  static constexpr int kSlotK = kForm == Form::whole ? kChunk : 32;
  static constexpr int kSlotOctets = kSlotK / 8, kChunkSlots = kChunk / kSlotK, kLaneSlotOctets = 4 / kChunkSlots;
  static constexpr int kSlots = kPacked ? kDepth / kSlotK : 0;
  static constexpr int kPaddedSlots = (kSlots + Atom::kCorrectSlots - 1) / Atom::kCorrectSlots * Atom::kCorrectSlots;

  // Octets of one load.
  static constexpr int kUnitOctets = kKind == WeightKind::int4 ? 4 : kKind == WeightKind::int8 ? 2 : 1;
  static constexpr int kRun = kUnitOctets < kLaneSlotOctets ? kUnitOctets : kLaneSlotOctets, kLoads = 4 / kRun;
  static constexpr int kOctetBytes = kKind == WeightKind::int4 ? 4 : kKind == WeightKind::int8 ? 8 : 16;

  // Of a chunk's octets, where a lane's octet j stands before its part is added.
  __host__ __device__ static constexpr int octet(int j) { return j / kRun * Atom::kParts * kRun + j % kRun; }

  static constexpr int kPitch = kDepth + 8;  // elements of a row of x: rows lie 4 banks apart
  static constexpr int kXUnits = kTokens * kDepth / 8 / kThreads;
  static constexpr int kScales = (kColumns * kSlots + kThreads - 1) / kThreads;
};

// Shared memory of a block: one stage of kDepth k's, at the end the results of a token tile.
template <class Shape, class T>
struct alignas(16) StreamStage {
  static constexpr int kSlots = Shape::kPacked ? Shape::kPaddedSlots : 1;
  union {
    T x[Shape::kTokens * Shape::kPitch];
    float results[16][Shape::kColumns + 4];
  };
  float scale[kSlots][Shape::kColumns];
  float minus[kSlots][Shape::kColumns];  // -scale * (offset + zero)
  float x_sum[kSlots][Shape::kTokens];
  int32_t rows[Shape::kTokens], x_rows[Shape::kTokens];  // of out and of x, -1 in padding
};

// What a thread carries from global to shared memory for the next stage.
template <class Shape, class Atom, class T, WeightKind kKind>
struct StreamFill {
  using Codes = StreamCodes<T, kKind>;
  using Stage = StreamStage<Shape, T>;
  static constexpr int kRowUnits = Shape::kDepth / 8, kScales = Shape::kScales > 0 ? Shape::kScales : 1;

  Vec4 x[Shape::kXUnits];
  float scale[kScales], zero[kScales];
  uint32_t first_group[kScales];

  __device__ static int column_of(int i) { return (static_cast<int>(threadIdx.x) + i * Shape::kThreads) / Shape::kSlots; }
  __device__ static int slot_of(int i) { return (static_cast<int>(threadIdx.x) + i * Shape::kThreads) % Shape::kSlots; }

  __device__ __forceinline__ void begin(const GemmArgs& a, int64_t n0) {
    if constexpr (Shape::kPacked) {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int column = column_of(i);
        const int64_t row = column < Shape::kColumns ? weight_row(a, n0, column) : 0;
        first_group[i] = static_cast<uint32_t>((row < 0 ? 0 : row) * a.w.groups);
      }
    }
  }

  __device__ __forceinline__ void load(const GemmArgs& a, const Stage& stage, int64_t expert, int k0) {
#pragma unroll
    for (int i = 0; i < Shape::kXUnits; ++i) {
      const int u = static_cast<int>(threadIdx.x) + i * Shape::kThreads, k = k0 + u % kRowUnits * 8;
      const int64_t row = stage.x_rows[u / kRowUnits];
      x[i] = {{0, 0, 0, 0}};
      if (row >= 0 && k < a.w.k) x[i] = *reinterpret_cast<const Vec4*>(static_cast<const T*>(a.x) + row * a.x_stride + k);
    }
    if constexpr (Shape::kPacked) {
      const int64_t base = expert * a.w.n * a.w.groups;
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int k = k0 + slot_of(i) * Shape::kSlotK;
        scale[i] = zero[i] = 0.f;
        if (k >= a.w.k || column_of(i) >= Shape::kColumns) continue;
        const int64_t at = base + first_group[i] + (a.w.groups == 1 ? 0 : group_of(a, k));
        scale[i] = load_float(a.w.scales, a.w.scale_dtype, at);
        zero[i] = static_cast<float>(a.w.zeros ? a.w.zeros[at] : Codes::kMidpoint);
      }
    }
  }

  __device__ __forceinline__ void store(Stage& stage) const {
#pragma unroll
    for (int i = 0; i < Shape::kXUnits; ++i) {
      const int u = static_cast<int>(threadIdx.x) + i * Shape::kThreads, row = u / kRowUnits, octet = u % kRowUnits;
      *reinterpret_cast<Vec4*>(stage.x + row * Shape::kPitch + octet * 8) = Codes::ordered(x[i]);
      if constexpr (Shape::kPacked) {
        float sum = Codes::sum(x[i]);
#pragma unroll
        for (int mask = 1; mask < Shape::kSlotOctets; mask *= 2) sum += shfl_xor_in_32(sum, mask);
        if (octet % Shape::kSlotOctets == 0) stage.x_sum[octet / Shape::kSlotOctets][row] = sum;
      }
    }
    if constexpr (Shape::kPacked) {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        if (column_of(i) >= Shape::kColumns) continue;
        stage.scale[slot_of(i)][column_of(i)] = scale[i];
        stage.minus[slot_of(i)][column_of(i)] = -scale[i] * (Codes::kOffset + zero[i]);
      }
    }
  }
};

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
  int lane, part, first_column;
  Sums sums[kRowTiles][kTokenTiles];

  __device__ __forceinline__ StreamWave(const GemmArgs& a, int64_t expert, int64_t n0) {
    lane = static_cast<int>(threadIdx.x) % Atom::kWave;
    part = Atom::kParts == 1 ? 0 : lane / 16;
    first_column = static_cast<int>(threadIdx.x) / Atom::kWave * kRowTiles * 16;
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
          *reinterpret_cast<Sums*>(&stage.results[lane % 16][first_column + r * 16 + lane / 16 * Shape::kSums]) = sums[r][t];
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < 16 * kQuads; i += Shape::kThreads) {
        const int token = i / kQuads, r = i % kQuads / 4 * 16 + i % 4 * 2, row = stage.rows[tile * 16 + token];
        const float* v = &stage.results[token][r];
        if (row >= 0) finish(a, expert, row, n0, r, v[0], v[1], v[8], v[9]);
      }
    }
  }
};

template <class Atom, class T, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles>
__global__ void __launch_bounds__(Atom::kWave* Atom::kWaves, 2) stream_kernel(GemmArgs a, uint32_t column_tiles) {
  using Shape = StreamShape<Atom, kKind, kForm, kTokenTiles, kRowTiles>;
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
  if (whole_steps > 0) {
#pragma unroll
    for (int u = 0; u < Shape::kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) wave.load(u, r, ring[u][r]);
    }
  }
  StreamFill<Shape, Atom, T, kKind> fill;
  fill.begin(a, n0);
  fill.load(a, stage, expert, 0);
  int step = 0;
  for (int k0 = 0; k0 < k_count; k0 += Shape::kDepth) {
    __syncthreads();  // nobody reads the stage before any more
    fill.store(stage);
    if (k0 + Shape::kDepth < k_count) fill.load(a, stage, expert, k0 + Shape::kDepth);
    __syncthreads();
    const int left = whole_steps - step, steps = left < Shape::kSteps ? left : Shape::kSteps;
    // The main loop: chunks of this step are in registers, those of the next on their way.
#pragma unroll 1
    for (int i = 0; i < steps; ++i, ++step) {
      const int next = step + 1 < whole_steps ? step + 1 : step;
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
    if (steps < Shape::kSteps && k_count % Shape::kStep != 0) {
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
    if constexpr (Shape::kPacked) wave.correct(stage);
  }
  wave.store(a, stage, expert, n0);
}

template <class Atom, class T, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles>
Status launch_stream_kernel(const GemmArgs& a, Stream stream) {
  using Shape = StreamShape<Atom, kKind, kForm, kTokenTiles, kRowTiles>;
  const int64_t tiles = ceil_div(a.columns, a.gated ? Shape::kColumns / 2 : Shape::kColumns);
  return launch("stream_kernel", stream_kernel<Atom, T, kKind, kForm, kTokenTiles, kRowTiles>, a.blocks.blocks * tiles, Shape::kThreads, 0,
                stream, a, static_cast<uint32_t>(tiles));
}

template <class Atom, class T, WeightKind kKind, Form kForm>
Status launch_stream_rows(const GemmArgs& a, int block_rows, Stream stream) {
  if (block_rows == 16) return launch_stream_kernel<Atom, T, kKind, kForm, 1, 1>(a, stream);
  if (block_rows == 32) return launch_stream_kernel<Atom, T, kKind, kForm, 2, 1>(a, stream);
  if (block_rows == 64) return launch_stream_kernel<Atom, T, kKind, kForm, 4, 2>(a, stream);
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
