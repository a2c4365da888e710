// The instruction set is chosen once a process, and every set that was passed over keeps its reason: that is what the environment report
// prints, and what the error says when INT4_EMU_CPU_ISA asks for a set that cannot be had.
#include "select.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "features.h"

namespace int4_emu::cpu {
namespace {

struct Candidate {
  const char* name;
  const TileTable* table;  // null: not usable
  const char* reason;      // why not
};
constexpr int kCandidates = 4;

struct Choice {
  Candidate candidates[kCandidates];  // best first
  const TileTable* table;
  IsaChoice isa;
  Candidate other_avx512;  // of the other makers' cores
};

// The CPU's reason wins over the build's: it is the one that rebuilding would not change.
Candidate make_candidate(const char* name, const TileTable* compiled, const char* cpu_reason) {
  if (compiled == nullptr) return {name, nullptr, cpu_reason != nullptr ? cpu_reason : "this build was compiled without it"};
  if (cpu_reason != nullptr) return {name, nullptr, cpu_reason};
  return {name, compiled, nullptr};
}

// Adds to the reasons, after a semicolon; what does not fit is cut off.
__attribute__((format(printf, 2, 3))) void append(IsaChoice& isa, const char* format, ...) {
  size_t used = std::strlen(isa.rejections);
  if (used > 0) used += std::snprintf(isa.rejections + used, sizeof isa.rejections - used, "; ");
  if (used >= sizeof isa.rejections) return;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(isa.rejections + used, sizeof isa.rejections - used, format, arguments);
  va_end(arguments);
}

Choice choose() {
  Choice c{};
  const Features f = detect_features();
  c.candidates[0] = make_candidate("amx", amx_table(), f.amx);
  c.candidates[1] = make_candidate("avx512", avx512_table(f.fast_dots), f.avx512);
  c.candidates[2] = make_candidate("avx2", avx2_table(), f.avx2);
  c.candidates[3] = {"portable", portable_table(), nullptr};
  c.other_avx512 = make_candidate("avx512-other", avx512_table(!f.fast_dots), f.avx512);
  c.table = portable_table();

  // Better sets that come first leave a reason each; the first usable one, or the one asked for, ends the walk.
  const char* wanted = std::getenv("INT4_EMU_CPU_ISA");
  if (wanted != nullptr && *wanted == '\0') wanted = nullptr;
  for (const Candidate& candidate : c.candidates) {
    if (wanted != nullptr && std::strcmp(wanted, candidate.name) != 0) {
      if (c.isa.name == nullptr && candidate.table != nullptr) append(c.isa, "%s: INT4_EMU_CPU_ISA=%s", candidate.name, wanted);
      else if (c.isa.name == nullptr) append(c.isa, "%s: %s", candidate.name, candidate.reason);
      continue;
    }
    if (candidate.table != nullptr) {
      c.table = candidate.table;
      c.isa.name = candidate.name;
      break;
    }
    // An override is never replaced by something else: no name, and the portable table only so that there is one.
    if (wanted != nullptr) {
      c.isa.rejections[0] = '\0';
      append(c.isa, "INT4_EMU_CPU_ISA=%s cannot be used: %s", wanted, candidate.reason);
      return c;
    }
    append(c.isa, "%s: %s", candidate.name, candidate.reason);
  }
  if (c.isa.name == nullptr) {
    c.isa.rejections[0] = '\0';
    append(c.isa, "INT4_EMU_CPU_ISA must be portable, avx2, avx512 or amx, got \"%s\"", wanted);
  }
  return c;
}

// Constructed by the first caller, thread-safe, and never again: later changes of the environment have no effect.
const Choice& choice() {
  static const Choice c = choose();
  return c;
}

}  // namespace

const TileTable& active_table() { return *choice().table; }

IsaChoice select_isa() { return choice().isa; }

Status check_isa() {
  const IsaChoice& isa = choice().isa;
  return isa.name != nullptr ? Status{} : make_error(Code::unsupported, "%s", isa.rejections);
}

const TileTable* find_table(const char* name, const char** why) {
  const Choice& c = choice();
  const Candidate* found = std::strcmp(name, c.other_avx512.name) == 0 ? &c.other_avx512 : nullptr;
  for (const Candidate& candidate : c.candidates) {
    if (std::strcmp(name, candidate.name) == 0) found = &candidate;
  }
  *why = found != nullptr ? found->reason : "unknown instruction set";
  return found != nullptr ? found->table : nullptr;
}

const char* packed_numerics(DType x) {
  return x == DType::bf16 && active_table().bf16.gemm != nullptr ? "rounded" : "exact";
}

}  // namespace int4_emu::cpu
