// A few rows of x times canonical int4 codes where they lie: what the ways of simd_dots512.h and simd_limbs512.h share. Included after
// simd_split512.h.
//
// A vector holds 128 codes of a weight row, eight a lane, so a group of less than 128 columns is a run of lanes, and its scale is a lane's
// factor.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kCodesBlock = 128;    // codes of a vector
constexpr int64_t kCodesRows = 4;       // weight rows at a time
constexpr int64_t kCodesGroups = 512;   // of a row: bounds the scratch on the stack
constexpr int64_t kCodesMost = kCodesBlock * 1024;  // columns, for the same reason
constexpr float kLimbLargest = 127 * 256;  // of a fixed-point number of two signed bytes
constexpr int64_t kCodesVectors = 4;    // rows of x times parts of the split

bool serves_codes(const Weight& w, DType x, int64_t m) {
  return w.packed && w.bits == 4 && w.layout == Layout::canonical && w.k % kCodesBlock == 0 && w.k > 0 && w.k <= kCodesMost &&
         w.groups <= kCodesGroups && (128 % w.group_size == 0 ? w.group_size >= 8 : groups_are_whole(w, kCodesBlock)) &&
         m * splits_of(x) <= kCodesVectors;
}

// The lines of weights to fetch while some rows are multiplied: bytes from the first row to the first line, then from a row's line to that of
// the row below and to the row's next one.
struct CodesAhead {
  int64_t bytes, row, line;
};

// `bytes` ahead: those of other rows, or further on in the same ones. Hardware prefetchers do not follow several streams within a page, but
// they do follow lines that are asked for in their order in memory, where rows lie one behind another.
inline CodesAhead codes_ahead(const Weight& w, int64_t step, int64_t rows, int64_t bytes, bool of_other_rows) {
  if (of_other_rows && step == 1 && w.n_stride % 64 == 0 && w.n_stride * 8 == w.k * w.bits) return {bytes, 64, rows * 64};
  return {bytes, step * w.n_stride, 64};
}
inline void fetch_codes(const uint8_t* first_row, const CodesAhead& a, int64_t row, int64_t line) {
  _mm_prefetch(reinterpret_cast<const char*>(first_row + a.bytes + row * a.row + line * a.line), _MM_HINT_T1);
}

// What the rows of a product share.
struct CodesShared {
  const void* x;
  int64_t blocks;                  // of a row
  CodesAhead ahead;
  const uint16_t* first_group;     // [blocks] of the lanes of each block
  Vi lane_group;                   // and which group after it a lane belongs to
  Vi table;
};

// Scales in fp32 and zero points, in each byte of a word or in fp32, [kCodesRows][groups], with a vector's length to spare.
struct CodesGroups {
  alignas(64) float scales[kCodesRows * kCodesGroups + kLanes];
  alignas(64) float zeros[kCodesRows * kCodesGroups + kLanes];
};

template <bool kZerosAreFloats>
inline void load_groups(const Weight& w, int64_t expert, int64_t row, int64_t count, int64_t at, CodesGroups& groups) {
  const char* scales = scales_of(w, expert, row);
  for (int64_t i = 0; i < count; i += kLanes)
    store(groups.scales + at + i, load_first(scales, w.scale_dtype, i, count - i < kLanes ? count - i : kLanes));
  if (w.zeros == nullptr) return;
  const uint8_t* zeros = zeros_of(w, expert, row);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vi z = load_first_bytes(zeros + i, count - i < kLanes ? count - i : kLanes);
    store(groups.zeros + at + i, kZerosAreFloats ? to_float(z) : _mm512_castsi512_ps(replicate_bytes(z)));
  }
}

// Four rows of a part: where they lie and what comes with them.
struct CodesStep {
  const uint8_t* rows[kCodesRows];
  int64_t row, columns;  // the first row, and how many of the four there are
  float* c;              // of the first row of x
};

inline CodesStep codes_step(const ProductArgs& a, int64_t step, int64_t steps_of_part) {
  const Weight& w = *a.weight;
  const int64_t part = step / steps_of_part, j = step % steps_of_part * kCodesRows;
  CodesStep s;
  s.columns = a.n - j < kCodesRows ? a.n - j : kCodesRows;
  s.row = a.row0[part] + j * a.step;
  s.c = a.c + part * a.m * a.ldc + j;
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + a.expert * w.expert_stride;
  for (int64_t r = 0; r < kCodesRows; ++r) s.rows[r] = codes + (s.row + (r < s.columns ? r : s.columns - 1) * a.step) * w.n_stride;
  return s;
}

// The first row of a step; of one beyond the last, that of the columns after these, which most often come next.
inline int64_t row_of_step(const ProductArgs& a, int64_t step, int64_t steps_of_part) {
  const int64_t part = step / steps_of_part, beyond = step - a.parts * steps_of_part;
  if (part < a.parts) return a.row0[part] + step % steps_of_part * kCodesRows * a.step;
  return a.row0[0] + (a.n + beyond * kCodesRows) * a.step;
}

// `Way` multiplies kCodesRows rows of codes by kM rows of x in kSplits parts each.
template <bool kZeros, int kM, int kSplits, class Way>
void multiply_codes(const ProductArgs& a) {
  const Weight& w = *a.weight;
  alignas(64) uint16_t first_group[kCodesMost / kCodesBlock];
  CodesGroups groups[2];
  CodesShared t;
  t.x = a.packed_x;
  t.blocks = w.k / kCodesBlock;
  t.first_group = first_group;
  t.table = code_table(kZeros);
  const int64_t group_size = w.group_size < w.k ? w.group_size : w.k;
  const int64_t per_block = group_size < kCodesBlock ? kCodesBlock / group_size : 1;
  const int64_t blocks_per_group = group_size < kCodesBlock ? 1 : group_size / kCodesBlock;
  for (int64_t b = 0, inside = 0, group = 0; b < t.blocks; ++b) {
    first_group[b] = static_cast<uint16_t>(group);
    if (++inside == blocks_per_group) inside = 0, group += per_block;
  }
  alignas(64) uint32_t lane_group[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lane_group[lane] = static_cast<uint32_t>(lane * per_block / kLanes);
  t.lane_group = _mm512_load_si512(lane_group);

  const auto load = [&](const CodesStep& s, CodesGroups& to) {
    if (a.step == 1) return load_groups<Way::kZerosAreFloats>(w, a.expert, s.row, s.columns * w.groups, 0, to);
    for (int64_t r = 0; r < s.columns; ++r) load_groups<Way::kZerosAreFloats>(w, a.expert, s.row + r * a.step, w.groups, r * w.groups, to);
  };
  const int64_t steps_of_part = (a.n + kCodesRows - 1) / kCodesRows, steps = a.parts * steps_of_part;
  // Codes are fetched about 4 KB before they are read, steps ahead, or in long rows further on in the same row: hardware prefetchers know
  // nothing of the second part. Scales are brought in one step ahead.
  const int64_t step_bytes = kCodesRows * w.n_stride, steps_ahead = step_bytes <= 8192 ? (4095 + step_bytes) / step_bytes : 0;
  CodesStep step = codes_step(a, 0, steps_of_part);
  load(step, groups[0]);
  for (int64_t i = 0; i < steps; ++i) {
    const CodesStep next = codes_step(a, i + 1 < steps ? i + 1 : i, steps_of_part);
    load(next, groups[(i + 1) & 1]);
    const int64_t bytes = steps_ahead > 0 ? (row_of_step(a, i + steps_ahead, steps_of_part) - step.row) * w.n_stride : 2048;
    t.ahead = codes_ahead(w, a.step, kCodesRows, bytes, steps_ahead > 0);
    Vf sums[kCodesRows][kM * kSplits];
    Way::rows(t, step.rows, groups[i & 1], w.groups, sums);
#pragma GCC unroll 4
    for (int q = 0; q < kM; ++q) {
      Vf total[kCodesRows];
#pragma GCC unroll 4
      for (int r = 0; r < kCodesRows; ++r) {
        total[r] = sums[r][q * kSplits];
#pragma GCC unroll 3
        for (int s = 1; s < kSplits; ++s) total[r] = add(total[r], sums[r][q * kSplits + s]);
      }
      store_sums(step.c + q * a.ldc, sum4(total[0], total[1], total[2], total[3]), step.columns, false);
    }
    step = next;
  }
}

}  // namespace
}  // namespace int4_emu::cpu
