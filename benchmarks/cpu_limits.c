// What one thread can read and multiply at best. Compiled by cpu_limits.py for the machine it runs on.
#include <immintrin.h>
#include <stdint.h>

// Sums `bytes` bytes, a multiple of 256: four loads in flight a step, and the hardware's prefetchers.
__attribute__((target("avx2"))) int64_t read_all(const char* p, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t i = 0; i < bytes; i += 128) {
    _mm_prefetch(p + i + 4096, _MM_HINT_T0);
    _mm_prefetch(p + i + 4160, _MM_HINT_T0);
    a = _mm256_add_epi64(a, _mm256_loadu_si256((const __m256i*)(p + i)));
    b = _mm256_add_epi64(b, _mm256_loadu_si256((const __m256i*)(p + i + 32)));
    c = _mm256_add_epi64(c, _mm256_loadu_si256((const __m256i*)(p + i + 64)));
    d = _mm256_add_epi64(d, _mm256_loadu_si256((const __m256i*)(p + i + 96)));
  }
  a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  return _mm256_extract_epi64(a, 0) + _mm256_extract_epi64(a, 1) + _mm256_extract_epi64(a, 2) + _mm256_extract_epi64(a, 3);
}

// Twelve chains of multiply-adds: 192 floating-point operations a step.
__attribute__((target("avx2,fma"))) double fma_operations(int64_t steps) {
  __m256 sums[12];
  const __m256 x = _mm256_set1_ps(1e-9f);
  for (int i = 0; i < 12; ++i) sums[i] = x;
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(x, x, sums[i]);
  }
  for (int i = 1; i < 12; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  float first[8];
  _mm256_storeu_ps(first, sums[0]);
  return first[0] > 1e30f ? 0 : 192. * (double)steps;
}

// Four tile products of 16 x 16 x 32 a step, of which none waits for another. The caller has asked the kernel for AMX. The operands are no
// zeros: with those a core runs at a higher clock than any real product does.
__attribute__((target("amx-tile,amx-bf16"))) double amx_operations(int64_t steps) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  } __attribute__((aligned(64))) config = {1, 0, {0}, {0}, {0}};
  for (int i = 0; i < 8; ++i) config.column_bytes[i] = 64, config.rows[i] = 16;
  // gcc 12 does not know that this instruction reads memory, and drops stores before it as dead.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  uint16_t values[512];
  for (int i = 0; i < 512; ++i) values[i] = (uint16_t)(0x3a00 + i);  // bf16, 0.0005 to 0.008
  __asm__ volatile("" ::"r"(values) : "memory");
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values, 64);
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values, 64);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4. * 2 * 16 * 16 * 32 * (double)steps;
}
