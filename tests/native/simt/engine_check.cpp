// Small kernels that are right or wrong in one known way, to show that the engine runs the first and stops the second.
//   engine_check ARCH CASE SEED  prints "ok" and exits with 0, or ends as the engine ends a wrong program
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "hip/hip_runtime.h"
#include "program.h"

namespace {

constexpr unsigned kThreads = 128;

template <class T>
T* device(const std::vector<T>& values) {
  void* p = nullptr;
  hipMalloc(&p, values.size() * sizeof(T));
  hipMemcpy(p, values.data(), values.size() * sizeof(T), hipMemcpyHostToDevice);
  return static_cast<T*>(p);
}

void must(bool ok, const char* what) {
  if (ok) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

__global__ void sum_kernel(const int* in, int* out) {
  __shared__ int partial[kThreads];
  partial[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  for (unsigned step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

__global__ void lanes_kernel(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  int* mine = out + t * 6;
  if (t % warpSize < 32) mine[3] = __shfl(t, 5, 32);  // half of a wave of 64
  __syncthreads();
  mine[0] = __shfl_xor(t, 1);
  mine[1] = __shfl(t, 3, 16);
  mine[2] = static_cast<int>(__ballot(t % 2) & 0xff);
  mine[4] = __shfl_down(t, 2);
  mine[5] = __builtin_amdgcn_readfirstlane(t);
}

__global__ void unwritten_kernel(float* out) {
  __shared__ float values[kThreads];
  if (threadIdx.x != 7) values[threadIdx.x] = 1.f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void race_kernel(int* out) {
  __shared__ int value;
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x == 0) value = i;
    __syncthreads();
    out[threadIdx.x] += value;  // no barrier before the next write
  }
}

__global__ void divergent_kernel(int* out) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void early_return_kernel(int* out) {
  if (threadIdx.x == 100) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_operations_kernel(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = t % 2 ? __shfl(t, 0) : __shfl_xor(t, 1);
}

__global__ void past_kernel(int* out) { out[threadIdx.x + (threadIdx.x == 127)] = 1; }
__global__ void before_kernel(int* out) { out[static_cast<int>(threadIdx.x) - (threadIdx.x == 0)] = 1; }
__global__ void read_past_kernel(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x + 1] & 1; }
__global__ void dynamic_kernel(int extra) {
  int* shared = static_cast<int*>(simt::dynamic_shared());
  if (threadIdx.x == 0) shared[extra] = 1;
}

using Half4 = short __attribute__((vector_size(8)));
using Half16 = short __attribute__((vector_size(32)));
using Float4 = float __attribute__((vector_size(16)));
using Float8 = float __attribute__((vector_size(32)));

__global__ void lane_missing_kernel(float* out) {
  const Half4 a = {}, b = {};
  Float4 c = {};
  if (threadIdx.x != 9) c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
  out[threadIdx.x] = c[0];
}

__global__ void halves_differ_kernel(float* out) {
  Half16 a = {};
  const Half16 b = {};
  Float8 c = {};
  a[3] = threadIdx.x == 20 ? 1 : 0;
  c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
  out[threadIdx.x] = c[0];
}

// One matrix instruction against its own definition. `Operand` and `Sum` are read and written by element; index functions as documented.
short to_bits(int value) {  // small integers are exact
  const float f = static_cast<float>(value);
  return static_cast<short>(__float_as_uint(f) >> 16);
}
int a_value(int row, int k) { return (row * 7 + k * 3) % 11 - 5; }
int b_value(int k, int column) { return (k * 5 + column * 2) % 13 - 6; }
float product(int row, int column) {
  int sum = row - column;
  for (int k = 0; k < 16; ++k) sum += a_value(row, k) * b_value(k, column);
  return static_cast<float>(sum);
}

__global__ void mfma_kernel(int* wrong) {
  const int l = static_cast<int>(threadIdx.x) % 64;
  Half4 a, b;
  Float4 c;
  for (int i = 0; i < 4; ++i) {
    a[i] = to_bits(a_value(l % 16, 4 * (l / 16) + i));
    b[i] = to_bits(b_value(4 * (l / 16) + i, l % 16));
    c[i] = static_cast<float>(4 * (l / 16) + i - l % 16);
  }
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
  for (int r = 0; r < 4; ++r) wrong[0] += c[r] != product(4 * (l / 16) + r, l % 16);
}

__global__ void wmma_kernel(int* wrong) {
  const int l = static_cast<int>(threadIdx.x) % 32;
  Half16 a, b;
  Float8 c;
  for (int i = 0; i < 16; ++i) a[i] = to_bits(a_value(l % 16, i)), b[i] = to_bits(b_value(i, l % 16));
  for (int r = 0; r < 8; ++r) c[r] = static_cast<float>(2 * r + l / 16 - l % 16);
  c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
  for (int r = 0; r < 8; ++r) wrong[0] += c[r] != product(2 * r + l / 16, l % 16);
}

void check_lanes() {
  int* out = device(std::vector<int>(kThreads * 6));
  simt::launch("lanes", lanes_kernel, 1, kThreads, 0, out);
  const int wave = simt::architecture().wave;
  for (int t = 0; t < static_cast<int>(kThreads); ++t) {
    const int* got = out + t * 6;
    must(got[0] == (t ^ 1), "shfl_xor");
    must(got[1] == t / 16 * 16 + 3, "shfl in 16");
    must(got[2] == 0xaa, "ballot");
    must(got[3] == (t % wave < 32 ? t / 32 * 32 + 5 : 0), "shfl in half a wave");
    must(got[4] == (t % wave + 2 < wave ? t + 2 : t), "shfl_down");
    must(got[5] == t / wave * wave, "readfirstlane");
  }
}

int run(const std::string& name) {
  int* out = device(std::vector<int>(kThreads));
  float* floats = device(std::vector<float>(kThreads));
  if (name == "sum") {
    std::vector<int> in(kThreads, 3);
    simt::launch("sum", sum_kernel, 5, kThreads, 0, device(in), out);
    for (int i = 0; i < 5; ++i) must(out[i] == 3 * static_cast<int>(kThreads), "sum");
  } else if (name == "lanes") {
    check_lanes();
  } else if (name == "unwritten") {
    simt::launch("unwritten", unwritten_kernel, 2, kThreads, 0, floats);
    for (unsigned i = 0; i < kThreads; ++i) must((floats[i] == floats[i]) == (i != 7), "poison");
  } else if (name == "race") {
    simt::launch("race", race_kernel, 1, kThreads, 0, out);
    for (unsigned i = 0; i < kThreads; ++i) must(out[i] == 6, "race");
  } else if (name == "divergent") {
    simt::launch("divergent", divergent_kernel, 1, kThreads, 0, out);
  } else if (name == "early return") {
    simt::launch("early return", early_return_kernel, 1, kThreads, 0, out);
  } else if (name == "two operations") {
    simt::launch("two operations", two_operations_kernel, 1, kThreads, 0, out);
  } else if (name == "past") {
    simt::launch("past", past_kernel, 1, kThreads, 0, out);
  } else if (name == "before") {
    simt::launch("before", before_kernel, 1, kThreads, 0, out);
    hipDeviceSynchronize();
  } else if (name == "read past") {
    simt::launch("read past", read_past_kernel, 1, kThreads, 0, device(std::vector<int>(kThreads)), out);
  } else if (name == "misaligned") {
    simt::launch("past", past_kernel, 1, 8, 0, reinterpret_cast<int*>(reinterpret_cast<char*>(out) + 2));
  } else if (name == "dynamic inside") {
    simt::launch("dynamic", dynamic_kernel, 3, kThreads, 64, 15);
  } else if (name == "dynamic past") {
    simt::launch("dynamic", dynamic_kernel, 3, kThreads, 64, 16);
  } else if (name == "dynamic before") {
    simt::launch("dynamic", dynamic_kernel, 3, kThreads, 64, -2);
  } else if (name == "too much shared memory") {
    simt::launch("dynamic", dynamic_kernel, 1, kThreads, 200 << 10, 0);
    must(hipGetLastError() == hipErrorInvalidConfiguration && hipGetLastError() == hipSuccess, "launch error");
  } else if (name == "lane missing") {
    simt::launch("lane missing", lane_missing_kernel, 1, kThreads, 0, floats);
  } else if (name == "halves differ") {
    simt::launch("halves differ", halves_differ_kernel, 1, kThreads, 0, floats);
  } else if (name == "mfma") {
    simt::launch("mfma", mfma_kernel, 1, kThreads, 0, out);
    must(out[0] == 0, "mfma");
  } else if (name == "wmma") {
    simt::launch("wmma", wmma_kernel, 1, kThreads, 0, out);
    must(out[0] == 0, "wmma");
  } else {
    return std::printf("no such case: %s\n", name.c_str()), 2;
  }
  return std::printf("ok\n"), 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || !simt::set_architecture(argv[1])) return std::printf("engine_check ARCH CASE SEED\n"), 2;
  simt::set_seed(static_cast<unsigned>(std::atoi(argv[3])));
  simt::install_fault_handler();
  return run(argv[2]);
}
