// canonical <-> cpu_n16: blocks of 16 rows with their 32-bit words transposed (core/layout.h).
#include <cstring>

#include "../core/layout.h"
#include "api.h"
#include "bits.h"

namespace int4_emu::cpu {
namespace {

constexpr int64_t kBlockRows = 16;

// canonical [16][words] and tiles [words][16], of one block of rows.
template <bool kForward>
void convert_block(const uint8_t* in, uint8_t* out, int64_t words, int bits) {
  for (int64_t w = 0; w < words; ++w) {
    for (int64_t r = 0; r < kBlockRows; ++r) {
      // Even codes move to the low half of the word: a shift and the mask 0x000f000f then give two neighbours as 16-bit lanes.
      const int64_t canonical = 4 * (r * words + w), tiled = 4 * (w * kBlockRows + r);
      const uint32_t word = load_word(in + (kForward ? canonical : tiled));
      const uint32_t moved = bits == 8 ? word : (kForward ? interleave_nibbles(word) : deinterleave_nibbles(word));
      store_word(out + (kForward ? tiled : canonical), moved);
    }
  }
}

template <bool kForward>
Status convert(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, const Parallel& parallel) {
  if (bits != 4 && bits != 8) return make_error(Code::invalid_value, "bits must be 4 or 8, got %d", bits);
  if (layout == Layout::canonical) {
    const int64_t row = row_bytes(k, bits);
    parallel.for_each(batch * n, 64, [&](int64_t begin, int64_t end) {
      std::memcpy(out + begin * row, in + begin * row, static_cast<size_t>((end - begin) * row));
    });
    return {};
  }
  if (!layout_fits(layout, n, k, bits)) {
    return make_error(Code::invalid_value, "layout %d needs N %% 16 == 0 and K %% %d == 0, got N=%lld, K=%lld", static_cast<int>(layout),
                      32 / bits, (long long)n, (long long)k);
  }
  const int64_t words = k * bits / 32, bytes = words * 4 * kBlockRows;
  parallel.for_each(batch * (n / kBlockRows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) convert_block<kForward>(in + i * bytes, out + i * bytes, words, bits);
  });
  return {};
}

}  // namespace

Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, const Parallel& parallel) {
  return convert<true>(in, out, batch, n, k, bits, layout, parallel);
}

Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout, const Parallel& parallel) {
  return convert<false>(in, out, batch, n, k, bits, layout, parallel);
}

}  // namespace int4_emu::cpu
