// Copies that leave the caches alone, for results that no cache holds until they are read. In files for the baseline CPU: on x86 that has
// stores of 16 bytes past the caches.
#pragma once

#include <cstdint>
#include <cstring>

namespace int4_emu::cpu {

// An output of this many bytes leaves the caches before anyone reads it.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

#if defined(__SSE2__)
typedef long long StreamVector __attribute__((vector_size(16)));

// `bytes` and `to` are multiples of 16.
static inline void stream_copy(void* to, const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16) {
    StreamVector v;
    std::memcpy(&v, static_cast<const char*>(from) + i, 16);
    StreamVector* p = reinterpret_cast<StreamVector*>(static_cast<char*>(to) + i);
#if defined(__clang__)
    __builtin_nontemporal_store(v, p);
#else
    __builtin_ia32_movntdq(p, v);
#endif
  }
}

// Orders streamed stores before those that tell another thread that this one is done.
static inline void stream_fence() { __builtin_ia32_sfence(); }
#else
static inline void stream_copy(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
static inline void stream_fence() {}
#endif

}  // namespace int4_emu::cpu
