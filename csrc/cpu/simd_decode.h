// Packed codes to fp32 or 16-bit weights. Included after simd_math.h.
#pragma once

#include "simd_memory.h"

namespace int4_emu::cpu {
namespace {

// One row of codes with what gives them a value. Code p of the row lies at p - origin in `codes`.
struct CodeRow {
  const uint8_t* codes;
  int64_t origin;
  int bits;
  bool even_odd;        // int4 words ordered k0,k2,k4,k6,k1,k3,k5,k7 instead of ascending; origin is then a multiple of 8
  const void* scales;   // [groups]
  DType scale_dtype;
  const uint8_t* zeros; // [groups] or null: 8 or 128
  int64_t group_size;
};

inline int code_at(const CodeRow& row, int64_t p) {
  const int64_t i = p - row.origin;
  if (row.bits == 8) return row.codes[i];
  if (!row.even_odd) return (row.codes[i / 2] >> (4 * (i & 1))) & 15;
  const int64_t nibble = (i & 1) * 4 + (i & 7) / 2;
  return (row.codes[i / 8 * 4 + nibble / 2] >> (4 * (nibble & 1))) & 15;
}

// (code - zero) * scale of all sixteen codes, rounded to the 16-bit type D. `finite`: the scale is, and so makes no NaN.
template <DType D>
inline Table16 value_table(Vf zero_point, Vf scale, bool finite) {
  alignas(64) uint16_t entries[16];
  const auto values = [&](int first) { return mul(sub(add(to_float(iota()), set1(static_cast<float>(first))), zero_point), scale); };
  if constexpr (D == DType::bf16 && kLanes == 8) {
    if (finite) {
      store_bf16_numbers(entries, values(0), values(8));
      return make_table(entries);
    }
  }
  for (int i = 0; i < 16; i += kLanes) store_as<D>(entries, i, values(i));
  return make_table(entries);
}

// Fewer than kLanes codes, or codes that do not start on a word.
template <DType D>
inline void decode_few(const CodeRow& row, int64_t p, int64_t count, float zero_point, float scale, void* out, int64_t i) {
  alignas(64) float buffer[kLanes] = {0};
  for (int64_t j = 0; j < count; ++j) buffer[j] = static_cast<float>(code_at(row, p + j));
  store_tail<D>(out, i, mul(sub(load(buffer), set1(zero_point)), set1(scale)), count);
}

// Codes first..last of a row, all of one group, to out[0..last - first).
template <DType D>
inline void decode_group(const CodeRow& row, int64_t first, int64_t last, float zero_point, float scale, char* out) {
  const int64_t mask = row.bits == 8 ? 0 : row.even_odd ? 7 : 1;  // a vector of codes starts where these bits are 0
  int64_t p = first, head = -first & mask;
  if (head > 0) {
    if (head > last - first) head = last - first;
    decode_few<D>(row, p, head, zero_point, scale, out, 0);
    p += head;
  }
  if constexpr (D != DType::f32) {
    // A table costs about as much as decoding 16 codes one vector at a time.
    if (row.bits == 4 && !row.even_odd && last - p >= 32) {
      const Table16 table = value_table<D>(set1(zero_point), set1(scale), scale - scale == 0.f);
      const uint8_t* codes = row.codes + (p - row.origin) / 2;
      for (; p + 32 <= last; p += 32, codes += 16) lookup32(table, codes, reinterpret_cast<uint16_t*>(out) + (p - first));
    }
  }
  const Vf z = set1(zero_point), s = set1(scale);
  if (row.bits == 8) {
    const uint8_t* codes = row.codes - row.origin;
    if constexpr (D == DType::bf16) {
      // A finite scale makes no NaN.
      for (; scale - scale == 0.f && p + 2 * kLanes <= last; p += 2 * kLanes) {
        const Vf a = mul(sub(codes8(codes + p), z), s), b = mul(sub(codes8(codes + p + kLanes), z), s);
        store_bf16_numbers(reinterpret_cast<uint16_t*>(out) + (p - first), a, b);
      }
    }
    for (; p + kLanes <= last; p += kLanes) store_as<D>(out, p - first, mul(sub(codes8(codes + p), z), s));
  } else {
    const Vi shifts = code_shifts(row.even_odd);
    const uint8_t* codes = row.codes + (p - row.origin) / 2;
    for (; p + kLanes <= last; p += kLanes, codes += kLanes / 2) store_as<D>(out, p - first, mul(sub(codes4(codes, shifts), z), s));
  }
  if (p < last) decode_few<D>(row, p, last - p, zero_point, scale, out, p - first);
}

inline float zero_point_of(const CodeRow& row, int64_t group) {
  return row.zeros ? static_cast<float>(row.zeros[group]) : row.bits == 4 ? 8.f : 128.f;
}

// Zero points and scales of groups first..first + count <= kLanes, in fp32.
inline void group_values(const CodeRow& row, int64_t first, int64_t count, float* zero_points, float* scales) {
  if (count < kLanes) {
    for (int64_t g = 0; g < count; ++g) {
      zero_points[g] = zero_point_of(row, first + g);
      scales[g] = scalar_at(row.scales, row.scale_dtype, first + g);
    }
    return;
  }
  store(zero_points, row.zeros ? codes8(row.zeros + first) : set1(row.bits == 4 ? 8.f : 128.f));
  if (row.scale_dtype == DType::f32) store(scales, load_as<DType::f32>(row.scales, first));
  else if (row.scale_dtype == DType::f16) store(scales, load_as<DType::f16>(row.scales, first));
  else store(scales, load_as<DType::bf16>(row.scales, first));
}

// A multiple of 32 codes of one group, canonical int4 or int8. Streamed, each block goes past the caches when it is done: rows that left as
// a whole had memory wait for arithmetic, then arithmetic for memory. `out` is aligned to 32 bytes then.
constexpr int64_t kBlockCodes = 32;
template <DType D, int kBits, bool kStream>
inline void decode_blocks(const uint8_t* codes, int64_t count, Vf zero_point, Vf scale, bool finite, char* out) {
  constexpr int64_t kCodeBytes = kBlockCodes * kBits / 8, kOutBytes = kBlockCodes * kBytes<D>;
  const auto for_each_block = [&](auto decode) {
    alignas(64) char block[kOutBytes];
    for (int64_t p = 0; p < count; p += kBlockCodes, codes += kCodeBytes, out += kOutBytes) {
      decode(kStream ? block : out);
      if constexpr (kStream) copy_run<true>(out, block, kOutBytes);
    }
  };
  if constexpr (D != DType::f32 && kBits == 4) {
    const Table16 table = value_table<D>(zero_point, scale, finite);
    for_each_block([&](char* to) { lookup32(table, codes, reinterpret_cast<uint16_t*>(to)); });
    return;
  }
  const Vi shifts = code_shifts(false);
  const auto value = [&](int64_t j) {
    if constexpr (kBits == 4) return mul(sub(codes4(codes + j / 2, shifts), zero_point), scale);
    else return mul(sub(codes8(codes + j), zero_point), scale);
  };
  if (D == DType::bf16 && finite) {
    for_each_block([&](char* to) {
#pragma GCC unroll 2
      for (int64_t j = 0; j < kBlockCodes; j += 2 * kLanes) store_bf16_numbers(reinterpret_cast<uint16_t*>(to) + j, value(j), value(j + kLanes));
    });
    return;
  }
  for_each_block([&](char* to) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kBlockCodes; j += kLanes) store_as<D>(to, j, value(j));
  });
}

// decode_row for canonical codes in whole groups of whole blocks, without decode_group's questions, a vector of groups at a time: their
// zero points and scales are brought to fp32 at once and broadcast from there. Returns how many codes, which other rows have none of.
template <DType D, int kBits, bool kStream>
inline int64_t decode_whole_groups(const CodeRow& row, int64_t k0, int64_t k, char* out) {
  const uint8_t* codes = row.codes + (k0 - row.origin) * kBits / 8;
  alignas(64) float zero_points[kLanes], scales[kLanes];
  const int64_t last = (k0 + k) / row.group_size;
  for (int64_t group = k0 / row.group_size; group < last; group += kLanes) {
    const int64_t count = last - group < kLanes ? last - group : kLanes;
    group_values(row, group, count, zero_points, scales);
    for (int64_t g = 0; g < count; ++g, codes += row.group_size * kBits / 8, out += row.group_size * kBytes<D>) {
      decode_blocks<D, kBits, kStream>(codes, row.group_size, set1(zero_points[g]), set1(scales[g]), scales[g] - scales[g] == 0.f, out);
    }
  }
  return last * row.group_size - k0;
}

template <DType D, bool kStream>
inline int64_t decode_whole_groups(const CodeRow& row, int64_t k0, int64_t k, void* out) {
  if (row.even_odd || row.group_size % kBlockCodes != 0 || k0 % row.group_size != 0) return 0;
  char* to = static_cast<char*>(out);
  return row.bits == 4 ? decode_whole_groups<D, 4, kStream>(row, k0, k, to) : decode_whole_groups<D, 8, kStream>(row, k0, k, to);
}

// Codes k0..k0+k of a row to `out`, elements of D; one rounding of the exact fp32 product.
template <DType D>
inline void decode_row(const CodeRow& row, int64_t k0, int64_t k, void* out) {
  int64_t p = k0 + decode_whole_groups<D, false>(row, k0, k, out);
  int64_t group = p / row.group_size;
  while (p < k0 + k) {
    const int64_t group_end = (group + 1) * row.group_size;
    const int64_t end = group_end < k0 + k ? group_end : k0 + k;
    const float scale = scalar_at(row.scales, row.scale_dtype, group);
    decode_group<D>(row, p, end, zero_point_of(row, group), scale, static_cast<char*>(out) + (p - k0) * kBytes<D>);
    p = end;
    ++group;
  }
}

// Row n, columns k0..k0+k of one expert in either layout.
template <DType D>
inline void decode_weight_row(const Weight& w, int64_t expert, int64_t n, int64_t k0, int64_t k, void* out) {
  const int64_t group0 = (expert * w.n + n) * w.groups;
  CodeRow row;
  row.bits = w.bits;
  row.scales = static_cast<const char*>(w.scales) + group0 * (w.scale_dtype == DType::f32 ? 4 : 2);
  row.scale_dtype = w.scale_dtype;
  row.zeros = w.zeros ? w.zeros + group0 : nullptr;
  row.group_size = w.group_size;
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + expert * w.expert_stride;
  if (w.layout == Layout::canonical) {
    row.codes = base + n * w.n_stride;
    row.origin = 0;
    row.even_odd = false;
    decode_row<D>(row, k0, k, out);
    return;
  }
  // cpu_n16: the row's words lie 64 bytes apart; collect a stretch of them first.
  constexpr int64_t kStretch = 128;
  alignas(64) uint32_t words[kStretch];
  const int64_t codes_per_word = 32 / w.bits;
  const uint8_t* column = base + (n / 16) * (w.k / codes_per_word) * 64 + (n % 16) * 4;
  row.codes = reinterpret_cast<const uint8_t*>(words);
  row.even_odd = w.bits == 4;
  for (int64_t p = k0; p < k0 + k;) {
    const int64_t first_word = p / codes_per_word;
    const int64_t available = w.k / codes_per_word - first_word;
    const int64_t count = available < kStretch ? available : kStretch;
    for (int64_t i = 0; i < count; ++i) __builtin_memcpy(words + i, column + (first_word + i) * 64, 4);
    row.origin = first_word * codes_per_word;
    const int64_t end = row.origin + count * codes_per_word < k0 + k ? row.origin + count * codes_per_word : k0 + k;
    decode_row<D>(row, p, end - p, static_cast<char*>(out) + (p - k0) * kBytes<D>);
    p = end;
  }
}

template <DType D>
inline void dequantize_row_to(const CodeRow& row, int64_t k, void* out, void* staged) {
  if (staged == nullptr) return decode_row<D>(row, 0, k, out);
  const int64_t done = decode_whole_groups<D, true>(row, 0, k, out);
  decode_row<D>(row, done, k - done, staged);
  copy_run<true>(static_cast<char*>(out) + done * kBytes<D>, static_cast<const char*>(staged), (k - done) * kBytes<D>);
}

void dequantize_row(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k, int64_t group_size,
                    void* out, DType out_dtype, void* staged) {
  const CodeRow row{codes, 0, bits, false, scales, scale_dtype, zeros, group_size};
  if (out_dtype == DType::f32) dequantize_row_to<DType::f32>(row, k, out, staged);
  else if (out_dtype == DType::f16) dequantize_row_to<DType::f16>(row, k, out, staged);
  else dequantize_row_to<DType::bf16>(row, k, out, staged);
}

}  // namespace
}  // namespace int4_emu::cpu
