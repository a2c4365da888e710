// AMD's matrix instructions and byte permutation behind small functions: the only file that names these builtins. Each function has a
// body on the architectures that have the instruction (`__gfx*__` of the pass that compiles them) and is never called on others.
#pragma once

#include "numeric.cuh"

namespace int4_emu::gpu::amd {

// What a lane holds of a 16x16 result: a quarter or an eighth of a wave's 256 numbers.
using Float4 = float __attribute__((vector_size(16)));
using Float8 = float __attribute__((vector_size(32)));
using Short4 = short __attribute__((vector_size(8)));
using Short8 = short __attribute__((vector_size(16)));
using Short16 = short __attribute__((vector_size(32)));
#if defined(INT4_EMU_SIMT)  // a host's compiler need not know 16-bit floats, and bits are all that counts there
using Half4 = Short4;
using Half8 = Short8;
using Half16 = Short16;
using Brain8 = Short8;
#else
using Half4 = _Float16 __attribute__((vector_size(8)));
using Half8 = _Float16 __attribute__((vector_size(16)));
using Half16 = _Float16 __attribute__((vector_size(32)));
using Brain8 = __bf16 __attribute__((vector_size(16)));
#endif

// The same bits as another type; `from` may be longer.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) <= sizeof(From), "reads past the source");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Bytes 0..3 of the selector pick from low (0..3) and high (4..7).
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__AMDGCN__) || defined(INT4_EMU_SIMT)
  return __builtin_amdgcn_perm(high, low, selector);
#else
  return low ^ high ^ selector;
#endif
}
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return permute(a, b, 0x05040100u); }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) { return permute(a, b, 0x07060302u); }

// (bits & mask) | magic in one instruction. The compiler makes two of it: gfx9 takes one constant outside vector registers, not two.
__device__ __forceinline__ uint32_t and_or(uint32_t bits, uint32_t mask, uint32_t magic) {
#if defined(__AMDGCN__)
  uint32_t out;
  asm("v_and_or_b32 %0, %1, %2, %3" : "=v"(out) : "v"(bits), "s"(mask), "v"(magic));
  return out;
#else
  return (bits & mask) | magic;
#endif
}

// `value`, to be had only after `v` was worked out. A load at an address that waits so may take over the registers that v was made
// from; else the compiler hoists the load and copies them first.
__device__ __forceinline__ uint32_t after(uint32_t value, const Vec4& v) {
#if defined(__AMDGCN__)
  asm("" : "+v"(value) : "v"(v.w[0]), "v"(v.w[1]), "v"(v.w[2]), "v"(v.w[3]));
#else
  (void)v;
#endif
  return value;
}

// A value that is the same in every lane of the wave, for the compiler to know.
__device__ __forceinline__ int uniform(int value) {
#if defined(__AMDGCN__) || defined(INT4_EMU_SIMT)
  return __builtin_amdgcn_readfirstlane(value);
#else
  return value;
#endif
}

// The value, unknown to the compiler: a loop with such a step stays a loop, and its loads stay where they are.
__device__ __forceinline__ int hidden(int value) {
#if defined(__AMDGCN__)
  asm("" : "+s"(value));
#endif
  return value;
}

// The value, as something new each time: what follows from it is worked out where it is used instead of being kept in registers all
// through a loop that has better use for them.
__device__ __forceinline__ int renewed(int value) {
#if defined(__AMDGCN__)
  asm volatile("" : "+v"(value));
#endif
  return value;
}

// c += a * b for eight k of each lane, in the lane's order: c[row][column], a[row][k], b[k][column].
// gfx9: lane l holds row or column l % 16, k's of part l / 16 of four; c rows 4 * (l / 16) + i, column l % 16.
template <class T>
__device__ __forceinline__ void mfma_gfx9(const Vec4& a, const Vec4& b, Float4& c) {
#if defined(__gfx950__)
  if constexpr (std::is_same<T, Bf16>::value) {
    c = __builtin_amdgcn_mfma_f32_16x16x32_bf16(bits_as<Brain8>(a), bits_as<Brain8>(b), c, 0, 0, 0);
  } else {
    c = __builtin_amdgcn_mfma_f32_16x16x32_f16(bits_as<Half8>(a), bits_as<Half8>(b), c, 0, 0, 0);
  }
#elif defined(__gfx90a__) || defined(__gfx942__)
  // Four k's an instruction.
  const Vec4 a_rest = {{a.w[2], a.w[3], 0, 0}}, b_rest = {{b.w[2], b.w[3], 0, 0}};
  if constexpr (std::is_same<T, Bf16>::value) {
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<Short4>(a), bits_as<Short4>(b), c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<Short4>(a_rest), bits_as<Short4>(b_rest), c, 0, 0, 0);
  } else {
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(bits_as<Half4>(a), bits_as<Half4>(b), c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(bits_as<Half4>(a_rest), bits_as<Half4>(b_rest), c, 0, 0, 0);
  }
#else
  (void)a, (void)b, (void)c;
#endif
}

// The same layout in fp32, one k a lane: a is row l % 16 at k = l / 16.
__device__ __forceinline__ void mfma_gfx9_f32(float a, float b, Float4& c) {
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
  c = __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, 0, 0, 0);
#else
  (void)a, (void)b, (void)c;
#endif
}

// gfx11, wave32: lane l holds row or column l % 16 with all sixteen k's, twice over the wave; c rows 2 * i + l / 16, column l % 16.
template <class T>
__device__ __forceinline__ void wmma_gfx11(const Vec4 (&a)[2], const Vec4 (&b)[2], Float8& c) {
#if defined(__GFX11__)
  if constexpr (std::is_same<T, Bf16>::value) {
    c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(bits_as<Short16>(a), bits_as<Short16>(b), c);
  } else {
    c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(bits_as<Half16>(a), bits_as<Half16>(b), c);
  }
#else
  (void)a, (void)b, (void)c;
#endif
}

// gfx12, wave32: lane l holds row or column l % 16, k's of half l / 16; c rows 8 * (l / 16) + i, column l % 16.
template <class T>
__device__ __forceinline__ void wmma_gfx12(const Vec4& a, const Vec4& b, Float8& c) {
#if defined(__GFX12__)
  if constexpr (std::is_same<T, Bf16>::value) {
    c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(bits_as<Short8>(a), bits_as<Short8>(b), c);
  } else {
    c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(bits_as<Half8>(a), bits_as<Half8>(b), c);
  }
#else
  (void)a, (void)b, (void)c;
#endif
}

}  // namespace int4_emu::gpu::amd
