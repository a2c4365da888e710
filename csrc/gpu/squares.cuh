// Squares of eight rows by eight columns, one a thread: how dequantize reads codes, scales and zero points where speed matters.
//
// Whole units of eight columns inside one group. Eight rows of a square are eight words (sixteen with 8-bit codes), and where scales and
// zero points run along the rows, one load serves all of them. Lanes run along the columns, so that a row leaves in long runs. Where rows
// run fastest in memory, a block turns its words in shared memory, so that these are read in long runs too.
#pragma once

#include "codes.cuh"

namespace int4_emu::gpu {

using Words = CodeReader::Words;

struct Output {
  void* data;
  bool codes;  // uint8 codes, else dtype
  DType dtype;
  bool aligned;  // every unit may be stored whole
};

// body(pointer to elements of the result's type)
template <class Body>
Status with_type(const Output& out, const Body& body) {
  if (out.dtype == DType::f32) return body(static_cast<float*>(out.data));
  return out.dtype == DType::bf16 ? body(static_cast<Bf16*>(out.data)) : body(static_cast<Fp16*>(out.data));
}

constexpr int kSquareThreads = 256;
// Units of eight columns that a block takes at once, and strips of eight rows. Where a strip is no more than eight bytes of a stored row,
// more strips make the runs longer.
template <Words kWords, int kBits>
constexpr int kLanes = kWords == Words::columns_along_out && kBits == 8 ? 16 : 32;
template <Words kWords, int kBits>
constexpr int kStrips = kSquareThreads / kLanes<kWords, kBits>;
// Squares of a thread, kStrips strips apart, for longer runs too.
template <Words kWords, int kBits>
constexpr int kSquares = kWords == Words::rows || kBits == 8 || kSharedKilobytes < 128 ? 1 : 4;

// Blocks of a multiprocessor that registers must allow: what shared memory allows where tiles are turned in it.
template <Words kWords, int kBits>
constexpr int kSquareBlocks = kWords == Words::rows ? (kBits == 4 ? 6 : 5) : (kBits == 8 && kSharedKilobytes < 128 ? 3 : 4);

// Eight codes of a row: nibbles of one word, or bytes of two.
template <int kBits>
struct alignas(kBits) Eight {
  uint32_t w[kBits / 4];
};

// fetch() and put() for the whole block at once, then eight(s, j): of square s the codes of row j, or where they are packed along the rows
// (AWQ, Quark), of column j. Turned ones need a barrier after put(), and one before it where the tile was read.
template <Words kWords, int kBits, int kPerThread>
struct Squares {
  static constexpr bool kTurned = kWords != Words::rows, kAlong = kWords == Words::columns_along_out;
  static constexpr int kUnits = kLanes<kWords, kBits>, kStride = kUnits + 1, kWide = kBits / 4;
  static constexpr int kBlockStrips = kStrips<kWords, kBits>, kAll = kPerThread * kBlockStrips;
  // Stored rows, of four words a thread: columns of the matrix, or as many of them as a word has codes.
  static constexpr int kRowWords = kAlong ? kAll * kWide : kAll * 8, kRows = kAlong ? kUnits * 8 : kUnits * kWide;
  static constexpr int kVectors = kRowWords / 4, kRowsApart = kSquareThreads / kVectors, kRounds = kRows / kRowsApart;
  Eight<kBits> own[8];    // not turned
  Vec4 fetched[kRounds];  // turned
  uint32_t* tile;         // [half][j][strip][unit]

  __device__ __forceinline__ Eight<kBits> eight(int s, int j) const {
    if constexpr (!kTurned) return own[j];
    const int strip = s * kBlockStrips + static_cast<int>(threadIdx.x) / kUnits, unit = static_cast<int>(threadIdx.x) % kUnits;
    Eight<kBits> out;
#pragma unroll
    for (int h = 0; h < kWide; ++h) out.w[h] = tile[((h * 8 + j) * kAll + strip) * kStride + unit];
    return out;
  }
  __device__ __forceinline__ void fetch(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0);
  __device__ __forceinline__ void put();
};

template <Words kWords, int kBits, int kPerThread>
__device__ __forceinline__ void Squares<kWords, kBits, kPerThread>::fetch(const CodeReader& reader, int64_t b, int64_t o0, int64_t k0) {
  const PackedMatrix& m = reader.m;
  const uint8_t* base = static_cast<const uint8_t*>(m.qweight) + b * reader.source_size;
  if constexpr (kTurned) {
    const int part = static_cast<int>(threadIdx.x) % kVectors * 4, first = static_cast<int>(threadIdx.x) / kVectors;
    const int64_t rows = kAlong ? m.in_features : m.in_features / 8 * kWide;
    const int64_t row_words = kAlong ? m.out_features / 8 * kWide : m.out_features;
    const int64_t row0 = (kAlong ? k0 : k0 / 8 * kWide) + first, word0 = (kAlong ? o0 / 8 * kWide : o0) + part;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t row = row0 + r * kRowsApart;
      fetched[r] = {{0, 0, 0, 0}};
      if (row >= rows) continue;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(base + row * reader.source_row) + word0;
      if (reader.vectors_aligned && word0 + 4 <= row_words) {
        fetched[r] = *reinterpret_cast<const Vec4*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (word0 + i < row_words) fetched[r].w[i] = from[i];
        }
      }
    }
  } else {
    const int64_t o = o0 + threadIdx.x / kUnits * 8, k = k0 + threadIdx.x % kUnits * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      own[j] = {};
      if (k >= m.in_features || o + j >= m.out_features) continue;
      own[j] = *reinterpret_cast<const Eight<kBits>*>(base + (o + j) * reader.source_row + k * kBits / 8);
    }
  }
}

template <Words kWords, int kBits, int kPerThread>
__device__ __forceinline__ void Squares<kWords, kBits, kPerThread>::put() {
  if constexpr (kTurned) {
    __shared__ uint32_t shared[kWide * 8 * kAll * kStride];
    tile = shared;
    const int part = static_cast<int>(threadIdx.x) % kVectors * 4, first = static_cast<int>(threadIdx.x) / kVectors;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int row = first + r * kRowsApart;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = part + i;
        const int j = kAlong ? row % 8 : word % 8, half = kAlong ? word % kWide : row % kWide;
        const int strip = kAlong ? word / kWide : word / 8, unit = kAlong ? row / 8 : row / kWide;
        tile[((half * 8 + j) * kAll + strip) * kStride + unit] = fetched[r].w[i];
      }
    }
  }
}

// Scales and zero points of eight rows in one group: as they are stored where they run along the rows, then as numbers.
template <int kBits>
struct StoredGroups {
  Vec4 low, high;
  Eight<kBits> zeros;
};
struct Groups {
  float scales[8];
  uint32_t zeros[8];
};

// The zero points of rows o..o+8, four or eight a word; where a byte each, these are bytes of words too.
template <int kBits>
__device__ __forceinline__ Eight<kBits> load_zeros(const CodeReader& reader, int64_t b, int64_t o, int64_t c) {
  Eight<kBits> out = {};
  if (reader.m.qzeros == nullptr) return out;
  const GroupRow row(reader, b, o);
  if constexpr (kBits == 4) {
    out.w[0] = row.zero_word(c);
  } else {
    const int64_t half = reader.traits.transposed ? 4 : reader.m.groups * 4;  // bytes from one word to that of the next four rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (o + 4 * h >= reader.m.out_features) continue;
      out.w[h] = (*reinterpret_cast<const uint32_t*>(row.zeros + c * row.zero_step + h * half) + row.word_add) ^ reader.flip;
    }
  }
  return out;
}

template <int kBits>
__device__ __forceinline__ void spread_zeros(const CodeReader& reader, const Eight<kBits>& words, uint32_t* zeros) {
  const uint32_t add = !reader.byte_zeros && reader.traits.zeros == FormatTraits::Zeros::code_minus_one ? 1u : 0u;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t code = kBits == 4 ? words.w[0] >> (4 * reader.slot(j)) : words.w[j / 4 % (kBits / 4)] >> (j % 4 * 8);
    zeros[j] = reader.m.qzeros ? (code + add) & ((1u << kBits) - 1) : 1u << (kBits - 1);
  }
}

template <int kBits>
__device__ __forceinline__ StoredGroups<kBits> load_groups(const CodeReader& reader, int64_t b, int64_t o, int64_t c) {
  const PackedMatrix& m = reader.m;
  const int64_t at = reader.scale_index(b, o, c) * (m.scale_dtype == DType::f32 ? 4 : 2);
  const Vec4* from = reinterpret_cast<const Vec4*>(static_cast<const char*>(m.scales) + at);
  StoredGroups<kBits> g;
  g.low = from[0];
  g.high = {{0, 0, 0, 0}};
  if (m.scale_dtype == DType::f32) g.high = from[1];
  g.zeros = load_zeros<kBits>(reader, b, o, c);
  return g;
}

template <int kBits>
__device__ __forceinline__ Groups spread(const CodeReader& reader, const StoredGroups<kBits>& g) {
  Groups out;
  if (reader.m.scale_dtype == DType::f32) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out.scales[j] = as_float(g.low.w[j]), out.scales[4 + j] = as_float(g.high.w[j]);
  } else {
    widen_eight(g.low, reader.m.scale_dtype, out.scales);
  }
  spread_zeros<kBits>(reader, g.zeros, out.zeros);
  return out;
}

// The same of a format whose scales run along the groups.
template <int kBits>
__device__ __forceinline__ Groups load_row_groups(const CodeReader& reader, int64_t b, int64_t o, int64_t c) {
  const PackedMatrix& m = reader.m;
  const int64_t at = reader.scale_index(b, o, c);
  Groups out;
#pragma unroll
  for (int j = 0; j < 8; ++j) out.scales[j] = o + j < m.out_features ? load_float(m.scales, m.scale_dtype, at + j * m.groups) : 0.f;
  if (m.qzeros && reader.byte_zeros) {
    const uint8_t* zeros = static_cast<const uint8_t*>(m.qzeros) + at;
#pragma unroll
    for (int j = 0; j < 8; ++j) out.zeros[j] = o + j < m.out_features ? zeros[j * m.groups] ^ (reader.flip & 0xffu) : 0u;
  } else {
    spread_zeros<kBits>(reader, load_zeros<kBits>(reader, b, o, c), out.zeros);
  }
  return out;
}

// Byte i of word n and byte n of word i change places, of four words; then the same of nibbles and eight words.
__device__ __forceinline__ void turn_bytes(uint32_t* w) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a = w[i], b = w[i + 1];
    w[i] = (a & 0x00ff00ffu) | (b << 8 & 0xff00ff00u);
    w[i + 1] = (a >> 8 & 0x00ff00ffu) | (b & 0xff00ff00u);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = w[i], b = w[i + 2];
    w[i] = low_pair(a, b);
    w[i + 2] = high_pair(a, b);
  }
}
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


// Columns' codes to rows' codes: AWQ's nibbles, Quark's bytes.
__device__ __forceinline__ void turn(const CodeReader& reader, Eight<4>* square) {
  uint32_t words[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) words[j] = square[j].w[0];
  turn_nibbles(words);
#pragma unroll
  for (int j = 0; j < 8; ++j) square[j].w[0] = reader.traits.interleaved ? words[j / 2 + j % 2 * 4] : words[j];
}
__device__ __forceinline__ void turn(const CodeReader&, Eight<8>* square) {
  uint32_t words[16];  // [column half][row half][4]
#pragma unroll
  for (int j = 0; j < 8; ++j) words[j / 4 * 8 + j % 4] = square[j].w[0], words[j / 4 * 8 + 4 + j % 4] = square[j].w[1];
#pragma unroll
  for (int i = 0; i < 16; i += 4) turn_bytes(words + i);
#pragma unroll
  for (int j = 0; j < 8; ++j) square[j] = {{words[j / 4 * 4 + j % 4], words[8 + j / 4 * 4 + j % 4]}};
}

// 2^23 + code i, exact.
__device__ __forceinline__ float code_plus_2_23(const Eight<4>& e, int i) { return as_float(((e.w[0] >> (4 * i)) & 0xfu) | 0x4b000000u); }
__device__ __forceinline__ float code_plus_2_23(const Eight<8>& e, int i) {
  return as_float(((e.w[i / 4] >> (i % 4 * 8)) & 0xffu) | 0x4b000000u);
}

// (code - zero) * scale of eight codes to eight elements.
template <class T, int kBits>
__device__ __forceinline__ void store_scaled(T* to, const Eight<kBits>& codes, uint32_t zero, float scale, bool own_type) {
  if constexpr (kPairMath && sizeof(T) == 2 && kBits == 4) {
    // Scales in T: the product is exact before its one rounding, as in fp32, and two are made at once.
    if (own_type) {
      const uint32_t factor = pack_pair<T>(scale, scale), word = codes.w[0];
      const float minus = -static_cast<float>(zero);
      const uint32_t minus_zero = pack_pair<T>(minus, minus);
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = scale_code_pair<T>(word >> (4 * i), minus_zero, factor);
      store_16_bytes(to, low_pair(v[0], v[1]), low_pair(v[2], v[3]), high_pair(v[0], v[1]), high_pair(v[2], v[3]));
      return;
    }
  }
  (void)own_type;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = (code_plus_2_23(codes, i) - (8388608.f + static_cast<float>(zero))) * scale;
  store_eight(to, values);
}

}  // namespace int4_emu::gpu
