// One row of fp32 x times canonical int4 codes where they lie, on vdpbf16ps: exact q - z. Included after simd_codes512.h.
//
// Codes i and i + 4 of a lane's eight become the halves of a lane by one shift and one lookup; x is packed in that order:
// [row][part of the split][block of 128][i][lane][2].
#pragma once

namespace int4_emu::cpu {
namespace {

size_t packed_x_bytes_dots(const Weight& w, DType x, int64_t m) { return static_cast<size_t>(m * splits_of(x) * w.k) * 2; }

void pack_x_dots(const Weight& w, const PackXArgs& a) {
  alignas(64) uint16_t natural[kMaxSplits][kCodesBlock];
  const int64_t splits = splits_of(a.dtype);
  uint16_t* out = static_cast<uint16_t*>(a.out);
  for (int64_t i = 0; i < a.m; ++i, out += splits * w.k) {
    for (int64_t k0 = 0; k0 < w.k; k0 += kCodesBlock) {
      for (int64_t j = 0; j < kCodesBlock; j += 32) split_columns(a, i, k0 + j, natural[0] + j, kCodesBlock);
      for (int64_t s = 0; s < splits; ++s) {
        uint16_t* to = out + s * w.k + k0;
        for (int64_t lane = 0; lane < kLanes; ++lane)
          for (int64_t c = 0; c < 8; ++c) to[c % 4 * 32 + lane * 2 + c / 4] = natural[s][lane * 8 + c];
      }
    }
  }
}

// sums[r][v] of weight row r and x vector v.
template <bool kZeros, int kVectors>
inline void codes_rows(const CodesShared& t, const uint8_t* const rows[kCodesRows], const CodesGroups& groups, int64_t group_count,
                       Vf sums[kCodesRows][kVectors]) {
#pragma GCC unroll 4
  for (int r = 0; r < kCodesRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  }
  for (int64_t b = 0; b < t.blocks; ++b) {
    const uint16_t* x = static_cast<const uint16_t*>(t.x) + b * kCodesBlock;
#pragma GCC unroll 4
    for (int r = 0; r < kCodesRows; ++r) {
      const uint8_t* codes = rows[r] + b * 64;
      const int64_t group = r * group_count + t.first_group[b];
      fetch_codes(rows[0], t.ahead, r, b);
      Vi index[4], z = _mm512_setzero_si512();
      if constexpr (kZeros) z = _mm512_permutexvar_epi32(t.lane_group, _mm512_loadu_si512(groups.zeros + group));
      code_indices<kZeros>(_mm512_loadu_si512(codes), z, index);
      const Vf scale = _mm512_permutexvar_ps(t.lane_group, load(groups.scales + group));
      Vf part[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) part[v] = zero();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Vi weights = _mm512_permutexvar_epi16(index[i], t.table);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          part[v] = DotBf16::multiply_add(_mm512_loadu_si512(x + v * t.blocks * kCodesBlock + i * 32), weights, part[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(part[v], scale, sums[r][v]);
    }
  }
}

template <bool kZeros, int kVectors>
struct Dots {
  static constexpr bool kZerosAreFloats = false;
  static void rows(const CodesShared& t, const uint8_t* const rows[kCodesRows], const CodesGroups& groups, int64_t group_count,
                   Vf sums[kCodesRows][kVectors]) {
    codes_rows<kZeros, kVectors>(t, rows, groups, group_count, sums);
  }
};

void multiply_dots(const ProductArgs& a) {
  if (a.weight->zeros != nullptr) multiply_codes<true, 1, kMaxSplits, Dots<true, kMaxSplits>>(a);
  else multiply_codes<false, 1, kMaxSplits, Dots<false, kMaxSplits>>(a);
}

}  // namespace
}  // namespace int4_emu::cpu
