// Runs the checks of tests/gpu through the shim. Options: --arch=gfx942, --seed=1, --quick, --every=N and --phase=I (cases I, I + N, ...
// of the layer and grouped ones), --only-for="bf16 4" (those of this dtype and bits), --only=formats,align,layers,grouped,limits,
// --stop (at the first failure), --list-kernels-run (their demangled names after the checks, one a line).
#include <algorithm>
#include <chrono>
#include <string>

#include "../../gpu/harness.h"
#include "program.h"

namespace selfcheck {
Report report;
bool quick = false;
bool kernels_only = false;
int every = 1;
}  // namespace selfcheck

int main(int argc, char** argv) {
  using namespace selfcheck;
  std::string only = "formats,align,layers,grouped,limits,";
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals), value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "--quick") {
      quick = true;
    } else if (name == "--list-kernels-run") {
      list = true;
    } else if (name == "--stop") {
      stop_at_failure = true;
    } else if (name == "--every") {
      every = std::max(1, std::atoi(value.c_str()));
    } else if (name == "--only-for") {
      only_for = value;
    } else if (name == "--phase") {
      phase = std::atoi(value.c_str());
    } else if (name == "--seed") {
      simt::set_seed(static_cast<unsigned>(std::atoi(value.c_str())));
    } else if (name == "--only") {
      only = value + ",";
    } else if (name != "--arch" || !simt::set_architecture(value.c_str())) {
      std::fprintf(stderr, "unknown option or architecture: %s\n", argument.c_str());
      return 2;
    }
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  simt::install_fault_handler();
  must(gpu::set_device(0), "set_device");
  const std::pair<const char*, void (*)()> parts[] = {
      {"formats", check_formats}, {"align", check_align}, {"layers", check_layers}, {"grouped", check_grouped}, {"limits", check_limits}};
  for (const auto& [name, check] : parts) {
    if (only.find(std::string(name) + ",") == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    check();
    std::printf("%s: %.2f s\n", name, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (list) {
    for (const std::string& kernel : simt::kernels_run()) std::printf("kernel %s\n", kernel.c_str());
  }
  std::printf("%d checks passed, %d failed\n", report.passed, report.failed);
  return report.failed == 0 ? 0 : 1;
}
