// Launches of grouped_gemm and fused_moe on every family, dtype and kind of weight.
#include "cases.h"

namespace cases {
namespace {

using gpu::Atom;

// What is known of a family's tiles: threads of a block, and weight rows of a tile by the rows of x in a block.
struct Family {
  Atom atom;
  const char* name;  // of the kernel's template argument
  int wave_rows;     // weight rows that a block takes, 16 per wave
  int chunk;         // columns that share a scale in kernels of form 0
  int split;         // waves that share out k where blocks are few
  int wide;          // tiles of weight rows a wave takes beside 64 rows of x
};
const Family kFma{Atom::fma, "FmaAtom", 0, 0, 0, 0};

Family family_of([[maybe_unused]] const std::string& arch) {
#ifdef INT4_EMU_ATOM_MFMA_GFX9
  if (arch == "gfx90a" || arch == "gfx942" || arch == "gfx950") return {Atom::mfma_gfx9, "MfmaGfx9", 4 * 16, 128, 2, 2};
#endif
#ifdef INT4_EMU_ATOM_WMMA_GFX11
  if (arch.substr(0, 5) == "gfx11") return {Atom::wmma_gfx11, "WmmaGfx11", 8 * 16, 32, 4, 1};
#endif
#ifdef INT4_EMU_ATOM_WMMA_GFX12
  if (arch.substr(0, 5) == "gfx12") return {Atom::wmma_gfx12, "WmmaGfx12", 8 * 16, 64, 4, 1};
#endif
  return kFma;
}

const char* type_name(DType t) { return t == DType::f32 ? "float" : t == DType::bf16 ? "Bf16" : "Fp16"; }

// Kinds of weight: 0 dense, 1 int4, 2 int8.
Weight weight(int kind, int64_t experts, int64_t n, int64_t k, int64_t group_size, DType dense, char* data) {
  Weight w;
  w.experts = experts, w.n = n, w.k = k;
  w.data = data;
  if (kind == 0) {
    w.dtype = dense;
    w.n_stride = k, w.expert_stride = n * k;
    return w;
  }
  w.packed = true;
  w.bits = kind == 1 ? 4 : 8;
  w.n_stride = k * w.bits / 8, w.expert_stride = n * w.n_stride;
  w.scales = data + (int64_t{1} << 38);
  w.scale_dtype = DType::bf16;
  w.group_size = group_size, w.groups = up(k, group_size);
  return w;
}

// Rows of x in a block: the smallest size that holds the average rows of an expert, else the largest.
int block_rows(const Family& f, int64_t rows, int64_t experts) {
  const int64_t average = up(rows, rows < experts ? rows : experts);
  if (average <= 16) return 16;
  if (f.atom != Atom::fma && average <= 32) return 32;
  return 64;
}

// Blocks of any distribution of rows over experts: full ones, and one more for each expert that may have a rest.
int64_t row_blocks(int64_t rows, int64_t experts, int64_t block) {
  const int64_t touched = rows < experts ? rows : experts, bound = rows / block + touched;
  return rows < bound ? rows : bound;
}

Want gemm(const Family& f, DType x, int kind, int64_t group_size, int64_t rows, int64_t experts, int64_t columns, bool gated) {
  const int block = block_rows(f, rows, experts);
  const int64_t blocks = row_blocks(rows, experts, block);
  char name[128];
  if (f.atom == Atom::fma) {
    // Two stages of (rows + 64) x 32 floats, rows 36 floats apart; 64 weight rows.
    std::snprintf(name, sizeof(name), "gemm_kernel<FmaAtom<%d>, %s, (WeightKind)%d>", block, type_name(x), kind);
    return {name, blocks * up(columns, gated ? 32 : 64), 256, size_t{2} * (block + 64) * 36 * 4};
  }
  const int row_tiles = block == 64 ? f.wide : 1;
  // Blocks of all waves side by side would not fill the device's 104 compute units twice: waves share out k instead.
  const bool narrow = block == 16 && blocks * up(columns, f.wave_rows / 2) < 2 * 104;
  const int split = narrow ? f.split : 1, width = f.wave_rows * row_tiles / split;
  const int form = kind == 0 || group_size % f.chunk == 0 ? 0 : 1;
  std::snprintf(name, sizeof(name), "stream_kernel<%s<%s>, %s, (WeightKind)%d, (Form)%d, %d, %d, %d>", f.name, type_name(x), type_name(x), kind,
                form, block / 16, row_tiles, split);
  return {name, blocks * up(columns, gated ? width / 2 : width), 256, 0};
}

struct Shape {
  int64_t rows, experts;
};

void grouped(const char* arch, const Family& f, DType x, int kind, int64_t group_size, Shape s) {
  const int64_t n = 200, k = 512;
  GroupedGemmProblem p;
  p.rows = s.rows;
  p.x = memory(0);
  p.x_stride = k;
  p.dtype = x;
  p.weight = weight(kind, s.experts, n, k, group_size, x, memory(1));
  p.out = memory(9);
  const gpu::DeviceOffsets offsets{memory(5), true};
  const size_t bytes = gpu::grouped_gemm_workspace_bytes(p);
  const int block = block_rows(f, s.rows, s.experts);
  const int64_t positions = row_blocks(s.rows, s.experts, block) * block, fill = up(positions, 1024);
  const std::string name = std::string("grouped_gemm ") + gpu::atom_name(f.atom);
  run(name, arch, [&] { return gpu::grouped_gemm(p, offsets, memory(20), bytes, kStream, f.atom); },
      {{"group_blocks_kernel", 1, 1024, 0},
       {"group_rows_kernel", fill > 1024 ? 1024 : fill, 1024, 0},
       gemm(f, x, kind, group_size, s.rows, s.experts, n, false)});
  if (seen.size() != 3) return;
  const gpu::GemmArgs a = gemm_args(seen[2]);
  expect(a.w.data == p.weight.data && a.w.scales == p.weight.scales && a.x == p.x && a.out == p.out, name + ": the caller's tensors");
  expect(a.x_stride == k && a.columns == n && a.out_stride == n && !a.gated && a.out_dtype == x && a.x_dtype == x, name + ": shape and dtype");
  expect(lies_in(a.blocks.rows, memory(20), bytes) && lies_in(a.blocks.experts, memory(20), bytes), name + ": blocks in the workspace");
  expect(a.blocks.blocks * block == positions && a.blocks.row_count == s.rows, name + ": as many blocks as were worked out");
}

void layer(const char* arch, const Family& f, DType x, int kind, int64_t group_size, bool gated, int64_t tokens) {
  const int64_t experts = 8, topk = 2, hidden = 512, intermediate = 384, slots = tokens * topk;
  MoeProblem p;
  p.tokens = tokens, p.hidden = hidden, p.intermediate = intermediate, p.topk = topk;
  p.x = memory(0);
  p.x_stride = hidden;
  p.dtype = x;
  p.w13 = weight(kind, experts, gated ? 2 * intermediate : intermediate, hidden, group_size, x, memory(1));
  p.w2 = weight(kind, experts, hidden, intermediate, group_size, x, memory(2));
  p.topk_weights = reinterpret_cast<const float*>(memory(3));
  p.topk_ids = memory(4);
  p.global_experts = experts;
  p.activation.kind = gated ? Activation::silu : Activation::relu2_no_mul;
  p.out = memory(9);
  const size_t bytes = gpu::moe_workspace_bytes(p);
  std::vector<Want> wanted = {{"sort_small_kernel", 1, 1024, experts * 4 + 4096},
                              gemm(f, x, kind, group_size, slots, experts, intermediate, gated),
                              gemm(f, x, kind, group_size, slots, experts, hidden, false),
                              {"moe_sum_kernel", tokens * up(hidden, 1024), 256, 0}};
  if (slots > 2048) {
    const int64_t chunks = up(slots, 2048);
    wanted.erase(wanted.begin());
    wanted.insert(wanted.begin(), {{"count_kernel", chunks, 1024, experts * 4}, {"cursor_kernel", 1, 1024, 0}, {"scatter_kernel", chunks, 1024, experts * 4}});
  }
  const std::string name = std::string("fused_moe ") + gpu::atom_name(f.atom);
  run(name, arch, [&] { return gpu::fused_moe(p, memory(20), bytes, kStream, f.atom); }, wanted);
  if (seen.size() != wanted.size()) return;
  const gpu::GemmArgs first = gemm_args(seen[seen.size() - 3]), second = gemm_args(seen[seen.size() - 2]);
  expect(first.w.data == p.w13.data && first.x == p.x && second.w.data == p.w2.data && second.x == first.out, name + ": the tensors in their order");
  expect(first.gated == gated && first.activated && first.columns == intermediate && !second.gated && !second.activated, name + ": epilogues");
  expect(lies_in(first.out, memory(20), bytes) && lies_in(second.out, memory(20), bytes), name + ": intermediate results in the workspace");
  expect(second.out_dtype == DType::f32 && second.columns == hidden && second.out_stride == hidden, name + ": fp32 slots for the sum");
}

// Columns permuted per expert: x is copied row by row before either projection.
void gathered(const char* arch, DType x) {
  GroupedGemmProblem p;
  p.rows = 40;
  p.x = memory(0);
  p.x_stride = 512;
  p.dtype = x;
  p.weight = weight(1, 4, 64, 512, 128, x, memory(1));
  p.weight.perm = reinterpret_cast<const int32_t*>(memory(3));
  p.out = memory(9);
  const size_t bytes = gpu::grouped_gemm_workspace_bytes(p);
  const Family f = x == DType::f32 ? kFma : family_of(arch);
  const int64_t positions = row_blocks(40, 4, 16) * 16;
  run("grouped_gemm with permuted columns", arch, [&] { return gpu::grouped_gemm(p, {memory(5), false}, memory(20), bytes, kStream, Atom::automatic); },
      {{"group_blocks_kernel", 1, 1024, 0},
       {"group_rows_kernel", 1, 1024, 0},
       {std::string("gather_kernel<") + type_name(x) + ">", positions, 256, 0},
       gemm(f, x, 1, 128, 40, 4, 64, false)});
  if (seen.size() != 4) return;
  const gpu::GemmArgs a = gemm_args(seen[3]);
  expect(lies_in(a.x, memory(20), bytes) && a.w.perm == nullptr && a.row_divisor == 1, "gathered x lies in the workspace");
}

}  // namespace

void layers(const char* arch) {
  const Family own = family_of(arch);
  const Shape shapes[] = {{1, 8}, {100, 8}, {2000, 200}, {200, 8}, {4000, 8}, {3000000, 128}};
  for (const DType x : {DType::bf16, DType::f16, DType::f32}) {
    for (int kind = 0; kind < 3; ++kind) {
      for (const int64_t group_size : {int64_t{32}, int64_t{128}}) {
        for (const Shape s : shapes) {
          grouped(arch, kFma, x, kind, group_size, s);
          if (own.atom != Atom::fma && x != DType::f32) grouped(arch, own, x, kind, group_size, s);
        }
      }
      for (const bool gated : {true, false}) {
        for (const int64_t tokens : {int64_t{1}, int64_t{100}, int64_t{5000}}) {
          layer(arch, kFma, x, kind, 32, gated, tokens);
          if (own.atom != Atom::fma && x != DType::f32) layer(arch, own, x, kind, 128, gated, tokens);
        }
      }
    }
    gathered(arch, x);
  }
  GroupedGemmProblem nothing;
  nothing.weight = weight(1, 4, 64, 512, 128, DType::bf16, memory(1));
  run("grouped_gemm of no rows", arch, [&] { return gpu::grouped_gemm(nothing, {}, nullptr, 0, kStream); }, {});
  MoeProblem none;
  none.hidden = 512;
  run("fused_moe of no tokens", arch, [&] { return gpu::fused_moe(none, nullptr, 0, kStream); }, {});
}

}  // namespace cases
