// The contract between the MoE driver and an instruction set: a table of tile functions over row-major panels.
//
// Two compute types: f32 x f32 and, where the set has a bf16 dot product, bf16 x bf16, both accumulating in fp32. A weight panel is
// `n` rows of `k` consecutive columns in the compute type; x rows are packed once per expert by the set itself.
// ISA files include this header, <cstdint> and intrinsics only; everything they define sits in their own anonymous namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/problem.h"

namespace int4_emu::cpu {

// Rows n0..n0+n, columns k0..k0+k of one expert's matrix, to be written to `out` [n][ld] in the compute type; columns k..ld are zeroed.
struct LoadPanelArgs {
  const Weight* weight;
  int64_t expert, n0, n, k0, k;
  void* out;
  int64_t ld;  // elements, a multiple of TileTable::k_multiple
};

// Gathers m rows of x (rows[i] indexes x; null = 0..m), optionally permutes columns and scales rows, converts to the compute type and lays
// them out as `gemm` of the same table and compute type wants them.
struct PackXArgs {
  const void* x;
  DType dtype;
  int64_t x_stride;       // elements
  const int64_t* rows;    // [m] or null
  const float* row_scale; // [m] or null: x * scale in fp32, rounded to `dtype` before anything else (router weight on the input)
  const int32_t* perm;    // [k] or null
  int64_t m, k;
  void* out;              // packed_x_bytes(m, k) bytes, 64-byte aligned
};

// c[i][j] (+)= sum over k of x[i][k0 + k] * w[j][k]; c is fp32 [m][ldc].
struct GemmArgs {
  const void* packed_x;   // as pack_x of the whole (m, total_k) wrote it
  int64_t m, total_k;
  const void* w;          // panel [n][ldw], compute type
  int64_t n, ldw, k0, k;  // k0 is a multiple of k_multiple; k too but for the last block
  float* c;
  int64_t ldc;
  bool accumulate;        // false: overwrite
};

// Codes stored with the input columns outermost, or in rows whose columns name their groups, dequantised to rows 0..n, columns 0..k of
// `out`: (q - z) * s, one rounding. n is a multiple of 8 and starts on a word of zeros, k and group_size are multiples of 16 (or the columns lie in one group, or name their own).
struct DequantizeTransposedArgs {
  int bits;
  const uint8_t* codes;   // packed along O, int4: words [k][O / 8], int8: bytes [k][O]; else words [k * bits / 32][O] or, in rows, its transpose
  int64_t code_step;      // bytes between rows of words
  bool in_rows;           // then not packed along O, and flip is zero
  bool packed_along_out;
  bool interleaved;       // AWQ: row r of eight sits in slot 0,4,1,5,2,6,3,7, in codes packed along O and in zeros
  uint32_t flip;          // xor of a word that makes two's complement codes and zeros unsigned
  const void* scales;     // [groups][O]
  DType scale_dtype;
  int64_t scale_step;     // elements between groups
  const uint8_t* zeros;   // [groups][O], codes of `bits` bits packed along O, or null: the midpoint
  int64_t zero_step;      // bytes between groups
  uint32_t zero_word_add; // added to a word of zeros, which wraps, before the flip
  int zero_code_add;      // added to each zero point, modulo 2^bits
  const int32_t* group_of;  // [k], the group of each column, or null: column / group_size
  int64_t n, k, group_size, groups;
  void* out;
  int64_t ld;             // elements between rows
  DType out_dtype;
  bool stream;            // write past the caches; out and its rows are then aligned to 32 bytes
};
// With group_of, a strip of rows has all its groups' values beside it.
constexpr int64_t kMostIndexedGroups = 512;

struct ComputeFunctions {
  size_t (*packed_x_bytes)(int64_t m, int64_t k);
  void (*pack_x)(const PackXArgs&);
  void (*load_panel)(const LoadPanelArgs&);
  void (*gemm)(const GemmArgs&);
};

// c[p][i][j] = sum over all k of x[i][k] * w[row0[p] + j * step][k], for the rows of one unit and n columns of one or two parts.
struct ProductArgs {
  const Weight* weight;
  int64_t expert;
  const void* packed_x;   // as pack_x of the same ProductFunctions wrote it
  DType dtype;            // of x before it was packed
  int64_t m;
  int parts;              // 1, or 2: gate and up
  int64_t row0[2], step;
  int64_t n;
  float* c;               // [parts][m][ldc], overwritten
  int64_t ldc;
  void* scratch;          // of this thread: [parts][m rounded up to 32][n rounded up to 32] floats, 64-byte aligned
};

// A whole product from the weights as they are stored, for weights and numbers of rows to which a set has a better way than panels in
// the compute type: exact codes with the scale of each group in fp32, or panels in the order of its own tiles.
struct ProductFunctions {
  // Whether m rows of x of this dtype can be multiplied by this weight; the other three are called only then.
  bool (*serves)(const Weight& weight, DType x, int64_t m);
  size_t (*packed_x_bytes)(const Weight& weight, DType x, int64_t m);
  // args.out: packed_x_bytes. False where these numbers need panels after all: infinities, NaN and extremes have no fixed point.
  bool (*pack_x)(const Weight& weight, const PackXArgs& args);
  void (*multiply)(const ProductArgs& args);
  int64_t wide_rows;  // with this many rows a unit's tasks are better wide, for x comes from L3 once a task; 0: never
};

struct TileTable {
  const char* name;
  int64_t k_multiple;                 // k blocks and panel rows are padded to this many elements
  ComputeFunctions f32;
  ComputeFunctions bf16;              // null pointers where the set has no bf16 dot product
  ProductFunctions product;           // null pointers where panels are all there is
  // h[i][j] = act(gate, up) in fp32, rounded to `dtype`; gate, up fp32 [m][ld] (up null without gate), h [m][ldh].
  void (*activate)(const ActivationSpec&, const float* gate, const float* up, int64_t ld, int64_t m, int64_t n, void* h, int64_t ldh, DType dtype);
  // out[j] = sum over i of weight[i] * y[rows[i]][j] in fp32, in order of i, rounded to dtype; y fp32 [*][n].
  void (*combine)(const float* y, int64_t ldy, const int64_t* rows, const float* weight, int64_t count, int64_t n, void* out, DType dtype);
  // One row of dequantised weights from canonical codes: out[k] = (q - z[k / group_size]) * s[k / group_size], one rounding.
  // `staged`, if not null, is room for the row, from which it may be written past the caches; out and the row's bytes are multiples of 32 then.
  void (*dequantize_row)(const uint8_t* codes, int bits, const void* scales, DType scale_dtype, const uint8_t* zeros, int64_t k, int64_t group_size,
                         void* out, DType out_dtype, void* staged);
  void (*dequantize_transposed)(const DequantizeTransposedArgs&);  // null: dequantize_row is all there is
  // Called once per thread before and after a run of gemm calls (AMX tile configuration); may be null.
  void (*begin_thread)();
  void (*end_thread)();
};

// Null when the file was compiled without its instruction set.
const TileTable* portable_table();
const TileTable* avx2_table();
const TileTable* avx512_table(bool fast_dots);  // Features::fast_dots
const TileTable* amx_table();

}  // namespace int4_emu::cpu
