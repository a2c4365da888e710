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
// that a row leaves in long runs. Where rows run fastest in memory, a block takes more of them and turns their words in shared memory, so
// that these are read in long runs too.
constexpr int kLanes = 32, kStrips = kThreads / kLanes;  // units of eight columns, and strips of eight rows, that a block takes at once
template <CodeReader::Words kWords>
constexpr int kSquares = kWords == CodeReader::Words::rows || kSharedKilobytes < 128 ? 1 : 4;  // of a thread, kStrips strips apart

// load() for the whole block at once, then word(s, j): of square s the codes of row j, or where they are packed along the rows (AWQ), of
// column j.
template <CodeReader::Words kWords>
struct Squares {
  static constexpr bool kTurned = kWords != CodeReader::Words::rows;
  static constexpr int kAll = kSquares<kWords> * kStrips, kStride = kLanes + 1;
  uint32_t own[8];
  const uint32_t* tile;  // [j][strip][lane]

  __device__ __forceinline__ uint32_t word(int s, int j) const {
    if constexpr (!kTurned) return own[j];
    return tile[(j * kAll + s * kStrips + static_cast<int>(threadIdx.x) / kLanes) * kStride + static_cast<int>(threadIdx.x) % kLanes];
  }
  __device__ __forceinline__ void load(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0);
};

template <CodeReader::Words kWords>
__device__ __forceinline__ void Squares<kWords>::load(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0) {
  const PackedMatrix& m = reader.m;
  const uint8_t* base = static_cast<const uint8_t*>(m.qweight) + b * reader.source_size;
  if constexpr (kTurned) {
    __shared__ uint32_t shared[8 * kAll * kStride];
    tile = shared;
    // Stored rows, of four words a thread: columns of the matrix, or eight of them.
    constexpr bool kAlong = kWords == CodeReader::Words::columns_along_out;
    constexpr int kRowWords = kAlong ? kAll : kAll * 8, kRows = kAlong ? kLanes * 8 : kLanes;
    constexpr int kVectors = kRowWords / 4, kRowsApart = kThreads / kVectors, kRounds = kRows / kRowsApart;
    const int part = static_cast<int>(threadIdx.x) % kVectors * 4, first = static_cast<int>(threadIdx.x) / kVectors;
    const int64_t rows = kAlong ? m.in_features : m.in_features / 8, row_words = kAlong ? m.out_features / 8 : m.out_features;
    const int64_t row0 = (kAlong ? k0 : k0 / 8) + first, word0 = (kAlong ? o0 / 8 : o0) + part;
    Vec4 v[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t row = row0 + r * kRowsApart;
      v[r] = {{0, 0, 0, 0}};
      if (row >= rows) continue;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(base + row * reader.source_row) + word0;
      if (reader.vectors_aligned && word0 + 4 <= row_words) {
        v[r] = *reinterpret_cast<const Vec4*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (word0 + i < row_words) v[r].w[i] = from[i];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int row = first + r * kRowsApart;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = kAlong ? row % 8 : (part + i) % 8, strip = kAlong ? part + i : (part + i) / 8, lane = kAlong ? row / 8 : row;
        shared[(j * kAll + strip) * kStride + lane] = v[r].w[i];
      }
    }
    __syncthreads();
  } else {
    const int64_t o = o0 + threadIdx.x / kLanes * 8, k = k0 + threadIdx.x % kLanes * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint8_t* from = base + (o + j) * reader.source_row + (k >> 1);
      own[j] = k < m.in_features && o + j < m.out_features ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
  }
}

// Scales and zero points of eight rows in one group: as they are stored where they run along the rows, then as numbers.
struct StoredGroups {
  Vec4 low, high;
  uint32_t zeros;
};
struct Groups {
  float scales[8];
  uint32_t zeros[8];
};

__device__ __forceinline__ StoredGroups load_groups(const CodeReader& reader, int64_t b, int64_t o, int64_t c) {
  const PackedMatrix& m = reader.m;
  const int64_t at = reader.scale_index(b, o, c) * (m.scale_dtype == DType::f32 ? 4 : 2);
  const Vec4* from = reinterpret_cast<const Vec4*>(static_cast<const char*>(m.scales) + at);
  StoredGroups g;
  g.low = from[0];
  g.high = {{0, 0, 0, 0}};
  if (m.scale_dtype == DType::f32) g.high = from[1];
  g.zeros = m.qzeros ? GroupRow(reader, b, o).zero_word(c) : 0;
  return g;
}

__device__ __forceinline__ void spread_zeros(const CodeReader& reader, uint32_t word, uint32_t* zeros) {
  const uint32_t add = reader.traits.zeros == FormatTraits::Zeros::code_minus_one ? 1u : 0u;
#pragma unroll
  for (int j = 0; j < 8; ++j) zeros[j] = reader.m.qzeros ? ((word >> (4 * reader.slot(j))) + add) & 0xfu : 8u;
}

__device__ __forceinline__ Groups spread(const CodeReader& reader, const StoredGroups& g) {
  Groups out;
  if (reader.m.scale_dtype == DType::f32) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out.scales[j] = as_float(g.low.w[j]), out.scales[4 + j] = as_float(g.high.w[j]);
  } else {
    widen_eight(g.low, reader.m.scale_dtype, out.scales);
  }
  spread_zeros(reader, g.zeros, out.zeros);
  return out;
}

// The same of a format whose scales run along the groups.
__device__ __forceinline__ Groups load_row_groups(const CodeReader& reader, int64_t b, int64_t o, int64_t c) {
  const PackedMatrix& m = reader.m;
  const int64_t at = reader.scale_index(b, o, c);
  Groups out;
#pragma unroll
  for (int j = 0; j < 8; ++j) out.scales[j] = o + j < m.out_features ? load_float(m.scales, m.scale_dtype, at + j * m.groups) : 0.f;
  if (m.qzeros && reader.byte_zeros) {
#pragma unroll
    for (int j = 0; j < 8; ++j) out.zeros[j] = o + j < m.out_features ? static_cast<const uint8_t*>(m.qzeros)[at + j * m.groups] : 0u;
  } else {
    spread_zeros(reader, m.qzeros ? GroupRow(reader, b, o).zero_word(c) : 0u, out.zeros);
  }
  return out;
}

// Nibble i of word n and nibble n of word i change places.
__device__ __forceinline__ void turn_nibbles(uint32_t* w) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t a = w[i], b = w[i + 1];
    w[i] = (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u);
    w[i + 1] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i % 4 >= 2) continue;
    const uint32_t a = w[i], b = w[i + 2];
    w[i] = (a & 0x00ff00ffu) | (b << 8 & 0xff00ff00u);
    w[i + 2] = (a >> 8 & 0x00ff00ffu) | (b & 0xff00ff00u);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = w[i], b = w[i + 4];
    w[i] = low_pair(a, b);
    w[i + 4] = high_pair(a, b);
  }
}

// (code - zero) * scale of eight codes, the nibbles of `word` (code i in nibble i), to eight elements.
template <class T>
__device__ __forceinline__ void store_scaled(T* to, uint32_t word, uint32_t zero, float scale, bool own_type) {
  if constexpr (kPairMath && sizeof(T) == 2) {
    // Scales in T: the product is exact before its one rounding, as in fp32, and two are made at once.
    if (own_type) {
      const uint32_t factor = pack_pair<T>(scale, scale);
      const float minus = -static_cast<float>(zero);
      const uint32_t minus_zero = pack_pair<T>(minus, minus);
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = scale_code_pair<T>(word >> (4 * i), minus_zero, factor);
      *reinterpret_cast<Vec4*>(to) = {{low_pair(v[0], v[1]), low_pair(v[2], v[3]), high_pair(v[0], v[1]), high_pair(v[2], v[3])}};
      return;
    }
  }
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // 2^23 + code, exact.
    values[i] = (as_float(((word >> (4 * i)) & 0xfu) | 0x4b000000u) - (8388608.f + static_cast<float>(zero))) * scale;
  }
  store_eight(to, values);
}

template <CodeReader::Words kWords, class T>
__global__ void __launch_bounds__(kThreads, kWords == CodeReader::Words::rows ? 6 : 4)
    dequantize_int4_kernel(CodeReader reader, T* out, uint32_t row_tiles, uint32_t column_tiles, int group_shift, bool own_type) {
  using Words = CodeReader::Words;
  const PackedMatrix& m = reader.m;
  const uint32_t row_tile = blockIdx.x / column_tiles;
  const int64_t b = row_tile / row_tiles, k0 = static_cast<int64_t>(blockIdx.x % column_tiles) * (kLanes * 8);
  const int64_t o0 = static_cast<int64_t>(row_tile % row_tiles) * (kSquares<kWords> * kStrips * 8);
  const int64_t k = k0 + threadIdx.x % kLanes * 8;
  const uint32_t column = static_cast<uint32_t>(k);
  const uint32_t c = group_shift >= 0 ? column >> group_shift : column / static_cast<uint32_t>(m.group_size);
  int64_t o = o0 + threadIdx.x / kLanes * 8;
  bool inside = k < m.in_features && o < m.out_features;
  StoredGroups stored = {};
  if (kWords != Words::rows && inside) stored = load_groups(reader, b, o, c);
  Squares<kWords> squares;
  squares.load(reader, b, o0, k0);
#pragma unroll 1
  for (int s = 0; s < kSquares<kWords> && inside; ++s) {
    const Groups groups = kWords == Words::rows ? load_row_groups(reader, b, o, c) : spread(reader, stored);
    T* to = out + (b * m.out_features + o) * m.in_features + k;
    o += kStrips * 8;
    inside = o < m.out_features;
    if (kWords != Words::rows && s + 1 < kSquares<kWords> && inside) stored = load_groups(reader, b, o, c);
    uint32_t words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j] = squares.word(s, j) ^ reader.flip;
    if (kWords == Words::columns_along_out) turn_nibbles(words);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (kWords == Words::rows && o - kStrips * 8 + j >= m.out_features) break;
      uint32_t word = words[j];
      if constexpr (kWords == Words::rows) {
        if (reader.traits.interleaved) word = uninterleave(word);
      }
      if constexpr (kWords == Words::columns_along_out) word = reader.traits.interleaved ? words[j / 2 + j % 2 * 4] : words[j];
      store_scaled(to + j * m.in_features, word, groups.zeros[j], groups.scales[j], own_type);
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
    const bool own_type = m.scale_dtype == out.dtype;
    return launch(name, dequantize_int4_kernel<kWords, T>, blocks, kThreads, 0, stream, reader, to, rows32, columns32, shift, own_type);
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
