// What the check program and the runtime see of the engine.
#pragma once

#include <string>
#include <vector>

#include "engine.h"

namespace simt {

void run_grid(const Grid& grid, const Body& body);

// Demangled names of the kernels that ran, sorted.
std::vector<std::string> kernels_run();
std::string symbol_at(const void* address);

void install_fault_handler();  // a touched guard page ends the program with a sentence

}  // namespace simt
