// The instruction set in use, chosen once a process.
#pragma once

#include "../core/status.h"
#include "tile.h"

namespace int4_emu::cpu {

// Ok, or why INT4_EMU_CPU_ISA cannot be served. Every entry point that computes calls it first.
Status check_isa();

// The tiles of select_isa(); the portable ones where check_isa() is an error.
const TileTable& active_table();

// The table called `name`, or null with the reason in *why: an unknown name, not in this build, not on this CPU. "avx512-other" is the one for other
// makers' cores, which only tests ask for.
const TileTable* find_table(const char* name, const char** why);

}  // namespace int4_emu::cpu
