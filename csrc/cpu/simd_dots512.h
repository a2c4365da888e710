// One row of fp32 x times canonical int4 codes where they lie, on vdpbf16ps: exact q - z. Included after simd_codes512.h.
//
// Codes i and i + 4 of a lane's eight become the halves of a lane by one shift and one lookup; x is packed in that order:
// [part of the split][block of 128][i][lane][2].
#pragma once

namespace int4_emu::cpu {
namespace {

size_t packed_x_bytes_dots(const Weight& w) { return static_cast<size_t>(kMaxSplits * w.k) * 2; }

void pack_x_dots(const Weight& w, const PackXArgs& a) {
  alignas(64) uint16_t natural[kMaxSplits][kCodesBlock];
  for (int64_t k0 = 0; k0 < w.k; k0 += kCodesBlock) {
    for (int64_t j = 0; j < kCodesBlock; j += 32) split_columns(a, 0, k0 + j, natural[0] + j, kCodesBlock);
    for (int64_t s = 0; s < kMaxSplits; ++s) {
      uint16_t* to = static_cast<uint16_t*>(a.out) + s * w.k + k0;
      for (int64_t lane = 0; lane < kLanes; ++lane)
        for (int64_t c = 0; c < 8; ++c) to[c % 4 * 32 + lane * 2 + c / 4] = natural[s][lane * 8 + c];
    }
  }
}

bool serves_dots(const Weight& w, DType x, int64_t m) { return x == DType::f32 && m == 1 && w.bits == 4 && serves_codes(w); }

template <bool kZeros>
class Dots {
 public:
  static constexpr int kRows = 1, kSide = kCodesRows;
  struct Values {
    alignas(64) float scales[kCodesRows * kCodesUnits + kLanes];
    alignas(64) uint32_t zeros[kCodesRows * kCodesUnits + kLanes];  // in each byte
  };

  Dots(const ProductArgs& a, int64_t /*first*/)
      : w_(*a.weight),
        x_(static_cast<const uint16_t*>(a.packed_x)),
        units_(w_),
        table_(code_table(kZeros)),
        lane_group_(unit_of_lanes(units_.per_block)) {}

  void load(const char* scales, const uint8_t* zeros, int64_t r, Values& to) const {
    for (int64_t g = 0; g < w_.groups; g += kLanes) {
      const int64_t count = w_.groups - g < kLanes ? w_.groups - g : kLanes, at = r * units_.stride + g;
      store(to.scales + at, load_first(scales, w_.scale_dtype, g, count));
      if constexpr (kZeros) _mm512_storeu_si512(to.zeros + at, replicate_bytes(load_first_bytes(zeros + g, count)));
    }
  }

  void rows(const uint8_t* const rows[kCodesRows], const CodesAhead& ahead, const Values& values, Vf sums[kCodesRows][kRows]) const {
#pragma GCC unroll 4
    for (int r = 0; r < kCodesRows; ++r) sums[r][0] = zero();
    for (int64_t b = 0; b < units_.blocks; ++b) {
      const uint16_t* x = x_ + b * kCodesBlock;
      const int64_t group = b * units_.per_block / units_.per_group;
#pragma GCC unroll 4
      for (int r = 0; r < kCodesRows; ++r) {
        fetch_codes(rows[0], ahead, r, b);
        Vi index[4], z = _mm512_setzero_si512();
        if constexpr (kZeros) z = _mm512_permutexvar_epi32(lane_group_, _mm512_loadu_si512(values.zeros + r * units_.stride + group));
        code_indices<kZeros>(_mm512_loadu_si512(rows[r] + b * 64), z, index);
        Vf part[kMaxSplits];
#pragma GCC unroll 3
        for (int s = 0; s < kMaxSplits; ++s) part[s] = zero();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Vi weights = _mm512_permutexvar_epi16(index[i], table_);
#pragma GCC unroll 3
          for (int s = 0; s < kMaxSplits; ++s)
            part[s] = DotBf16::multiply_add(_mm512_loadu_si512(x + s * w_.k + i * 32), weights, part[s]);
        }
        const Vf scale = _mm512_permutexvar_ps(lane_group_, cpu::load(values.scales + r * units_.stride + group));
#pragma GCC unroll 3
        for (int s = 0; s < kMaxSplits; ++s) sums[r][0] = fma(part[s], scale, sums[r][0]);
      }
    }
  }

 private:
  const Weight& w_;
  const uint16_t* x_;
  CodesUnits units_;
  Vi table_, lane_group_;
};

void multiply_dots(const ProductArgs& a) {
  if (a.weight->zeros != nullptr) multiply_codes<Dots<true>>(a, 0);
  else multiply_codes<Dots<false>>(a, 0);
}

}  // namespace
}  // namespace int4_emu::cpu
