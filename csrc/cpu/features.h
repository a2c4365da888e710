// What this CPU and its operating system let a process execute.
#pragma once

namespace int4_emu::cpu {

// Each reason is null when the instruction set may be used, else the reason why not ("the CPU has no AVX2").
struct Features {
  const char* avx2;    // AVX2, FMA, F16C
  const char* avx512;  // F, BW, DQ, VL, BF16, VNNI, and everything of avx2
  const char* amx;     // AMX-TILE, AMX-BF16, AMX-INT8, and everything of avx512
  bool fast_dots;      // vdpbf16ps multiplies more a cycle than multiply-adds in fp32: AMD's does, Intel's does not
};

// Reads cpuid and XCR0. Where the CPU has AMX it also asks Linux for the permission to use tiles, which holds for the whole process
// and makes later signal frames larger; call it once.
Features detect_features();

}  // namespace int4_emu::cpu
