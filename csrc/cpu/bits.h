// Rearrangements of 32-bit words of eight 4-bit codes. Each function works on scalars and on vectors of words alike.
#pragma once

#include <cstdint>
#include <cstring>

namespace int4_emu::cpu {

typedef uint32_t Words4 __attribute__((vector_size(16)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

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

// rows[r] lane j becomes rows[j] lane r.
static inline void transpose_words(Words4 rows[4]) {
  const Words4 a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5), b = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Words4 c = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7), d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  rows[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  rows[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  rows[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// Of each two nibbles of a byte, the low ones of both words to `low`, the high ones to `high`; those of `low` come first.
static inline void swap_nibbles(Words4& low, Words4& high) {
  const Words4 swap = ((low >> 4) ^ high) & 0x0f0f0f0fu;
  low ^= swap << 4;
  high ^= swap;
}

// Byte j of 16 * kRows, counted through all rows, becomes byte j / kRows of row j % kRows: with sixteen rows a transpose, with four the
// bytes of each word apart. A round turns the bits of j by one: its highest goes last.
template <int kRows>
static inline void transpose_bytes(Words4* rows) {
  for (int round = 0; round < 4; ++round) {
    Bytes16 turned[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      const Bytes16 a = reinterpret_cast<Bytes16>(rows[i]), b = reinterpret_cast<Bytes16>(rows[i + kRows / 2]);
      turned[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      turned[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, turned, sizeof(turned));
  }
}

}  // namespace int4_emu::cpu
