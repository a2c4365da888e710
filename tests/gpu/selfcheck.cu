// Checks every GPU op against a host reference without torch. Arguments: --quick (small, for sanitizers), --every=N (one in N of the layer
// and grouped cases), --kernels (quick, and each kernel without all of its options, for racecheck), --time (the table of times), --only-time. The exit status is 0 when every check passed.
#include <algorithm>

#include "harness.h"

namespace selfcheck {
Report report;
bool quick = false;
bool kernels_only = false;
int every = 1;
}  // namespace selfcheck

int main(int argc, char** argv) {
  using namespace selfcheck;
  bool timing = false, checks = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    kernels_only = kernels_only || argument == "--kernels";
    quick = quick || kernels_only || argument == "--quick";
    if (argument.rfind("--every=", 0) == 0) every = std::max(1, std::atoi(argument.c_str() + 8));
    timing = timing || argument == "--time" || argument == "--only-time";
    checks = checks && argument != "--only-time";
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  must(gpu::set_device(0), "set_device");
  for (DType t : {DType::f32, DType::bf16, DType::f16}) {
    const gpu::AtomChoice c = gpu::select_atom(0, t);
    std::printf("select_atom(%s): %s, %s; %s; built for %s\n", dtype_text(t), gpu::atom_name(c.atom), c.numerics, c.rejections,
                gpu::compiled_architectures());
  }
  if (checks) {
    check_formats();
    check_align();
    check_layers();
    check_grouped();
    check_limits();
    std::printf("%d checks passed, %d failed\n", report.passed, report.failed);
  }
  if (timing) time_everything();
  return report.failed == 0 ? 0 : 1;
}
