// Device memory between pages that may not be touched, streams and graphs, properties.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <sys/mman.h>

#include "hip/hip_runtime.h"
#include "program.h"

namespace simt {
struct Stream {};
struct Graph {
  std::vector<std::function<void()>> steps;
};

namespace {

constexpr size_t kPage = 4096;
constexpr int kDevices = 1;

struct Block {
  char* map;
  size_t map_bytes, bytes;
  // Fills of the page before `data`, and up to 15 bytes after it, still as they were.
  bool intact(const char* data) const {
    const char* end = map + map_bytes - kPage;
    const auto filled = [](char c) { return c == char(0xff); };
    return std::all_of(static_cast<const char*>(map) + kPage, data, filled) && std::all_of(data + bytes, end, filled);
  }
};
std::map<char*, Block> blocks;  // by data

hipError_t last_error = hipSuccess;
Graph* capturing = nullptr;

hipError_t remember(hipError_t error) {
  if (error != hipSuccess) last_error = error;
  return error;
}

void check_guards(const char* data, const Block& block) {
  if (!block.intact(data)) fail("a kernel wrote beside a buffer of %zu bytes", block.bytes);
}

void on_fault(int signal, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  if (signal == SIGILL || signal == SIGTRAP) fail("an access that is not aligned to its type");
  for (const auto& [data, block] : blocks) {
    if (at >= block.map && at < block.map + block.map_bytes) {
      fail("touched byte %lld of a buffer of %zu bytes", static_cast<long long>(at - data), block.bytes);
    }
  }
  fail("touched memory outside every buffer, at %p", info->si_addr);
}

}  // namespace

void submit(const Grid& grid, const Body* taken) {
  const std::shared_ptr<const Body> body(taken);
  const bool fits = grid.threads >= 1 && grid.threads <= 1024 && grid.shared <= architecture().shared_memory;
  if (!fits) {
    remember(hipErrorInvalidConfiguration);
  } else if (capturing) {
    capturing->steps.push_back([grid, body] { run_grid(grid, *body); });
  } else {
    run_grid(grid, *body);
  }
}

void install_fault_handler() {
  static char stack[64 << 10];
  const stack_t alternate{stack, 0, sizeof(stack)};
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP}) sigaction(signal, &action, nullptr);
}

}  // namespace simt

using namespace simt;

hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
hipError_t hipSetDevice(int device) { return remember(device >= 0 && device < kDevices ? hipSuccess : hipErrorInvalidDevice); }
hipError_t hipGetDeviceCount(int* count) { return *count = kDevices, hipSuccess; }

hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device) {
  if (device < 0 || device >= kDevices) return remember(hipErrorInvalidDevice);
  const Architecture& a = architecture();
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "host imitation of %s", a.name);
  // As the runtime spells it, features included.
  std::snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "%s%s", a.name, a.wave == 64 ? ":sramecc+:xnack-" : "");
  properties->major = a.major, properties->minor = a.minor, properties->multiProcessorCount = 4, properties->warpSize = a.wave;
  properties->maxThreadsPerBlock = 1024, properties->sharedMemPerBlock = a.shared_memory, properties->totalGlobalMem = size_t{1} << 34;
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  if (device < 0 || device >= kDevices) return remember(hipErrorInvalidDevice);
  *value = attribute == hipDeviceAttributeWarpSize ? architecture().wave : 4;
  return hipSuccess;
}

hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int value) {
  return remember(static_cast<size_t>(value) <= architecture().shared_memory ? hipSuccess : hipErrorInvalidValue);
}
hipError_t hipPeekAtLastError() { return last_error; }
hipError_t hipGetLastError() {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

const char* hipGetErrorString(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "no error";
    case hipErrorInvalidValue:
      return "invalid argument";
    case hipErrorOutOfMemory:
      return "out of memory";
    case hipErrorInvalidConfiguration:
      return "invalid configuration argument";
    case hipErrorInvalidDevice:
      return "invalid device ordinal";
  }
  return "unknown error";
}

hipError_t hipMalloc(void** out, size_t bytes) {
  *out = nullptr;
  const size_t rounded = (bytes + 15) / 16 * 16, pages = (rounded + kPage - 1) / kPage + 1, map_bytes = (pages + 2) * kPage;
  void* map = mmap(nullptr, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return remember(hipErrorOutOfMemory);
  char* begin = static_cast<char*>(map) + kPage;
  if (mprotect(begin, pages * kPage, PROT_READ | PROT_WRITE) != 0) return remember(hipErrorOutOfMemory);
  std::memset(begin, 0xff, pages * kPage);
  char* data = begin + pages * kPage - rounded;
  blocks[data] = {static_cast<char*>(map), map_bytes, bytes};
  *out = data;
  return hipSuccess;
}

hipError_t hipFree(void* pointer) {
  if (pointer == nullptr) return hipSuccess;
  const auto at = blocks.find(static_cast<char*>(pointer));
  if (at == blocks.end()) return remember(hipErrorInvalidValue);
  check_guards(at->first, at->second);
  munmap(at->second.map, at->second.map_bytes);
  blocks.erase(at);
  return hipSuccess;
}

hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  if (bytes) std::memcpy(to, from, bytes);
  return hipSuccess;
}
hipError_t hipMemset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes), hipSuccess; }
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
  if (!capturing) return hipMemcpy(to, from, bytes, kind);
  capturing->steps.push_back([=] { hipMemcpy(to, from, bytes, kind); });
  return hipSuccess;
}
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) {
  if (!capturing) return hipMemset(to, value, bytes);
  capturing->steps.push_back([=] { hipMemset(to, value, bytes); });
  return hipSuccess;
}
hipError_t hipDeviceSynchronize() {
  if (capturing) fail("synchronised while a stream was capturing");
  for (const auto& [data, block] : blocks) check_guards(data, block);
  return hipSuccess;
}

hipError_t hipStreamCreate(hipStream_t* stream) { return *stream = new Stream, hipSuccess; }
hipError_t hipStreamDestroy(hipStream_t stream) { return delete stream, hipSuccess; }
hipError_t hipStreamSynchronize(hipStream_t) { return hipDeviceSynchronize(); }
hipError_t hipStreamBeginCapture(hipStream_t, hipStreamCaptureMode) { return capturing = new Graph, hipSuccess; }
hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t* graph) { return *graph = capturing, capturing = nullptr, hipSuccess; }
hipError_t hipGraphInstantiate(hipGraphExec_t* instance, hipGraph_t graph, void*, char*, size_t) {
  return *instance = new Graph(*graph), hipSuccess;
}
hipError_t hipGraphLaunch(hipGraphExec_t instance, hipStream_t) {
  for (const auto& step : instance->steps) step();
  return hipSuccess;
}
hipError_t hipGraphExecDestroy(hipGraphExec_t instance) { return delete instance, hipSuccess; }
hipError_t hipGraphDestroy(hipGraph_t graph) { return delete graph, hipSuccess; }
