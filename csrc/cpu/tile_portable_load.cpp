// Weights of every kind to fp32 panels and dequantised rows, in plain C++. Packed rows go through a buffer of bytes, one code each, so
// that the loops that multiply are the same for both widths and both layouts.
#include "../core/layout.h"
#include "bits.h"
#include "convert.h"
#include "tile.h"

namespace int4_emu::cpu {

void portable_load_panel(const LoadPanelArgs& a);
void portable_dequantize_row(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k,
                             int64_t group_size, void* out, DType out_dtype, void* staged);

namespace {

// Codes that pass through a buffer at once; even, so that a run begins on a byte.
constexpr int64_t kRun = 256;

// Columns k0..k0+k of canonical codes, one a byte. k0 may be odd.
void expand(const uint8_t* codes, int bits, int64_t k0, int64_t k, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes + k0, static_cast<size_t>(k));
    return;
  }
  codes += k0 / 2;
  int64_t i = 0;
  if (k0 % 2 == 1 && k > 0) {
    out[i++] = *codes++ >> 4;
  }
  const int64_t pairs = (k - i) / 2;
  for (int64_t j = 0; j < pairs; ++j) {
    out[i + 2 * j] = codes[j] & 0x0f;
    out[i + 2 * j + 1] = codes[j] >> 4;
  }
  if ((k - i) % 2 == 1) out[k - 1] = codes[pairs] & 0x0f;
}

// Columns k0..k0+k of row n of a matrix in cpu_n16 order; k0 may be any column.
void expand_n16(const uint8_t* data, int bits, int64_t total_k, int64_t n, int64_t k0, int64_t k, uint8_t* out) {
  const int64_t kw = 32 / bits, words = total_k / kw;
  // Block n / 16 is [words][16] words of 4 bytes; the row's next word is 64 bytes on.
  const uint8_t* row = data + (n / 16 * words * 16 + n % 16) * 4;
  for (int64_t j = 0; j < k;) {
    const int64_t word_index = (k0 + j) / kw, first = (k0 + j) % kw;
    uint32_t word = load_word(row + word_index * 64);
    if (bits == 4) word = deinterleave_nibbles(word);
    word >>= first * bits;
    const int64_t count = kw - first < k - j ? kw - first : k - j;
    for (int64_t i = 0; i < count; ++i) out[j + i] = static_cast<uint8_t>((word >> (i * bits)) & (bits == 4 ? 0xfu : 0xffu));
    j += count;
  }
}

// out[j] = (codes[j] - z) * s over columns k0..k0+k, group by group. codes [k]; scales and zeros are those of group 0.
void multiply_out(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k0, int64_t k,
                  int64_t group_size, float* out) {
  for (int64_t j = 0; j < k;) {
    const int64_t group = (k0 + j) / group_size, left = (group + 1) * group_size - (k0 + j);
    const int64_t count = left < k - j ? left : k - j;
    const float scale = load_float(scales, scale_dtype, group);
    const int zero = zeros ? zeros[group] : (bits == 4 ? 8 : 128);
    for (int64_t i = 0; i < count; ++i) out[j + i] = static_cast<float>(static_cast<int>(codes[j + i]) - zero) * scale;
    j += count;
  }
}

// Row n of the expert, columns a.k0..a.k0+a.k, to out [a.k].
void load_packed_row(const LoadPanelArgs& a, int64_t n, float* out) {
  const Weight& w = *a.weight;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + a.expert * w.expert_stride;
  const int64_t row = a.expert * w.n + n;
  const void* scales = element(w.scales, w.scale_dtype, row * w.groups);
  const uint8_t* zeros = w.zeros ? w.zeros + row * w.groups : nullptr;
  uint8_t codes[kRun];
  for (int64_t j = 0; j < a.k; j += kRun) {
    const int64_t length = a.k - j < kRun ? a.k - j : kRun;
    if (w.layout == Layout::cpu_n16) {
      expand_n16(data, w.bits, w.k, n, a.k0 + j, length, codes);
    } else {
      expand(data + n * w.n_stride, w.bits, a.k0 + j, length, codes);
    }
    multiply_out(codes, w.bits, scales, w.scale_dtype, zeros, a.k0 + j, length, w.group_size, out + j);
  }
}

// Panel rows j of a dense matrix whose rows are neighbours in memory (a transposed view): tiles keep both sides in L1.
void load_transposed(const LoadPanelArgs& a, const void* first) {
  const Weight& w = *a.weight;
  float* out = static_cast<float*>(a.out);
  constexpr int64_t kTile = 16;
  for (int64_t i0 = 0; i0 < a.k; i0 += kTile) {
    const int64_t i1 = i0 + kTile < a.k ? i0 + kTile : a.k;
    for (int64_t j = 0; j < a.n; ++j) {
      for (int64_t i = i0; i < i1; ++i) out[j * a.ld + i] = load_float(first, w.dtype, j * w.n_stride + i * w.k_stride);
    }
  }
}

}  // namespace

void portable_load_panel(const LoadPanelArgs& a) {
  const Weight& w = *a.weight;
  float* out = static_cast<float*>(a.out);
  if (w.packed) {
    for (int64_t j = 0; j < a.n; ++j) load_packed_row(a, a.n0 + j, out + j * a.ld);
  } else {
    const void* first = element(w.data, w.dtype, a.expert * w.expert_stride + a.n0 * w.n_stride + a.k0 * w.k_stride);
    if (w.k_stride == 1) {
      for (int64_t j = 0; j < a.n; ++j) load_floats(element(first, w.dtype, j * w.n_stride), w.dtype, a.k, out + j * a.ld);
    } else {
      load_transposed(a, first);
    }
  }
  // Zeros up to the panel's width: the products run over whole vectors.
  for (int64_t j = 0; j < a.n; ++j) {
    for (int64_t i = a.k; i < a.ld; ++i) out[j * a.ld + i] = 0.f;
  }
}

void portable_dequantize_row(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k,
                             int64_t group_size, void* out, DType out_dtype, void*) {
  uint8_t bytes[kRun];
  float values[kRun];
  for (int64_t j = 0; j < k; j += kRun) {
    const int64_t length = k - j < kRun ? k - j : kRun;
    expand(codes, bits, j, length, bytes);
    multiply_out(bytes, bits, scales, scale_dtype, zeros, j, length, group_size, values);
    store_floats(values, out_dtype, length, element(out, out_dtype, j));
  }
}

}  // namespace int4_emu::cpu
