// Registers the GPU kernels of the ops that `_C` has defined. CUDA and ROCm share the dispatch key. Loaded after `_C`.

#include "../gpu/api.h"
#include "box.h"
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(int4_emu, CUDA, m) {
#define OP(op) m.impl(#op, &int4_emu::binding::Boxed<&int4_emu::binding::op>::call);
#include "ops.inc"
#undef OP
}

#define INT4_EMU_API extern "C" __attribute__((visibility("default")))

INT4_EMU_API const char* int4_emu_gpu_architectures() { return int4_emu::gpu::compiled_architectures(); }

// "mma_sm80 (rounded weights)" for `device` and an x of this dtype (0 float32, 1 float16, 2 bfloat16); `why` gets at most `size`
// bytes: the reasons against better families, or against all of them where the result is null.
INT4_EMU_API const char* int4_emu_gpu_atom(int device, int dtype, char* why, int size) {
  using namespace int4_emu;
  const gpu::AtomChoice choice = gpu::select_atom(device, static_cast<DType>(dtype));
  int i = 0;
  for (; i + 1 < size && choice.rejections[i]; ++i) why[i] = choice.rejections[i];
  if (size > 0) why[i] = 0;
  return choice.atom == gpu::Atom::automatic ? nullptr : gpu::atom_name(choice.atom);
}
