// grouped_gemm: ragged groups of rows, each by its expert's weight. One projection of fused_moe without routing: the rows come sorted, so
// their order is the order of the output.
#include <cstring>

#include "gemm.h"

namespace int4_emu::cpu {
namespace {

// The workspace: one list for grouped_gemm_workspace_bytes and grouped_gemm.
struct Plan {
  Plan(const GroupedGemmProblem& p, const TileTable& table, int threads, Arena& arena) : projection(table, p.weight, p.dtype) {
    packed_bytes = packed_capacity(projection, p.rows);
    const int64_t unit_rows = p.rows < kUnitRows ? p.rows : kUnitRows;
    ld = projection.most_columns(unit_rows);
    tile_floats = unit_rows * ld;
    units = arena.take<Unit>(max_units(p.rows, p.weight.experts));
    packed = arena.take<char>(packed_bytes);
    scratch_floats = round_up(projection.scratch_floats(unit_rows, 1, false), 16);
    scratch = arena.take<float>(threads * scratch_floats);
    tiles = arena.take<float>(threads * tile_floats);
  }

  Projection projection;
  int64_t packed_bytes, ld, scratch_floats, tile_floats;
  Unit* units;
  char* packed;
  float *scratch, *tiles;  // per worker: scratch of a product; fp32 outputs [unit rows][ld]
};

void zero_rows(const GroupedGemmProblem& p, int64_t begin, int64_t end) {
  const int64_t row = p.weight.n * dtype_bytes(p.dtype);
  if (end > begin) std::memset(static_cast<char*>(p.out) + begin * row, 0, static_cast<size_t>((end - begin) * row));
}

}  // namespace

size_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p, int threads) {
  Arena arena(nullptr, 0);
  Plan plan(p, active_table(), threads < 1 ? 1 : threads, arena);
  return arena.used();
}

Status grouped_gemm(const GroupedGemmProblem& p, void* workspace, size_t bytes, const Parallel& parallel) {
  if (Status s = check_isa(); !s) return s;
  if (p.rows == 0 || p.weight.n == 0) return {};
  const TileTable& table = active_table();
  Arena arena(Arena::align(workspace), bytes);
  Plan plan(p, table, parallel.threads < 1 ? 1 : parallel.threads, arena);
  if (!arena.fits()) {
    return make_error(Code::internal, "grouped_gemm needs a workspace of %zu bytes, got %zu", arena.used(), bytes);
  }
  const int64_t experts = p.weight.experts, columns = p.weight.n;
  // Groups ascend and touch, so only the ends can lie outside all of them.
  zero_rows(p, 0, experts > 0 ? p.offsets[0] : p.rows);
  if (experts > 0) zero_rows(p, p.offsets[experts], p.rows);
  int64_t units = 0;
  for (int64_t e = 0; e < experts; ++e) units = append_units(e, p.offsets[e], p.offsets[e + 1] - p.offsets[e], plan.units, units);

  const Parallel pool = pool_for(parallel, p.rows, experts, columns * p.weight.k);
  for (int64_t begin = 0; begin < units;) {
    const int64_t end = next_wave(plan.projection, nullptr, plan.units, begin, units, plan.packed_bytes, p.rows);
    const int64_t width = task_columns(plan.projection, plan.units, begin, end, columns, pool.threads), chunks = ceil_div(columns, width);
    run_tasks(pool, table, end - begin, [&](int64_t, int64_t i) {
      Unit& unit = plan.units[begin + i];
      const char* x = static_cast<const char*>(p.x) + unit.row0 * p.x_stride * dtype_bytes(p.dtype);
      plan.projection.pack(unit, x, p.x_stride, nullptr, nullptr, plan.packed);
    });
    run_tasks(pool, table, (end - begin) * chunks, [&](int64_t worker, int64_t task) {
      const Unit& unit = plan.units[begin + task / chunks];
      const int64_t n0 = task % chunks * width, n = columns - n0 < width ? columns - n0 : width;
      float* c = plan.tiles + worker * plan.tile_floats;
      plan.projection.multiply(unit, plan.packed, {1, {n0, 0}, 1}, n, plan.scratch + worker * plan.scratch_floats, c, plan.ld);
      // A sum of one row with weight one: rounds fp32 to the output's dtype.
      const float one = 1.f;
      for (int64_t i = 0; i < unit.m; ++i) {
        char* out = static_cast<char*>(p.out) + ((unit.row0 + i) * columns + n0) * dtype_bytes(p.dtype);
        table.combine(c, plan.ld, &i, &one, 1, n, out, p.dtype);
      }
    });
    begin = end;
  }
  return {};
}

}  // namespace int4_emu::cpu
