// The runtime functions that the sources and the checks call. Everything runs at once, on the calling thread.
#pragma once

#include <cstddef>

// clang-format off
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidConfiguration = 9, hipErrorInvalidDevice = 101 };
enum hipMemcpyKind { hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice, hipMemcpyDefault };
enum hipDeviceAttribute_t { hipDeviceAttributeMultiprocessorCount, hipDeviceAttributeWarpSize };
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };
enum hipStreamCaptureMode { hipStreamCaptureModeGlobal };
// clang-format on

namespace simt {
struct Stream;
struct Graph;
}  // namespace simt
using hipStream_t = simt::Stream*;
using hipGraph_t = simt::Graph*;
using hipGraphExec_t = simt::Graph*;

struct hipDeviceProp_t {
  char name[256], gcnArchName[256];
  int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock;
  size_t sharedMemPerBlock, totalGlobalMem;
};

hipError_t hipGetDevice(int* device);
hipError_t hipSetDevice(int device);
hipError_t hipGetDeviceCount(int* count);
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device);
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipFuncSetAttribute(const void* kernel, hipFuncAttribute attribute, int value);
hipError_t hipGetLastError();
hipError_t hipPeekAtLastError();
const char* hipGetErrorString(hipError_t error);

// Memory that ends where the next page may not be touched, filled with 0xff; the rest of its first page is a guard that
// hipDeviceSynchronize and hipFree look at.
hipError_t hipMalloc(void** out, size_t bytes);
hipError_t hipFree(void* pointer);
hipError_t hipMemset(void* to, int value, size_t bytes);
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind kind);
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t stream);
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t stream);
hipError_t hipDeviceSynchronize();

hipError_t hipStreamCreate(hipStream_t* stream);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode);
hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph);
hipError_t hipGraphInstantiate(hipGraphExec_t* instance, hipGraph_t graph, void* node, char* log, size_t log_size);
hipError_t hipGraphLaunch(hipGraphExec_t instance, hipStream_t stream);
hipError_t hipGraphExecDestroy(hipGraphExec_t instance);
hipError_t hipGraphDestroy(hipGraph_t graph);
