// What fused_moe and grouped_gemm share: rows of x grouped by expert, multiplied panel by panel.
//
// A Unit is up to kUnitRows rows of one expert. Its x is packed once; then every task takes (unit, chunk of output columns), loads
// weight panels into its worker's scratch and multiplies all the unit's rows by them. Workers draw tasks from a shared counter. No
// result depends on which worker runs a task: the partition is fixed by the shapes.
#pragma once

#include <atomic>

#include "../core/layout.h"
#include "api.h"
#include "select.h"

namespace int4_emu::cpu {

// More rows of one expert than this make another unit: bounds the fp32 tiles that a worker holds.
constexpr int64_t kUnitRows = 512;
// Output columns of a task: of many rows where the set asks for it, else at most, and at least where wider tasks would be too few for the
// threads; then of a panel (one for the gate, one for the up rows). A task begins by waiting for memory, which costs short ones more.
constexpr int64_t kWideColumns = 256, kTaskColumns = 128, kNarrowColumns = 64, kTasksPerThread = 4;
constexpr int64_t kPanelColumns = 32;
// Columns of the weight matrix in a panel; streamed panels have half the rows and twice the columns.
constexpr int64_t kPanelDepth = 1024;
// What packed x may take beyond the needs of one unit.
constexpr int64_t kWaveBytes = int64_t{8} << 20;

struct Unit {
  int64_t expert, row0, m;  // rows row0..row0+m of the expert-sorted order
  size_t packed;            // offset of its packed x
  bool panels;              // x has numbers that only panels take: set by packing
};

// Cuts aligned pieces off a caller's workspace; with a null base it only adds up.
class Arena {
 public:
  Arena(void* base, size_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}
  template <class T>
  T* take(int64_t count) {
    used_ = (used_ + 63) & ~size_t{63};
    char* p = base_ ? base_ + used_ : nullptr;
    used_ += static_cast<size_t>(count) * sizeof(T);
    return reinterpret_cast<T*>(p);
  }
  // The base need not be aligned: one line is kept for that.
  static void* align(void* base) { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(base) + 63) & ~uintptr_t{63}); }
  size_t used() const { return ((used_ + 63) & ~size_t{63}) + 64; }
  bool fits() const { return used() <= bytes_; }

 private:
  char* base_;
  size_t bytes_, used_ = 0;
};

// One projection with the compute type that its weights and x ask for.
class Projection {
 public:
  Projection(const TileTable& table, const Weight& weight, DType x);

  // One or two runs of panel rows of the same columns: gate and up. Row j of part p is row0[p] + j * step.
  struct Parts {
    int count;
    int64_t row0[2], step;
  };

  const Weight& weight() const { return weight_; }
  // Bytes of the packed x of m rows, and the most that any unit of up to m rows takes.
  int64_t packed_bytes(int64_t m) const;
  int64_t most_packed_bytes(int64_t m) const;
  // Output columns of a task at most, where units have m rows.
  int64_t most_columns(int64_t m) const { return product_.wide_rows > 0 && m >= product_.wide_rows ? kWideColumns : kTaskColumns; }
  // Packed x of the rows of `unit`, taken from x row by row.
  void pack(Unit& unit, const void* x, int64_t x_stride, const int64_t* rows, const float* row_scale, char* packed) const;
  // Floats of a worker's scratch for units of up to m rows: a panel (interleaved parts are loaded together) or what a whole product needs.
  int64_t scratch_floats(int64_t m, int parts, bool interleaved) const {
    const int64_t depth = round_up(weight_.k, 64);
    const int64_t panel = (interleaved ? 2 : 1) * kPanelColumns * (depth < kPanelDepth ? depth : kPanelDepth);
    const int64_t whole = product_.serves ? parts * round_up(m, 32) * most_columns(m) : 0;
    return panel > whole ? panel : whole;
  }
  // c[part][m][n] (part stride m * ldc) = x * W^T + bias for n columns of each part.
  void multiply(const Unit& unit, const char* packed, const Parts& parts, int64_t n, void* scratch, float* c, int64_t ldc) const;

 private:
  int64_t panel_bytes(int64_t m) const;
  bool direct(int64_t m) const;
  bool whole(int64_t m) const { return product_.serves != nullptr && product_.serves(weight_, dtype_, m); }
  void add_bias(const Unit& unit, const Parts& parts, int64_t n, float* c, int64_t ldc) const;

  const Weight& weight_;
  const ComputeFunctions& functions_;
  const ProductFunctions& product_;
  DType dtype_;  // of x
  int64_t k_multiple_, element_bytes_;
  bool same_type_;  // dense weights already in the compute type
};

// The caller's pool, or none where waking it up takes longer than the work: `rows` rows over `experts` experts of `weights` weights each.
// Decoding a weight costs about as much as two multiply-adds, and a million of either about 0.1 ms.
inline Parallel pool_for(const Parallel& parallel, int64_t rows, int64_t experts, int64_t weights) {
  constexpr int64_t kSerialWork = int64_t{1} << 20;
  return (experts < rows ? experts : rows) * weights + rows * weights / 2 < kSerialWork ? Parallel{} : parallel;
}

// Runs body(worker, task) for every task, begin_thread and end_thread around each worker's share. A worker draws runs of tasks, which get
// shorter towards the end: neighbours share packed x, and the codes of the next task are the ones that prefetchers run into.
template <class Body>
void run_tasks(const Parallel& parallel, const TileTable& table, int64_t tasks, const Body& body) {
  const int64_t workers = parallel.threads < 1 ? 1 : (tasks < parallel.threads ? tasks : parallel.threads);
  std::atomic<int64_t> next{0};
  parallel.for_each(workers, 1, [&](int64_t worker, int64_t) {
    if (table.begin_thread) table.begin_thread();
    for (int64_t task = next.load(std::memory_order_relaxed); task < tasks;) {
      const int64_t left = tasks - task, run = left < 4 * workers ? 1 : left / (2 * workers);
      if (!next.compare_exchange_weak(task, task + run, std::memory_order_relaxed)) continue;
      for (const int64_t end = task + run; task < end; ++task) body(worker, task);
      task = next.load(std::memory_order_relaxed);
    }
    if (table.end_thread) table.end_thread();
  });
}

// Appends the units of one expert's rows, evenly cut; returns the new count.
int64_t append_units(int64_t expert, int64_t row0, int64_t rows, Unit* units, int64_t count);
// The most units that `rows` rows over `experts` experts can make.
constexpr int64_t max_units(int64_t rows, int64_t experts) { return (experts < rows ? experts : rows) + rows / kUnitRows; }

// Output columns of a task over units begin..end - 1 of n columns each, whose rows lie one behind another.
inline int64_t task_columns(const Projection& projection, const Unit* units, int64_t begin, int64_t end, int64_t n, int threads) {
  const int64_t count = end - begin, rows = units[end - 1].row0 + units[end - 1].m - units[begin].row0;
  int64_t columns = projection.most_columns(rows / count);
  while (columns > kNarrowColumns && count * ceil_div(n, columns) < kTasksPerThread * threads) columns /= 2;
  return columns;
}

// Bytes that packed x may take at once. Enough for any single unit; beyond kWaveBytes the units go in waves.
int64_t packed_capacity(const Projection& projection, int64_t rows);
// The end of the wave that begins at unit `begin`: as many units as fit in `capacity` bytes and `rows` rows, and at least one. Sets
// their offsets. `second` is null or a projection that reuses the space.
int64_t next_wave(const Projection& first, const Projection* second, Unit* units, int64_t begin, int64_t count, int64_t capacity,
                  int64_t rows);

}  // namespace int4_emu::cpu
