// Runs grids: a block at a time, its waves one after another until each blocks, in an order that the seed decides.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <link.h>
#include <random>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

#include "fiber.h"
#include "hip/hip_runtime.h"
#include "program.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {
namespace {

constexpr Architecture kArchitectures[] = {
    {"gfx90a", 64, 9, 0, 64 << 10},  {"gfx942", 64, 9, 4, 64 << 10},  {"gfx950", 64, 9, 5, 160 << 10},
    {"gfx1100", 32, 11, 0, 64 << 10}, {"gfx1201", 32, 12, 0, 64 << 10}, {"gfx1030", 32, 10, 3, 64 << 10},
};
const Architecture* device = &kArchitectures[1];

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStack = 128 << 10, kPage = 4096;

enum class State : uint8_t { ready, meeting, barrier, done };

struct Fiber {
  Context context;
  State state = State::done;
  Site site{};
  const char* what = nullptr;
  WaveFunction function = nullptr;
  void* mine = nullptr;
  bool all_lanes = false;
};

Fiber fibers[kMostThreads];
Context scheduler;
Fiber* current = nullptr;
char* stacks = nullptr;
std::mt19937 random_order(1);
const Grid* grid_now = nullptr;
const Body* body_now = nullptr;
std::set<const void*> ran;

struct Segment {
  char* begin = nullptr;
  size_t bytes = 0;
};

// The thread-local segment of this program: every __shared__ variable.
Segment shared_variables() {
  Segment found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS || info->dlpi_tls_data == nullptr) continue;
          *static_cast<Segment*>(out) = {static_cast<char*>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
        }
        return 1;  // the program itself comes first; libraries keep theirs
      },
      &found);
  return found;
}

// Dynamic shared memory ends at a page that may not be touched; what lies before it is checked for harm.
struct DynamicShared {
  char *pages = nullptr, *data = nullptr;
  size_t bytes = 0;
  static constexpr size_t kRoom = 160 << 10, kBefore = 1024;

  void begin_block(size_t wanted) {
    if (pages == nullptr) {
      void* got = mmap(nullptr, kRoom + 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (got == MAP_FAILED || mprotect(static_cast<char*>(got) + kPage, kRoom + kPage, PROT_READ | PROT_WRITE) != 0) fail("no memory");
      pages = static_cast<char*>(got) + kPage;
    }
    bytes = (wanted + 15) / 16 * 16;
    data = pages + kPage + kRoom - bytes;
    std::memset(data - kBefore, 0xff, bytes + kBefore);
  }
  void end_block() const {
    for (const char* p = data - kBefore; p < data; ++p) {
      if (*p != char(0xff)) fail("wrote %d bytes before its dynamic shared memory", static_cast<int>(data - p));
    }
  }
} dynamic;

int wave_of(const Fiber* f) { return static_cast<int>(f - fibers) / device->wave; }

void enter() {
  body_now->run();
  current->state = State::done;
  current->context.switch_to(scheduler);
  std::abort();
}

void resume(Fiber& f) {
  threadIdx.x = static_cast<unsigned>(&f - fibers);
  current = &f;
  scheduler.switch_to(f.context);
  current = nullptr;
}

// Stops the running thread until the scheduler makes it ready again.
void wait_as(State state, Site site) {
  Fiber& f = *current;
  f.state = state;
  f.site = site;
  f.context.switch_to(scheduler);
}

bool same(const Site& a, const Site& b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }

const char* file_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// Every lane of the wave is blocked and some wait for each other: lets them go on together.
void complete_meeting(Fiber* lanes, int count) {
  const Fiber* first = nullptr;
  void* mine[64] = {};
  for (int i = 0; i < count; ++i) {
    const Fiber& f = lanes[i];
    if (f.state != State::meeting) continue;
    if (first == nullptr) first = &f;
    if (std::strcmp(f.what, first->what) != 0 || !same(f.site, first->site)) {
      fail("lanes %d and %d of wave %d are at two operations at once: %s (%s:%d) and %s (%s:%d)", static_cast<int>(first - lanes), i,
           wave_of(lanes), first->what, file_name(first->site.file), first->site.line, f.what, file_name(f.site.file), f.site.line);
    }
    mine[i] = f.mine;
  }
  for (int i = 0; first->all_lanes && i < device->wave; ++i) {
    if (i >= count || mine[i] == nullptr) {
      fail("lane %d of wave %d is missing at %s (%s:%d), which takes all lanes", i, wave_of(lanes), first->what,
           file_name(first->site.file), first->site.line);
    }
  }
  first->function(mine, device->wave);
  for (int i = 0; i < count; ++i) {
    if (mine[i]) lanes[i].state = State::ready;
  }
}

// Until each of its lanes waits at the block's barrier or is done.
void run_wave(int wave, unsigned threads) {
  const int first = wave * device->wave, count = std::min(device->wave, static_cast<int>(threads) - first);
  Fiber* lanes = fibers + first;
  const bool backwards = random_order() % 2;
  for (;;) {
    for (int i = 0; i < count; ++i) {
      Fiber& f = lanes[backwards ? count - 1 - i : i];
      if (f.state == State::ready) resume(f);
    }
    if (std::none_of(lanes, lanes + count, [](const Fiber& f) { return f.state == State::meeting; })) return;
    complete_meeting(lanes, count);
  }
}

// All waves are blocked. Lets them pass the barrier, or says why they cannot; false when the block is done.
bool pass_barrier(unsigned threads) {
  const Fiber *waiting = nullptr, *done = nullptr;
  for (const Fiber* f = fibers; f < fibers + threads; ++f) {
    if (f->state == State::done) {
      done = f;
      continue;
    }
    if (waiting && !same(f->site, waiting->site)) {
      fail("divergent barrier: thread %d waits at %s:%d, thread %d at %s:%d", static_cast<int>(waiting - fibers),
           file_name(waiting->site.file), waiting->site.line, static_cast<int>(f - fibers), file_name(f->site.file), f->site.line);
    }
    if (waiting == nullptr) waiting = f;
  }
  if (waiting == nullptr) return false;
  if (done) {
    fail("thread %d returned while thread %d waits at the barrier in %s:%d", static_cast<int>(done - fibers),
         static_cast<int>(waiting - fibers), file_name(waiting->site.file), waiting->site.line);
  }
  for (Fiber* f = fibers; f < fibers + threads; ++f) f->state = State::ready;
  return true;
}

void run_block(const Grid& grid) {
  static const Segment variables = shared_variables();
  std::memset(variables.begin, 0xff, variables.bytes);
  dynamic.begin_block(grid.shared);
  for (unsigned t = 0; t < grid.threads; ++t) {
    // Tops at different distances from the page's end: stacks that are whole pages apart would share a few cache lines.
    fibers[t].context.prepare(stacks + t * kStack + kPage, kStack - kPage - t * 320 % 8192, enter);
    fibers[t].state = State::ready;
  }
  std::vector<int> waves((grid.threads + device->wave - 1) / device->wave);
  for (size_t i = 0; i < waves.size(); ++i) waves[i] = static_cast<int>(i);
  do {
    std::shuffle(waves.begin(), waves.end(), random_order);
    for (int wave : waves) run_wave(wave, grid.threads);
  } while (pass_barrier(grid.threads));
  dynamic.end_block();
}

}  // namespace

const Architecture& architecture() { return *device; }

bool set_architecture(const char* name) {
  for (const Architecture& a : kArchitectures) {
    if (std::strcmp(a.name, name) == 0) device = &a;
  }
  return std::strcmp(device->name, name) == 0;
}

void set_seed(unsigned seed) { random_order.seed(seed); }

void meet(const char* what, WaveFunction function, void* mine, bool all_lanes, Site site) {
  current->what = what;
  current->function = function;
  current->mine = mine;
  current->all_lanes = all_lanes;
  wait_as(State::meeting, site);
}

int lane_index() { return static_cast<int>(current - fibers) % device->wave; }

void block_barrier(Site site) { wait_as(State::barrier, site); }

void* dynamic_shared() { return dynamic.data; }

void fail(const char* format, ...) {
  std::fflush(stdout);
  va_list list;
  va_start(list, format);
  std::fprintf(stderr, "simt: %s", architecture().name);
  if (grid_now) std::fprintf(stderr, ": kernel %s, block %u of %u", symbol_at(grid_now->kernel).c_str(), blockIdx.x, grid_now->blocks);
  if (current) std::fprintf(stderr, ", thread %u", threadIdx.x);
  std::fprintf(stderr, ": ");
  std::vfprintf(stderr, format, list);
  std::fprintf(stderr, "\n");
  va_end(list);
  std::fflush(stderr);
  _exit(3);
}

void run_grid(const Grid& grid, const Body& body) {
  if (stacks == nullptr) {
    void* got = mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) fail("no memory for stacks");
    stacks = static_cast<char*>(got);
    for (unsigned t = 0; t < kMostThreads; ++t) mprotect(stacks + t * kStack, kPage, PROT_NONE);
  }
  grid_now = &grid;
  body_now = &body;
  ran.insert(grid.kernel);
  gridDim = dim3(grid.blocks);
  blockDim = dim3(grid.threads);
  threadIdx = blockIdx = {0, 0, 0};
  std::vector<unsigned> order(grid.blocks);
  for (unsigned i = 0; i < grid.blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_order);
  for (unsigned block : order) {
    blockIdx.x = block;
    run_block(grid);
  }
  grid_now = nullptr;
}

std::vector<std::string> kernels_run() {
  std::set<std::string> names;
  for (const void* kernel : ran) names.insert(symbol_at(kernel));
  return {names.begin(), names.end()};
}

}  // namespace simt
