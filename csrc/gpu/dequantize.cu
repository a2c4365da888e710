// Every format to dense weights or to one code a byte: a thread takes eight columns of a row, so that 4-bit codes come as one word
// and the results leave in 16-byte stores.
#include "api.h"
#include "act_order.cuh"

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

// The case that matters for speed: whole units inside one group, floats out (squares.cuh).
template <Words kWords, int kBits, class T>
__global__ void __launch_bounds__(kSquareThreads, (kSquareBlocks<kWords, kBits>))
    dequantize_squares_kernel(CodeReader reader, T* out, uint32_t row_tiles, uint32_t column_tiles, int group_shift, bool own_type) {
  constexpr int kPerThread = kSquares<kWords, kBits>, kUnits = kLanes<kWords, kBits>, kBlockStrips = kStrips<kWords, kBits>;
  const PackedMatrix& m = reader.m;
  const uint32_t row_tile = blockIdx.x / column_tiles;
  const int64_t b = row_tile / row_tiles, k0 = static_cast<int64_t>(blockIdx.x % column_tiles) * (kUnits * 8);
  const int64_t o0 = static_cast<int64_t>(row_tile % row_tiles) * (kPerThread * kBlockStrips * 8);
  const int64_t k = k0 + threadIdx.x % kUnits * 8;
  const uint32_t column = static_cast<uint32_t>(k);
  const uint32_t c = group_shift >= 0 ? column >> group_shift : column / static_cast<uint32_t>(m.group_size);
  int64_t o = o0 + threadIdx.x / kUnits * 8;
  bool inside = k < m.in_features && o < m.out_features;
  StoredGroups<kBits> stored = {};
  if (kWords != Words::rows && inside) stored = load_groups<kBits>(reader, b, o, c);
  Squares<kWords, kBits, kPerThread> squares;
  squares.fetch(reader, b, o0, k0);
  squares.put();
  if constexpr (kWords != Words::rows) __syncthreads();
#pragma unroll 1
  for (int s = 0; s < kPerThread && inside; ++s) {
    const Groups groups = kWords == Words::rows ? load_row_groups<kBits>(reader, b, o, c) : spread(reader, stored);
    T* to = out + (b * m.out_features + o) * m.in_features + k;
    o += kBlockStrips * 8;
    inside = o < m.out_features;
    if (kWords != Words::rows && s + 1 < kPerThread && inside) stored = load_groups<kBits>(reader, b, o, c);
    Eight<kBits> square[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      square[j] = squares.eight(s, j);
#pragma unroll
      for (int h = 0; h < kBits / 4; ++h) square[j].w[h] ^= reader.flip;
    }
    if constexpr (kWords == Words::columns_along_out) turn(reader, square);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (kWords == Words::rows && o - kBlockStrips * 8 + j >= m.out_features) break;
      if constexpr (kWords == Words::rows && kBits == 4) {
        if (reader.traits.interleaved) square[j].w[0] = uninterleave(square[j].w[0]);
      }
      store_scaled(to + j * m.in_features, square[j], groups.zeros[j], groups.scales[j], own_type);
    }
  }
}

template <Words kWords, int kBits>
Status launch_squares(const CodeReader& reader, const Output& out, Stream stream, const char* name) {
  const PackedMatrix& m = reader.m;
  const int64_t column_tiles = ceil_div(m.in_features, kLanes<kWords, kBits> * 8);
  const int64_t row_tiles = ceil_div(m.out_features, kSquares<kWords, kBits> * kStrips<kWords, kBits> * 8);
  int shift = -1;
  for (int i = 0; i < 31; ++i) {
    if (m.group_size == int64_t{1} << i) shift = i;
  }
  return with_type(out, [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    return launch(name, dequantize_squares_kernel<kWords, kBits, T>, m.batch * row_tiles * column_tiles, kSquareThreads, 0, stream, reader,
                  to, static_cast<uint32_t>(row_tiles), static_cast<uint32_t>(column_tiles), shift, m.scale_dtype == out.dtype);
  });
}

// Whether the kernels of squares can read this matrix and write its result.
bool takes_squares(const CodeReader& reader, const Output& out) {
  const PackedMatrix& m = reader.m;
  if (out.codes || !out.aligned) return false;
  if (!m.g_idx && (m.group_size % 8 != 0 || m.group_size > INT32_MAX)) return false;
  if (!reader.traits.transposed) return m.bits == 4 ? reader.words_aligned : reader.source_row % 8 == 0 && is_aligned(m.qweight, 8);
  return m.out_features % 8 == 0 && is_aligned(m.qweight, 16) && is_aligned(m.scales, 16) && is_aligned(m.qzeros, 4);
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
  const Words words = !reader.traits.transposed                                 ? Words::rows
                      : reader.traits.packed_along_out || reader.plain_bytes ? Words::columns_along_out
                                                                              : Words::columns_along_in;
  if (!takes_squares(reader, out) || (m.g_idx && !takes_act_order(reader, words))) {
    return launch(name, dequantize_kernel, blocks, kThreads, 0, as_stream(stream), reader, out, row_tiles, unit_tiles);
  }
  const auto go = [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (m.g_idx) return launch_act_order<kBits>(reader, words, out, as_stream(stream), name);
    if (words == Words::rows) return launch_squares<Words::rows, kBits>(reader, out, as_stream(stream), name);
    if (words == Words::columns_along_in) return launch_squares<Words::columns_along_in, kBits>(reader, out, as_stream(stream), name);
    return launch_squares<Words::columns_along_out, kBits>(reader, out, as_stream(stream), name);
  };
  return m.bits == 4 ? go(std::integral_constant<int, 4>{}) : go(std::integral_constant<int, 8>{});
}

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out, void* stream) {
  return launch_dequantize(m, {out, true, DType::f32, false}, stream, "unpack");
}

Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, void* stream) {
  return launch_dequantize(m, {out, false, out_dtype, false}, stream, "dequantize");
}

}  // namespace int4_emu::gpu
