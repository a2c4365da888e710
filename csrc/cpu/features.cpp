#include "features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace int4_emu::cpu {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return Registers{};
  return r;
}

// Register state that the operating system saves: without its bit an instruction faults although cpuid lists it.
uint64_t enabled_state(bool has_xgetbv) {
  if (!has_xgetbv) return 0;
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // the intrinsic would need -mxsave
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr bool has(uint64_t value, uint64_t bits) { return (value & bits) == bits; }
constexpr uint32_t bit(int i) { return uint32_t{1} << i; }

constexpr uint64_t kYmmState = 0x6;       // SSE and the upper halves of ymm
constexpr uint64_t kZmmState = 0xe6;      // and mask registers, upper halves of zmm0-15, zmm16-31
constexpr uint64_t kTileState = 0x60000;  // AMX tile configuration and data

// Linux hands out the 8 KB of tile state only to processes that ask (5.16 and later).
const char* request_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kArchGetPermission = 0x1022, kArchRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) != 0) return "Linux refused the permission to use AMX tiles";
  unsigned long granted = 0;
  if (syscall(SYS_arch_prctl, kArchGetPermission, &granted) != 0 || !has(granted, uint64_t{1} << kTileData))
    return "Linux did not grant the permission to use AMX tiles";
  return nullptr;
#else
  return "AMX is used on Linux only";
#endif
}

}  // namespace

Features detect_features() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), extended1 = cpuid(7, 1);
  const uint64_t state = enabled_state(has(basic.ecx, bit(27)));  // OSXSAVE
  Features f{};
  if (!has(extended.ebx, bit(5))) f.avx2 = "the CPU has no AVX2";
  else if (!has(basic.ecx, bit(12) | bit(29))) f.avx2 = "the CPU has no FMA or F16C";
  else if (!has(state, kYmmState)) f.avx2 = "the operating system does not save AVX registers";

  if (f.avx2 != nullptr) f.avx512 = f.avx2;
  else if (!has(extended.ebx, bit(16) | bit(17) | bit(30) | bit(31))) f.avx512 = "the CPU has no AVX-512 F, BW, DQ and VL";
  else if (!has(extended1.eax, bit(5))) f.avx512 = "the CPU has no AVX-512 BF16";
  else if (!has(extended.ecx, bit(11))) f.avx512 = "the CPU has no AVX-512 VNNI";
  else if (!has(state, kZmmState)) f.avx512 = "the operating system does not save AVX-512 registers";

  if (f.avx512 != nullptr) f.amx = f.avx512;
  else if (!has(extended.edx, bit(22) | bit(24))) f.amx = "the CPU has no AMX-BF16";
  else if (!has(extended.edx, bit(25))) f.amx = "the CPU has no AMX-INT8";
  else if (!has(state, kTileState)) f.amx = "the operating system does not save AMX tiles";
  else f.amx = request_tiles();

  const Registers vendor = cpuid(0, 0);  // "Auth" "enti" "cAMD", in this order of registers
  f.fast_dots = vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65 && vendor.ecx == 0x444d4163;
  return f;
}

#else

Features detect_features() {
  constexpr const char* reason = "the CPU is not x86-64";
  return {reason, reason, reason, false};
}

#endif

}  // namespace int4_emu::cpu
