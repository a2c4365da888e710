// What stream.cuh keeps in shared memory, how it is filled, and how packed codes become the matrix instruction's numbers.
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

template <class Atom, WeightKind kKind, Form kForm, int kTokenTiles, int kRowTiles, int kSplitOfK>
struct StreamShape {
  static constexpr bool kPacked = kKind != WeightKind::dense;
  static constexpr int kThreads = Atom::kWave * Atom::kWaves;
  static constexpr int kSplit = kSplitOfK;
  static constexpr int kTokens = 16 * kTokenTiles, kColumns = 16 * kRowTiles * Atom::kWaves / kSplit;
  static constexpr int kChunk = 32 * Atom::kParts;                       // k
  static constexpr int kDepth = 512 / kTokenTiles;                       // k of x in shared memory
  static constexpr int kUnroll = kTokenTiles <= 2 ? 2 : 1;               // chunks an iteration of the main loop
  static constexpr int kStep = kUnroll * kChunk, kSteps = kDepth / kStep;
  static constexpr int kSums = sizeof(typename Atom::Sums) / sizeof(float);
  static_assert(kSteps % kSplit == 0, "every stage is shared out alike");

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
    float results[Shape::kSplit][16][Shape::kColumns + 4];
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

  // Blocks of many tokens have no registers to spare for addresses.
  __device__ static __forceinline__ int own_thread() {
    const int thread = static_cast<int>(threadIdx.x);
    return Shape::kTokens > 16 ? amd::renewed(thread) : thread;
  }
  __device__ static int column_of(int thread, int i) { return (thread + i * Shape::kThreads) / Shape::kSlots; }
  __device__ static int slot_of(int thread, int i) { return (thread + i * Shape::kThreads) % Shape::kSlots; }

  __device__ __forceinline__ void begin(const GemmArgs& a, int64_t n0) {
    if constexpr (Shape::kPacked) {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int column = column_of(static_cast<int>(threadIdx.x), i);
        const int64_t row = column < Shape::kColumns ? weight_row(a, n0, column) : 0;
        first_group[i] = static_cast<uint32_t>((row < 0 ? 0 : row) * a.w.groups);
      }
    }
  }

  __device__ __forceinline__ void load(const GemmArgs& a, const Stage& stage, int64_t expert, int k0) {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < Shape::kXUnits; ++i) {
      const int u = thread + i * Shape::kThreads, k = k0 + u % kRowUnits * 8;
      const int64_t row = stage.x_rows[u / kRowUnits];
      x[i] = {{0, 0, 0, 0}};
      if (row >= 0 && k < a.w.k) x[i] = *reinterpret_cast<const Vec4*>(static_cast<const T*>(a.x) + row * a.x_stride + k);
    }
    if constexpr (Shape::kPacked) {
      const int64_t base = expert * a.w.n * a.w.groups;
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int k = k0 + slot_of(thread, i) * Shape::kSlotK;
        scale[i] = zero[i] = 0.f;
        if (k >= a.w.k || column_of(thread, i) >= Shape::kColumns) continue;
        const int64_t at = base + first_group[i] + (a.w.groups == 1 ? 0 : group_of(a, k));
        scale[i] = load_float(a.w.scales, a.w.scale_dtype, at);
        zero[i] = static_cast<float>(a.w.zeros ? a.w.zeros[at] : Codes::kMidpoint);
      }
    }
  }

  __device__ __forceinline__ void store(Stage& stage) const {
    const int thread = own_thread();
#pragma unroll
    for (int i = 0; i < Shape::kXUnits; ++i) {
      const int u = thread + i * Shape::kThreads, row = u / kRowUnits, octet = u % kRowUnits;
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
        if (column_of(thread, i) >= Shape::kColumns) continue;
        stage.scale[slot_of(thread, i)][column_of(thread, i)] = scale[i];
        stage.minus[slot_of(thread, i)][column_of(thread, i)] = -scale[i] * (Codes::kOffset + zero[i]);
      }
    }
  }
};

}  // namespace int4_emu::gpu
