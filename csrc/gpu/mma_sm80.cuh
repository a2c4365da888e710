// NVIDIA's sm_80 instructions, and exact unpacking of 4- and 8-bit codes to pairs of 16-bit floats. Included only by *_sm80 files.
#pragma once

#include "numeric.cuh"

namespace int4_emu::gpu::sm80 {

__device__ inline void copy_async_16(void* shared, const void* global, bool inside) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global), "r"(inside ? 16 : 0) : "memory");
}
// The same, and a sign to the L2 that the rest of the 128-byte line is wanted too.
__device__ inline void copy_async_16_line(void* shared, const void* global, bool inside) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global), "r"(inside ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void copy_async_4(void* shared, const void* global, bool inside) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(global), "r"(inside ? 4 : 0));
}
__device__ inline void commit_async() { asm volatile("cp.async.commit_group;\n"); }
template <int kNewest>
__device__ inline void wait_async() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kNewest) : "memory");
}

// Streams past L1, which x keeps.
__device__ inline Vec4 load_streaming(const void* p) {
  Vec4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
}

__device__ inline void load_matrices(uint32_t* r, const void* shared) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// What differs between bf16 and fp16: the mma, the packed multiply-add, and the number in whose last bits a code fits: kBase + code.
template <class T>
struct Pair;

template <>
struct Pair<Bf16> {
  static constexpr uint32_t kMagic = 0x43004300u, kSixteen = 0x41804180u, kOne = 0x3f803f80u;
  static constexpr float kBase = 128.f;
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  __device__ static uint32_t pack(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  // c[16 x 8] += a[16 x 16] b[16 x 8]
  __device__ static void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

template <>
struct Pair<Fp16> {
  static constexpr uint32_t kMagic = 0x64006400u, kSixteen = 0x4c004c00u, kOne = 0x3c003c00u;
  static constexpr float kBase = 1024.f;
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  __device__ static uint32_t pack(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  __device__ static void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

template <class T>
__device__ inline uint32_t splat(float f) {
  return Pair<T>::pack(f, f);
}

// kBase + nibble j and kBase + nibble j + 4 of a word, exact in both types.
template <class T>
__device__ inline uint32_t nibble_pair(uint32_t word, int j) {
  uint32_t out;  // (word & 0x000f000f) | kMagic in one instruction
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(out) : "r"(word >> (4 * j)), "n"(0x000f000f), "r"(Pair<T>::kMagic));
  return out;
}

// What unpack_int4 and unpack_int8 subtract: -(kBase + zero), in whose last bits a zero point below 128 fits, and -zero.
template <class T>
__device__ inline uint32_t minus_int4(int zero) {
  return (Pair<T>::kMagic | 0x80008000u) + static_cast<uint32_t>(zero) * 0x00010001u;
}
// Likewise of a zero point that stands in both halves of `both`.
template <class T>
__device__ inline uint32_t minus_int4_pair(uint32_t both) {
  return (Pair<T>::kMagic | 0x80008000u) + both;
}
template <class T>
__device__ inline uint32_t minus_int8(int zero) {
  return splat<T>(-static_cast<float>(zero));
}

// Half `i` of a word, moved to the top; byte `i` of a word, as two numbers of 16 bits.
__device__ inline uint32_t halfword_on_top(uint32_t word, uint32_t i) { return __byte_perm(word, 0, 0x1044u + (i & 1u) * 0x2200u); }
__device__ inline uint32_t byte_twice(uint32_t word, uint32_t i) { return __byte_perm(word, 0, 0x4040u + (i & 3u) * 0x0101u); }

__device__ inline float half_to_float(uint32_t bits) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }\n" : "=f"(f) : "r"(bits));
  return f;
}

// code - zero of a word of eight 4-bit codes, exact: pairs (0, 4), (1, 5), (2, 6), (3, 7).
template <class T>
__device__ inline void unpack_int4(uint32_t word, uint32_t minus, uint32_t* out) {
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j] = Pair<T>::fma(nibble_pair<T>(word, j), Pair<T>::kOne, minus);
}

// code - zero of a word of four 8-bit codes, exact (|code - zero| < 256): pairs (0, 2), (1, 3).
template <class T>
__device__ inline void unpack_int8(uint32_t word, uint32_t minus, uint32_t* out) {
  const uint32_t minus_base = Pair<T>::kMagic | 0x80008000u;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t low = Pair<T>::fma(nibble_pair<T>(word, 2 * j), Pair<T>::kOne, minus_base);
    const uint32_t high = Pair<T>::fma(nibble_pair<T>(word, 2 * j + 1), Pair<T>::kOne, minus_base);
    out[j] = Pair<T>::fma(Pair<T>::fma(high, Pair<T>::kSixteen, low), Pair<T>::kOne, minus);
  }
}

// A scale as the unpackers multiply by it: in T where that is its own type (one rounding of the exact product), else in fp32.
template <class T, bool kOwnType>
struct Scale {
  float value = 1.f;
  uint32_t pair = 0;

  Scale() = default;
  __device__ explicit Scale(float v) : value(v), pair(kOwnType ? splat<T>(v) : 0u) {}

  __device__ uint32_t times(uint32_t codes) const {
    if constexpr (kOwnType) return Pair<T>::fma(codes, pair, 0x80008000u);  // + (-0)
    const float low = to_float(T{static_cast<uint16_t>(codes)}), high = to_float(T{static_cast<uint16_t>(codes >> 16)});
    return Pair<T>::pack(low * value, high * value);
  }
};

template <class T>
__host__ __device__ inline bool is_type(DType t) {
  return t == (std::is_same<T, Bf16>::value ? DType::bf16 : DType::f16);
}

__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

}  // namespace int4_emu::gpu::sm80
