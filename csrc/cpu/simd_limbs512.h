// Rows of bf16 or fp16 x, up to four at a time, times canonical codes where they lie, in integers (vpdpbusd). Included after simd_codes512.h.
//
// x is fixed point of 16 bits with a scale for each unit (CodesUnits): exact within 2^-7 (fp16: 2^-4) of the largest there, and off by at
// most 2^-16 of it below. Two signed bytes each, high and low limbs, the numbers meet codes as unsigned bytes: int4 takes a mask and a shift
// for 128 codes, where bf16 would cost four lookups and four products of several micro-operations each. Sums of a lane's codes are exact; the
// scales of weights and of x are multiplied once for each unit, and zero points times sums of x are taken off before the first code.
#pragma once

namespace int4_emu::cpu {
namespace {

constexpr int64_t kLimbRows = 4;             // rows of x at a time
constexpr float kLimbLargest = 127 * 256;    // of a number of two signed bytes
constexpr float kLimbHuge = 0x1p100f, kLimbTiny = 0x1p-80f;  // of a row's largest: beyond these, scales might not keep its numbers

// 128 columns of a row of x.
struct alignas(64) LimbBlock {
  int8_t bytes[2][2][64];  // high and low limbs: of even and odd columns for int4, of the first and the last 64 for int8
};
struct LimbUnits {
  float most;                             // the largest magnitude of the block; infinite where a NaN is
  float scale[kCodesBlock / kLanes];
  int32_t sums[2][kCodesBlock / kLanes];  // of high and low limbs
};

template <class Add>
inline Vi across_lanes(Vi v, const Add& add) {
  for (int i = 1; i < kLanes; i *= 2) {
    alignas(64) uint32_t other[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) other[lane] = static_cast<uint32_t>(lane ^ i);
    v = add(v, _mm512_permutexvar_epi32(_mm512_load_si512(other), v));
  }
  return v;
}
inline int32_t sum_of_lanes(Vi v) {
  return _mm512_cvtsi512_si32(across_lanes(v, [](Vi a, Vi b) { return _mm512_add_epi32(a, b); }));
}
inline Vf largest_lane(Vf v) {
  const auto larger = [](Vi a, Vi b) { return _mm512_castps_si512(vmax(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b))); };
  return _mm512_castsi512_ps(across_lanes(_mm512_castps_si512(v), larger));
}

// Whether a row with this largest magnitude is one that limbs can hold.
inline bool limbs_hold(float most) { return most == 0.f || (most >= kLimbTiny && most < kLimbHuge); }

// Columns k0.. of row i of x.
template <DType D>
void pack_limbs(const Weight& w, const CodesUnits& units, const PackXArgs& a, const void* row, int64_t i, int64_t k0, LimbBlock& to, LimbUnits& of) {
  const Vf infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
  const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const int64_t vectors = units.columns / kLanes;
  of.most = 0.f;
  for (int64_t u = 0; u < units.per_block; ++u) {
    Vf v[kCodesBlock / kLanes], largest = zero();
    for (int64_t j = 0; j < vectors; ++j) {
      v[j] = x_vector<D>(a, row, i, k0 + (u * vectors + j) * kLanes);
      largest = vmax(largest, _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v[j], v[j], _CMP_UNORD_Q), vabs(v[j]), infinity));
    }
    largest = largest_lane(largest);
    const float magnitude = _mm512_cvtss_f32(largest), most = magnitude > 1e-33f ? magnitude : 1e-33f;
    of.most = magnitude > of.most ? magnitude : of.most;
    const Vf factor = set1(kLimbLargest / most);
    Vi sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t j = 0; j < vectors; ++j) {
      const int64_t at = u * vectors + j;  // of the block's vectors
      const Vi number = to_int(mul(v[j], factor)), low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
      const Vi limbs[2] = {_mm512_srai_epi32(sub(number, low), 8), low};
      for (int limb = 0; limb < 2; ++limb) {
        sums[limb] = _mm512_add_epi32(sums[limb], limbs[limb]);
        const __m128i bytes = _mm512_cvtepi32_epi8(limbs[limb]);
        if (w.bits == 8) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to.bytes[limb][at / 4] + at % 4 * 16), bytes);
          continue;
        }
        const __m128i apart = _mm_shuffle_epi8(bytes, even_first);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to.bytes[limb][0] + at * 8), apart);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to.bytes[limb][1] + at * 8), _mm_unpackhi_epi64(apart, apart));
      }
    }
    of.scale[u] = most * (1.f / kLimbLargest);
    for (int limb = 0; limb < 2; ++limb) of.sums[limb][u] = sum_of_lanes(sums[limb]);
  }
}

bool serves_limbs(const Weight& w, DType x) { return x != DType::f32 && serves_codes(w); }

// For each row its blocks, its units' scales, and the sums of their numbers.
size_t limb_row_bytes(const Weight& w) { return static_cast<size_t>(w.k / kCodesBlock) * sizeof(LimbBlock) + CodesUnits(w).stride * 8; }
size_t packed_x_bytes_limbs(const Weight& w, int64_t m) { return m * limb_row_bytes(w); }

template <DType D>
bool pack_x_limbs_as(const Weight& w, const PackXArgs& a) {
  const CodesUnits units(w);
  bool holds = true;
  for (int64_t i = 0; i < a.m; ++i) {
    LimbBlock* blocks = reinterpret_cast<LimbBlock*>(static_cast<char*>(a.out) + i * limb_row_bytes(w));
    float *scales = reinterpret_cast<float*>(blocks + units.blocks), *sums = scales + units.stride;
    __builtin_memset(scales, 0, units.stride * 8);
    const void* row = x_row(a, i, 2);
    float most = 0.f;
    for (int64_t b = 0; b < units.blocks; ++b, scales += units.per_block, sums += units.per_block) {
      LimbUnits of;
      pack_limbs<D>(w, units, a, row, i, b * kCodesBlock, blocks[b], of);
      most = of.most > most ? of.most : most;
      for (int64_t u = 0; u < units.per_block; ++u) {
        scales[u] = of.scale[u];
        sums[u] = static_cast<float>(of.sums[0][u] * 256 + of.sums[1][u]) * of.scale[u];
      }
    }
    holds &= limbs_hold(most);
  }
  return holds;
}

bool pack_x_limbs(const Weight& w, const PackXArgs& a) {
  return a.dtype == DType::bf16 ? pack_x_limbs_as<DType::bf16>(w, a) : pack_x_limbs_as<DType::f16>(w, a);
}

// kWhole: a unit is a block.
template <int kBits, bool kWhole, int kM>
class Limbs {
 public:
  static constexpr int kRows = kM;
  // A row of x meets rows of codes one after another, as they lie in memory. More rows of x are loaded once for all rows of a step.
  static constexpr int kSide = kM == 1 ? 1 : kCodesRows;
  struct Values {
    Vf start[kCodesRows][kM];  // minus zero points times sums of x, in any lanes
    alignas(64) float scales[kM][kCodesRows][kCodesUnits + kLanes];  // of weights times those of x; a vector may begin with the last one
  };

  Limbs(const ProductArgs& a, int64_t first)
      : w_(*a.weight), units_(w_), x_(static_cast<const char*>(a.packed_x) + first * limb_row_bytes(w_)), x_row_(limb_row_bytes(w_)) {
    lane_unit_ = unit_of_lanes(kBits == 4 ? units_.per_block : units_.per_block / 2);
    if (units_.per_group == 1) return;
    for (int64_t u = 0; u < units_.stride; ++u)
      group_after_[u] = u < units_.count ? static_cast<uint32_t>(u / units_.per_group - u / kLanes * kLanes / units_.per_group) : 0;
  }

  void load(const char* scales, const uint8_t* zeros, int64_t r, Values& to) const {
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) to.start[r][i] = zero();
    for (int64_t u = 0; u < units_.stride; u += kLanes) {
      const int64_t group = u / units_.per_group, count = w_.groups - group < kLanes ? w_.groups - group : kLanes;
      Vf scale = load_first(scales, w_.scale_dtype, group, count);
      Vf offset = mul(scale, zeros ? to_float(load_first_bytes(zeros + group, count)) : set1(kBits == 4 ? 8.f : 128.f));
      if (units_.per_group > 1) {
        const Vi index = _mm512_load_si512(group_after_ + u);
        scale = _mm512_permutexvar_ps(index, scale);
        offset = _mm512_permutexvar_ps(index, offset);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kM; ++i) {
        const float* of_x = x_scales(i) + u;
        store(to.scales[i][r] + u, mul(scale, cpu::load(of_x)));
        to.start[r][i] = fnma(offset, cpu::load(of_x + units_.stride), to.start[r][i]);
      }
    }
  }

  void rows(const uint8_t* const rows[kCodesRows], const CodesAhead& ahead, const Values& values, Vf sums[kCodesRows][kM]) const {
#pragma GCC unroll 4
    for (int r = 0; r < kCodesRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kM; ++i) sums[r][i] = values.start[r][i];
    }
    const Vi nibbles = _mm512_set1_epi32(0x0f0f0f0f);
    const int64_t per_block = kWhole ? 1 : units_.per_block;
#pragma GCC unroll 4
    for (int first = 0; first < kCodesRows; first += kSide) {
      for (int64_t b = 0; b < units_.blocks; ++b) {
#pragma GCC unroll 4
        for (int r = first; r < first + kSide; ++r) {
          const uint8_t* codes = rows[r] + b * (kBits * 16);
          Vi v[2];
          v[0] = _mm512_loadu_si512(codes);
          if constexpr (kBits == 4) {
            fetch(rows, ahead, r, b);
            v[1] = _mm512_and_si512(_mm512_srli_epi32(v[0], 4), nibbles);
            v[0] = _mm512_and_si512(v[0], nibbles);
          } else {
            fetch(rows, ahead, r, 2 * b);
            fetch(rows, ahead, r, 2 * b + 1);
            v[1] = _mm512_loadu_si512(codes + 64);
          }
#pragma GCC unroll 4
          for (int i = 0; i < kM; ++i) {
            const LimbBlock& x = reinterpret_cast<const LimbBlock*>(x_ + i * x_row_)[b];
            const float* scale = values.scales[i][r] + b * per_block;
            Vf& sum = sums[r][i];
            if constexpr (kWhole) {
              sum = fma(to_float(product(v, x, 0, 2)), set1(*scale), sum);
            } else if constexpr (kBits == 4) {
              sum = fma(to_float(product(v, x, 0, 2)), _mm512_permutexvar_ps(lane_unit_, cpu::load(scale)), sum);
            } else {
              sum = fma(to_float(product(v, x, 0, 1)), _mm512_permutexvar_ps(lane_unit_, cpu::load(scale)), sum);
              sum = fma(to_float(product(v, x, 1, 2)), _mm512_permutexvar_ps(lane_unit_, cpu::load(scale + per_block / 2)), sum);
            }
          }
        }
      }
    }
  }

 private:
  const float* x_scales(int64_t i) const { return reinterpret_cast<const float*>(x_ + i * x_row_ + units_.blocks * sizeof(LimbBlock)); }

  static inline __attribute__((always_inline)) void fetch(const uint8_t* const rows[kCodesRows], const CodesAhead& ahead, int r, int64_t line) {
    if constexpr (kSide == 1) fetch_line(rows[r] + line * 64 + ahead.bytes);
    else fetch_codes(rows[0], ahead, r, line);
  }

  // Of vectors first..last - 1.
  static inline __attribute__((always_inline)) Vi product(const Vi (&v)[2], const LimbBlock& x, int first, int last) {
    Vi sum = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int h = first; h < last; ++h) sum = _mm512_dpbusd_epi32(sum, v[h], _mm512_load_si512(x.bytes[0][h]));
    sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 2
    for (int h = first; h < last; ++h) sum = _mm512_dpbusd_epi32(sum, v[h], _mm512_load_si512(x.bytes[1][h]));
    return sum;
  }

  const Weight& w_;
  const CodesUnits units_;
  const char* x_;
  const int64_t x_row_;
  Vi lane_unit_;  // of a vector, from its first one
  alignas(64) uint32_t group_after_[kCodesUnits];  // of a unit of a larger group, from the group of the first of sixteen
};

template <int kBits, bool kWhole>
void multiply_limbs_as(const ProductArgs& a) {
  int64_t first = 0;
  for (; a.m - first >= kLimbRows; first += kLimbRows) multiply_codes<Limbs<kBits, kWhole, kLimbRows>>(a, first);
  if (a.m - first == 3) multiply_codes<Limbs<kBits, kWhole, 3>>(a, first);
  else if (a.m - first == 2) multiply_codes<Limbs<kBits, kWhole, 2>>(a, first);
  else if (a.m - first == 1) multiply_codes<Limbs<kBits, kWhole, 1>>(a, first);
}

void multiply_limbs(const ProductArgs& a) {
  const bool whole = CodesUnits(*a.weight).per_block == 1;
  if (a.weight->bits == 4) whole ? multiply_limbs_as<4, true>(a) : multiply_limbs_as<4, false>(a);
  else whole ? multiply_limbs_as<8, true>(a) : multiply_limbs_as<8, false>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
