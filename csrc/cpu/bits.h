// Rearrangements of 32-bit words of eight 4-bit codes. Each function works on scalars and on vectors of words alike.
#pragma once

#include <cstdint>
#include <cstring>

namespace int4_emu::cpu {

typedef uint32_t Words4 __attribute__((vector_size(16)));

static inline uint32_t load_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

static inline void store_word(void* p, uint32_t word) { std::memcpy(p, &word, 4); }

// Slot order 0,2,4,6,1,3,5,7 (AWQ, cpu_n16) to plain order: nibbles of the low and the high half alternate.
static inline uint32_t deinterleave_nibbles(uint32_t x) {
  uint32_t t = ((x >> 8) ^ x) & 0x0000ff00u;
  x ^= t ^ (t << 8);
  t = ((x >> 4) ^ x) & 0x00f000f0u;
  return x ^ t ^ (t << 4);
}

// The inverse: even codes to the low half, odd codes to the high half.
static inline uint32_t interleave_nibbles(uint32_t x) {
  uint32_t t = ((x >> 4) ^ x) & 0x00f000f0u;
  x ^= t ^ (t << 4);
  t = ((x >> 8) ^ x) & 0x0000ff00u;
  return x ^ t ^ (t << 8);
}

// rows[r] nibble j becomes rows[j] nibble r: an 8 x 8 transpose in three rounds of block swaps.
template <class Word>
static inline void transpose_nibbles(Word rows[8]) {
  const auto swap = [](Word& a, Word& b, int shift, uint32_t mask) {
    const Word t = ((a >> shift) ^ b) & mask;
    b ^= t;
    a ^= t << shift;
  };
  for (int r = 0; r < 4; ++r) swap(rows[r], rows[r + 4], 16, 0x0000ffffu);
  for (int r = 0; r < 8; r += (r & 1) ? 3 : 1) swap(rows[r], rows[r + 2], 8, 0x00ff00ffu);
  for (int r = 0; r < 8; r += 2) swap(rows[r], rows[r + 1], 4, 0x0f0f0f0fu);
}

// rows[r] lane j becomes rows[j] lane r.
static inline void transpose_words(Words4 rows[4]) {
  const Words4 a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5), b = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Words4 c = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7), d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  rows[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  rows[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  rows[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

}  // namespace int4_emu::cpu
