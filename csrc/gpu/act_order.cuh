// Dequantising with act-order: every column may have a group of its own.
//
// A block keeps the scales and zero points of its rows in shared memory, with one more group, of zeros, for columns that have none, and
// takes as many columns as it can with one such table. A 16-bit scale leaves the low bits of its float free: the zero point stands there.
#pragma once

#include "squares.cuh"

namespace int4_emu::gpu {

constexpr int kTableRows = 64, kSpanColumns = 256;
constexpr int kPair = 2, kTableStride = kTableRows + kPair;  // groups start in different banks
struct alignas(8) Pair {
  uint32_t w[kPair];
};

template <int kBits>
__device__ __forceinline__ float scaled(const Eight<kBits>& codes, int i, uint32_t entry) {
  return (code_plus_2_23(codes, i) - as_float((entry & 0xffu) | 0x4b000000u)) * as_float(entry & 0xffffe000u);
}

// Fills the table [groups + 1][kTableStride]: where scales run along the groups of a row, entry by entry, else eight rows at a time.
template <Words kWords, int kBits>
__device__ __forceinline__ void fill_table(const CodeReader& reader, int64_t b, int64_t o0, uint32_t* table) {
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t groups = static_cast<uint32_t>(reader.m.groups);
  if constexpr (kWords == Words::rows) {
    constexpr int kApart = kSquareThreads / kTableRows;
    const int r = thread / kApart;
    const bool inside = o0 + r < reader.m.out_features;
    const GroupRow row(reader, b, inside ? o0 + r : o0);
#pragma unroll 4
    for (uint32_t c = thread % kApart; c <= groups; c += kApart) {
      const uint32_t at = c < groups ? c : groups - 1, entry = as_bits(row.scale(at)) | static_cast<uint32_t>(row.zero(at));
      table[c * kTableStride + r] = c < groups && inside ? entry : 0u;
    }
  } else {
    constexpr int kPieces = kTableRows / 8;
    const int64_t o = o0 + thread % kPieces * 8;
    uint32_t* to = table + thread % kPieces * 8;
#pragma unroll 2
    for (uint32_t c = thread / kPieces; c <= groups; c += kSquareThreads / kPieces) {
      Groups g = {};
      if (c < groups && o < reader.m.out_features) g = spread(reader, load_groups<kBits>(reader, b, o, c));
#pragma unroll
      for (int j = 0; j < 8; ++j) to[c * kTableStride + j] = as_bits(g.scales[j]) | g.zeros[j];
    }
  }
}

template <Words kWords, int kBits, class T>
__global__ void __launch_bounds__(kSquareThreads, kBits == 4 ? 3 : 2)
    act_order_kernel(CodeReader reader, T* out, uint32_t row_tiles, uint32_t spans, int span) {
  static_assert(kStrips<kWords, kBits> * 8 == kTableRows && kLanes<kWords, kBits> * 8 == kSpanColumns, "a table serves one tile's rows");
  constexpr bool kTurned = kWords != Words::rows;
  const PackedMatrix& m = reader.m;
  const uint32_t row_tile = blockIdx.x / spans, groups = static_cast<uint32_t>(m.groups);
  const int64_t b = row_tile / row_tiles, o0 = static_cast<int64_t>(row_tile % row_tiles) * kTableRows;
  const int64_t first = static_cast<int64_t>(blockIdx.x % spans) * span, end = first + span;
  const int64_t last = end < m.in_features ? end : m.in_features;
  // The codes and groups of the tile to come are asked for before one is worked on.
  Squares<kWords, kBits, 1> next;
  Vec4 next_groups[2] = {};
  const auto fetch = [&](int64_t k0) {
    next.fetch(reader, b, o0, k0);
    const int64_t k = k0 + threadIdx.x % 32 * 8;
    if (k >= m.in_features) return;
    const Vec4* from = reinterpret_cast<const Vec4*>(m.g_idx + b * m.in_features + k);
    next_groups[0] = from[0], next_groups[1] = from[1];
  };
  fetch(first);
  uint32_t* table = dynamic_shared<uint32_t>();
  fill_table<kWords, kBits>(reader, b, o0, table);
  if (!kTurned) __syncthreads();
  const int strip = static_cast<int>(threadIdx.x) / 32 * 8;
  const int64_t o = o0 + strip;
#pragma unroll 1
  for (int64_t k0 = first; k0 < last; k0 += kSpanColumns) {
    if (kTurned) {
      __syncthreads();  // the table is there, and the tile before is read
      next.put();
      __syncthreads();
    }
    const Squares<kWords, kBits, 1> squares = next;
    uint32_t at[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t c = next_groups[i / 4].w[i % 4];
      at[i] = (c < groups ? c : groups) * kTableStride + strip;
    }
    if (k0 + kSpanColumns < last) fetch(k0 + kSpanColumns);
    const int64_t k = k0 + threadIdx.x % 32 * 8;
    if (k >= m.in_features) continue;
#pragma unroll
    for (int r0 = 0; r0 < 8; r0 += kPair) {
      float values[kPair][8];
      Eight<kBits> codes[kPair];
#pragma unroll
      for (int r = 0; r < kPair; ++r) {
        codes[r] = squares.eight(0, r0 + r);
#pragma unroll
        for (int h = 0; h < kBits / 4; ++h) codes[r].w[h] ^= reader.flip;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Pair entry = *reinterpret_cast<const Pair*>(table + at[i] + r0);
#pragma unroll
        for (int r = 0; r < kPair; ++r) values[r][i] = scaled(codes[r], i, entry.w[r]);
      }
#pragma unroll
      for (int r = 0; r < kPair; ++r) {
        if (o + r0 + r < m.out_features) store_eight(out + (b * m.out_features + o + r0 + r) * m.in_features + k, values[r]);
      }
    }
  }
}

// Whether this kernel serves a matrix that the kernels of squares could read: with a tile of codes, the table must fit into the shared
// memory that a block has without asking.
inline size_t table_bytes(const PackedMatrix& m) { return static_cast<size_t>((m.groups + 1) * kTableStride * 4); }
inline bool takes_act_order(const CodeReader& reader, Words words) {
  const PackedMatrix& m = reader.m;
  const size_t tile = words == Words::rows ? 0 : static_cast<size_t>(m.bits / 4) * 8 * 8 * 33 * 4;
  return words != Words::columns_along_out && !reader.traits.interleaved && m.scale_dtype != DType::f32 && is_aligned(m.g_idx, 16) &&
         m.groups < INT16_MAX && table_bytes(m) + tile <= 46 * 1024;
}

template <int kBits>
Status launch_act_order(const CodeReader& reader, Words words, const Output& out, Stream stream, const char* name) {
  const PackedMatrix& m = reader.m;
  const int64_t row_tiles = ceil_div(m.out_features, kTableRows), column_tiles = ceil_div(m.in_features, kSpanColumns);
  // Wide spans make good use of a table; few blocks do not fill the device.
  const int64_t fill = 12 * multiprocessors();
  int64_t span = column_tiles < 8 ? column_tiles : 8;
  while (span > 1 && m.batch * row_tiles * ceil_div(column_tiles, span) < fill) span = ceil_div(span, 2);
  const int64_t spans = ceil_div(column_tiles, span), blocks = m.batch * row_tiles * spans;
  return with_type(out, [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const auto kernel =
        words == Words::rows ? act_order_kernel<Words::rows, kBits, T> : act_order_kernel<Words::columns_along_in, kBits, T>;
    return launch(name, kernel, blocks, kSquareThreads, table_bytes(m), stream, reader, to, static_cast<uint32_t>(row_tiles),
                  static_cast<uint32_t>(spans), static_cast<int>(span) * kSpanColumns);
  });
}

}  // namespace int4_emu::gpu
