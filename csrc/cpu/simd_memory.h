// Bytes on their way between memory and the caches, 256 bits at a time at most. Included by what needs it.
#pragma once

#include <immintrin.h>

#include "tile.h"

namespace int4_emu::cpu {
namespace {

// Lines to fetch into L1, of rows whose pieces of so many bytes lie `stride` bytes apart: a piece after the other, because hardware prefetchers
// follow lines that are asked for in their order in memory, but not several streams within a page.
struct LinesAhead {
  const char* at;
  int64_t lines, skip, left;  // of a piece; bytes to the next one; of this piece
  LinesAhead(const void* first, int64_t bytes, int64_t stride)
      : at(static_cast<const char*>(first)), lines((bytes + 63) / 64), skip(stride - lines * 64), left(lines) {}
  void fetch() {
    _mm_prefetch(at, _MM_HINT_T0);
    at += 64;
    if (--left == 0) at += skip, left = lines;
  }
};

// A multiple of 32 bytes. Streamed, they go to memory without being read first, and `to` is aligned to 32 bytes. Half as wide stores took
// 1.1-1.5 times as long.
template <bool kStream>
inline void copy_run(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    if constexpr (kStream) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), v);
    else _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), v);
  }
}

}  // namespace
}  // namespace int4_emu::cpu
