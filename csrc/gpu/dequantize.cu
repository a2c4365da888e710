// Every format to dense weights or to one code a byte: a thread takes eight columns of a row, so that 4-bit codes come as one word
// and the results leave in 16-byte stores.
#include "api.h"
#include "codes.cuh"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;  // of eight columns, per thread

// Lanes of a warp: formats packed by rows read along k; transposed ones take 8 rows x 4 units, which fills the 32-byte sectors of
// both the source (8 words along O) and the result (64 bytes along I).
struct Tiling {
  int64_t lane_rows, rows, units;  // rows of a warp; rows and units of a block and step
};
__host__ __device__ inline Tiling tiling(bool transposed) { return transposed ? Tiling{8, 16, 16} : Tiling{1, 8, 32}; }

struct Output {
  void* data;
  bool codes;  // uint8 codes, else dtype
  DType dtype;
  bool aligned;  // every unit may be stored whole
};

__device__ void dequantize_unit(const CodeReader& reader, int64_t b, int64_t o, int64_t k, int count, const Output& out) {
  const PackedMatrix& m = reader.m;
  uint8_t codes[8];
  reader.eight_codes(b, o, k, count, codes);
  const int64_t at = (b * m.out_features + o) * m.in_features + k;
  if (out.codes) {
    uint8_t* to = static_cast<uint8_t*>(out.data) + at;
    if (out.aligned) {
      uint2 v;
      v.x = codes[0] | codes[1] << 8 | codes[2] << 16 | static_cast<uint32_t>(codes[3]) << 24;
      v.y = codes[4] | codes[5] << 8 | codes[6] << 16 | static_cast<uint32_t>(codes[7]) << 24;
      *reinterpret_cast<uint2*>(to) = v;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < count) to[j] = codes[j];
      }
    }
    return;
  }
  float values[8];
  if (m.g_idx == nullptr && m.group_size % 8 == 0) {
    const GroupRow row(reader, b, o);
    const int64_t c = k / m.group_size;
    const float scale = row.scale(c);
    const int zero = row.zero(c);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = static_cast<float>(codes[j] - zero) * scale;
  } else {
    const GroupRow row(reader, b, o);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[j] = 0.f;
      if (j >= count) continue;
      const int64_t c = m.g_idx ? m.g_idx[b * m.in_features + k + j] : (k + j) / m.group_size;
      if (c >= 0 && c < m.groups) values[j] = static_cast<float>(codes[j] - row.zero(c)) * row.scale(c);
    }
  }
  if (out.aligned) {
    store_eight(out.data, out.dtype, at, values);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) store_float(out.data, out.dtype, at + j, values[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) dequantize_kernel(CodeReader reader, Output out, int64_t row_tiles, int64_t unit_tiles) {
  const Tiling t = tiling(reader.traits.transposed);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps_down = static_cast<int>(t.rows / t.lane_rows), lane_units = static_cast<int>(32 / t.lane_rows);
  const int64_t tile = blockIdx.x, row_tile = tile / unit_tiles;
  const int64_t b = row_tile / row_tiles;
  const int64_t o = row_tile % row_tiles * t.rows + warp % warps_down * t.lane_rows + lane % t.lane_rows;
  if (o >= reader.m.out_features) return;
  const int64_t first = tile % unit_tiles * (t.units * kUnits) + warp / warps_down * lane_units + lane / t.lane_rows;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t k = (first + i * t.units) * 8, left = reader.m.in_features - k;
    if (left > 0) dequantize_unit(reader, b, o, k, left < 8 ? static_cast<int>(left) : 8, out);
  }
}

// The case that matters for speed: 4-bit words, whole units inside one group, floats out. A thread takes squares of eight rows by eight
// columns: eight words, and where scales and zero points run along the rows, one load for all of them. Lanes run along the columns, so
// that a row leaves in long runs, and where rows run fastest in memory, a block takes enough of them to read long runs too; where words
// hold eight rows (AWQ), they go through shared memory for that.
constexpr int kLanes = 32, kStrips = kThreads / kLanes;  // units of eight columns, and strips of eight rows, that a block takes at once
template <CodeReader::Words kWords>
constexpr int kSquares = kWords == CodeReader::Words::rows ? 1 : 4;  // of a thread, kStrips strips apart

// The squares of a thread; load() for the whole block at once, then word(s, j): of square s the codes of row j, or where they are packed
// along the rows, of column j.
template <CodeReader::Words kWords>
struct Squares {
  static constexpr bool kThrough = kWords == CodeReader::Words::columns_along_out;  // shared memory
  static constexpr int kCount = kSquares<kWords>, kAll = kCount * kStrips, kStride = kLanes + 1;
  uint32_t own[kThrough ? 1 : kCount][8];
  const uint32_t* tile;  // [column % 8][strip][column / 8]

  __device__ __forceinline__ uint32_t word(int s, int j) const {
    if constexpr (!kThrough) return own[s][j];
    return tile[(j * kAll + s * kStrips + static_cast<int>(threadIdx.x) / kLanes) * kStride + static_cast<int>(threadIdx.x) % kLanes];
  }
  __device__ __forceinline__ void load(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0);
};

template <CodeReader::Words kWords>
__device__ __forceinline__ void Squares<kWords>::load(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, strip = static_cast<int>(threadIdx.x) / kLanes;
  const PackedMatrix& m = reader.m;
  const uint8_t* base = static_cast<const uint8_t*>(m.qweight) + b * reader.source_size;
  const int64_t o = o0 + strip * 8, k = k0 + lane * 8;
  if constexpr (kThrough) {
    __shared__ uint32_t shared[8 * kAll * kStride];
    tile = shared;
    constexpr int kVectors = kAll / 4, kColumns = kThreads / kVectors, kRounds = kLanes * 8 / kColumns;
    const int part = static_cast<int>(threadIdx.x) % kVectors * 4, first = static_cast<int>(threadIdx.x) / kVectors;
    Vec4 v[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t column = k0 + first + r * kColumns;
      v[r] = {{0, 0, 0, 0}};
      if (column >= m.in_features) continue;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(base + column * reader.source_row) + o0 / 8 + part;
      if (reader.vectors_aligned && o0 + part * 8 + 32 <= m.out_features) {
        v[r] = *reinterpret_cast<const Vec4*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (o0 + (part + i) * 8 < m.out_features) v[r].w[i] = from[i];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int column = first + r * kColumns;
#pragma unroll
      for (int i = 0; i < 4; ++i) shared[(column % 8 * kAll + part + i) * kStride + column / 8] = v[r].w[i];
    }
    __syncthreads();
  } else {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const int64_t row = o + s * kStrips * 8;
      const bool inside = row < m.out_features && k < m.in_features;
      if constexpr (kWords == CodeReader::Words::columns_along_in) {
        const Vec4* from = reinterpret_cast<const Vec4*>(base + (k >> 3) * reader.source_row + row * 4);
        Vec4 low = {{0, 0, 0, 0}}, high = low;
        if (inside) low = from[0], high = from[1];
#pragma unroll
        for (int j = 0; j < 4; ++j) own[s][j] = low.w[j], own[s][4 + j] = high.w[j];
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint8_t* from = base + (row + j) * reader.source_row + (k >> 1);
          own[s][j] = inside && row + j < m.out_features ? *reinterpret_cast<const uint32_t*>(from) : 0u;
        }
      }
    }
  }
}

// Scales and zero points of group c of the rows o..o+8.
template <bool kTransposed>
__device__ __forceinline__ void load_groups(const CodeReader& reader, int64_t b, int64_t o, int64_t c, float* scales, float* zeros) {
  const PackedMatrix& m = reader.m;
  const int64_t at = reader.scale_index(b, o, c);
  if constexpr (kTransposed) {
    load_eight(m.scales, m.scale_dtype, at, scales);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) scales[j] = o + j < m.out_features ? load_float(m.scales, m.scale_dtype, at + j * m.groups) : 0.f;
  }
  if (m.qzeros == nullptr) {
#pragma unroll
    for (int j = 0; j < 8; ++j) zeros[j] = 8.f;
  } else if (reader.byte_zeros) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      zeros[j] = o + j < m.out_features ? static_cast<float>(static_cast<const uint8_t*>(m.qzeros)[at + j * m.groups]) : 0.f;
    }
  } else {
    const GroupRow row(reader, b, o);
    const uint32_t word = row.zero_word(c);
#pragma unroll
    for (int j = 0; j < 8; ++j) zeros[j] = static_cast<float>(((word >> reader.shift(j)) + row.code_add) & 0xfu);
  }
}

template <CodeReader::Words kWords, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_int4_kernel(CodeReader reader, T* out, uint32_t row_tiles, uint32_t column_tiles, int group_shift) {
  const PackedMatrix& m = reader.m;
  const uint32_t row_tile = blockIdx.x / column_tiles;
  const int64_t b = row_tile / row_tiles, k0 = static_cast<int64_t>(blockIdx.x % column_tiles) * (kLanes * 8);
  const int64_t o0 = static_cast<int64_t>(row_tile % row_tiles) * (kSquares<kWords> * kStrips * 8);
  Squares<kWords> squares;
  squares.load(reader, b, o0, k0);
  const int64_t k = k0 + threadIdx.x % kLanes * 8;
  if (k >= m.in_features) return;
  const uint32_t column = static_cast<uint32_t>(k);
  const uint32_t c = group_shift >= 0 ? column >> group_shift : column / static_cast<uint32_t>(m.group_size);
  constexpr int kUnrolled = Squares<kWords>::kThrough ? 1 : kSquares<kWords>;
#pragma unroll kUnrolled
  for (int s = 0; s < kSquares<kWords>; ++s) {
    const int64_t o = o0 + (s * kStrips + threadIdx.x / kLanes) * 8;
    if (o >= m.out_features) return;
    uint32_t words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j] = squares.word(s, j) ^ reader.flip;
    float scales[8], zeros[8];
    load_groups<kWords != CodeReader::Words::rows>(reader, b, o, c, scales, zeros);
    T* to = out + (b * m.out_features + o) * m.in_features + k;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (kWords == CodeReader::Words::rows && o + j >= m.out_features) return;
      const int row_shift = reader.shift(j);
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = kWords == CodeReader::Words::columns_along_out ? words[i] >> row_shift : words[j] >> reader.shift(i);
        // 2^23 + code, exact.
        values[i] = (as_float((code & 0xfu) | 0x4b000000u) - (8388608.f + zeros[j])) * scales[j];
      }
      store_eight(to + j * m.in_features, values);
    }
  }
}

template <CodeReader::Words kWords>
Status launch_int4(const CodeReader& reader, const Output& out, Stream stream, const char* name) {
  const PackedMatrix& m = reader.m;
  const int64_t row_tiles = ceil_div(m.out_features, kSquares<kWords> * kStrips * 8), column_tiles = ceil_div(m.in_features, kLanes * 8);
  const int64_t blocks = m.batch * row_tiles * column_tiles;
  const uint32_t rows32 = static_cast<uint32_t>(row_tiles), columns32 = static_cast<uint32_t>(column_tiles);
  int shift = -1;
  for (int i = 0; i < 31; ++i) {
    if (m.group_size == int64_t{1} << i) shift = i;
  }
  const auto go = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    return launch(name, dequantize_int4_kernel<kWords, T>, blocks, kThreads, 0, stream, reader, to, rows32, columns32, shift);
  };
  if (out.dtype == DType::f32) return go(static_cast<float*>(out.data));
  return out.dtype == DType::bf16 ? go(static_cast<Bf16*>(out.data)) : go(static_cast<Fp16*>(out.data));
}

Status launch_dequantize(const PackedMatrix& m, Output out, void* stream, const char* name) {
  CodeReader reader;
  if (Status s = make_reader(m, reader); !s) return s;
  if (m.batch <= 0 || m.out_features <= 0 || m.in_features <= 0) return {};
  const int64_t unit_bytes = out.codes ? 8 : 16;
  out.aligned = m.in_features % 8 == 0 && is_aligned(out.data, unit_bytes);
  const Tiling t = tiling(reader.traits.transposed);
  const int64_t row_tiles = ceil_div(m.out_features, t.rows), unit_tiles = ceil_div(ceil_div(m.in_features, 8), t.units * kUnits);
  const int64_t blocks = m.batch * row_tiles * unit_tiles;
  using Words = CodeReader::Words;
  const bool transposed = reader.traits.transposed;
  const bool whole = m.bits == 4 && !out.codes && out.aligned && m.g_idx == nullptr && m.group_size % 8 == 0 && m.group_size <= INT32_MAX;
  const bool loads = transposed ? m.out_features % 8 == 0 && is_aligned(m.qweight, 16) && is_aligned(m.scales, 16) : reader.words_aligned;
  if (!whole || !loads) return launch(name, dequantize_kernel, blocks, kThreads, 0, as_stream(stream), reader, out, row_tiles, unit_tiles);
  if (!transposed) return launch_int4<Words::rows>(reader, out, as_stream(stream), name);
  return reader.traits.packed_along_out ? launch_int4<Words::columns_along_out>(reader, out, as_stream(stream), name)
                                        : launch_int4<Words::columns_along_in>(reader, out, as_stream(stream), name);
}

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out, void* stream) {
  return launch_dequantize(m, {out, true, DType::f32, false}, stream, "unpack");
}

Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, void* stream) {
  return launch_dequantize(m, {out, false, out_dtype, false}, stream, "dequantize");
}

}  // namespace int4_emu::gpu
