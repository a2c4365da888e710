// Every format to dense weights: a block of rows is brought into canonical form in scratch, then the instruction set's row
// function multiplies it out. Transposed formats go through slices of columns, so that the scratch stays in L2. Matrices of even sizes in
// these formats skip the canonical form where the instruction set has a function for them. Large results are streamed past the caches.
#include <atomic>
#include <optional>

#include "api.h"
#include "canonical.h"
#include "convert.h"
#include "select.h"
#include "stream.h"

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

// What a thread needs for one block of rows after another; parts that the checkpoint already stores as wanted are empty.
struct BlockScratch {
  BlockScratch(const PackedMatrix& m, const CanonicalReader& reader, int64_t stride, int64_t groups, int64_t row_bytes)
      : codes(reader.codes_in_place(0, 0) ? 0 : reader.block_rows() * stride),
        scales(reader.scales_in_place() ? 0 : reader.block_rows() * groups * dtype_bytes(m.scale_dtype)),
        zeros(reader.zeros_in_place() || !m.qzeros ? 0 : reader.block_rows() * groups),
        row_codes(m.g_idx && m.bits == 8 ? m.in_features : 0),
        row_values(m.g_idx && m.bits == 8 ? m.in_features * 4 : 0),
        row_scales(m.g_idx && m.bits == 8 ? m.groups * 4 : 0),
        every_code(m.g_idx && m.bits == 4 ? m.groups * 8 : 0),
        table(m.g_idx && m.bits == 4 ? m.groups * 16 * 4 : 0),
        first(m.g_idx && m.bits == 4 ? m.in_features * 4 : 0),
        row(row_bytes) {
    // The codes 0..15 of each group, packed.
    if (m.g_idx && m.bits == 4 && every_code.data) {
      for (int64_t i = 0; i < m.groups * 8; ++i) every_code.data[i] = static_cast<uint8_t>(0x10 + 0x22 * (i % 8));
    }
  }
  bool ok() const {
    return codes.data && scales.data && zeros.data && row_codes.data && row_values.data && row_scales.data && every_code.data && table.data &&
           first.data && row.data;
  }

  Scratch codes, scales, zeros;               // [rows][stride] bytes, [rows][groups], [rows][groups]
  Scratch row_codes, row_values, row_scales;  // act-order, int8: one row as bytes [I], as fp32 [I], its scales in fp32 [C]
  Scratch every_code, table, first;           // act-order, int4: packed codes [C][8], what they stand for in one row [C][16], and
                                              // where each column's group begins in that [I]
  Scratch row;                                // one row of results, before it is streamed
};

// Rows o0..o0+n, columns k0..k0+k of matrix b.
struct Tile {
  int64_t b, o0, n, k0, k;
};

// The general way: any format, width, size and order of groups, on any instruction set.
class Dequantizer {
 public:
  Dequantizer(const PackedMatrix& m, const CanonicalReader& reader, DType out_dtype, void* out)
      : m_(m), reader_(reader), table_(active_table()), out_dtype_(out_dtype), out_(static_cast<char*>(out)) {
    columns_ = m.g_idx ? m.in_features : slice_length(m.in_features, m.group_size, reader.slice_columns());
    stride_ = scratch_stride(row_bytes(round_up(columns_, 8), m.bits));
    slices_ = columns_ > 0 ? ceil_div(m.in_features, columns_) : 0;
    ranges_ = ceil_div(m.out_features, reader.block_rows());
    // Every row, and every slice of one, begins and ends on 32 bytes.
    const int64_t element = dtype_bytes(out_dtype), total = m.batch * m.out_features * m.in_features * element;
    stream_ = total >= kStreamBytes && m.in_features * element % 32 == 0 && columns_ * element % 32 == 0 &&
              reinterpret_cast<uintptr_t>(out) % 32 == 0;
  }

  int64_t tiles() const { return m_.batch * ranges_ * slices_; }

  // Tiles begin..end; false when out of memory.
  bool run(int64_t begin, int64_t end) const {
    const BlockScratch scratch(m_, reader_, stride_, m_.g_idx ? m_.groups : ceil_div(columns_, m_.group_size),
                               stream_ ? columns_ * dtype_bytes(out_dtype_) : 0);
    if (!scratch.ok()) return false;
    for (int64_t i = begin; i < end; ++i) run_tile(tile(i), scratch);
    if (stream_) stream_fence();
    return true;
  }

 private:
  Tile tile(int64_t i) const {
    const int64_t k0 = i % slices_ * columns_, o0 = i / slices_ % ranges_ * reader_.block_rows(), rows = reader_.block_rows();
    return {i / slices_ / ranges_, o0, m_.out_features - o0 < rows ? m_.out_features - o0 : rows, k0,
            m_.in_features - k0 < columns_ ? m_.in_features - k0 : columns_};
  }

  char* output(int64_t b, int64_t o, int64_t k) const {
    return out_ + ((b * m_.out_features + o) * m_.in_features + k) * dtype_bytes(out_dtype_);
  }

  void run_tile(const Tile& t, const BlockScratch& scratch) const {
    // Groups c0..c0+c; in place, rows of scales and zeros lie C groups apart, in scratch c.
    const int64_t c0 = m_.g_idx ? 0 : t.k0 / m_.group_size, c = m_.g_idx ? m_.groups : ceil_div(t.k0 + t.k, m_.group_size) - c0;
    const int64_t scale_bytes = dtype_bytes(m_.scale_dtype), first = (t.b * m_.out_features + t.o0) * m_.groups + c0;
    const char* scales = static_cast<const char*>(m_.scales) + first * scale_bytes;
    const uint8_t* zeros = m_.qzeros ? static_cast<const uint8_t*>(m_.qzeros) + first : nullptr;
    int64_t scale_step = m_.groups * scale_bytes, zero_step = m_.qzeros ? m_.groups : 0;
    if (!reader_.scales_in_place()) {
      reader_.read_scales(t.b, t.o0, t.n, c0, c, scratch.scales.data);
      scales = reinterpret_cast<const char*>(scratch.scales.data);
      scale_step = c * scale_bytes;
    }
    if (m_.qzeros && !reader_.zeros_in_place()) {
      reader_.read_zeros(t.b, t.o0, t.n, c0, c, scratch.zeros.data);
      zeros = scratch.zeros.data;
      zero_step = c;
    }
    // Canonical and compressed_tensors codes are multiplied out where they lie.
    const bool in_place = reader_.codes_in_place(t.b, t.o0) != nullptr;
    if (!in_place) reader_.read_codes(t.b, t.o0, t.n, t.k0, t.k, scratch.codes.data, stride_);
    if (m_.g_idx && m_.bits == 4) {
      uint32_t* first_of = reinterpret_cast<uint32_t*>(scratch.first.data);
      for (int64_t j = 0; j < t.k; ++j) first_of[j] = static_cast<uint32_t>(m_.g_idx[t.b * m_.in_features + j]) * 16;
    }
    for (int64_t i = 0; i < t.n; ++i) {
      const uint8_t* codes = in_place ? reader_.codes_in_place(t.b, t.o0 + i) + t.k0 * m_.bits / 8 : scratch.codes.data + i * stride_;
      const char* row_scales = scales + i * scale_step;
      const uint8_t* row_zeros = zeros ? zeros + i * zero_step : nullptr;
      // What the next row reads, which begins where this one ends: its few scales and zero points are too far apart for the hardware to foresee.
      if (in_place) fetch(codes + row_bytes(t.k, m_.bits), row_bytes(t.k, m_.bits));
      if (reader_.scales_in_place()) fetch(row_scales + scale_step, scale_step);
      if (zeros && reader_.zeros_in_place()) fetch(row_zeros + zero_step, zero_step);
      char* const place = output(t.b, t.o0 + i, t.k0);
      if (m_.g_idx == nullptr) {
        table_.dequantize_row(codes, m_.bits, row_scales, m_.scale_dtype, row_zeros, t.k, m_.group_size, place, out_dtype_,
                              stream_ ? scratch.row.data : nullptr);
        continue;
      }
      void* out = stream_ ? scratch.row.data : static_cast<void*>(place);
      if (m_.bits == 4) run_indexed_row4(t, codes, row_scales, row_zeros, scratch, out);
      else run_indexed_row(t, codes, row_scales, row_zeros, scratch, out);
      if (stream_) stream_copy(place, out, t.k * dtype_bytes(out_dtype_));
    }
  }

  // Always inlined: gcc 12 takes a function that only prefetches for one without effects, and drops calls of it.
  static inline __attribute__((always_inline)) void fetch(const void* first, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(first) + i);
  }

  // act-order, int4: a group has sixteen values in a row, so they are multiplied out once and looked up by every column.
  void run_indexed_row4(const Tile& t, const uint8_t* codes, const char* scales, const uint8_t* zeros, const BlockScratch& scratch,
                        void* out) const {
    table_.dequantize_row(scratch.every_code.data, 4, scales, m_.scale_dtype, zeros, m_.groups * 16, 16, scratch.table.data, out_dtype_, nullptr);
    const uint32_t* first = reinterpret_cast<const uint32_t*>(scratch.first.data);
    if (dtype_bytes(out_dtype_) == 2) look_up<uint16_t>(scratch.table.data, first, codes, t.k, out);
    else look_up<uint32_t>(scratch.table.data, first, codes, t.k, out);
  }

  // T: the bits of an output element. first[j] is where column j's group begins in the table, a multiple of 16.
  template <class T>
  static void look_up(const void* table, const uint32_t* first, const uint8_t* codes, int64_t k, void* out) {
    const T* values = static_cast<const T*>(table);
    T* to = static_cast<T*>(out);
    int64_t j = 0;
    for (; j + 8 <= k; j += 8) {
      uint32_t word;
      std::memcpy(&word, codes + j / 2, 4);
      for (int i = 0; i < 8; ++i) to[j + i] = values[first[j + i] | (word >> (4 * i) & 15)];
    }
    for (; j < k; ++j) to[j] = values[first[j] | (codes[j / 2] >> (j % 2 * 4) & 15)];
  }

  // act-order, int8: every column names its own group.
  void run_indexed_row(const Tile& t, const uint8_t* codes, const char* scales, const uint8_t* zeros, const BlockScratch& scratch,
                       void* out) const {
    float* row_scales = reinterpret_cast<float*>(scratch.row_scales.data);
    float* values = reinterpret_cast<float*>(scratch.row_values.data);
    const int32_t* g_idx = m_.g_idx + t.b * m_.in_features;
    const int midpoint = m_.bits == 4 ? 8 : 128;
    expand_codes(codes, m_.bits, t.k, scratch.row_codes.data);
    load_floats(scales, m_.scale_dtype, m_.groups, row_scales);
    for (int64_t j = 0; j < t.k; ++j) {
      const int32_t group = g_idx[j];
      values[j] = static_cast<float>(scratch.row_codes.data[j] - (zeros ? zeros[group] : midpoint)) * row_scales[group];
    }
    store_floats(values, out_dtype_, t.k, out);
  }

  const PackedMatrix& m_;
  const CanonicalReader& reader_;
  const TileTable& table_;
  DType out_dtype_;
  char* out_;
  int64_t columns_, stride_, slices_, ranges_;  // columns of a tile, bytes between scratch rows, tiles along I and along O
  bool stream_;
};

// Rows of one task of the instruction set's own function for transposed formats: a cache line of words packed along O.
constexpr int64_t kTransposedRows = 128;

// The groups of a block of stored rows with the groups outermost, as that function reads them.
class TurnedGroups {
 public:
  explicit TurnedGroups(const PackedMatrix& m)
      : m_(m),
        rows_(m.qzeros ? kTransposedRows * m.groups : 0),
        scales_(kTransposedRows * m.groups * 4),
        zeros_(m.qzeros ? kTransposedRows * m.groups : 0) {}
  bool ok() const { return rows_.data && scales_.data && zeros_.data; }

  void read(const CanonicalReader& reader, int64_t b, int64_t o0, DequantizeTransposedArgs& a) const {
    const int64_t size = dtype_bytes(m_.scale_dtype);
    const char* scales = static_cast<const char*>(m_.scales) + (b * m_.out_features + o0) * a.groups * size;
    if (size == 2) turn<uint16_t>(scales, a.n, a.groups, scales_.data);
    else turn<uint32_t>(scales, a.n, a.groups, scales_.data);
    a.scales = scales_.data;
    a.scale_step = a.n;
    if (!m_.qzeros) return;
    a.zeros = zeros_.data;
    a.zero_step = a.n * m_.bits / 8;
    if (const uint8_t* words = reader.zero_words(b, o0)) return turn<uint32_t>(words, a.zero_step / 4, a.groups, zeros_.data);
    reader.read_zeros(b, o0, a.n, 0, a.groups, rows_.data);
    a.zero_word_add = 0;
    a.zero_code_add = 0;
    turn<uint8_t>(rows_.data, a.n, a.groups, zeros_.data);
    if (m_.bits == 8) return;
    for (int64_t i = 0; i < a.groups * a.zero_step; ++i) zeros_.data[i] = static_cast<uint8_t>(zeros_.data[2 * i] | zeros_.data[2 * i + 1] << 4);
  }

 private:
  // [rows][groups] to [groups][rows], in strips whose lines stay in L1; elements are only moved, so T is any type of their size.
  template <class T>
  static void turn(const void* rows_of_groups, int64_t rows, int64_t groups, void* out) {
    constexpr int64_t kStrip = 16;
    const T* from = static_cast<const T*>(rows_of_groups);
    T* to = static_cast<T*>(out);
    for (int64_t g0 = 0; g0 < groups; g0 += kStrip) {
      const int64_t g1 = g0 + kStrip < groups ? g0 + kStrip : groups;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t g = g0; g < g1; ++g) to[g * rows + i] = from[i * groups + g];
      }
    }
  }

  const PackedMatrix& m_;
  Scratch rows_, scales_, zeros_;  // zero points one a byte [n][groups]; [groups][n] scales and zero points of `bits` bits
};

// False where that function or this matrix does not allow it.
bool dequantize_transposed(const PackedMatrix& m, const CanonicalReader& reader, DType out_dtype, void* out, const Parallel& parallel,
                           std::atomic<bool>& ok) {
  const auto run = active_table().dequantize_transposed;
  DequantizeTransposedArgs probe;
  if (run == nullptr) return false;
  const bool in_rows = reader.describe_rows(0, 0, 0, probe);
  if (!in_rows && !reader.describe(0, 0, 0, probe)) return false;
  const int64_t ranges = ceil_div(m.out_features, kTransposedRows);
  const int64_t bytes = m.batch * m.out_features * m.in_features * dtype_bytes(out_dtype);
  const bool stream = bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(out) % 32 == 0;
  parallel.for_each(m.batch * ranges, 1, [&](int64_t begin, int64_t end) {
    const auto describe = in_rows ? &CanonicalReader::describe_rows : &CanonicalReader::describe;
    std::optional<TurnedGroups> groups;
    if (in_rows && !groups.emplace(m).ok()) return ok.store(false, std::memory_order_relaxed);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / ranges, o0 = i % ranges * kTransposedRows, left = m.out_features - o0;
      DequantizeTransposedArgs args;
      (reader.*describe)(b, o0, left < kTransposedRows ? left : kTransposedRows, args);
      if (in_rows) groups->read(reader, b, o0, args);
      args.out = static_cast<char*>(out) + (b * m.out_features + o0) * m.in_features * dtype_bytes(out_dtype);
      args.ld = m.in_features;
      args.out_dtype = out_dtype;
      args.stream = stream;
      run(args);
    }
  });
  return true;
}

}  // namespace

Status dequantize(const PackedMatrix& m, DType out_dtype, void* out, const Parallel& parallel) {
  if (Status s = check_isa(); !s) return s;
  const CanonicalReader reader(m);
  if (Status s = reader.check(); !s) return s;
  std::atomic<bool> ok{true};
  if (!dequantize_transposed(m, reader, out_dtype, out, parallel, ok)) {
    const Dequantizer dequantizer(m, reader, out_dtype, out);
    parallel.for_each(dequantizer.tiles(), 1, [&](int64_t begin, int64_t end) {
      if (!dequantizer.run(begin, end)) ok.store(false, std::memory_order_relaxed);
    });
  }
  return ok.load() ? Status{} : make_error(Code::internal, "out of memory for the scratch of %lld rows", (long long)reader.block_rows());
}

}  // namespace int4_emu::cpu
