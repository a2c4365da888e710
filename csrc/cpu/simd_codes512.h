// A few rows of x times canonical codes where they lie: what the ways of simd_dots512.h, simd_limbs512.h and simd_amx_limbs.h share. Included
// after simd_split512.h.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kCodesBlock = 128;    // columns at a time: a vector of int4 codes, or two of int8 codes
constexpr int64_t kCodesRows = 4;       // weight rows at a time
constexpr int64_t kCodesUnits = 512;    // of a row (CodesUnits): bounds the scratch on the stack

// A row's columns in units that share a scale and lie in one block: a group, or a block of a larger one. A group of less than a block is a
// run of lanes of its vector, and its scale is a factor of theirs.
struct CodesUnits {
  explicit CodesUnits(const Weight& w)
      : columns(w.group_size < kCodesBlock && w.group_size < w.k ? w.group_size : kCodesBlock),
        blocks(w.k / kCodesBlock),
        per_block(kCodesBlock / columns),
        count(blocks * per_block),
        stride(round_up_to(count, kLanes)),
        per_group(w.group_size >= w.k ? count : w.group_size / columns) {}
  int64_t columns, blocks, per_block;
  int64_t count, stride;  // of a row, and rounded up to whole vectors
  int64_t per_group;      // units
};

// Which of a vector's units each lane belongs to: what spreads their values over the lanes.
inline Vi unit_of_lanes(int64_t per_vector) {
  alignas(64) uint32_t unit[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) unit[lane] = static_cast<uint32_t>(lane * per_vector / kLanes);
  return _mm512_load_si512(unit);
}

bool serves_codes(const Weight& w) {
  if (!w.packed || w.layout != Layout::canonical || w.k % kCodesBlock != 0 || w.k == 0) return false;
  const bool parts = w.group_size < kCodesBlock && w.group_size >= kLanes && kCodesBlock % w.group_size == 0;
  return (parts || groups_are_whole(w, kCodesBlock)) && CodesUnits(w).count <= kCodesUnits;
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
// Always inlined: gcc 12 takes a function that only prefetches for one without effects, and drops calls of it.
inline __attribute__((always_inline)) void fetch_line(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
inline __attribute__((always_inline)) void fetch_codes(const uint8_t* first_row, const CodesAhead& a, int64_t row, int64_t line) {
  fetch_line(first_row + a.bytes + row * a.row + line * a.line);
}

// Four rows of a part: where they lie and what comes with them.
struct CodesStep {
  const uint8_t* rows[kCodesRows];
  int64_t row, columns;  // the first row, and how many of the four there are
  float* c;              // of the first of the rows of x in hand
};

inline CodesStep codes_step(const ProductArgs& a, int64_t first, int64_t step, int64_t steps_of_part) {
  const Weight& w = *a.weight;
  const int64_t part = step / steps_of_part, j = step % steps_of_part * kCodesRows;
  CodesStep s;
  s.columns = a.n - j < kCodesRows ? a.n - j : kCodesRows;
  s.row = a.row0[part] + j * a.step;
  s.c = a.c + (part * a.m + first) * a.ldc + j;
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

// From a line that is read to the one to fetch, for rows that are read one after another.
inline int64_t bytes_in_order(const Weight& w, int64_t step) {
  constexpr int64_t kAhead = 6144;
  const int64_t rows = kAhead / w.n_stride;
  return step == 1 || rows == 0 ? kAhead : rows * step * w.n_stride;
}

// `Way` multiplies kCodesRows rows of codes, Way::kSide at a time, by rows first.. first + Way::kRows of x, with what it has made of their scales
// and zero points in Way::Values.
template <class Way>
void multiply_codes(const ProductArgs& a, int64_t first) {
  const Weight& w = *a.weight;
  const Way way(a, first);
  typename Way::Values values[2];
  const auto load = [&](const CodesStep& s, typename Way::Values& to) {
    for (int64_t r = 0, row = s.row; r < s.columns; ++r, row += a.step)
      way.load(scales_of(w, a.expert, row), w.zeros ? zeros_of(w, a.expert, row) : nullptr, r, to);
  };
  const int64_t steps_of_part = (a.n + kCodesRows - 1) / kCodesRows, steps = a.parts * steps_of_part;
  // Codes of rows side by side are fetched about 4 KB before they are read, steps ahead, or in long rows further on in the same row: hardware
  // prefetchers know nothing of the second part. Scales are brought in one step ahead.
  const int64_t step_bytes = kCodesRows * w.n_stride, steps_ahead = step_bytes <= 8192 ? (4095 + step_bytes) / step_bytes : 0;
  const int64_t in_order = bytes_in_order(w, a.step);
  CodesStep step = codes_step(a, first, 0, steps_of_part);
  load(step, values[0]);
  for (int64_t i = 0; i < steps; ++i) {
    const CodesStep next = codes_step(a, first, i + 1 < steps ? i + 1 : i, steps_of_part);
    load(next, values[(i + 1) & 1]);
    const int64_t bytes = Way::kSide == 1   ? in_order
                          : steps_ahead > 0 ? (row_of_step(a, i + steps_ahead, steps_of_part) - step.row) * w.n_stride
                                            : 2048;
    Vf sums[kCodesRows][Way::kRows];
    way.rows(step.rows, codes_ahead(w, a.step, kCodesRows, bytes, steps_ahead > 0), values[i & 1], sums);
#pragma GCC unroll 4
    for (int q = 0; q < Way::kRows; ++q) store_sums(step.c + q * a.ldc, sum4(sums[0][q], sums[1][q], sums[2][q], sums[3][q]), step.columns, false);
    step = next;
  }
}

}  // namespace
}  // namespace int4_emu::cpu
