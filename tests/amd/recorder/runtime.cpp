// Compiled with the HIP headers of the compiler that builds the program, so that the structures are that version's.
#include "runtime.h"

#include <hip/hip_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct Device {
  std::string architecture;
  int wave;
};
std::vector<Device> devices;
int current = 0;
hipError_t last = hipSuccess, failing = hipSuccess;

// By the address of the host's stub. Filled by other objects' constructors, perhaps before this object's ran.
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> all;
  return all;
}

void (*on_launch)(const RecordedLaunch&) = nullptr;
void (*on_copy)(void*, const void*, size_t, void*) = nullptr;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  hipStream_t stream;
};
std::vector<Configuration> pushed;

// What a host object registers.
struct FatBinary {
  uint32_t magic, version;
  const void* binary;
  void* unused;
};

hipError_t remember(hipError_t error) {
  if (error != hipSuccess) last = error;
  return error;
}
bool exists(int device) { return device >= 0 && device < static_cast<int>(devices.size()); }

}  // namespace

void recorder_on_launch(void (*callback)(const RecordedLaunch&)) { on_launch = callback; }
void recorder_on_copy(void (*callback)(void*, const void*, size_t, void*)) { on_copy = callback; }
int recorder_add_device(const char* architecture, int wave) {
  devices.push_back({architecture, wave});
  return static_cast<int>(devices.size()) - 1;
}
void recorder_fail_next(int error) { failing = static_cast<hipError_t>(error); }

extern "C" {

// What compiled code calls before main and around <<<>>>.
void** __hipRegisterFatBinary(const void* data) {
  static void* handle = nullptr;
  const auto* wrapper = static_cast<const FatBinary*>(data);
  if (wrapper->magic != 0x48495046 || std::memcmp(wrapper->binary, "__CLANG_OFFLOAD_BUNDLE__", 24) != 0) {
    std::fprintf(stderr, "not a fat binary of code objects\n");
    std::abort();
  }
  return &handle;
}
void __hipRegisterFunction(void**, const void* stub, char*, const char* name, unsigned, uint3*, uint3*, dim3*, dim3*, int*) {
  kernels()[stub] = name;
}
void __hipUnregisterFatBinary(void**) {}
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream) {
  const Configuration c = pushed.back();
  pushed.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared, *stream = c.stream;
  return hipSuccess;
}
hipError_t hipLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared, hipStream_t stream) {
  if (failing != hipSuccess) {
    const hipError_t error = failing;
    failing = hipSuccess;
    return remember(error);
  }
  const auto found = kernels().find(stub);
  if (found == kernels().end()) return remember(hipErrorInvalidDeviceFunction);
  const RecordedLaunch launch{found->second.c_str(), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, stream, arguments};
  if (on_launch) on_launch(launch);
  return hipSuccess;
}

hipError_t hipGetDeviceCount(int* count) { return *count = static_cast<int>(devices.size()), hipSuccess; }
hipError_t hipGetDevice(int* device) { return *device = current, hipSuccess; }
hipError_t hipSetDevice(int device) {
  if (!exists(device)) return remember(hipErrorInvalidDevice);
  current = device;
  return hipSuccess;
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device) {
  if (!exists(device)) return remember(hipErrorInvalidDevice);
  std::memset(properties, 0, sizeof(*properties));
  std::strncpy(properties->gcnArchName, devices[device].architecture.c_str(), sizeof(properties->gcnArchName) - 1);
  properties->warpSize = devices[device].wave;
  properties->multiProcessorCount = 104;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 64 * 1024;
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  if (!exists(device) || attribute != hipDeviceAttributeMultiprocessorCount) return remember(hipErrorInvalidValue);
  return *value = 104, hipSuccess;
}
hipError_t hipFuncSetAttribute(const void* stub, hipFuncAttribute, int) {
  return remember(kernels().count(stub) ? hipSuccess : hipErrorInvalidDeviceFunction);
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind, hipStream_t stream) {
  if (on_copy) on_copy(to, from, bytes, stream);
  return hipSuccess;
}
hipError_t hipGetLastError() {
  const hipError_t error = last;
  last = hipSuccess;
  return error;
}
hipError_t hipPeekAtLastError() { return last; }
const char* hipGetErrorString(hipError_t error) { return error == hipSuccess ? "no error" : "recorded error"; }
const char* hipGetErrorName(hipError_t) { return "recorded"; }

}  // extern "C"
