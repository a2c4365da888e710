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
      for (int j = 0; j < count; ++j) to[j] = codes[j];
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
    for (int j = 0; j < count; ++j) store_float(out.data, out.dtype, at + j, values[j]);
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

// The case that matters for speed: 4-bit words, whole units inside one group, floats out. All loads of a thread are issued first.
template <CodeReader::Words kWords>
__global__ void __launch_bounds__(kThreads)
    dequantize_int4_kernel(CodeReader reader, Output out, uint32_t row_tiles, uint32_t unit_tiles, int group_shift) {
  const PackedMatrix& m = reader.m;
  const Tiling t = tiling(kWords != CodeReader::Words::rows);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps_down = static_cast<int>(t.rows / t.lane_rows), lane_units = static_cast<int>(32 / t.lane_rows);
  const uint32_t tile = blockIdx.x, row_tile = tile / unit_tiles;
  const int64_t b = row_tile / row_tiles;
  const int64_t o = row_tile % row_tiles * t.rows + warp % warps_down * t.lane_rows + lane % t.lane_rows;
  if (o >= m.out_features) return;
  const int step = static_cast<int>(t.units) * 8, columns = static_cast<int>(m.in_features);
  const int first = (static_cast<int>(tile % unit_tiles) * static_cast<int>(t.units * kUnits) + warp / warps_down * lane_units +
                     lane / static_cast<int>(t.lane_rows)) *
                    8;
  const GroupRow row(reader, b, o);
  const int64_t at = (b * m.out_features + o) * m.in_features;
  uint32_t words[kUnits];
  float scales[kUnits], zeros[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int k = first + i * step;
    if (k >= columns) continue;
    const uint32_t c =
        group_shift >= 0 ? static_cast<uint32_t>(k) >> group_shift : static_cast<uint32_t>(k) / static_cast<uint32_t>(m.group_size);
    words[i] = reader.nibbles<kWords>(b, o, k);
    scales[i] = row.scale(c);
    zeros[i] = static_cast<float>(row.zero(c));
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int k = first + i * step;
    if (k >= columns) continue;
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // 2^23 + code, exact.
      const float code = as_float(((words[i] >> (4 * j)) & 0xfu) | 0x4b000000u);
      values[j] = (code - (8388608.f + zeros[i])) * scales[i];
    }
    store_eight(out.data, out.dtype, at + k, values);
  }
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
  const bool fast = m.bits == 4 && !out.codes && out.aligned && m.g_idx == nullptr && m.group_size % 8 == 0 && m.group_size <= INT32_MAX &&
                    m.in_features <= INT32_MAX / 2;
  const uint32_t rows32 = static_cast<uint32_t>(row_tiles), units32 = static_cast<uint32_t>(unit_tiles);
  int shift = -1;
  for (int i = 0; i < 31; ++i) {
    if (m.group_size == int64_t{1} << i) shift = i;
  }
  if (!fast) return launch(name, dequantize_kernel, blocks, kThreads, 0, as_stream(stream), reader, out, row_tiles, unit_tiles);
  const auto kernel = !reader.traits.transposed         ? dequantize_int4_kernel<CodeReader::Words::rows>
                      : !reader.traits.packed_along_out ? dequantize_int4_kernel<CodeReader::Words::columns_along_in>
                                                        : dequantize_int4_kernel<CodeReader::Words::columns_along_out>;
  return launch(name, kernel, blocks, kThreads, 0, as_stream(stream), reader, out, rows32, units32, shift);
}

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out, void* stream) {
  return launch_dequantize(m, {out, true, DType::f32, false}, stream, "unpack");
}

Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, void* stream) {
  return launch_dequantize(m, {out, false, out_dtype, false}, stream, "dequantize");
}

}  // namespace int4_emu::gpu
