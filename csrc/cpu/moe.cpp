// fused_moe: route -> W13 with gather, activation in its epilogue -> W2 -> weighted sum in fp32, in slot order.
#include "../core/route.h"
#include "gemm.h"

namespace int4_emu::cpu {
namespace {

// Tokens are taken in chunks whose fp32 outputs of W2 stay below this.
constexpr int64_t kChunkBytes = int64_t{64} << 20;

bool gated(Activation kind) { return static_cast<int32_t>(kind) < 16; }

// Tokens of a chunk; every chunk routes, multiplies and combines for itself.
int64_t chunk_tokens(const MoeProblem& p) {
  const int64_t token_bytes = p.topk * p.hidden * int64_t{4};
  const int64_t fitting = token_bytes > 0 ? kChunkBytes / token_bytes : p.tokens;
  return fitting < 1 ? 1 : (fitting < p.tokens ? fitting : p.tokens);
}

// The workspace: one list for moe_workspace_bytes and fused_moe.
struct Plan {
  Plan(const MoeProblem& p, const TileTable& table, int threads, Arena& arena)
      : w13(table, p.w13, p.dtype), w2(table, p.w2, p.dtype), tokens(chunk_tokens(p)) {
    const int64_t slots = tokens * p.topk, unit_rows = slots < kUnitRows ? slots : kUnitRows;
    const int64_t first = packed_capacity(w13, slots), second = packed_capacity(w2, slots);
    packed_bytes = first > second ? first : second;
    ldh = round_up(p.intermediate, 64);
    // A wave holds as many rows of h as its packed x takes, but never fewer than one unit.
    const int64_t h_row = ldh * dtype_bytes(p.dtype), fitting = packed_bytes / (h_row > 0 ? h_row : 1);
    wave_rows = fitting > kUnitRows ? (fitting < slots ? fitting : slots) : unit_rows;
    ld = w13.most_columns(unit_rows);
    tile_floats = 2 * unit_rows * ld;

    offsets = arena.take<int64_t>(p.w13.experts + 1);
    cursor = arena.take<int64_t>(p.w13.experts);
    sorted = arena.take<int64_t>(slots);
    position = arena.take<int64_t>(slots);
    row_scale = arena.take<float>(p.weight_on_input ? slots : 0);
    units = arena.take<Unit>(max_units(slots, p.w13.experts));
    packed = arena.take<char>(packed_bytes);
    h = arena.take<char>(wave_rows * h_row);
    y = arena.take<float>(slots * p.hidden);
    const int64_t up = w13.scratch_floats(unit_rows, gated(p.activation.kind) ? 2 : 1, p.w13_order == W13Order::interleaved);
    const int64_t down = w2.scratch_floats(unit_rows, 1, false);
    scratch_floats = round_up(up > down ? up : down, 16);
    scratch = arena.take<float>(threads * scratch_floats);
    tiles = arena.take<float>(threads * tile_floats);
    combine_rows = arena.take<int64_t>(threads * p.topk);
    combine_weights = arena.take<float>(threads * p.topk);
  }

  Projection w13, w2;
  int64_t tokens, packed_bytes, wave_rows, ldh, ld, scratch_floats, tile_floats;
  int64_t *offsets, *cursor;     // [E + 1], [E]
  int64_t *sorted, *position;    // [slots]: row -> token (after sorting), slot -> row or -1
  float* row_scale;              // [slots] router weight of each row, when it multiplies the input
  Unit* units;
  char *packed, *h;              // packed x and h [wave_rows][ldh], in x's dtype, of one wave
  float *y, *scratch, *tiles;    // y [rows][H]; per worker: scratch of a product, fp32 tiles of gate and up
  int64_t* combine_rows;         // [threads][k]
  float* combine_weights;
};

class Layer {
 public:
  Layer(const MoeProblem& p, const TileTable& table, const Parallel& parallel, Plan& plan)
      : p_(p), table_(table), parallel_(parallel), plan_(plan) {}

  void run() {
    for (int64_t t = 0; t < p_.tokens; t += plan_.tokens) {
      const int64_t count = p_.tokens - t < plan_.tokens ? p_.tokens - t : plan_.tokens;
      const int64_t units = route(t, count);
      for (int64_t begin = 0; begin < units;) {
        const int64_t end = next_wave(plan_.w13, &plan_.w2, plan_.units, begin, units, plan_.packed_bytes, plan_.wave_rows);
        project_up(begin, end);
        project_down(begin, end);
        begin = end;
      }
      combine(t, count);
    }
  }

 private:
  // Sorts the chunk's slots by expert and cuts them into units; returns their number.
  int64_t route(int64_t token0, int64_t tokens) {
    const int64_t slots = tokens * p_.topk, first = token0 * p_.topk;
    // Ids are read where they lie; the slots of a chunk are numbered from its first token.
    const Route route{static_cast<const char*>(p_.topk_ids) + first * (p_.ids_are_int64 ? 8 : 4), p_.ids_are_int64, p_.expert_map,
                      p_.global_experts, p_.w13.experts};
    const int64_t rows = count_by_expert(route, slots, 1, plan_.offsets);
    int64_t units = 0;
    for (int64_t e = 0; e < p_.w13.experts; ++e) {
      const int64_t begin = plan_.offsets[e];
      plan_.cursor[e] = begin;
      units = append_units(e, begin, plan_.offsets[e + 1] - begin, plan_.units, units);
    }
    sort_by_expert(route, slots, plan_.cursor, plan_.sorted, plan_.position);
    // From here on sorted holds the token of each row: the rows of x that packing gathers.
    for (int64_t i = 0; i < rows; ++i) {
      if (p_.weight_on_input) plan_.row_scale[i] = p_.topk_weights[first + plan_.sorted[i]];
      plan_.sorted[i] = token0 + plan_.sorted[i] / p_.topk;
    }
    return units;
  }

  // body(worker, unit, n0, n) over units begin..end times runs of output columns.
  template <class Body>
  void for_columns(int64_t begin, int64_t end, int64_t n, const Body& body) {
    const int64_t columns = task_columns(plan_.w13, plan_.units, begin, end, n, parallel_.threads), chunks = ceil_div(n, columns);
    run_tasks(parallel_, table_, (end - begin) * chunks, [&](int64_t worker, int64_t task) {
      const int64_t n0 = task % chunks * columns;
      body(worker, plan_.units[begin + task / chunks], n0, n - n0 < columns ? n - n0 : columns);
    });
  }

  // Row of h where `unit` of the wave that starts at unit `begin` keeps its rows.
  char* h_rows(int64_t begin, const Unit& unit) const {
    return plan_.h + (unit.row0 - plan_.units[begin].row0) * plan_.ldh * dtype_bytes(p_.dtype);
  }

  void project_up(int64_t begin, int64_t end) {
    run_tasks(parallel_, table_, end - begin, [&](int64_t, int64_t i) {
      Unit& unit = plan_.units[begin + i];
      plan_.w13.pack(unit, p_.x, p_.x_stride, plan_.sorted + unit.row0, p_.weight_on_input ? plan_.row_scale + unit.row0 : nullptr,
                     plan_.packed);
    });
    const bool gate = gated(p_.activation.kind), halves = p_.w13_order == W13Order::halves;
    for_columns(begin, end, p_.intermediate, [&](int64_t worker, const Unit& unit, int64_t n0, int64_t n) {
      // Gate and up of the same columns in one task, so that the activation finds both in cache.
      Projection::Parts parts{gate ? 2 : 1, {n0, p_.intermediate + n0}, 1};
      if (gate && !halves) parts = {2, {2 * n0, 2 * n0 + 1}, 2};
      float* c = plan_.tiles + worker * plan_.tile_floats;
      plan_.w13.multiply(unit, plan_.packed, parts, n, plan_.scratch + worker * plan_.scratch_floats, c, plan_.ld);
      char* h = h_rows(begin, unit) + n0 * dtype_bytes(p_.dtype);
      table_.activate(p_.activation, c, gate ? c + unit.m * plan_.ld : nullptr, plan_.ld, unit.m, n, h, plan_.ldh, p_.dtype);
    });
  }

  void project_down(int64_t begin, int64_t end) {
    run_tasks(parallel_, table_, end - begin, [&](int64_t, int64_t i) {
      Unit& unit = plan_.units[begin + i];
      plan_.w2.pack(unit, h_rows(begin, unit), plan_.ldh, nullptr, nullptr, plan_.packed);
    });
    for_columns(begin, end, p_.hidden, [&](int64_t worker, const Unit& unit, int64_t n0, int64_t n) {
      // Through a compact tile: rows of y lie a power of two apart and would fight for the same cache sets.
      float* c = plan_.tiles + worker * plan_.tile_floats;
      plan_.w2.multiply(unit, plan_.packed, {1, {n0, 0}, 1}, n, plan_.scratch + worker * plan_.scratch_floats, c, plan_.ld);
      for (int64_t i = 0; i < unit.m; ++i) {
        float* row = plan_.y + (unit.row0 + i) * p_.hidden + n0;
        for (int64_t j = 0; j < n; ++j) row[j] = c[i * plan_.ld + j];
      }
    });
  }

  // Unrouted slots are left out, so their rows of y, which nobody wrote, are never read.
  void combine(int64_t token0, int64_t tokens) {
    constexpr int64_t kTokens = 4;
    const DType out_dtype = p_.out_is_f32 ? DType::f32 : p_.dtype;
    run_tasks(parallel_, table_, ceil_div(tokens, kTokens), [&](int64_t worker, int64_t task) {
      int64_t* rows = plan_.combine_rows + worker * p_.topk;
      float* weights = plan_.combine_weights + worker * p_.topk;
      const int64_t end = (task + 1) * kTokens < tokens ? (task + 1) * kTokens : tokens;
      for (int64_t t = task * kTokens; t < end; ++t) {
        int64_t count = 0;
        for (int64_t j = 0; j < p_.topk; ++j) {
          const int64_t row = plan_.position[t * p_.topk + j];
          if (row < 0) continue;
          rows[count] = row;
          // A weight that went into x must not count twice.
          weights[count++] = p_.weight_on_input ? 1.f : p_.topk_weights[(token0 + t) * p_.topk + j];
        }
        char* out = static_cast<char*>(p_.out) + (token0 + t) * p_.hidden * dtype_bytes(out_dtype);
        table_.combine(plan_.y, p_.hidden, rows, weights, count, p_.hidden, out, out_dtype);
      }
    });
  }

  const MoeProblem& p_;
  const TileTable& table_;
  const Parallel& parallel_;
  Plan& plan_;
};

}  // namespace

size_t moe_workspace_bytes(const MoeProblem& p, int threads) {
  Arena arena(nullptr, 0);
  Plan plan(p, active_table(), threads < 1 ? 1 : threads, arena);
  return arena.used();
}

Status fused_moe(const MoeProblem& p, void* workspace, size_t bytes, const Parallel& parallel) {
  if (Status s = check_isa(); !s) return s;
  if (p.tokens == 0 || p.hidden == 0) return {};
  const TileTable& table = active_table();
  Arena arena(Arena::align(workspace), bytes);
  Plan plan(p, table, parallel.threads < 1 ? 1 : parallel.threads, arena);
  if (!arena.fits()) {
    return make_error(Code::internal, "fused_moe needs a workspace of %zu bytes, got %zu", arena.used(), bytes);
  }
  const Parallel pool = pool_for(parallel, p.tokens * p.topk, p.w13.experts, p.w13.n * p.w13.k + p.w2.n * p.w2.k);
  Layer(p, table, pool, plan).run();
  return {};
}

}  // namespace int4_emu::cpu
