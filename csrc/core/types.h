// Plain types shared by every device: the numbers of the enums are part of the op schemas.
#pragma once

#include <cstdint>

namespace int4_emu {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

// How a checkpoint stores codes, zero points and scales: see FormatTraits in layout.h.
enum class Format : int32_t {
  canonical = 0,
  compressed_tensors = 1,
  gptq_v1 = 2,
  gptq_v2 = 3,
  awq = 4,
  quark_int_order = 5,
  quark_int_reorder = 6,
  quark_uint_order = 7,
  quark_uint_reorder = 8,
  quark_int_channel_order = 9,
  quark_int_channel_reorder = 10,
  quark_uint_channel_order = 11,
  quark_uint_channel_reorder = 12,
  gptq_v1_nibble = 13,
};
constexpr int kFormatCount = 14;

// Below 16 gated, act(gate) * up; from 16 on the same functions without a gate, in the same order.
enum class Activation : int32_t {
  silu = 0,
  gelu = 1,
  gelu_tanh = 2,
  relu2 = 3,
  swigluoai = 4,
  silu_no_mul = 16,
  gelu_no_mul = 17,
  gelu_tanh_no_mul = 18,
  relu2_no_mul = 19,
};

// Rows of w13: all gate rows and then all up rows, or g0, u0, g1, u1, ...
enum class W13Order : int32_t { halves = 0, interleaved = 1 };

// Order of the packed codes in memory; see layout.h for what each id means.
enum class Layout : int32_t { canonical = 0, cpu_n16 = 1 };

constexpr int64_t dtype_bytes(DType t) { return t == DType::f32 ? 4 : 2; }

}  // namespace int4_emu
