// unpack, unpack_zeros and repack: checkpoint formats to bytes and to the canonical layout. All three read a block of rows in canonical
// form into scratch and write it out row by row; a block is what one task of the pool does.
#include <atomic>
#include <cstring>
#include <vector>

#include "api.h"
#include "canonical.h"

namespace int4_emu::cpu {
namespace {

// Runs body(b, o0, n) over blocks of rows of all matrices; body returns false when it ran out of memory.
template <class Body>
Status for_each_block(const PackedMatrix& m, int64_t block, const Parallel& parallel, const Body& body) {
  const int64_t blocks = ceil_div(m.out_features, block);
  std::atomic<bool> ok{true};
  parallel.for_each(m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t o0 = i % blocks * block;
      const int64_t n = m.out_features - o0 < block ? m.out_features - o0 : block;
      if (!body(i / blocks, o0, n)) ok.store(false, std::memory_order_relaxed);
    }
  });
  return ok.load() ? Status{} : make_error(Code::internal, "out of memory for the scratch of %lld rows", (long long)block);
}

// Where each source row goes. Without a permutation row o goes to o; with one, possibly to several rows or to none.
class RowTargets {
 public:
  RowTargets(const int32_t* out_perm, int64_t rows) : identity_(out_perm == nullptr) {
    if (identity_) return;
    starts_.assign(static_cast<size_t>(rows) + 1, 0);
    targets_.resize(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) ++starts_[out_perm[i] + 1];
    // Counting sort by source row; the cursor is where the next target of a row goes.
    for (int64_t o = 0; o < rows; ++o) starts_[o + 1] += starts_[o];
    std::vector<int64_t> cursor(starts_.begin(), starts_.end() - 1);
    for (int64_t i = 0; i < rows; ++i) targets_[cursor[out_perm[i]]++] = i;
  }

  template <class Body>
  void for_each(int64_t o, const Body& body) const {
    if (identity_) return body(o);
    for (int64_t i = starts_[o]; i < starts_[o + 1]; ++i) body(targets_[i]);
  }

 private:
  bool identity_;
  std::vector<int64_t> starts_, targets_;  // CSR: targets of source row o are targets_[starts_[o]..starts_[o + 1]]
};

// Rows whose columns are gathered together: the codes and the turned codes of so many stay in L2.
constexpr int64_t kGatheredRows = 64;

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out, const Parallel& parallel) {
  const CanonicalReader reader(m);
  if (Status s = reader.check(); !s) return s;
  const int64_t k = m.in_features, stride = scratch_stride(row_bytes(round_up(k, 8), m.bits)), block = reader.block_rows();
  return for_each_block(m, block, parallel, [&](int64_t b, int64_t o0, int64_t n) {
    const bool in_place = reader.codes_in_place(b, o0) != nullptr;
    Scratch scratch(in_place ? 0 : n * stride);
    if (!scratch.data) return false;
    if (!in_place) reader.read_codes(b, o0, n, 0, k, scratch.data, stride);
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* row = in_place ? reader.codes_in_place(b, o0 + i) : scratch.data + i * stride;
      expand_codes(row, m.bits, k, out + (b * m.out_features + o0 + i) * k);
    }
    return true;
  });
}

Status unpack_zeros(const PackedMatrix& m, uint8_t* out, const Parallel& parallel) {
  const CanonicalReader reader(m);
  if (Status s = reader.check(); !s) return s;
  return for_each_block(m, reader.block_rows(), parallel, [&](int64_t b, int64_t o0, int64_t n) {
    reader.read_zeros(b, o0, n, 0, m.groups, out + (b * m.out_features + o0) * m.groups);
    return true;
  });
}

Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out, const Parallel& parallel) {
  const CanonicalReader reader(m);
  if (Status s = reader.check(); !s) return s;
  const int64_t k = m.in_features, rows = m.out_features, groups = m.groups;
  const int64_t width = row_bytes(k, m.bits), scale_row = groups * dtype_bytes(m.scale_dtype);
  const int64_t stride = scratch_stride(row_bytes(round_up(k, 8), m.bits));
  const RowTargets targets(out_perm, rows);
  // Columns of int4 are gathered many rows at a time, those of int8 in one.
  const bool turned = in_perm != nullptr && m.bits == 4;
  const int64_t block = turned ? kGatheredRows : reader.block_rows();

  return for_each_block(m, block, parallel, [&](int64_t b, int64_t o0, int64_t n) {
    // codes [n][stride] | scales [n][C] | zeros [n][C] | columns [k][n], or a row [k], of codes before the gather
    Scratch codes(n * stride), scales(n * scale_row), zeros(out.zeros ? n * groups : 0);
    Scratch stored(turned ? reader.permuted_scratch(n) : (in_perm ? k : 0));
    if (!codes.data || !scales.data || !zeros.data || !stored.data) return false;
    if (turned) {
      reader.read_permuted_codes(b, o0, n, in_perm, stored.data, codes.data, stride);
    } else {
      reader.read_codes(b, o0, n, 0, k, codes.data, stride);
    }
    // Scales keep their group order: a column permutation sorts by group, it does not renumber.
    if (m.scales) reader.read_scales(b, o0, n, 0, groups, scales.data);
    if (out.zeros) {
      if (m.qzeros) {
        reader.read_zeros(b, o0, n, 0, groups, zeros.data);
      } else {
        std::memset(zeros.data, m.bits == 4 ? 8 : 128, static_cast<size_t>(n * groups));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      uint8_t* row = codes.data + i * stride;
      if (in_perm && !turned) {
        std::memcpy(stored.data, row, static_cast<size_t>(k));
        for (int64_t j = 0; j < k; ++j) row[j] = stored.data[in_perm[j]];
      }
      targets.for_each(o0 + i, [&](int64_t target) {
        const int64_t to = b * rows + target;
        std::memcpy(out.qweight + to * width, row, static_cast<size_t>(width));
        if (m.scales && out.scales) std::memcpy(static_cast<char*>(out.scales) + to * scale_row, scales.data + i * scale_row, scale_row);
        if (out.zeros) std::memcpy(out.zeros + to * groups, zeros.data + i * groups, static_cast<size_t>(groups));
      });
    }
    return true;
  });
}

}  // namespace int4_emu::cpu
