// Every format to dense weights: a block of rows is brought into canonical form in scratch, then the instruction set's row
// function multiplies it out. Transposed formats go through slices of columns, so that the scratch stays in L2.
#include <atomic>

#include "api.h"
#include "canonical.h"
#include "convert.h"
#include "select.h"

namespace int4_emu::cpu {
namespace {

// Columns per slice: all of them, or a length near `wanted` at which a slice begins with a group or lies inside one.
int64_t slice_length(int64_t k, int64_t group_size, int64_t wanted) {
  if (k <= wanted) return k;
  if (group_size % 8 == 0 && group_size <= wanted) return wanted / group_size * group_size;
  for (int64_t step = wanted / 8 * 8; step >= 128; step -= 8) {
    if (group_size % step == 0) return step;
  }
  return group_size >= k ? wanted / 8 * 8 : k;
}

// act-order: every column names its own group.
void dequantize_row_indexed(const uint8_t* codes, const float* scales, const uint8_t* zeros, int midpoint, const int32_t* g_idx, int64_t k,
                            float* values, DType out_dtype, void* out) {
  for (int64_t j = 0; j < k; ++j) {
    const int32_t group = g_idx[j];
    values[j] = static_cast<float>(codes[j] - (zeros ? zeros[group] : midpoint)) * scales[group];
  }
  store_floats(values, out_dtype, k, out);
}

struct Task {
  const PackedMatrix& m;
  const CanonicalReader& reader;
  const TileTable& table;
  DType out_dtype;
  char* out;
  int64_t slice, stride;  // columns per slice, bytes between scratch rows

  char* out_row(int64_t b, int64_t o) const {
    return out + (b * m.out_features + o) * m.in_features * dtype_bytes(out_dtype);
  }

  // Rows o0..o0+n of matrix b; false when out of memory.
  bool run(int64_t b, int64_t o0, int64_t n) const {
    const int64_t groups = m.groups, scale_bytes = dtype_bytes(m.scale_dtype), first_row = b * m.out_features + o0;
    const bool codes_here = reader.codes_in_place(b, o0) != nullptr;
    const bool scales_here = reader.scales_in_place(), zeros_here = reader.zeros_in_place() || !m.qzeros;
    Scratch codes(codes_here ? 0 : n * stride), scales(scales_here ? 0 : n * groups * scale_bytes), zeros(zeros_here ? 0 : n * groups);
    if (!codes.data || !scales.data || !zeros.data) return false;
    const char* scale_rows = static_cast<const char*>(m.scales) + first_row * groups * scale_bytes;
    const uint8_t* zero_rows = m.qzeros ? static_cast<const uint8_t*>(m.qzeros) + first_row * groups : nullptr;
    if (!scales_here) {
      reader.read_scales(b, o0, n, scales.data);
      scale_rows = reinterpret_cast<const char*>(scales.data);
    }
    if (!zeros_here) {
      reader.read_zeros(b, o0, n, zeros.data);
      zero_rows = zeros.data;
    }
    if (m.g_idx) return run_indexed(b, o0, n, codes.data, scale_rows, zero_rows);

    for (int64_t k0 = 0; k0 < m.in_features; k0 += slice) {
      const int64_t k = m.in_features - k0 < slice ? m.in_features - k0 : slice;
      if (!codes_here) reader.read_codes(b, o0, n, k0, k, codes.data, stride);
      const int64_t group = k0 / m.group_size;
      for (int64_t i = 0; i < n; ++i) {
        const uint8_t* row = codes_here ? reader.codes_in_place(b, o0 + i) + k0 * m.bits / 8 : codes.data + i * stride;
        table.dequantize_row(row, m.bits, scale_rows + (i * groups + group) * scale_bytes, m.scale_dtype,
                             zero_rows ? zero_rows + i * groups + group : nullptr, k, m.group_size,
                             out_row(b, o0 + i) + k0 * dtype_bytes(out_dtype), out_dtype);
      }
    }
    return true;
  }

  bool run_indexed(int64_t b, int64_t o0, int64_t n, uint8_t* codes, const char* scale_rows, const uint8_t* zero_rows) const {
    const int64_t k = m.in_features, groups = m.groups;
    Scratch bytes(k), values(k * 4), scales(groups * 4);
    if (!bytes.data || !values.data || !scales.data) return false;
    float* row_scales = reinterpret_cast<float*>(scales.data);
    const bool codes_here = reader.codes_in_place(b, o0) != nullptr;
    if (!codes_here) reader.read_codes(b, o0, n, 0, k, codes, stride);
    for (int64_t i = 0; i < n; ++i) {
      expand_codes(codes_here ? reader.codes_in_place(b, o0 + i) : codes + i * stride, m.bits, k, bytes.data);
      load_floats(element(static_cast<const void*>(scale_rows), m.scale_dtype, i * groups), m.scale_dtype, groups, row_scales);
      dequantize_row_indexed(bytes.data, row_scales, zero_rows ? zero_rows + i * groups : nullptr, m.bits == 4 ? 8 : 128, m.g_idx + b * k, k,
                             reinterpret_cast<float*>(values.data), out_dtype, out_row(b, o0 + i));
    }
    return true;
  }
};

}  // namespace

Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, const Parallel& parallel) {
  if (Status s = check_isa(); !s) return s;
  const CanonicalReader reader(m);
  if (Status s = reader.check(); !s) return s;
  const int64_t k = m.in_features;
  const int64_t slice = m.g_idx ? k : slice_length(k, m.group_size, reader.slice_columns());
  const Task task{m, reader, active_table(), out_dtype, static_cast<char*>(out), slice, scratch_stride(row_bytes(round_up(slice, 8), m.bits))};

  const int64_t block = reader.block_rows(), blocks = ceil_div(m.out_features, block);
  std::atomic<bool> ok{true};
  parallel.for_each(m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t o0 = i % blocks * block;
      const int64_t n = m.out_features - o0 < block ? m.out_features - o0 : block;
      if (!task.run(i / blocks, o0, n)) ok.store(false, std::memory_order_relaxed);
    }
  });
  return ok.load() ? Status{} : make_error(Code::internal, "out of memory for the scratch of %lld rows", (long long)block);
}

}  // namespace int4_emu::cpu
