// Device functions: barriers, lane exchange, bits, atomics. Only what kernels use or are likely to.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "engine.h"

namespace simt {

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// What a lane that is not there hands out.
constexpr uint64_t kAbsent = ~uint64_t{0};

struct Exchange {
  uint64_t value;
  int source;
};

inline void exchange(void* const* lanes, int wave) {
  uint64_t values[64];
  for (int i = 0; i < wave; ++i) values[i] = lanes[i] ? static_cast<Exchange*>(lanes[i])->value : kAbsent;
  for (int i = 0; i < wave; ++i) {
    if (Exchange* e = static_cast<Exchange*>(lanes[i])) e->value = e->source >= 0 && e->source < wave ? values[e->source] : kAbsent;
  }
}

template <class T>
inline T read_lane(const char* what, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8, "at most 64 bits are exchanged");
  Exchange e{0, source};
  std::memcpy(&e.value, &value, sizeof(T));
  meet(what, exchange, &e, false, site);
  std::memcpy(&value, &e.value, sizeof(T));
  return value;
}

// The value of the lowest lane that is there.
inline void broadcast_first(void* const* lanes, int wave) {
  const Exchange* first = nullptr;
  for (int i = 0; i < wave; ++i) {
    if (lanes[i] && first == nullptr) first = static_cast<Exchange*>(lanes[i]);
    if (lanes[i]) static_cast<Exchange*>(lanes[i])->value = first->value;
  }
}

inline void vote(void* const* lanes, int wave) {
  uint64_t mask = 0;
  for (int i = 0; i < wave; ++i) mask |= static_cast<uint64_t>(lanes[i] && static_cast<Exchange*>(lanes[i])->value) << i;
  for (int i = 0; i < wave; ++i) {
    if (lanes[i]) static_cast<Exchange*>(lanes[i])->value = mask;
  }
}

inline void nothing(void* const*, int) {}

}  // namespace simt

// No constant, as in new runtimes.
struct SimtWaveSize {
  operator int() const { return simt::architecture().wave; }
};
constexpr SimtWaveSize warpSize{};

inline void __syncthreads(simt::Site site = simt::here()) { simt::block_barrier(site); }
inline void __builtin_amdgcn_s_barrier(simt::Site site = simt::here()) { simt::block_barrier(site); }
inline void __syncwarp(simt::Site site = simt::here()) {
  int there = 0;
  simt::meet("__syncwarp", simt::nothing, &there, false, site);
}
inline void __builtin_amdgcn_wave_barrier(simt::Site site = simt::here()) { __syncwarp(site); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// `width` a power of two: lanes talk inside aligned groups of that many.
template <class T>
inline T __shfl(T value, int source, int width = warpSize, simt::Site site = simt::here()) {
  return simt::read_lane("__shfl", value, (simt::lane_index() & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T>
inline T __shfl_xor(T value, int mask, int width = warpSize, simt::Site site = simt::here()) {
  const int lane = simt::lane_index(), source = lane ^ mask;
  return simt::read_lane("__shfl_xor", value, (lane & ~(width - 1)) == (source & ~(width - 1)) ? source : lane, site);
}
template <class T>
inline T __shfl_down(T value, unsigned delta, int width = warpSize, simt::Site site = simt::here()) {
  const int lane = simt::lane_index(), within = lane & (width - 1);
  return simt::read_lane("__shfl_down", value, within + static_cast<int>(delta) < width ? lane + static_cast<int>(delta) : lane, site);
}
template <class T>
inline T __shfl_up(T value, unsigned delta, int width = warpSize, simt::Site site = simt::here()) {
  const int lane = simt::lane_index(), within = lane & (width - 1);
  return simt::read_lane("__shfl_up", value, within >= static_cast<int>(delta) ? lane - static_cast<int>(delta) : lane, site);
}
inline uint64_t __ballot(int predicate, simt::Site site = simt::here()) {
  simt::Exchange e{predicate != 0, 0};
  simt::meet("__ballot", simt::vote, &e, false, site);
  return e.value;
}
inline int __any(int predicate, simt::Site site = simt::here()) { return __ballot(predicate, site) != 0; }
inline int __all(int predicate, simt::Site site = simt::here()) { return __ballot(!predicate, site) == 0; }
// Does not wrap: a byte address past the wave reads zero on the hardware; here it shows.
inline int __builtin_amdgcn_ds_bpermute(int address, int value, simt::Site site = simt::here()) {
  return simt::read_lane("ds_bpermute", value, address / 4, site);
}
inline int __builtin_amdgcn_readfirstlane(int value, simt::Site site = simt::here()) {
  simt::Exchange e{static_cast<uint32_t>(value), 0};
  simt::meet("readfirstlane", simt::broadcast_first, &e, false, site);
  return static_cast<int>(e.value);
}

// Scheduling hints and waits mean nothing where instructions run one by one.
template <class... Ignored>
inline void __builtin_amdgcn_sched_barrier(Ignored...) {}
template <class... Ignored>
inline void __builtin_amdgcn_sched_group_barrier(Ignored...) {}
template <class... Ignored>
inline void __builtin_amdgcn_fence(Ignored...) {}
template <class... Ignored>
inline void __builtin_amdgcn_s_waitcnt(Ignored...) {}
template <class... Ignored>
inline void __builtin_amdgcn_s_setprio(Ignored...) {}

inline float __uint_as_float(unsigned v) { return simt::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return simt::bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return simt::bit_cast<float>(v); }
inline int __float_as_int(float v) { return simt::bit_cast<int>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
// The product is exact in double; calling the library's for each is a third of the time.
inline float simt_fmaf(float a, float b, float c) { return static_cast<float>(static_cast<double>(a) * b + c); }
#define fmaf simt_fmaf
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
template <class T>
inline T __ldg(const T* p) {
  return *p;
}

// v_perm_b32: selectors 0-3 take bytes of `low`, 4-7 of `high`, 8-11 the sign of bytes 1, 3, 5, 7, 12 is 0x00, the rest 0xff.
inline unsigned __builtin_amdgcn_perm(unsigned high, unsigned low, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = (selector >> (8 * i)) & 0xffu;
    unsigned byte = 0xff;
    if (s < 8) {
      byte = static_cast<unsigned>(bytes >> (8 * s)) & 0xffu;
    } else if (s < 12) {
      byte = (bytes >> ((2 * (s - 8) + 1) * 8 + 7)) & 1 ? 0xffu : 0u;
    } else if (s == 12) {
      byte = 0;
    }
    out |= byte << (8 * i);
  }
  return out;
}

// One thread runs at a time: an atomic is a plain update.
template <class T>
inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = static_cast<T>(before + value);
  return before;
}
template <class T>
inline T atomicMax(T* at, T value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}
template <class T>
inline T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <class T>
inline T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
template <class T>
inline T atomicCAS(T* at, T compare, T value) {
  const T before = *at;
  if (before == compare) *at = value;
  return before;
}
template <class T>
inline T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}
