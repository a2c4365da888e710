// Launches of the format ops and of moe_align. A thread block has 256 threads, 1024 where slots are sorted.
#include "cases.h"

namespace cases {
namespace {

PackedMatrix matrix(Format format, int bits, int64_t batch, int64_t out_features, int64_t in_features, int64_t group_size) {
  PackedMatrix m;
  m.format = format;
  m.bits = bits;
  m.batch = batch;
  m.out_features = out_features;
  m.in_features = in_features;
  m.group_size = group_size;
  m.groups = up(in_features, group_size);
  m.qweight = memory(0);
  m.scales = memory(1);
  m.scale_dtype = DType::bf16;
  m.qzeros = memory(2);
  return m;
}

// The general kernel: a warp takes 32 units of eight columns of one row, or, transposed, 8 rows by 4 units; a thread takes 4 of either.
int64_t dequantize_blocks(const PackedMatrix& m, bool transposed) {
  const int64_t units = up(m.in_features, 8);
  return m.batch * (transposed ? up(m.out_features, 16) * up(units, 16 * 4) : up(m.out_features, 8) * up(units, 32 * 4));
}

void dequantisation(const char* arch) {
  const PackedMatrix rows = matrix(Format::canonical, 4, 3, 40, 4096 + 64, 32), tall = matrix(Format::gptq_v2, 4, 2, 40, 1056, 32),
                     wide = matrix(Format::awq, 4, 2, 40, 1056, 32), bytes = matrix(Format::canonical, 8, 1, 7, 33, 33);
  run("unpack", arch, [&] { return gpu::unpack(rows, reinterpret_cast<uint8_t*>(memory(9)), kStream); },
      {{"dequantize_kernel", dequantize_blocks(rows, false), 256, 0}});
  // Whole units: 8 strips of 8 rows by 32 units of 8 columns a block, 16 by 16 of Quark's bytes.
  const PackedMatrix rows8 = matrix(Format::canonical, 8, 3, 40, 4096 + 64, 32), tall8 = matrix(Format::gptq_v2, 8, 2, 40, 1056, 32),
                     wide8 = matrix(Format::quark_int_order, 8, 2, 200, 1056, 32);
  const std::pair<const PackedMatrix*, const char*> whole[] = {{&rows, "0, 4"},  {&tall, "1, 4"},  {&wide, "2, 4"},
                                                               {&rows8, "0, 8"}, {&tall8, "1, 8"}, {&wide8, "2, 8"}};
  const std::pair<DType, const char*> types[] = {{DType::f32, "float"}, {DType::bf16, "Bf16"}, {DType::f16, "Fp16"}};
  for (const auto& [m, words] : whole) {
    const int64_t tile = m == &wide8 ? 128 : 64, blocks = m->batch * up(m->out_features, tile) * up(m->in_features, 64 * 256 / tile);
    for (const auto& [dtype, type] : types) {
      const std::string template_arguments = std::string("<(CodeReader::Words)") + words + ", " + type + ">";
      run("dequantize", arch, [&, m = m, dtype = dtype] { return gpu::dequantize(*m, dtype, memory(9), kStream); },
          {{"dequantize_squares_kernel" + template_arguments, blocks, 256, 0}});
      if (words[0] == '2') continue;
      // With a group of its own for each column: a table of 66 words for 64 rows, one group of zeros more.
      PackedMatrix ordered = *m;
      ordered.g_idx = reinterpret_cast<const int32_t*>(memory(3));
      const size_t table = static_cast<size_t>((m->groups + 1) * 66 * 4);
      run("dequantize act-order", arch, [&, dtype = dtype] { return gpu::dequantize(ordered, dtype, memory(9), kStream); },
          {{"act_order_kernel" + template_arguments, blocks, 256, table}});
    }
  }
  const auto dequantize = [&](const char* name, const PackedMatrix& m, bool transposed) {
    run(name, arch, [&] { return gpu::dequantize(m, DType::bf16, memory(9), kStream); },
        {{"dequantize_kernel", dequantize_blocks(m, transposed), 256, 0}});
  };
  dequantize("dequantize int8", bytes, false);
  PackedMatrix ordered = tall;
  ordered.g_idx = reinterpret_cast<const int32_t*>(memory(3));
  ordered.scale_dtype = DType::f32;
  dequantize("dequantize act-order with fp32 scales", ordered, true);
  PackedMatrix nothing = rows;
  nothing.batch = 0;
  run("dequantize of no matrix", arch, [&] { return gpu::dequantize(nothing, DType::f32, memory(9), kStream); }, {});

  run("unpack_zeros", arch, [&] { return gpu::unpack_zeros(tall, reinterpret_cast<uint8_t*>(memory(9)), kStream); },
      {{"repack_groups_kernel", up(2 * 40 * 33, 256), 256, 0}});
  const RepackOut out{reinterpret_cast<uint8_t*>(memory(9)), memory(10), reinterpret_cast<uint8_t*>(memory(11))};
  run("repack", arch, [&] { return gpu::repack(tall, nullptr, nullptr, out, kStream); },
      {{"repack_codes_kernel", up(2 * 40 * (1056 / 8), 256), 256, 0}, {"repack_groups_kernel", up(2 * 40 * 33, 256), 256, 0}});
  run("repack of codes alone", arch, [&] { return gpu::repack(tall, nullptr, nullptr, {out.qweight, nullptr, nullptr}, kStream); },
      {{"repack_codes_kernel", up(2 * 40 * (1056 / 8), 256), 256, 0}});
}

void tile_order(const char* arch) {
  uint8_t *in = reinterpret_cast<uint8_t*>(memory(0)), *out = reinterpret_cast<uint8_t*>(memory(9));
  for (int bits : {4, 8}) {
    const int64_t words = int64_t{5} * 48 * 96 * bits / 32;
    run("prepack", arch, [&] { return gpu::prepack(in, out, 5, 48, 96, bits, Layout::cpu_n16, kStream); },
        {{"prepack_kernel", up(words, 256), 256, 0}});
    run("unprepack", arch, [&] { return gpu::unprepack(in, out, 5, 48, 96, bits, Layout::cpu_n16, kStream); },
        {{"prepack_kernel", up(words, 256), 256, 0}});
  }
  run("prepack to canonical", arch, [&] { return gpu::prepack(in, out, 5, 48, 97, 4, Layout::canonical, kStream); }, {});
  char copy[128];
  std::snprintf(copy, sizeof(copy), "%p %p %d", static_cast<void*>(out), static_cast<void*>(in), 5 * 48 * 49);
  expect(copies.size() == 1 && copies[0] == copy, std::string(arch) + " prepack to canonical: one copy of " + copy);
}

// 2^32 threads are more than a grid may have: refused in a sentence, nothing launched.
void too_large(const char* arch) {
  seen.clear();
  const PackedMatrix m = matrix(Format::canonical, 4, int64_t{1} << 27, 8, 1024 * 8, 32);
  const Status status = gpu::dequantize(m, DType::bf16, memory(9), kStream);
  expect(!status && std::strstr(status.message, "must have at most") && seen.empty(), std::string(arch) + ": a grid that is too large");
}

void align(const char* arch) {
  struct {
    int64_t slots, experts;
  } const cases[] = {{0, 4}, {7, 4}, {2048, 8192}, {2048, 8193}, {2049, 60}, {100000, 8192}, {100000, 8193}};
  for (const auto& c : cases) {
    AlignProblem p;
    p.slots = c.slots;
    p.experts = p.global_experts = c.experts;
    p.block_size = 16;
    p.topk_ids = memory(0);
    int32_t* out = reinterpret_cast<int32_t*>(memory(9));
    p.sorted_slots = out, p.block_experts = out, p.expert_offsets = out, p.num_slots = out;
    const size_t bytes = gpu::align_workspace_bytes(c.slots, c.experts);
    // Counters of E experts lie in shared memory up to 8192 of them, beside a scan's 1024 partial sums; a block sorts 2048 slots.
    const size_t counters = c.experts <= 8192 ? static_cast<size_t>(c.experts) * 4 : 0;
    const int64_t chunks = up(c.slots, 2048);
    const std::vector<Want> one = {{"sort_small_kernel", 1, 1024, counters + 4096}},
                            many = {{"count_kernel", chunks, 1024, counters}, {"cursor_kernel", 1, 1024, 0}, {"scatter_kernel", chunks, 1024, counters}};
    run("moe_align of " + std::to_string(c.slots) + " slots, " + std::to_string(c.experts) + " experts", arch,
        [&] { return gpu::moe_align(p, memory(20), bytes, kStream); }, c.slots <= 2048 ? one : many);
  }
}

}  // namespace

void formats(const char* architecture) {
  dequantisation(architecture);
  tile_order(architecture);
  too_large(architecture);
  align(architecture);
}

}  // namespace cases
