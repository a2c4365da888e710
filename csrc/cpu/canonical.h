// Reads blocks of rows of a checkpoint matrix, whatever its format, in canonical form (core/layout.h).
#pragma once

#include <cstdint>
#include <cstdlib>

#include "../core/layout.h"
#include "../core/problem.h"
#include "../core/status.h"
#include "tile.h"

namespace int4_emu::cpu {

class CanonicalReader {
 public:
  explicit CanonicalReader(const PackedMatrix& m);

  // A refusal for format and bits that no checkpoint combines.
  Status check() const;

  // Codes of row o of matrix b where the checkpoint already stores canonical rows, else null.
  const uint8_t* codes_in_place(int64_t b, int64_t o) const;

  // Rows o0..o0+n, columns k0..k0+k: out [n][stride] bytes, stride >= row_bytes(round_up(k, 8)). k0 must be a multiple of 8, and so
  // must o0 where the format is transposed. Codes past the last column of the matrix come out as zero.
  void read_codes(int64_t b, int64_t o0, int64_t n, int64_t k0, int64_t k, uint8_t* out, int64_t stride) const;

  // Columns perm[0..k), as many as there are, of rows o0..o0+n of int4 codes; out as of read_codes. columns: permuted_scratch(n) bytes.
  void read_permuted_codes(int64_t b, int64_t o0, int64_t n, const int32_t* perm, uint8_t* columns, uint8_t* out, int64_t stride) const;
  int64_t permuted_scratch(int64_t n) const { return round_up(m_.in_features, 8) * row_bytes(round_up(n, 8), 4); }

  // Groups c0..c0+c of rows o0..o0+n: out [n][c] elements of m.scale_dtype.
  void read_scales(int64_t b, int64_t o0, int64_t n, int64_t c0, int64_t c, void* out) const;

  // True zero points, out [n][c]; m.qzeros must be given.
  void read_zeros(int64_t b, int64_t o0, int64_t n, int64_t c0, int64_t c, uint8_t* out) const;

  // Fills in all but the output for rows o0..o0+n of matrix b; false where the sizes or the format do not suit that function.
  bool describe(int64_t b, int64_t o0, int64_t n, DequantizeTransposedArgs& a) const;
  // The same for rows whose columns name their groups, all but the scales, the zero points and their steps.
  bool describe_rows(int64_t b, int64_t o0, int64_t n, DequantizeTransposedArgs& a) const;
  // Zero points of rows o0.. where they are stored as words packed along O [O / kw][C], else null. o0 is a multiple of 8.
  const uint8_t* zero_words(int64_t b, int64_t o0) const;

  // Rows per block and columns per slice at which reads and the caller's writes are long runs, and the scratch stays in L2.
  int64_t block_rows() const { return traits_.transposed ? (traits_.packed_along_out ? 256 : 128) : 16; }
  int64_t slice_columns() const { return traits_.transposed ? 2048 : INT64_MAX; }
  bool scales_in_place() const { return !traits_.transposed; }
  bool zeros_in_place() const { return m_.format == Format::canonical; }

 private:
  bool plain_bytes() const { return m_.bits == 8 && (traits_.plain_int8 || m_.format == Format::canonical); }
  int64_t codes_per_word() const { return 32 / m_.bits; }
  // First byte of the stored matrix b; of column k0 and row o0 in a transposed one.
  const uint8_t* matrix(int64_t b) const { return static_cast<const uint8_t*>(m_.qweight) + b * source_size_; }
  const uint8_t* transposed_source(int64_t b, int64_t o0, int64_t k0) const;
  // What turns a stored word of zeros, and then each of its codes, into true zero points.
  uint32_t zero_word_add() const;
  uint32_t zero_code_add() const;

  const PackedMatrix& m_;
  FormatTraits traits_;
  uint32_t flip_;         // xor that turns two's complement codes of a word into unsigned ones
  int64_t source_row_;    // bytes between rows of the stored qweight, whichever axis they run along
  int64_t source_size_;   // bytes of one stored matrix
};

// Scratch memory of one task; null data when the allocation failed.
struct Scratch {
  explicit Scratch(size_t bytes) : data(static_cast<uint8_t*>(std::malloc(bytes ? bytes : 1))) {}
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  uint8_t* data;
};

// Rows of scratch lie an odd number of cache lines apart, so that a column of them spreads over all sets of L1.
constexpr int64_t scratch_stride(int64_t bytes) { return round_up(bytes, 64) | 64; }

// codes [row_bytes(k)] -> one code a byte [k].
void expand_codes(const uint8_t* codes, int bits, int64_t k, uint8_t* out);

}  // namespace int4_emu::cpu
