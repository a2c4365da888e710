// Every launcher of csrc/gpu/api.h, on every architecture that the program was compiled for and one that it was not.
#include "cases.h"

namespace cases {
namespace {

struct Chip {
  const char* name;
  int wave;
};
const Chip kChips[] = {{"gfx90a", 64}, {"gfx942", 64}, {"gfx950", 64}, {"gfx1100", 32}, {"gfx1201", 32}, {"gfx1030", 32}};

// A chip without code in the build, and a launch that the runtime refuses, are one sentence each, and the next call works.
void refusals() {
  const int other = recorder_add_device("gfx906:sramecc+:xnack-", 64);
  const Status status = gpu::set_device(other);
  expect(!status && std::strstr(status.message, "built for") && std::strstr(status.message, "gfx906"),
         std::string("a chip that nothing was built for: ") + status.message);
  expect(static_cast<bool>(gpu::set_device(0)), "the next device works");
  PackedMatrix m;
  m.out_features = 8, m.in_features = 64, m.groups = 2, m.group_size = 32;
  m.qweight = memory(0), m.scales = memory(1);
  recorder_fail_next(1);
  const Status failed = gpu::dequantize(m, DType::f32, memory(9), kStream);
  expect(!failed && std::strstr(failed.message, "recorded error"), "a launch that fails is reported");
  expect(static_cast<bool>(gpu::dequantize(m, DType::f32, memory(9), kStream)), "the next launch works");
}

int all() {
  recorder_on_launch(on_launch);
  recorder_on_copy(on_copy);
  for (const Chip& chip : kChips) {
    const int device = recorder_add_device((std::string(chip.name) + ":xnack-").c_str(), chip.wave);
    const Status status = gpu::set_device(device);
    expect(static_cast<bool>(status), status.message);
    formats(chip.name);
    layers(chip.name);
  }
  refusals();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace cases

int main() { return cases::all(); }
