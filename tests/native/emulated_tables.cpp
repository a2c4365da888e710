// The choice of tables for a self-check of the emulated AVX-512 and AMX files: no question to the CPU.
#include <cstring>

#include "../../csrc/cpu/select.h"

namespace int4_emu::cpu {

const TileTable* find_table(const char* name, const char** why) {
  *why = "only avx512 and amx are emulated";
  if (std::strcmp(name, "avx512") == 0) return avx512_table(false);
  if (std::strcmp(name, "avx512-other") == 0) return avx512_table(true);
  if (std::strcmp(name, "amx") == 0) return amx_table();
  return nullptr;
}

}  // namespace int4_emu::cpu
