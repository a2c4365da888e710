// Runs one launcher at a time and compares what it launched with what was worked out by hand.
#pragma once

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "../../../csrc/gpu/gemm_args.h"
#include "runtime.h"

namespace cases {

using namespace int4_emu;

// Addresses that nothing follows: each tensor has a terabyte of its own.
inline char* memory(int n) { return reinterpret_cast<char*>((int64_t{n} + 1) << 40); }
inline bool lies_in(const void* p, const void* base, size_t bytes) {
  return p >= base && static_cast<const char*>(p) < static_cast<const char*>(base) + bytes;
}
inline void* const kStream = reinterpret_cast<void*>(0x5eed);
inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Want {
  std::string kernel;  // without namespaces and arguments
  int64_t grid;
  unsigned block;
  size_t shared;
};

struct Seen {
  std::string kernel, symbol;
  int64_t grid;
  unsigned block;
  size_t shared;
  std::vector<char> first;  // the first argument, of kernels that take GemmArgs
};

inline std::vector<Seen> seen;
inline std::vector<std::string> copies;
inline int failures = 0, checks = 0;

inline void expect(bool right, const std::string& what) {
  ++checks;
  if (right) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

// "gemm_kernel<FmaAtom<16>, float, (WeightKind)1>".
inline std::string readable(const char* symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : symbol;
  std::free(text);
  for (const char* noise : {"(anonymous namespace)::", "int4_emu::", "gpu::", "void "}) {
    for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, std::strlen(noise));
  }
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    depth += (name[i] == '<') - (name[i] == '>');
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

inline void on_launch(const RecordedLaunch& l) {
  Seen s{readable(l.kernel), l.kernel, l.grid[0], l.block[0], l.shared, {}};
  expect(l.grid[1] == 1 && l.grid[2] == 1 && l.block[1] == 1 && l.block[2] == 1, s.kernel + ": one dimension");
  expect(l.stream == kStream, s.kernel + ": the caller's stream");
  expect(s.block >= 1 && s.block <= 1024, s.kernel + ": at most 1024 threads");
  expect(s.grid * s.block < int64_t{1} << 32, s.kernel + ": fewer than 2^32 threads in the grid");
  if (s.kernel.find("gemm_kernel") == 0 || s.kernel.find("stream_kernel") == 0 || s.kernel.find("gather_kernel") == 0) {
    const char* first = static_cast<const char*>(l.arguments[0]);
    s.first.assign(first, first + sizeof(gpu::GemmArgs));
  }
  seen.push_back(s);
}
inline void on_copy(void* to, const void* from, size_t bytes, void* stream) {
  expect(stream == kStream, "copy: the caller's stream");
  char line[128];
  std::snprintf(line, sizeof(line), "%p %p %zu", to, from, bytes);
  copies.push_back(line);
}

inline gpu::GemmArgs gemm_args(const Seen& s) {
  gpu::GemmArgs a;
  std::memcpy(static_cast<void*>(&a), s.first.data(), sizeof(a));
  return a;
}

// What `launched` holds for check.py: every kernel with the largest block and dynamic shared memory that any case gave it.
struct Most {
  unsigned block = 0;
  size_t shared = 0;
};

// Runs `call` and compares. A list of nothing says that nothing may be launched.
template <class Call>
void run(const std::string& name, const char* architecture, const Call& call, const std::vector<Want>& wanted) {
  seen.clear();
  copies.clear();
  const Status status = call();
  const std::string where = std::string(architecture) + " " + name;
  expect(static_cast<bool>(status), where + ": " + (status ? "" : status.message));
  expect(seen.size() == wanted.size(), where + ": " + std::to_string(wanted.size()) + " launches, got " + std::to_string(seen.size()));
  for (size_t i = 0; i < seen.size(); ++i) {
    const Seen& s = seen[i];
    std::printf("launch %s %s %lld %u %zu\n", architecture, s.symbol.c_str(), (long long)s.grid, s.block, s.shared);
    if (i >= wanted.size()) {
      expect(false, where + ": also launched " + s.kernel);
      continue;
    }
    const Want& w = wanted[i];
    char said[512];
    std::snprintf(said, sizeof(said), ": %s grid %lld block %u shared %zu, got %s grid %lld block %u shared %zu", w.kernel.c_str(),
                  (long long)w.grid, w.block, w.shared, s.kernel.c_str(), (long long)s.grid, s.block, s.shared);
    expect(s.kernel == w.kernel && s.grid == w.grid && s.block == w.block && s.shared == w.shared, where + said);
  }
}

// The launchers of formats and routing (formats.cpp) and of the layers (layers.cpp), on the device of this architecture.
void formats(const char* architecture);
void layers(const char* architecture);

}  // namespace cases
