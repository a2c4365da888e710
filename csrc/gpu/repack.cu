// Checkpoint formats to the canonical layout, zero points to bytes, and canonical to tile order and back.
#include "api.h"
#include "codes.cuh"

namespace int4_emu::gpu {
namespace {

constexpr int kThreads = 256;

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// One thread: eight columns of one canonical row. Neighbouring threads hold neighbouring rows of a transposed source.
__global__ void __launch_bounds__(kThreads)
    repack_codes_kernel(CodeReader reader, const int32_t* in_perm, const int32_t* out_perm, uint8_t* qweight, int64_t units, bool aligned) {
  const PackedMatrix& m = reader.m;
  const int64_t i = thread_index(), per_matrix = m.out_features * units;
  if (i >= m.batch * per_matrix) return;
  const int64_t b = i / per_matrix, within = i % per_matrix;
  int64_t o, unit;
  if (reader.traits.transposed) {
    // 8 rows x 4 units a warp; the last rows and units of a matrix that these do not fill come in plain order.
    const int64_t whole = m.out_features / 8 * 8;
    const int64_t strip = within / (8 * units), in_strip = within % (8 * units);
    if (strip * 8 < whole) {
      o = strip * 8 + in_strip % 8;
      unit = in_strip / 8;
    } else {
      o = whole + (within - whole * units) / units;
      unit = (within - whole * units) % units;
    }
  } else {
    o = within / units;
    unit = within % units;
  }
  const int64_t source = out_perm ? out_perm[o] : o, k = unit * 8, left = m.in_features - k;
  const int count = left < 8 ? static_cast<int>(left) : 8;
  uint8_t codes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (source >= 0 && source < m.out_features) {
    if (in_perm == nullptr) {
      reader.eight_codes(b, source, k, count, codes);
    } else {
      for (int j = 0; j < count; ++j) {
        const int64_t column = in_perm[k + j];
        if (column >= 0 && column < m.in_features) codes[j] = reader.code(b, source, column);
      }
    }
  }
  uint8_t* to = qweight + (b * m.out_features + o) * ((m.in_features * m.bits + 7) / 8) + k * m.bits / 8;
  if (m.bits == 4) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) word |= static_cast<uint32_t>(codes[j]) << (4 * j);
    if (aligned) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      for (int j = 0; j < (count + 1) / 2; ++j) to[j] = static_cast<uint8_t>(word >> (8 * j));
    }
  } else {
    for (int j = 0; j < count; ++j) to[j] = codes[j];
  }
}

// One thread: one group of one row. Any of the two outputs may be null.
__global__ void __launch_bounds__(kThreads) repack_groups_kernel(CodeReader reader, const int32_t* out_perm, void* scales, uint8_t* zeros) {
  const PackedMatrix& m = reader.m;
  const int64_t i = thread_index(), per_matrix = m.out_features * m.groups;
  if (i >= m.batch * per_matrix) return;
  const int64_t b = i / per_matrix, o = i % per_matrix / m.groups, c = i % m.groups;
  const int64_t source = out_perm ? out_perm[o] : o;
  const bool inside = source >= 0 && source < m.out_features;
  if (zeros) zeros[i] = inside ? static_cast<uint8_t>(GroupRow(reader, b, source).zero(c)) : 0;
  if (scales == nullptr || m.scales == nullptr) return;
  if (m.scale_dtype == DType::f32) {
    static_cast<float*>(scales)[i] = inside ? static_cast<const float*>(m.scales)[reader.scale_index(b, source, c)] : 0.f;
  } else {
    static_cast<uint16_t*>(scales)[i] =
        inside ? static_cast<const uint16_t*>(m.scales)[reader.scale_index(b, source, c)] : static_cast<uint16_t>(0);
  }
}

// cpu_n16's nibble order (core/layout.h): nibble j of a tile word is column kOrder[j].
__device__ uint32_t reorder_nibbles(uint32_t word, bool forward) {
  uint32_t out = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = j < 4 ? 2 * j : 2 * j - 7;
    out |= forward ? ((word >> (4 * column)) & 0xfu) << (4 * j) : ((word >> (4 * j)) & 0xfu) << (4 * column);
  }
  return out;
}

// One thread: one word; canonical [N][words], tiles [N/16][words][16].
__global__ void __launch_bounds__(kThreads)
    prepack_kernel(const uint8_t* in, uint8_t* out, int64_t total, int64_t words, int bits, bool forward) {
  const int64_t i = thread_index();  // over the tile order
  if (i >= total) return;
  const int64_t block = i / (words * 16), w = i / 16 % words, row = block * 16 + i % 16, canonical = row * words + w;
  const uint8_t* from = in + 4 * (forward ? canonical : i);
  uint32_t word =
      from[0] | static_cast<uint32_t>(from[1]) << 8 | static_cast<uint32_t>(from[2]) << 16 | static_cast<uint32_t>(from[3]) << 24;
  if (bits == 4) word = reorder_nibbles(word, forward);
  uint8_t* to = out + 4 * (forward ? i : canonical);
  for (int j = 0; j < 4; ++j) to[j] = static_cast<uint8_t>(word >> (8 * j));
}

Status launch_prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, void* stream,
                      bool forward) {
  if (bits != 4 && bits != 8) return make_error(Code::invalid_value, "bits must be 4 or 8, got %d", bits);
  if (batch <= 0 || n <= 0 || k <= 0) return {};
  if (layout == Layout::canonical) {
    const size_t bytes = static_cast<size_t>(batch * n * row_bytes(k, bits));
    return check(INT4_EMU_RUNTIME(MemcpyAsync)(out, in, bytes, INT4_EMU_RUNTIME(MemcpyDeviceToDevice), as_stream(stream)), "prepack copy");
  }
  if (layout != Layout::cpu_n16) return make_error(Code::invalid_value, "layout must be 0 or 1, got %d", static_cast<int>(layout));
  if (!layout_fits(layout, n, k, bits)) {
    return make_error(Code::invalid_value, "layout %d needs N %% 16 == 0 and K %% %d == 0, got N=%lld, K=%lld", static_cast<int>(layout),
                      32 / bits, (long long)n, (long long)k);
  }
  const int64_t words = k * bits / 32, total = batch * n * words;
  return launch("prepack_kernel", prepack_kernel, ceil_div(total, kThreads), kThreads, 0, as_stream(stream), in, out, total, words, bits, forward);
}

Status launch_groups(const CodeReader& reader, const int32_t* out_perm, void* scales, uint8_t* zeros, void* stream, const char* name) {
  const PackedMatrix& m = reader.m;
  const int64_t total = m.batch * m.out_features * m.groups;
  return launch(name, repack_groups_kernel, ceil_div(total, kThreads), kThreads, 0, as_stream(stream), reader, out_perm, scales, zeros);
}

}  // namespace

Status unpack_zeros(const PackedMatrix& m, uint8_t* out, void* stream) {
  CodeReader reader;
  if (Status s = make_reader(m, reader); !s) return s;
  return launch_groups(reader, nullptr, nullptr, out, stream, "unpack_zeros");
}

Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out, void* stream) {
  CodeReader reader;
  if (Status s = make_reader(m, reader); !s) return s;
  const int64_t units = ceil_div(m.in_features, 8), total = m.batch * m.out_features * units;
  const bool aligned = m.bits == 4 && m.in_features % 8 == 0 && is_aligned(out.qweight, 4);
  const Status status = launch("repack_codes_kernel", repack_codes_kernel, ceil_div(total, kThreads), kThreads, 0, as_stream(stream), reader,
                               in_perm, out_perm, out.qweight, units, aligned);
  if (!status) return status;
  if (!out.zeros && !(out.scales && m.scales)) return {};
  return launch_groups(reader, out_perm, out.scales, out.zeros, stream, "repack");
}

Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, void* stream) {
  return launch_prepack(in, out, batch, n, k, bits, layout, stream, true);
}

Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, void* stream) {
  return launch_prepack(in, out, batch, n, k, bits, layout, stream, false);
}

}  // namespace int4_emu::gpu
