// One or a few rows of bf16 or fp16 x times canonical int4 codes where they lie, in integers (vpdpbusd). Included after simd_codes512.h.
//
// The eight columns of a lane are fixed-point numbers of 16 bits with a scale of their own: exact within 2^-7 (fp16: 2^-4) of the largest,
// and off by at most 2^-16 of it below. Two signed bytes each, high and low, they meet the codes as unsigned bytes: a mask and a shift for 128 codes,
// where bf16 would cost four lookups and four products of several micro-operations each. Sums of a lane are exact; scales are applied in
// fp32.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kLimbRows = 4;          // rows of x
constexpr int64_t kLimbBlock = 6 * 64;    // bytes of a row of x for 128 columns: see LimbBlock

// One vector each. Bytes of even and of odd columns (of a lane's eight), then each lane's scale, then what its zero points need of the sum
// of its numbers: minus eight times it (int32), or the sum itself (fp32).
struct alignas(64) LimbBlock {
  int8_t high[2][64], low[2][64];
  float scale[16];
  int32_t sum[16];
};
static_assert(sizeof(LimbBlock) == kLimbBlock, "six vectors");

bool serves_limbs(const Weight& w, DType x, int64_t m) { return x != DType::f32 && m <= kLimbRows && serves_codes(w, DType::bf16, m); }

size_t packed_x_bytes_limbs(const Weight& w, int64_t m) { return static_cast<size_t>(m * (w.k / kCodesBlock) * kLimbBlock); }

// Sixteen columns, two lanes' worth, to the block.
inline void pack_limbs(Vf v, int64_t first, bool zeros, LimbBlock& block) {
  const Vf infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
  Vf largest = vabs(v);
  largest = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), largest, infinity);  // a lane of 0 * infinity is NaN
  for (int i = 1; i < 8; i *= 2) {
    alignas(64) uint32_t other[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) other[lane] = static_cast<uint32_t>(lane ^ i);
    largest = vmax(largest, _mm512_permutexvar_ps(_mm512_load_si512(other), largest));
  }
  alignas(64) float most[kLanes];
  alignas(64) int32_t number[kLanes];
  store(most, largest);
  const Vf safe = vmax(largest, set1(1e-33f));
  _mm512_store_si512(number, to_int(mul(v, div(set1(kLimbLargest), safe))));
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t lane = first / 8 + half;
    int32_t sum = 0;
    for (int64_t c = 0; c < 8; ++c) {
      const int32_t value = number[half * 8 + c];
      const int8_t low = static_cast<int8_t>(value);
      block.low[c % 2][lane * 4 + c / 2] = low;
      block.high[c % 2][lane * 4 + c / 2] = static_cast<int8_t>((value - low) / 256);
      sum += value;
    }
    block.scale[lane] = (most[half * 8] > 1e-33f ? most[half * 8] : 1e-33f) * (1.f / kLimbLargest);
    if (zeros) {
      const float as_float = static_cast<float>(sum);
      __builtin_memcpy(&block.sum[lane], &as_float, 4);
    } else {
      block.sum[lane] = -8 * sum;
    }
  }
}

template <DType D>
void pack_x_limbs_as(const Weight& w, const PackXArgs& a) {
  LimbBlock* out = static_cast<LimbBlock*>(a.out);
  for (int64_t i = 0; i < a.m; ++i) {
    const void* row = x_row(a, i, 2);
    for (int64_t k0 = 0; k0 < w.k; k0 += kCodesBlock, ++out) {
      for (int64_t j = 0; j < kCodesBlock; j += kLanes) pack_limbs(x_vector<D>(a, row, i, k0 + j), j, w.zeros != nullptr, *out);
    }
  }
}

void pack_x_limbs(const Weight& w, const PackXArgs& a) {
  if (a.dtype == DType::bf16) pack_x_limbs_as<DType::bf16>(w, a);
  else pack_x_limbs_as<DType::f16>(w, a);
}

// sums[r][i] of weight row r and row i of x.
template <bool kZeros, int kM>
inline void limb_rows(const CodesShared& t, const uint8_t* const rows[kCodesRows], const CodesGroups& groups, int64_t group_count,
                      Vf sums[kCodesRows][kM]) {
#pragma GCC unroll 4
  for (int r = 0; r < kCodesRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) sums[r][i] = zero();
  }
  const Vi nibbles = _mm512_set1_epi32(0x0f0f0f0f);
  for (int64_t b = 0; b < t.blocks; ++b) {
    const LimbBlock* x = static_cast<const LimbBlock*>(t.x) + b;
#pragma GCC unroll 4
    for (int r = 0; r < kCodesRows; ++r) {
      const uint8_t* codes = rows[r] + b * 64;
      const int64_t group = r * group_count + t.first_group[b];
      fetch_codes(rows[0], t.ahead, r, b);
      const Vi words = _mm512_loadu_si512(codes);
      const Vi even = _mm512_and_si512(words, nibbles), odd = _mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles);
      const Vf scale = _mm512_permutexvar_ps(t.lane_group, load(groups.scales + group));
      Vf z = zero();
      if constexpr (kZeros) z = _mm512_permutexvar_ps(t.lane_group, load(groups.zeros + group));
#pragma GCC unroll 4
      for (int i = 0; i < kM; ++i) {
        const LimbBlock& block = x[i * t.blocks];
        Vi high = _mm512_setzero_si512(), low = kZeros ? _mm512_setzero_si512() : _mm512_load_si512(block.sum);
        high = _mm512_dpbusd_epi32(high, even, _mm512_load_si512(block.high[0]));
        low = _mm512_dpbusd_epi32(low, even, _mm512_load_si512(block.low[0]));
        high = _mm512_dpbusd_epi32(high, odd, _mm512_load_si512(block.high[1]));
        low = _mm512_dpbusd_epi32(low, odd, _mm512_load_si512(block.low[1]));
        Vf part = to_float(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
        if constexpr (kZeros) part = fnma(z, load(reinterpret_cast<const float*>(block.sum)), part);
        sums[r][i] = fma(part, mul(scale, load(block.scale)), sums[r][i]);
      }
    }
  }
}

template <bool kZeros, int kM>
struct Limbs {
  static constexpr bool kZerosAreFloats = true;
  static void rows(const CodesShared& t, const uint8_t* const rows[kCodesRows], const CodesGroups& groups, int64_t group_count,
                   Vf sums[kCodesRows][kM]) {
    limb_rows<kZeros, kM>(t, rows, groups, group_count, sums);
  }
};

template <bool kZeros>
void multiply_limbs_as(const ProductArgs& a) {
  if (a.m == 1) return multiply_codes<kZeros, 1, 1, Limbs<kZeros, 1>>(a);
  if (a.m == 2) return multiply_codes<kZeros, 2, 1, Limbs<kZeros, 2>>(a);
  if (a.m == 3) return multiply_codes<kZeros, 3, 1, Limbs<kZeros, 3>>(a);
  multiply_codes<kZeros, 4, 1, Limbs<kZeros, 4>>(a);
}

void multiply_limbs(const ProductArgs& a) {
  if (a.weight->zeros != nullptr) multiply_limbs_as<true>(a);
  else multiply_limbs_as<false>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
