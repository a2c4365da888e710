// What the checks share: device buffers with guards and poison, host conversions, a line per check.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cpu/convert.h"
#include "../../csrc/gpu/api.h"
#include "../../csrc/gpu/compat.cuh"

namespace selfcheck {

using namespace int4_emu;

struct Report {
  int passed = 0, failed = 0;
};
extern Report report;
extern bool quick;
extern bool kernels_only;     // each kernel, not each option
extern int every;             // of the layer and grouped cases, one in so many runs,
inline int phase = 0;         // starting with this one,
inline std::string only_for;  // and those of this dtype and bits alone ("bf16 4"), unless empty

inline const char* dtype_text(DType t) { return t == DType::f32 ? "f32" : (t == DType::bf16 ? "bf16" : "fp16"); }

// Whether the next case of those is to run.
inline bool next_case(DType type, int bits) {
  static int count = 0;
  if (!only_for.empty() && only_for != dtype_text(type) + (" " + std::to_string(bits))) return false;
  return count++ % every == phase;
}

inline bool stop_at_failure = false;

inline void expect(bool ok, const std::string& name, const std::string& detail = "") {
  ok ? ++report.passed : ++report.failed;
  std::printf("%s  %s%s%s\n", ok ? "ok  " : "FAIL", name.c_str(), detail.empty() ? "" : "  ", detail.c_str());
  if (!ok && stop_at_failure) std::exit(1);
}

inline void must(gpu::Error error, const char* what) {
  if (error == INT4_EMU_RUNTIME(Success)) return;
  std::printf("FAIL  %s: %s\n", what, INT4_EMU_RUNTIME(GetErrorString)(error));
  std::exit(2);
}

inline void must(const Status& s, const char* what) {
  if (s) return;
  std::printf("FAIL  %s: %s\n", what, s.message);
  std::exit(2);
}

inline void synchronize() { must(INT4_EMU_RUNTIME(DeviceSynchronize)(), "synchronize"); }

// fma, and whatever selection takes for this dtype and each problem where that can be another family.
inline std::vector<gpu::Atom> atoms_for(DType type) {
  if (gpu::select_atom(0, type).atom == gpu::Atom::fma) return {gpu::Atom::fma};
  return {gpu::Atom::fma, gpu::Atom::automatic};
}

// Device memory between two guard zones, filled with 0xff (a NaN in every float type). On the host shim the allocator guards it.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count, int skew = 0) : count_(count), skew_(skew) {
    must(INT4_EMU_RUNTIME(Malloc)(reinterpret_cast<void**>(&base_), skew_ + bytes() + 2 * kGuard), "allocate");
    must(INT4_EMU_RUNTIME(Memset)(base_, 0xff, skew_ + bytes() + 2 * kGuard), "poison");
    data_ = reinterpret_cast<T*>(base_ + kGuard + skew);
  }
  explicit Buffer(const std::vector<T>& v, int skew = 0) : Buffer(v.size(), skew) {
    if (!v.empty()) must(INT4_EMU_RUNTIME(Memcpy)(data_, v.data(), bytes(), INT4_EMU_RUNTIME(MemcpyHostToDevice)), "copy in");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { INT4_EMU_RUNTIME(Free)(base_); }

  T* get() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  std::vector<T> host() const {
    std::vector<T> v(count_);
    synchronize();
    if (count_) must(INT4_EMU_RUNTIME(Memcpy)(v.data(), data_, bytes(), INT4_EMU_RUNTIME(MemcpyDeviceToHost)), "copy out");
    return v;
  }
  // Whether nothing was written outside the buffer.
  bool guarded() const {
    std::vector<uint8_t> all(skew_ + bytes() + 2 * kGuard);
    synchronize();
    must(INT4_EMU_RUNTIME(Memcpy)(all.data(), base_, all.size(), INT4_EMU_RUNTIME(MemcpyDeviceToHost)), "copy guard");
    const size_t begin = reinterpret_cast<uint8_t*>(data_) - base_;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i < begin || i >= begin + bytes()) && all[i] != 0xff) return false;
    }
    return true;
  }

 private:
#if defined(INT4_EMU_SIMT)
  static constexpr size_t kGuard = 0;
#else
  static constexpr size_t kGuard = 1024;
#endif
  size_t count_, skew_;
  uint8_t* base_ = nullptr;
  T* data_ = nullptr;
};

using Random = std::mt19937;

inline std::vector<uint8_t> random_bytes(size_t n, Random& random) {
  std::vector<uint8_t> v(n);
  for (uint8_t& b : v) b = static_cast<uint8_t>(random());
  return v;
}

// A host array of floats in one of the dtypes.
struct Floats {
  DType type = DType::f32;
  std::vector<uint8_t> data;

  Floats() = default;
  Floats(DType t, const std::vector<float>& values) : type(t), data(values.size() * dtype_bytes(t)) {
    cpu::store_floats(values.data(), t, static_cast<int64_t>(values.size()), data.data());
  }
  float operator[](int64_t i) const { return cpu::load_float(data.data(), type, i); }
};

inline float round_to(DType type, float f) {
  if (type == DType::bf16) return cpu::bf16_to_float(cpu::float_to_bf16(f));
  return type == DType::f16 ? cpu::f16_to_float(cpu::float_to_f16(f)) : f;
}

inline std::vector<float> random_floats(size_t n, float scale, Random& random) {
  std::normal_distribution<float> normal(0.f, scale);
  std::vector<float> v(n);
  for (float& f : v) f = normal(random);
  return v;
}

void check_formats();
void check_align();
void check_layers();
void check_grouped();
void check_limits();
void time_everything();

}  // namespace selfcheck
