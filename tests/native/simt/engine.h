// What kernels and intrinsics see of the engine: launches, barriers, and operations that all lanes of a wave take part in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

namespace simt {

// A device to imitate.
struct Architecture {
  const char* name;
  int wave;              // lanes
  int major, minor;
  size_t shared_memory;  // bytes a block may have
};
const Architecture& architecture();
bool set_architecture(const char* name);  // false: unknown

// Decides the order of blocks, waves and lanes.
void set_seed(unsigned seed);

// Where an operation stands in the source.
struct Site {
  const char* file;
  int line;
};
// As a default argument: where the function is called.
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// An operation of a whole wave. `lanes[i]` is what lane i brought, null where that lane is elsewhere.
using WaveFunction = void (*)(void* const* lanes, int wave);
// Waits until every lane of the wave that can come here has come, `function` having run once. `what` must be a literal.
void meet(const char* what, WaveFunction function, void* mine, bool all_lanes, Site site);
int lane_index();

void block_barrier(Site site);
void* dynamic_shared();

// Ends the program with a sentence that names the kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Grid {
  const char* name;
  void* kernel;
  unsigned blocks, threads;
  size_t shared;
};
// A kernel with its arguments, copied for each thread that runs it.
struct Body {
  virtual ~Body() = default;
  virtual void run() const = 0;
};
template <class... Parameters>
struct BodyOf final : Body {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> parameters;
  template <class... Arguments>
  explicit BodyOf(void (*k)(Parameters...), Arguments&&... arguments) : kernel(k), parameters(static_cast<Parameters>(arguments)...) {}
  void run() const override { std::apply(kernel, parameters); }
};
// Runs the grid now, or notes it where a capture is under way; takes `body`.
void submit(const Grid& grid, const Body* body);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared, Arguments&&... arguments) {
  submit({name, reinterpret_cast<void*>(kernel), blocks, threads, shared}, new BodyOf<Parameters...>(kernel, arguments...));
}

}  // namespace simt
