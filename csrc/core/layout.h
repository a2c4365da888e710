// Layout ids and the layout algebra of checkpoint formats.
//
// canonical: rows of K codes, int4 two a byte with the even index in the low nibble, int8 one a byte.
// cpu_n16:   the same 32-bit words, transposed in blocks of 16 rows: [N/16][K/kw][16] words of kw = 32/bits codes,
//            int4 codes ordered k0,k2,k4,k6,k1,k3,k5,k7 from the low nibble, int8 in plain order.
//            Needs N % 16 == 0 and K % kw == 0.
#pragma once

#include "types.h"

namespace int4_emu {

// How a checkpoint format stores codes, zero points and scales.
struct FormatTraits {
  bool transposed;       // qweight [I.., O..], zeros and scales [C, O]; else [O.., I..], scales [O, C]
  bool packed_along_out; // codes of one word are neighbours along O (AWQ, Quark per group); else along I
  bool interleaved;      // AWQ slot order: column j of eight sits in slot 0,4,1,5,2,6,3,7
  bool is_signed;        // two's complement codes and zeros
  bool plain_int8;       // at 8 bits one int8/uint8 element a code, nothing packed (Quark)
  bool scales_are_1d;    // per-channel Quark: scales [O], zeros [ceil(O/8)] or [O]
  enum class Zeros { as_is, word_minus_one, code_minus_one } zeros;
};

FormatTraits format_traits(Format format);
const char* format_name(Format format);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Bytes of one canonical row of `k` codes.
constexpr int64_t row_bytes(int64_t k, int bits) { return ceil_div(k * bits, 8); }

// Whether a matrix [n, k] can be stored in `layout`.
constexpr bool layout_fits(Layout layout, int64_t n, int64_t k, int bits) {
  return layout == Layout::canonical || (layout == Layout::cpu_n16 && n % 16 == 0 && k % (32 / bits) == 0);
}

}  // namespace int4_emu
