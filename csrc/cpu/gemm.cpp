#include "gemm.h"

#include "convert.h"

namespace int4_emu::cpu {
namespace {

// With this many rows or fewer, dense weights of the compute type are multiplied where they lie; with more, a copied panel that
// stays in cache pays.
constexpr int64_t kDirectRows = 32;
// Up to this many rows the weights' way from memory counts: panels hold long pieces of few rows, which prefetchers follow. Sets without
// a matrix unit pay for a sum across lanes at the end of every piece, so the others are no shorter than they must be.
constexpr int64_t kStreamRows = 8;

// The bf16 dot product needs both sides in bf16 without loss beyond the one rounding of packed weights; fp32 and fp16 weights go in fp32.
bool takes_bf16(const TileTable& table, const Weight& weight, DType x) {
  return x == DType::bf16 && table.bf16.gemm != nullptr && (weight.packed || weight.dtype == DType::bf16);
}

struct Blocking {
  int64_t columns, depth;
};

Blocking choose_blocking(const Weight& weight, int64_t m, int64_t n, bool direct) {
  if (direct || weight.k == 0) return {n, weight.k};
  Blocking b{kPanelColumns, kPanelDepth};
  if (m <= kStreamRows && weight.k_stride == 1) b = {kPanelColumns / 2, 2 * kPanelDepth};
  if (b.columns > n) b.columns = n;
  // Blocks of equal depth, a multiple of any packing unit.
  const int64_t blocks = ceil_div(weight.k, b.depth);
  b.depth = round_up(ceil_div(weight.k, blocks), 64);
  return b;
}

}  // namespace

Projection::Projection(const TileTable& table, const Weight& weight, DType x)
    : weight_(weight),
      functions_(takes_bf16(table, weight, x) ? table.bf16 : table.f32),
      product_(table.product),
      dtype_(x),
      k_multiple_(table.k_multiple),
      element_bytes_(takes_bf16(table, weight, x) ? 2 : 4),
      same_type_(!weight.packed && weight.dtype == (takes_bf16(table, weight, x) ? DType::bf16 : DType::f32)) {}

int64_t Projection::panel_bytes(int64_t m) const { return round_up(static_cast<int64_t>(functions_.packed_x_bytes(m, weight_.k)), 64); }

int64_t Projection::packed_bytes(int64_t m) const {
  const int64_t panels = panel_bytes(m), whole_bytes = whole(m) ? round_up(static_cast<int64_t>(product_.packed_x_bytes(weight_, dtype_, m)), 64) : 0;
  return whole_bytes > panels ? whole_bytes : panels;
}

int64_t Projection::most_packed_bytes(int64_t m) const {
  int64_t most = panel_bytes(m);
  // Which way a number of rows goes need not be monotonic; there are few of them.
  for (int64_t i = 1; i <= m; ++i) {
    const int64_t bytes = packed_bytes(i);
    most = bytes > most ? bytes : most;
  }
  return most;
}

void Projection::pack(Unit& unit, const void* x, int64_t x_stride, const int64_t* rows, const float* row_scale, char* packed) const {
  const int32_t* perm = weight_.perm ? weight_.perm + unit.expert * weight_.k : nullptr;
  const PackXArgs args{x, dtype_, x_stride, rows, row_scale, perm, unit.m, weight_.k, packed + unit.packed};
  unit.panels = !whole(unit.m) || !product_.pack_x(weight_, args);
  if (unit.panels) functions_.pack_x(args);
}

// The product functions read whole vectors: rows whose length is no multiple of one cannot be read in place.
bool Projection::direct(int64_t m) const {
  return same_type_ && weight_.k_stride == 1 && weight_.k % k_multiple_ == 0 && m <= kDirectRows;
}

void Projection::multiply(const Unit& unit, const char* packed, const Parts& parts, int64_t n, void* scratch, float* c, int64_t ldc) const {
  // A sum of nothing: no block below would write it.
  if (weight_.k == 0) {
    for (int64_t i = 0; i < parts.count * unit.m * ldc; ++i) c[i] = 0.f;
  }
  if (!unit.panels) {
    product_.multiply({&weight_, unit.expert, packed + unit.packed, dtype_, unit.m, parts.count, {parts.row0[0], parts.row0[1]}, parts.step,
                       n, c, ldc, scratch});
    if (weight_.bias) add_bias(unit, parts, n, c, ldc);
    return;
  }
  const bool in_place = direct(unit.m);
  const Blocking block = choose_blocking(weight_, unit.m, n, in_place);
  const int64_t part_stride = unit.m * ldc;
  char* const panel = static_cast<char*>(scratch);
  for (int64_t j = 0; j < n; j += block.columns) {
    const int64_t columns = n - j < block.columns ? n - j : block.columns;
    for (int64_t k0 = 0; k0 < weight_.k; k0 += block.depth) {
      const int64_t k = weight_.k - k0 < block.depth ? weight_.k - k0 : block.depth;
      const int64_t ld = round_up(k, k_multiple_);
      // Interleaved parts are neighbouring rows: one run of the matrix, of which each part takes every other panel row.
      if (!in_place && parts.step == 2) {
        functions_.load_panel({&weight_, unit.expert, parts.row0[0] + 2 * j, 2 * columns, k0, k, panel, ld});
      }
      // Blocks along k add into c, in the same order for every caller.
      for (int p = 0; p < parts.count; ++p) {
        const int64_t row = parts.row0[p] + j * parts.step;
        GemmArgs args{packed + unit.packed, unit.m, weight_.k, nullptr, columns, 0, k0, k, c + p * part_stride + j, ldc, k0 != 0};
        // In place, the rows of a part lie `step` matrix rows apart; in a panel of interleaved parts, two panel rows.
        if (in_place) {
          const int64_t offset = unit.expert * weight_.expert_stride + row * weight_.n_stride + k0;
          args.w = static_cast<const char*>(weight_.data) + offset * element_bytes_;
          args.ldw = weight_.n_stride * parts.step;
        } else if (parts.step == 2) {
          args.w = panel + p * ld * element_bytes_;
          args.ldw = 2 * ld;
        } else {
          functions_.load_panel({&weight_, unit.expert, row, columns, k0, k, panel, ld});
          args.w = panel;
          args.ldw = ld;
        }
        functions_.gemm(args);
      }
    }
  }
  if (weight_.bias) add_bias(unit, parts, n, c, ldc);
}

void Projection::add_bias(const Unit& unit, const Parts& parts, int64_t n, float* c, int64_t ldc) const {
  float bias[kWideColumns];
  for (int p = 0; p < parts.count; ++p) {
    const int64_t first = unit.expert * weight_.n + parts.row0[p];
    for (int64_t j = 0; j < n; ++j) bias[j] = load_float(weight_.bias, weight_.bias_dtype, first + j * parts.step);
    for (int64_t i = 0; i < unit.m; ++i) {
      float* row = c + p * unit.m * ldc + i * ldc;
      for (int64_t j = 0; j < n; ++j) row[j] += bias[j];
    }
  }
}

int64_t append_units(int64_t expert, int64_t row0, int64_t rows, Unit* units, int64_t count) {
  const int64_t pieces = ceil_div(rows, kUnitRows);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = rows * i / pieces, end = rows * (i + 1) / pieces;
    units[count++] = {expert, row0 + begin, end - begin, 0, false};
  }
  return count;
}

int64_t packed_capacity(const Projection& projection, int64_t rows) {
  if (rows == 0) return 0;
  // Few rows: each may be a unit of its own.
  const int64_t unit = projection.most_packed_bytes(rows < kUnitRows ? rows : kUnitRows), separate = rows * projection.packed_bytes(1);
  const int64_t wanted = separate < kWaveBytes ? separate : kWaveBytes;
  return wanted > unit ? wanted : unit;
}

int64_t next_wave(const Projection& first, const Projection* second, Unit* units, int64_t begin, int64_t count, int64_t capacity,
                  int64_t rows) {
  int64_t used = 0, end = begin;
  for (; end < count; ++end) {
    int64_t bytes = first.packed_bytes(units[end].m);
    if (second) {
      const int64_t other = second->packed_bytes(units[end].m);
      bytes = other > bytes ? other : bytes;
    }
    // Offsets are those of the larger of the two: the second projection packs into the same places.
    if (end > begin && (used + bytes > capacity || units[end].row0 + units[end].m - units[begin].row0 > rows)) break;
    units[end].packed = static_cast<size_t>(used);
    used += bytes;
  }
  return end;
}

}  // namespace int4_emu::cpu
