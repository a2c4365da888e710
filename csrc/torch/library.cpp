// Registers the ops, and exports a few C functions that Python reads through ctypes: strings do not belong into op schemas.

#include "../cpu/api.h"
#include "box.h"
#include "ops.h"

STABLE_TORCH_LIBRARY(int4_emu, m) {
#define OP(schema) m.def(schema);
#include "../../python/int4_emu/schemas.inc"
#undef OP
}

STABLE_TORCH_LIBRARY_IMPL(int4_emu, CPU, m) {
#define OP(op) m.impl(#op, &int4_emu::binding::Boxed<&int4_emu::binding::op>::call);
#include "ops.inc"
#undef OP
}

#define INT4_EMU_API extern "C" __attribute__((visibility("default")))

// What the build was: "torch 2.13.0+cpu, gcc 12.2.0, target torch 2.10".
INT4_EMU_API const char* int4_emu_build_info() { return INT4_EMU_BUILD_INFO; }

// The CPU instruction set in use, or null with the reason in int4_emu_cpu_isa_reasons().
INT4_EMU_API const char* int4_emu_cpu_isa() { return int4_emu::cpu::select_isa().name; }
INT4_EMU_API const char* int4_emu_cpu_isa_reasons() {
  static const int4_emu::cpu::IsaChoice choice = int4_emu::cpu::select_isa();
  return choice.rejections;
}
INT4_EMU_API const char* int4_emu_packed_numerics(int dtype) {
  return int4_emu::cpu::packed_numerics(static_cast<int4_emu::DType>(dtype));
}
