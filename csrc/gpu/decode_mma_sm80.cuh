// The path for few rows per expert, bound by bandwidth: every weight is read once. Blocks stay, each with its share of the tiles of
// weight rows; tokens are the N side of the mma, eight wide; K is split over the warps of a block, which add up at the end of a tile.
// Weights come by asynchronous copies, several stages ahead and across tiles, so that the memory never waits for a tile to end.
//
// A lane's 16 bytes hold consecutive k; a sum over k may run in any order, so the mma's k slots are simply filled in the order in
// which the codes come out of a word, and x is paired up to match. A lane copies what it multiplies itself.
#pragma once

#include "activation.cuh"
#include "direct_sm80.cuh"
#include "mma_sm80.cuh"

namespace int4_emu::gpu {

constexpr int kDecodeWarps = 8, kDecodeThreads = 32 * kDecodeWarps, kDecodeTokens = 8, kDecodeBlocks = 2;  // blocks: of a multiprocessor

// How scales meet the sums: once per chunk of k in fp32, exactly, where a chunk lies inside one group; else on the weights, which are
// rounded once: in x's type where scales have it (per_lane), or in fp32 (per_lane_wide).
enum class ScaleMode { none, per_chunk, per_lane, per_lane_wide };

template <class T, WeightKind kKind, int kRowTiles, ScaleMode kScale>
struct Decode {
  using P = sm80::Pair<T>;
  static constexpr bool kPacked = kKind != WeightKind::dense;
  static constexpr int kLane = kKind == WeightKind::int4 ? 32 : (kKind == WeightKind::int8 ? 16 : 8);  // k of a lane's 16 bytes
  static constexpr int kChunk = 4 * kLane;                                                             // of the four lanes of a row
  static constexpr int kHalves = 2 * kRowTiles, kRows = 16 * kRowTiles;  // a lane's rows: 8 h + its group
  // A stage of a warp: codes [half][lane] of 16 bytes, then words that hold the scales, and as many with the zero points.
  static constexpr int kWords = !kPacked ? 0 : kHalves * (kScale == ScaleMode::per_chunk ? 8 : 32);
  static constexpr int kStageBytes = kHalves * 512 + 8 * kWords;
  static constexpr int kStages = (kScale == ScaleMode::per_chunk || !kPacked ? 8 : 6) / kRowTiles;
  static constexpr size_t kSharedBytes = static_cast<size_t>(kDecodeWarps) * kStages * kStageBytes;

  __device__ static int quad() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Weight row of local row r = 8 h + group() of a tile; a row of the last column, computed and never stored, where there is none.
  __device__ static uint32_t row_of(const GemmArgs& a, uint32_t column_tile, int r) {
    const uint32_t last = static_cast<uint32_t>(a.columns) - 1;
    if (!a.gated) {
      const uint32_t row = column_tile * kRows + r;
      return row < last ? row : last;
    }
    const uint32_t column = column_tile * (kRows / 2) + r / 16 * 8 + r % 8;
    return (column < last ? column : last) * static_cast<uint32_t>(a.column_step) + (r / 8 % 2 ? static_cast<uint32_t>(a.part_step) : 0u);
  }

  // Weight rows between a tile and the next; whether a tile's rows are all inside the matrix.
  __device__ static uint32_t tile_rows(const GemmArgs& a) { return a.gated ? kRows / 2 * static_cast<uint32_t>(a.column_step) : kRows; }
  __device__ static bool whole(const GemmArgs& a, uint32_t column_tile) {
    return (column_tile + 1) * (a.gated ? kRows / 2 : kRows) <= static_cast<uint32_t>(a.columns);
  }

  // Copies chunks to shared memory.
  struct Loader {
    const char* data;             // the expert's codes or elements
    const char *scales, *zeros;   // of the expert, down to a multiple of four
    uint32_t first;               // its first group from there
    uint32_t row_bytes[kHalves];  // from there to the lane's rows: below 2^32, or w_vector is false
    uint32_t row_groups[kScale == ScaleMode::per_chunk ? 1 : kHalves];

    __device__ void begin_tile(const GemmArgs& a, int64_t expert, uint32_t column_tile) {
      constexpr int kBytes = kPacked ? 1 : 2;
      const uint32_t apart = static_cast<uint32_t>(a.w.n_stride * kBytes), groups = static_cast<uint32_t>(a.w.groups);
      data = static_cast<const char*>(a.w.data) + expert * a.w.expert_stride * kBytes;
      if constexpr (kPacked) {
        const int64_t group0 = expert * a.w.n * a.w.groups, whole = group0 & ~int64_t{3};
        scales = static_cast<const char*>(a.w.scales) + whole * (a.w.scale_dtype == DType::f32 ? 4 : 2);
        zeros = reinterpret_cast<const char*>(a.w.zeros) + whole;
        first = static_cast<uint32_t>(group0 - whole);
      }
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t row = row_of(a, column_tile, h * 8 + group());
        row_bytes[h] = row * apart;
        if constexpr (kScale != ScaleMode::per_chunk) row_groups[h] = row * groups;
      }
      if constexpr (kScale == ScaleMode::per_chunk) row_groups[0] = row_of(a, column_tile, lane() % kRows) * groups;
    }

    // From one tile to the next of the same row block, all of whose rows there are.
    __device__ void next_tile(const GemmArgs& a) {
      const uint32_t rows = tile_rows(a);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) row_bytes[h] += rows * static_cast<uint32_t>(a.w.n_stride * (kPacked ? 1 : 2));
      if constexpr (kPacked) {
#pragma unroll
        for (int h = 0; h < (kScale == ScaleMode::per_chunk ? 1 : kHalves); ++h) row_groups[h] += rows * static_cast<uint32_t>(a.w.groups);
      }
    }

    __device__ void copy_words(const GemmArgs& a, char* stage, int at, uint32_t group) const {
      const uint32_t scale_byte = a.w.scale_dtype == DType::f32 ? group * 4u : group * 2u & ~3u;
      char* words = stage + kHalves * 512 + at * 4;
      sm80::copy_async_4(words, scales + scale_byte);
      if (a.w.zeros) sm80::copy_async_4(words + kWords * 4, zeros + (group & ~3u));
    }

    __device__ void copy(const GemmArgs& a, int chunk, char* stage) const {
      const int k = chunk * kChunk + quad() * kLane;
      const bool inside = k < static_cast<int>(a.w.k);
      const int bytes = !inside ? 0 : (kKind == WeightKind::dense ? k * 2 : (kKind == WeightKind::int4 ? k / 2 : k));
#pragma unroll
      for (int h = 0; h < kHalves; ++h) sm80::copy_async_16_line(stage + h * 512 + lane() * 16, data + row_bytes[h] + bytes, inside);
      if constexpr (kPacked) {
        const int first_k = kScale == ScaleMode::per_chunk ? chunk * kChunk : (inside ? k : 0);
        const uint32_t g = first + (static_cast<uint32_t>(first_k) >> a.group_shift);
        if constexpr (kScale == ScaleMode::per_chunk) {
          if (lane() < kRows) copy_words(a, stage, lane(), row_groups[0] + g);
        } else {
#pragma unroll
          for (int h = 0; h < kHalves; ++h) copy_words(a, stage, h * 32 + lane(), row_groups[h] + g);
        }
      }
    }
  };

  const GemmArgs& a;
  const T* x = nullptr;          // the lane's token's row of x at the lane's first k, null: no token
  uint32_t word_offset[kHalves]; // of the lane's first group in its word of scales or zero points
  float sums[kRowTiles][4];

  __device__ explicit Decode(const GemmArgs& args) : a(args) {}

  __device__ void next_tile() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if constexpr (kPacked) word_offset[h] = (word_offset[h] + tile_rows(a) * static_cast<uint32_t>(a.w.groups)) & 3u;
    }
  }
  __device__ void begin_tile(int64_t expert, uint32_t column_tile) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if constexpr (kPacked) {
        const uint32_t row = static_cast<uint32_t>(expert * a.w.n) + row_of(a, column_tile, h * 8 + group());
        word_offset[h] = row * static_cast<uint32_t>(a.w.groups) & 3u;
      }
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = 0.f;
    }
  }

  // Scales and what unpacking subtracts, of group g, out of a stage.
  __device__ void read_groups(const char* stage, uint32_t g, float* scales, uint32_t* minus) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(stage + kHalves * 512) + (kScale == ScaleMode::per_chunk ? group() : lane());
    constexpr int kApart = kWords / kHalves;
    if (a.w.scale_dtype == DType::f32) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) scales[h] = as_float(words[h * kApart]);
    } else {
      const bool bf16 = a.w.scale_dtype == DType::bf16;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t bits = sm80::halfword_on_top(words[h * kApart], word_offset[h] + g);
        scales[h] = bf16 ? as_float(bits) : sm80::half_to_float(bits >> 16);
      }
    }
    if (a.w.zeros == nullptr) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) minus[h] = minus_of(kKind == WeightKind::int4 ? 8 : 128);
    } else {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t both = sm80::byte_twice(words[kWords + h * kApart], word_offset[h] + g);
        minus[h] = kKind == WeightKind::int4 ? sm80::minus_int4_pair<T>(both) : sm80::minus_int8<T>(static_cast<int>(both & 0xffu));
      }
    }
  }
  __device__ static uint32_t minus_of(uint32_t zero) {
    return kKind == WeightKind::int4 ? sm80::minus_int4<T>(static_cast<int>(zero)) : sm80::minus_int8<T>(static_cast<int>(zero));
  }

  // Pairs of eight x as the weights of that octet are paired.
  __device__ static void pair_up(const Vec4& v, uint32_t* out) {
    if constexpr (kKind == WeightKind::int4) {  // (0, 4), (1, 5), (2, 6), (3, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[2]);
      out[1] = sm80::high_halves(v.w[0], v.w[2]);
      out[2] = sm80::low_halves(v.w[1], v.w[3]);
      out[3] = sm80::high_halves(v.w[1], v.w[3]);
    } else if constexpr (kKind == WeightKind::int8) {  // (0, 2), (1, 3), (4, 6), (5, 7)
      out[0] = sm80::low_halves(v.w[0], v.w[1]);
      out[1] = sm80::high_halves(v.w[0], v.w[1]);
      out[2] = sm80::low_halves(v.w[2], v.w[3]);
      out[3] = sm80::high_halves(v.w[2], v.w[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = v.w[j];
    }
  }

  // Pairs of eight weights: octet q of a lane's codes.
  template <class Scale>
  __device__ static void unpack(const Vec4& codes, int q, uint32_t minus, const Scale& scale, uint32_t* out) {
    if constexpr (!kPacked) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = codes.w[j];
    } else {
      if constexpr (kKind == WeightKind::int4) {
        sm80::unpack_int4<T>(codes.w[q], minus, out);
      } else {
        sm80::unpack_int8<T>(codes.w[2 * q], minus, out);
        sm80::unpack_int8<T>(codes.w[2 * q + 1], minus, out + 2);
      }
      if constexpr (kScale != ScaleMode::per_chunk) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = scale.times(out[j]);
      }
    }
  }

  // x of a chunk: asked for early, as it may have left the L1.
  struct ChunkOfX {
    Vec4 v[kLane / 8];
  };
  __device__ bool inside(int chunk) const { return chunk * kChunk + quad() * kLane < static_cast<int>(a.w.k); }
  __device__ ChunkOfX load_x(int chunk) const {
    ChunkOfX out;
    const bool there = x != nullptr && inside(chunk);
#pragma unroll
    for (int q = 0; q < kLane / 8; ++q) {
      out.v[q] = {{0, 0, 0, 0}};
      if (there) out.v[q] = reinterpret_cast<const Vec4*>(x + chunk * kChunk)[q];
    }
    return out;
  }

  __device__ void multiply(int chunk, const ChunkOfX& from_x, const char* stage) {
    Vec4 codes[kHalves];
    using Scale = sm80::Scale<T, kScale == ScaleMode::per_lane>;
    float scales[kHalves] = {};
    uint32_t minus[kHalves] = {};
    Scale times[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) codes[h] = *reinterpret_cast<const Vec4*>(stage + h * 512 + lane() * 16);
    if constexpr (kPacked) {
      const int first_k = kScale == ScaleMode::per_chunk ? chunk * kChunk : (inside(chunk) ? chunk * kChunk + quad() * kLane : 0);
      read_groups(stage, static_cast<uint32_t>(first_k) >> a.group_shift, scales, minus);
      if constexpr (kScale != ScaleMode::per_chunk) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) times[h] = Scale(scales[h]);
      }
    }
    float part[kRowTiles][4] = {};
#pragma unroll
    for (int q = 0; q < kLane / 8; ++q) {
      uint32_t b[4];
      pair_up(from_x.v[q], b);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t top[4], bottom[4];
        unpack(codes[2 * i], q, minus[2 * i], times[2 * i], top);
        unpack(codes[2 * i + 1], q, minus[2 * i + 1], times[2 * i + 1], bottom);
        float* to = kScale == ScaleMode::per_chunk ? part[i] : sums[i];
        P::mma(to, top[0], bottom[0], top[1], bottom[1], b[0], b[1]);
        P::mma(to, top[2], bottom[2], top[3], bottom[3], b[2], b[3]);
      }
    }
    if constexpr (kScale == ScaleMode::per_chunk) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(scales[2 * i + j / 2], part[i][j], sums[i][j]);
      }
    }
  }
};

// A tile's row block and place among the tiles of weight rows.
struct DecodePlace {
  uint32_t block, column_tile, tile = 0;  // tile: of those of the thread block

  __device__ DecodePlace(int64_t tile, uint32_t column_tiles)
      : block(static_cast<uint32_t>(tile / column_tiles)), column_tile(static_cast<uint32_t>(tile % column_tiles)) {}
  __device__ void step(uint32_t column_tiles) {
    ++tile;
    if (++column_tile == column_tiles) column_tile = 0, ++block;
  }
};

template <class T, WeightKind kKind, int kRowTiles, ScaleMode kScale>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocks) decode_kernel(GemmArgs a, uint32_t column_tiles) {
  using D = Decode<T, kKind, kRowTiles, kScale>;
  constexpr int kRows = D::kRows, kStages = D::kStages;
  __shared__ float partial[2][kDecodeWarps][kDecodeTokens][kRows + 1];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  char* ring = dynamic_shared<char>() + warp * kStages * D::kStageBytes;
  if (a.wait_early) wait_for_previous();
  const UsedBlocks blocks = used_blocks<kDecodeTokens, kDecodeThreads>(a);
  const int64_t tiles = static_cast<int64_t>(blocks.used) * column_tiles;
  const int64_t first = tiles * blockIdx.x / gridDim.x, last = tiles * (blockIdx.x + 1) / gridDim.x;
  const int chunks = static_cast<int>((a.w.k + D::kChunk - 1) / D::kChunk);

  // Warp w takes chunks w, w + kDecodeWarps, ... of every tile, or where they divide well, pairs of chunks: whole 128-byte lines.
  const bool pairs = chunks % (2 * kDecodeWarps) == 0;
  const int start = pairs ? 2 * warp : warp;
  const auto after = [&](int chunk) { return !pairs ? chunk + kDecodeWarps : (chunk % 2 ? chunk + 2 * kDecodeWarps - 1 : chunk + 1); };
  typename D::Loader loader;
  DecodePlace from(first, column_tiles), at = from;
  int load_tiles = warp < chunks ? static_cast<int>(last - first) : 0, load_chunk = start, load_stage = 0;
  const auto load = [&] {
    if (load_tiles > 0) {
      if (load_chunk == start) {
        if (from.tile > 0 && from.column_tile > 0 && D::whole(a, from.column_tile)) {
          loader.next_tile(a);
        } else {
          loader.begin_tile(a, blocks.experts[from.block], from.column_tile);
        }
      }
      loader.copy(a, load_chunk, ring + load_stage * D::kStageBytes);
      load_chunk = after(load_chunk);
      if (load_chunk >= chunks) {
        load_chunk = start, --load_tiles;
        from.step(column_tiles);
      }
    }
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
    sm80::commit_async();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load();
  if (!a.wait_early) wait_for_previous();
  let_next_start();

  D d(a);
  int64_t expert = 0;
  int stage = 0;
  for (int tiles_left = static_cast<int>(last - first); tiles_left > 0; --tiles_left, at.step(column_tiles)) {
    const uint32_t column_tile = at.column_tile;
    const auto row_at = [&](int token) {
      const int32_t row = blocks.rows[static_cast<int64_t>(at.block) * kDecodeTokens + token];
      return row < a.blocks.row_count ? row : -1;
    };
    if (at.tile == 0 || column_tile == 0) {
      expert = blocks.experts[at.block];
      const int32_t row = row_at(D::group());
      d.x = row < 0 ? nullptr : static_cast<const T*>(a.x) + static_cast<int64_t>(row / a.row_divisor) * a.x_stride + D::quad() * D::kLane;
    }
    if (at.tile > 0 && column_tile > 0 && D::whole(a, column_tile)) {
      d.next_tile();
    } else {
      d.begin_tile(expert, column_tile);
    }
    d.clear();
    for (int chunk = start; chunk < chunks; chunk = after(chunk)) {
      const typename D::ChunkOfX x = d.load_x(chunk);
      sm80::wait_async<kStages - 2>();
      __syncwarp();  // the copies of this stage are there, and nobody reads the one that is filled next
      load();
      d.multiply(chunk, x, ring + stage * D::kStageBytes);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // c[0..1]: weight row g, tokens 2q and 2q + 1; c[2..3]: weight row g + 8. Two buffers: a tile later there was a barrier.
    const int buffer = tiles_left % 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) partial[buffer][warp][D::quad() * 2 + j % 2][i * 16 + j / 2 * 8 + D::group()] = d.sums[i][j];
    }
    __syncthreads();
    // A thread: one token, weight rows r, r + 1, r + 8, r + 9.
    if (threadIdx.x >= kDecodeTokens * kRowTiles * 4) continue;
    const int token = static_cast<int>(threadIdx.x) / (kRowTiles * 4), i = static_cast<int>(threadIdx.x) % (kRowTiles * 4);
    const int32_t out_row = row_at(token);
    if (out_row < 0) continue;
    const int r = i / 4 * 16 + i % 4 * 2;
    float v[4] = {};
#pragma unroll
    for (int p = 0; p < kDecodeWarps; ++p) {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] += partial[buffer][p][token][r + j % 2 + j / 2 * 8];
    }
    finish(a, expert, out_row, static_cast<int64_t>(column_tile) * (a.gated ? kRows / 2 : kRows), r, v[0], v[1], v[2], v[3]);
  }
}

template <class T, WeightKind kKind, int kRowTiles, ScaleMode kScale>
Status launch_decode_kernel(const GemmArgs& a, Stream stream) {
  using D = Decode<T, kKind, kRowTiles, kScale>;
  const int64_t tiles = ceil_div(a.columns, a.gated ? D::kRows / 2 : D::kRows), most = kDecodeBlocks * multiprocessors();
  const int64_t blocks = a.blocks.blocks * tiles < most ? a.blocks.blocks * tiles : most;
  return launch_after("decode_kernel", decode_kernel<T, kKind, kRowTiles, kScale>, blocks, kDecodeThreads, D::kSharedBytes, stream, a,
                      static_cast<uint32_t>(tiles));
}

// Tiles of 32 weight rows, or of 16 where these spread better over the blocks.
template <class T, WeightKind kKind, ScaleMode kScale>
Status launch_decode_rows(const GemmArgs& a, Stream stream) {
  const int64_t narrow = a.blocks.blocks * ceil_div(a.columns, a.gated ? 8 : 16), most = kDecodeBlocks * multiprocessors();
  const int64_t narrow_turns = ceil_div(narrow, most), wide_turns = 2 * ceil_div(ceil_div(narrow, 2), most);
  if (narrow_turns * 10 < wide_turns * 9) return launch_decode_kernel<T, kKind, 1, kScale>(a, stream);
  return launch_decode_kernel<T, kKind, 2, kScale>(a, stream);
}

template <class T, WeightKind kKind>
Status launch_decode_packed(const GemmArgs& a, Stream stream) {
  if (a.w.group_size % Decode<T, kKind, 1, ScaleMode::per_chunk>::kChunk == 0 || a.w.groups == 1) {
    return launch_decode_rows<T, kKind, ScaleMode::per_chunk>(a, stream);
  }
  return sm80::is_type<T>(a.w.scale_dtype) ? launch_decode_rows<T, kKind, ScaleMode::per_lane>(a, stream)
                                           : launch_decode_rows<T, kKind, ScaleMode::per_lane_wide>(a, stream);
}

template <class T>
Status launch_decode(const GemmArgs& a, Stream stream) {
  switch (kind_of(a.w)) {
    case WeightKind::dense:
      return launch_decode_rows<T, WeightKind::dense, ScaleMode::none>(a, stream);
    case WeightKind::int4:
      return launch_decode_packed<T, WeightKind::int4>(a, stream);
    case WeightKind::int8:
      return launch_decode_packed<T, WeightKind::int8>(a, stream);
  }
  return {};
}

}  // namespace int4_emu::gpu
