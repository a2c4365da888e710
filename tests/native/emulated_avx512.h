// AVX-512 and AMX in plain C++, so that tile_avx512.cpp and tile_amx.cpp can be checked on a CPU without them.
//
// Given to the compiler with -include, on top of -mavx2 -mfma -mf16c: every intrinsic that those files use becomes a loop over lanes
// as the instruction's description says. 128- and 256-bit intrinsics stay real, but for those of AVX-512. Not fast, and nothing but tests
// may use it.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

// The lanes of a vector register: V is the compiler's type, T the lane's.
template <class V, class T>
struct Lanes {
  using Vector = V;
  static constexpr int kCount = sizeof(V) / sizeof(T);
  alignas(sizeof(V)) T lane[kCount];
  Lanes() = default;
  Lanes(V v) { std::memcpy(lane, &v, sizeof v); }
  operator V() const {
    V v;
    std::memcpy(&v, lane, sizeof v);
    return v;
  }
};
using F32 = Lanes<__m512, float>;
using U16 = Lanes<__m512i, uint16_t>;
using U32 = Lanes<__m512i, uint32_t>;
using I32 = Lanes<__m512i, int32_t>;
using U64 = Lanes<__m512i, uint64_t>;
using U8 = Lanes<__m512i, uint8_t>;
using HalfU16 = Lanes<__m256i, uint16_t>;
using QuarterU8 = Lanes<__m128i, uint8_t>;

template <class To, class From, class F>
inline To map(const From& a, F f) {
  To out;
  for (int i = 0; i < To::kCount; ++i) out.lane[i] = f(a.lane[i]);
  return out;
}
template <class L, class F>
inline L map2(const L& a, const L& b, F f) {
  L out;
  for (int i = 0; i < L::kCount; ++i) out.lane[i] = f(a.lane[i], b.lane[i]);
  return out;
}

#define EMULATED_BINARY(name, lanes, expression) \
  inline lanes::Vector name(lanes a_, lanes b_) { return map2(a_, b_, [](auto a, auto b) { return static_cast<decltype(a)>(expression); }); }
EMULATED_BINARY(add_ps, F32, a + b)
EMULATED_BINARY(sub_ps, F32, a - b)
EMULATED_BINARY(mul_ps, F32, a* b)
EMULATED_BINARY(div_ps, F32, a / b)
EMULATED_BINARY(min_ps, F32, a < b ? a : b)  // the second operand where either is NaN
EMULATED_BINARY(max_ps, F32, a > b ? a : b)
EMULATED_BINARY(add_epi32, U32, a + b)
EMULATED_BINARY(sub_epi32, U32, a - b)
EMULATED_BINARY(sub_epi8, U8, a - b)
EMULATED_BINARY(and_si512, U64, a& b)
EMULATED_BINARY(or_si512, U64, a | b)
EMULATED_BINARY(srlv_epi32, U32, b > 31 ? 0 : a >> b)
#undef EMULATED_BINARY

inline __m512i slli_epi32(U32 a, int n) { return map<U32>(a, [n](uint32_t x) { return n > 31 ? 0 : x << n; }); }
inline __m512i srli_epi32(U32 a, int n) { return map<U32>(a, [n](uint32_t x) { return n > 31 ? 0 : x >> n; }); }
inline __m512i srai_epi32(I32 a, int n) { return map<I32>(a, [n](int32_t x) { return x >> n; }); }
inline __m512 fmadd_ps(F32 a, F32 b, F32 c) {
  for (int i = 0; i < 16; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
inline __m512 fnmadd_ps(F32 a, F32 b, F32 c) {
  for (int i = 0; i < 16; ++i) c.lane[i] = std::fma(-a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
inline __m512 andnot_ps(__m512 a, __m512 b) {
  return reinterpret_cast<__m512>(__m512i(map2(U32(reinterpret_cast<__m512i>(a)), U32(reinterpret_cast<__m512i>(b)), [](uint32_t x, uint32_t y) { return ~x & y; })));
}
inline __m512 roundscale_ps(F32 a) { return map<F32>(a, [](float x) { return std::nearbyintf(x); }); }

inline __m512 cvtepi32_ps(I32 a) { return map<F32>(a, [](int32_t x) { return static_cast<float>(x); }); }
inline __m512i cvtps_epi32(F32 a) { return map<I32>(a, [](float x) { return _mm_cvtss_si32(_mm_set_ss(x)); }); }
inline __m256i cvtepi32_epi16(U32 a) { return map<HalfU16>(a, [](uint32_t x) { return static_cast<uint16_t>(x); }); }
inline __m128i cvtepi32_epi8(U32 a) { return map<QuarterU8>(a, [](uint32_t x) { return static_cast<uint8_t>(x); }); }
inline __m512i cvtepu16_epi32(HalfU16 a) { return map<U32>(a, [](uint16_t x) { return uint32_t{x}; }); }
inline __m512i cvtepu8_epi32(QuarterU8 a) { return map<U32>(a, [](uint8_t x) { return uint32_t{x}; }); }
inline __m512 cvtph_ps(HalfU16 a) { return map<F32>(a, [](uint16_t x) { return _cvtsh_ss(x); }); }
inline __m256i cvtps_ph(F32 a) { return map<HalfU16>(a, [](float x) { return static_cast<uint16_t>(_cvtss_sh(x, 0)); }); }

inline __m512i set1_epi32(int value) { return map<U32>(U32{}, [value](uint32_t) { return static_cast<uint32_t>(value); }); }
inline __m512 set1_ps(float value) { return map<F32>(U32{}, [value](uint32_t) { return value; }); }
template <class... T>
inline __m512i setr_epi32(T... value) {
  const int32_t list[16] = {value...};
  I32 out;
  std::memcpy(out.lane, list, sizeof list);
  return out;
}
inline __m512i broadcast_i64x4(__m256i a) {
  __m512i out;
  for (int i = 0; i < 2; ++i) std::memcpy(reinterpret_cast<char*>(&out) + 32 * i, &a, 32);
  return out;
}
inline __m256 castps512_ps256(__m512 a) {
  __m256 out;
  std::memcpy(&out, &a, 32);
  return out;
}
inline __m256 extractf32x8_ps(__m512 a, int half) {
  __m256 out;
  std::memcpy(&out, reinterpret_cast<const char*>(&a) + 32 * half, 32);
  return out;
}
inline __m512i castsi128_si512(__m128i a) {
  __m512i out;
  std::memset(&out, 0xee, 64);  // the upper lanes are undefined
  std::memcpy(&out, &a, 16);
  return out;
}

inline __m512i inserti32x4(__m512i a, __m128i b, int quarter) {
  std::memcpy(reinterpret_cast<char*>(&a) + 16 * quarter, &b, 16);
  return a;
}
// Bit i of a result is bit 4 a + 2 b + c of `table`, of bits i of the three.
inline __m512i ternarylogic(U32 a, U32 b, U32 c, int table) {
  for (int i = 0; i < 16; ++i) {
    uint32_t out = 0;
    for (int bit = 0; bit < 32; ++bit) {
      const int row = (a.lane[i] >> bit & 1) * 4 + (b.lane[i] >> bit & 1) * 2 + (c.lane[i] >> bit & 1);
      out |= static_cast<uint32_t>(table >> row & 1) << bit;
    }
    c.lane[i] = out;
  }
  return c;
}

// Lane i is table[index[i]]; the index is taken modulo the number of lanes.
template <class L>
inline typename L::Vector permutexvar(L index, L table) {
  return map<L>(index, [&](auto i) { return table.lane[i % L::kCount]; });
}
inline __m512 permutex2var_ps(F32 a, U32 index, F32 b) {
  F32 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = (index.lane[i] & 16 ? b : a).lane[index.lane[i] & 15];
  return out;
}
inline __m512 permutexvar_ps(U32 index, F32 table) {
  return map<F32>(index, [&](uint32_t i) { return table.lane[i % 16]; });
}
inline __m512i masked_permutexvar_epi16(U16 otherwise, __mmask32 mask, U16 index, U16 table) {
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) otherwise.lane[i] = table.lane[index.lane[i] % 32];
  return otherwise;
}
// Quarters of a (twice) and of b (twice), two selector bits each.
inline __m512i shuffle_i32x4(U64 a, U64 b, int selector) {
  U64 out;
  for (int q = 0; q < 4; ++q)
    for (int i = 0; i < 2; ++i) out.lane[2 * q + i] = (q < 2 ? a : b).lane[2 * (selector >> (2 * q) & 3) + i];
  return out;
}
// Alternating lanes of the low or the high half of each 128 bits.
template <class L>
inline typename L::Vector unpack(L a, L b, bool high) {
  constexpr int kPerQuarter = L::kCount / 4, kTaken = kPerQuarter / 2;
  L out;
  for (int q = 0; q < 4; ++q)
    for (int i = 0; i < kTaken; ++i) {
      out.lane[q * kPerQuarter + 2 * i] = a.lane[q * kPerQuarter + high * kTaken + i];
      out.lane[q * kPerQuarter + 2 * i + 1] = b.lane[q * kPerQuarter + high * kTaken + i];
    }
  return out;
}

inline __mmask16 mask_of(U32 flags) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (flags.lane[i] >> 31) << i;
  return static_cast<__mmask16>(mask);
}
inline __mmask16 unordered_mask(F32 a, F32 b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(std::isnan(a.lane[i]) || std::isnan(b.lane[i])) << i;
  return static_cast<__mmask16>(mask);
}
template <class L>
inline typename L::Vector blend(__mmask16 mask, L a, L b) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) a.lane[i] = b.lane[i];
  return a;
}

template <class V>
inline V load(const void* p, bool must_align) {
  if (must_align && reinterpret_cast<uintptr_t>(p) % 64 != 0) std::abort();
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v, bool must_align) {
  if (must_align && reinterpret_cast<uintptr_t>(p) % 64 != 0) std::abort();
  std::memcpy(p, &v, sizeof v);
}
inline __m512 masked_load(__mmask16 mask, const float* p) {  // lanes outside the mask are not touched in memory
  F32 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = mask >> i & 1 ? p[i] : 0.f;
  return out;
}
inline void masked_store(float* p, __mmask16 mask, F32 a) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = a.lane[i];
}

// The elements of the mask, zeros elsewhere; nothing else is read.
template <class V, class T>
inline V masked_load_as(uint64_t mask, const void* p) {
  Lanes<V, T> out;
  std::memset(out.lane, 0, sizeof out.lane);
  for (int i = 0; i < Lanes<V, T>::kCount; ++i)
    if (mask >> i & 1) std::memcpy(&out.lane[i], static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return out;
}

// Nearest, ties to even; subnormal numbers become zero, NaN stays NaN.
inline uint16_t narrow(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if (std::fabs(f) < 0x1p-126f) return static_cast<uint16_t>(bits >> 31 << 15);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __m512bh cvtne2ps_pbh(F32 high, F32 low) {
  Lanes<__m512bh, uint16_t> out;
  for (int i = 0; i < 16; ++i) out.lane[i] = narrow(low.lane[i]), out.lane[16 + i] = narrow(high.lane[i]);
  return out;
}

inline __m256bh cvtne2ps_pbh(Lanes<__m256, float> high, Lanes<__m256, float> low) {
  Lanes<__m256bh, uint16_t> out;
  for (int i = 0; i < 8; ++i) out.lane[i] = narrow(low.lane[i]), out.lane[8 + i] = narrow(high.lane[i]);
  return out;
}
inline __mmask8 subnormal_mask(Lanes<__m256, float> a) {
  int mask = 0;
  for (int i = 0; i < 8; ++i) mask |= (std::fpclassify(a.lane[i]) == FP_SUBNORMAL) << i;
  return static_cast<__mmask8>(mask);
}

inline float widen(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline __m512 dpbf16_ps(F32 sum, Lanes<__m512bh, uint16_t> a, Lanes<__m512bh, uint16_t> b) {
  for (int i = 0; i < 16; ++i) {
    sum.lane[i] += widen(a.lane[2 * i + 1]) * widen(b.lane[2 * i + 1]);
    sum.lane[i] += widen(a.lane[2 * i]) * widen(b.lane[2 * i]);
  }
  return sum;
}

inline __m512i dpbusd_epi32(I32 sum, U8 a, Lanes<__m512i, int8_t> b) {
  for (int i = 0; i < 64; ++i) sum.lane[i / 4] += a.lane[i] * b.lane[i];
  return sum;
}

// Tile registers and their configuration: rows and bytes a row of each, from the 64 bytes that ldtilecfg reads.
struct Tiles {
  uint8_t config[64] = {0};
  uint8_t data[8][16][64];
  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t] + 256 * config[17 + 2 * t]; }
};
static thread_local Tiles tiles;

inline void tile_configure(const void* p) {
  std::memcpy(tiles.config, p, 64);
  if (tiles.config[0] != 1) std::abort();  // the palette
  std::memset(tiles.data, 0, sizeof tiles.data);
}
inline void tile_zero(int t) { std::memset(tiles.data[t], 0, sizeof tiles.data[t]); }
inline void tile_load(int t, const void* p, int64_t stride) {
  tile_zero(t);
  for (int r = 0; r < tiles.rows(t); ++r) std::memcpy(tiles.data[t][r], static_cast<const char*>(p) + r * stride, tiles.row_bytes(t));
}
inline void tile_store(int t, void* p, int64_t stride) {
  for (int r = 0; r < tiles.rows(t); ++r) std::memcpy(static_cast<char*>(p) + r * stride, tiles.data[t][r], tiles.row_bytes(t));
}
// sums[r][c] += a[r][k] * b[k][c], where a[r][k] and b[k][c] are pairs of bf16.
inline void tile_multiply(int sums, int a, int b) {
  if (tiles.row_bytes(a) / 4 != tiles.rows(b) || tiles.rows(sums) != tiles.rows(a)) std::abort();
  for (int r = 0; r < tiles.rows(a); ++r)
    for (int k = 0; k < tiles.rows(b); ++k)
      for (int c = 0; c < tiles.row_bytes(sums) / 4; ++c) {
        float sum;
        uint16_t x[2], y[2];
        std::memcpy(&sum, &tiles.data[sums][r][4 * c], 4);
        std::memcpy(x, &tiles.data[a][r][4 * k], 4);
        std::memcpy(y, &tiles.data[b][k][4 * c], 4);
        sum += widen(x[0]) * widen(y[0]);
        sum += widen(x[1]) * widen(y[1]);
        std::memcpy(&tiles.data[sums][r][4 * c], &sum, 4);
      }
}

// sums[r][c] += a[r][k] * b[k][c], where a[r][k] are four unsigned and b[k][c] four signed bytes.
inline void tile_multiply_bytes(int sums, int a, int b) {
  if (tiles.row_bytes(a) / 4 != tiles.rows(b) || tiles.rows(sums) != tiles.rows(a)) std::abort();
  for (int r = 0; r < tiles.rows(a); ++r)
    for (int k = 0; k < tiles.rows(b); ++k)
      for (int c = 0; c < tiles.row_bytes(sums) / 4; ++c) {
        int32_t sum;
        std::memcpy(&sum, &tiles.data[sums][r][4 * c], 4);
        for (int i = 0; i < 4; ++i) sum += tiles.data[a][r][4 * k + i] * static_cast<int8_t>(tiles.data[b][k][4 * c + i]);
        std::memcpy(&tiles.data[sums][r][4 * c], &sum, 4);
      }
}

}  // namespace emulated

#define INT4_EMU_EMULATED
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// Without optimisation gcc defines some intrinsics as macros.
#undef _mm256_fpclass_ps_mask
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_inserti32x4
#undef _mm512_roundscale_ps
#undef _mm512_setr_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi32
#undef _mm512_ternarylogic_epi32
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_loadd
#undef _tile_stored
#undef _tile_stream_loadd
#undef _tile_zero

#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_sub_epi8 emulated::sub_epi8
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_inserti32x4 emulated::inserti32x4
#define _mm512_ternarylogic_epi32 emulated::ternarylogic
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_srlv_epi32 emulated::srlv_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_andnot_ps emulated::andnot_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_broadcast_i64x4 emulated::broadcast_i64x4
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_castsi128_si512 emulated::castsi128_si512
#define _mm512_shuffle_i32x4 emulated::shuffle_i32x4
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm256_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm256_fpclass_ps_mask(a, classes) emulated::subnormal_mask(a)
#define _mm256_permutexvar_epi16(i, t) emulated::permutexvar<emulated::HalfU16>(i, t)
#define _mm512_castps_si512(a) reinterpret_cast<__m512i>(a)
#define _mm512_castsi512_ps(a) reinterpret_cast<__m512>(a)
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::unordered_mask(a, b)
#define _mm512_cvtps_ph(a, rounding) emulated::cvtps_ph(a)
#define _mm512_roundscale_ps(a, rounding) emulated::roundscale_ps(a)
#define _mm512_cvtss_f32(a) emulated::F32(a).lane[0]
#define _mm512_cvtsi512_si32(a) emulated::I32(a).lane[0]
#define _mm512_setzero_ps() emulated::set1_ps(0.f)
#define _mm512_setzero_si512() emulated::set1_epi32(0)
#define _mm512_permutexvar_ps(i, t) emulated::permutexvar_ps(i, t)
#define _mm512_permutex2var_ps(a, i, b) emulated::permutex2var_ps(a, i, b)
#define _mm512_mask_permutexvar_epi16(a, m, i, t) emulated::masked_permutexvar_epi16(a, m, i, t)
#define _mm512_permutexvar_epi16(i, t) emulated::permutexvar<emulated::U16>(i, t)
#define _mm512_permutexvar_epi32(i, t) emulated::permutexvar<emulated::U32>(i, t)
#define _mm512_unpacklo_epi32(a, b) emulated::unpack<emulated::U32>(a, b, false)
#define _mm512_unpackhi_epi32(a, b) emulated::unpack<emulated::U32>(a, b, true)
#define _mm512_unpacklo_epi64(a, b) emulated::unpack<emulated::U64>(a, b, false)
#define _mm512_unpackhi_epi64(a, b) emulated::unpack<emulated::U64>(a, b, true)
#define _mm512_movepi32_mask(a) emulated::mask_of(a)
#define _mm512_mask_blend_epi32(m, a, b) emulated::blend<emulated::U32>(m, a, b)
#define _mm512_mask_blend_ps(m, a, b) emulated::blend<emulated::F32>(m, a, b)
#define _mm512_load_ps(p) emulated::load<__m512>(p, true)
#define _mm512_loadu_ps(p) emulated::load<__m512>(p, false)
#define _mm512_load_si512(p) emulated::load<__m512i>(p, true)
#define _mm512_loadu_si512(p) emulated::load<__m512i>(p, false)
#define _mm512_store_ps(p, v) emulated::store<__m512>(p, v, true)
#define _mm512_storeu_ps(p, v) emulated::store<__m512>(p, v, false)
#define _mm512_store_si512(p, v) emulated::store<__m512i>(p, v, true)
#define _mm512_storeu_si512(p, v) emulated::store<__m512i>(p, v, false)
#define _mm512_maskz_loadu_ps(m, p) emulated::masked_load(m, p)
#define _mm512_maskz_loadu_epi32(m, p) emulated::masked_load_as<__m512i, uint32_t>(m, p)
#define _mm256_maskz_loadu_epi16(m, p) emulated::masked_load_as<__m256i, uint16_t>(m, p)
#define _mm_maskz_loadu_epi8(m, p) emulated::masked_load_as<__m128i, uint8_t>(m, p)
#define _mm512_mask_storeu_ps(p, m, v) emulated::masked_store(p, m, v)
#define _tile_loadconfig(p) emulated::tile_configure(p)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(t) emulated::tile_zero(t)
#define _tile_loadd(t, p, stride) emulated::tile_load(t, p, stride)
#define _tile_stored(t, p, stride) emulated::tile_store(t, p, stride)
#define _tile_stream_loadd(t, p, stride) emulated::tile_load(t, p, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::tile_multiply(sums, a, b)
#define _tile_dpbusd(sums, a, b) emulated::tile_multiply_bytes(sums, a, b)
