// unpack, unpack_zeros, repack and prepack bit for bit against the CPU's; dequantize against (q - z) * s rounded once.
#include "../../csrc/core/layout.h"
#include "../../csrc/cpu/api.h"
#include "harness.h"

namespace selfcheck {
namespace {

const Parallel kSerial{};

// Random checkpoint tensors of one format.
struct Checkpoint {
  PackedMatrix m;
  std::vector<uint8_t> qweight, qzeros;
  Floats scales;
  std::vector<int32_t> g_idx;

  Checkpoint(Format format, int bits, int64_t batch, int64_t o, int64_t k, int64_t group, DType scale_type, bool with_zeros, bool order,
             Random& random) {
    const FormatTraits t = format_traits(format);
    const bool plain = bits == 8 && (t.plain_int8 || format == Format::canonical);
    const int64_t kw = 32 / bits, groups = ceil_div(k, group);
    int64_t bytes;
    if (plain) {
      bytes = o * k;
    } else if (t.transposed) {
      bytes = t.packed_along_out ? k * ceil_div(o, kw) * 4 : ceil_div(k, kw) * o * 4;
    } else {
      bytes = o * (format == Format::canonical ? row_bytes(k, bits) : ceil_div(k, kw) * 4);
    }
    qweight = random_bytes(batch * bytes, random);
    // The unused half of a canonical row's last byte is zero.
    if (format == Format::canonical && bits == 4 && k % 2 == 1) {
      for (int64_t row = 1; row <= batch * o; ++row) qweight[row * row_bytes(k, 4) - 1] &= 15;
    }
    const int64_t stored = plain || format == Format::canonical ? o : ceil_div(o, kw) * 4;
    if (with_zeros) qzeros = random_bytes(batch * stored * groups, random);
    scales = Floats(scale_type, random_floats(batch * o * groups, 0.05f, random));
    if (order) {
      for (int64_t i = 0; i < batch * k; ++i) g_idx.push_back(static_cast<int32_t>(random() % groups));
    }
    m.format = format, m.bits = bits, m.batch = batch, m.out_features = o, m.in_features = k, m.groups = groups, m.group_size = group;
    m.qweight = qweight.data(), m.scales = scales.data.data(), m.scale_dtype = scale_type;
    m.qzeros = with_zeros ? qzeros.data() : nullptr;
    m.g_idx = order ? g_idx.data() : nullptr;
  }
};

// The same matrix in device memory.
struct OnDevice {
  Buffer<uint8_t> qweight, qzeros, scales;
  Buffer<int32_t> g_idx;
  PackedMatrix m;
  explicit OnDevice(const Checkpoint& c) : qweight(c.qweight), qzeros(c.qzeros), scales(c.scales.data), g_idx(c.g_idx), m(c.m) {
    m.qweight = qweight.get(), m.scales = scales.get();
    m.qzeros = c.m.qzeros ? qzeros.get() : nullptr;
    m.g_idx = c.m.g_idx ? g_idx.get() : nullptr;
  }
};

std::string describe(const Checkpoint& c) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s int%d [%lld, %lld, %lld] g%lld %s%s%s", format_name(c.m.format), c.m.bits, (long long)c.m.batch,
                (long long)c.m.out_features, (long long)c.m.in_features, (long long)c.m.group_size, dtype_text(c.m.scale_dtype),
                c.m.qzeros ? " zeros" : "", c.m.g_idx ? " g_idx" : "");
  return text;
}

// Against (q - z) * s rounded once, of codes, zero points and scales in canonical order.
void check_dequantize(const Checkpoint& c, const PackedMatrix& on_device, const std::vector<uint8_t>& codes,
                      const std::vector<uint8_t>& zeros, const std::vector<uint8_t>& scales, DType type) {
  const int64_t batch = c.m.batch, o = c.m.out_features, k = c.m.in_features, groups = c.m.groups;
  Buffer<uint8_t> out(batch * o * k * dtype_bytes(type));
  must(gpu::dequantize(on_device, type, out.get(), nullptr), "dequantize");
  std::vector<float> want(batch * o * k);
  for (int64_t row = 0; row < batch * o; ++row) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t group = c.m.g_idx ? c.g_idx[row / o * k + j] : j / c.m.group_size, at = row * groups + group;
      if (group < 0 || group >= groups) continue;  // such a column is zero
      want[row * k + j] = static_cast<float>(codes[row * k + j] - zeros[at]) * cpu::load_float(scales.data(), c.m.scale_dtype, at);
    }
  }
  expect(out.host() == Floats(type, want).data && out.guarded(), std::string("dequantize to ") + dtype_text(type) + " " + describe(c));
}

void check_one(const Checkpoint& c, Random& random) {
  const OnDevice device(c);
  const int64_t batch = c.m.batch, o = c.m.out_features, k = c.m.in_features, groups = c.m.groups, size = dtype_bytes(c.m.scale_dtype);
  const std::string name = describe(c);

  std::vector<uint8_t> codes(batch * o * k), zeros(batch * o * groups, c.m.bits == 4 ? 8 : 128);
  must(cpu::unpack(c.m, codes.data(), kSerial), "cpu unpack");
  Buffer<uint8_t> got(codes.size());
  must(gpu::unpack(device.m, got.get(), nullptr), "unpack");
  bool ok = got.host() == codes && got.guarded();
  if (c.m.qzeros) {
    must(cpu::unpack_zeros(c.m, zeros.data(), kSerial), "cpu unpack_zeros");
    Buffer<uint8_t> z(zeros.size());
    must(gpu::unpack_zeros(device.m, z.get(), nullptr), "unpack_zeros");
    ok = ok && z.host() == zeros && z.guarded();
  }
  expect(ok, "unpack " + name);

  // repack without and with permutations; the CPU's scales are then the yardstick of dequantize.
  std::vector<uint8_t> canonical_scales(batch * o * groups * size);
  ok = true;
  for (bool permuted : {false, true}) {
    std::vector<int32_t> in(k), out(o);
    for (int64_t i = 0; i < k; ++i) in[i] = static_cast<int32_t>((i * 7 + random() % k) % k);
    for (int64_t i = 0; i < o; ++i) out[i] = static_cast<int32_t>(random() % o);
    const Buffer<int32_t> device_in(in), device_out(out);
    std::vector<uint8_t> q(batch * o * row_bytes(k, c.m.bits)), s(canonical_scales.size()), z(zeros.size());
    must(cpu::repack(c.m, permuted ? in.data() : nullptr, permuted ? out.data() : nullptr, {q.data(), s.data(), z.data()}, kSerial),
         "cpu repack");
    Buffer<uint8_t> gq(q.size()), gs(s.size()), gz(z.size());
    must(gpu::repack(device.m, permuted ? device_in.get() : nullptr, permuted ? device_out.get() : nullptr, {gq.get(), gs.get(), gz.get()},
                     nullptr),
         "repack");
    ok = ok && gq.host() == q && gs.host() == s && gz.host() == z && gq.guarded() && gs.guarded() && gz.guarded();
    if (!permuted) canonical_scales = s;
  }
  expect(ok, "repack " + name);

  for (DType type : {DType::f32, DType::bf16, DType::f16}) check_dequantize(c, device.m, codes, zeros, canonical_scales, type);
}

// Blocks that take several tiles of columns with one table of scales: only where there are many rows.
void check_act_order_spans(Format format, Random& random) {
  const Checkpoint c(format, 4, 3, 1096, 520, 40, DType::f16, true, true, random);
  const OnDevice device(c);
  std::vector<uint8_t> codes(3 * 1096 * 520), zeros(3 * 1096 * 13), scales(zeros.size() * 2), q(codes.size() / 2);
  must(cpu::unpack(c.m, codes.data(), kSerial), "cpu unpack");
  must(cpu::repack(c.m, nullptr, nullptr, {q.data(), scales.data(), zeros.data()}, kSerial), "cpu repack");
  check_dequantize(c, device.m, codes, zeros, scales, DType::bf16);
}

void check_prepack(int bits, Random& random) {
  const int64_t batch = 3, n = 48, k = 72;
  const std::vector<uint8_t> in = random_bytes(batch * n * row_bytes(k, bits), random);
  std::vector<uint8_t> want(in.size());
  const Buffer<uint8_t> device(in);
  bool ok = true;
  for (Layout layout : {Layout::canonical, Layout::cpu_n16}) {
    must(cpu::prepack(in.data(), want.data(), batch, n, k, bits, layout, kSerial), "cpu prepack");
    Buffer<uint8_t> packed(in.size()), back(in.size());
    must(gpu::prepack(device.get(), packed.get(), batch, n, k, bits, layout, nullptr), "prepack");
    must(gpu::unprepack(packed.get(), back.get(), batch, n, k, bits, layout, nullptr), "unprepack");
    ok = ok && packed.host() == want && back.host() == in && packed.guarded() && back.guarded();
  }
  expect(ok, "prepack and unprepack int" + std::to_string(bits));
}

}  // namespace

void check_formats() {
  Random random(7);
  const DType types[] = {DType::bf16, DType::f16, DType::f32};
  int turn = 0;
  for (int f = 0; f < kFormatCount; ++f) {
    for (int bits : {4, 8}) {
      const Format format = static_cast<Format>(f);
      const FormatTraits t = format_traits(format);
      if (bits == 8 && t.packed_along_out && !t.plain_int8) continue;
      for (int size = 0; size < (quick ? 1 : 3); ++size) {
        // Whole tiles, odd sizes, a group that is no multiple of eight with a short last group.
        int64_t o = size == 0 ? 40 : (size == 1 ? 19 : 264), k = size == 0 ? 72 : (size == 1 ? 37 : 1160),
                group = size == 0 ? 24 : (size == 1 ? 5 : 128);
        if (t.scales_are_1d) group = k;
        const bool with_zeros = size != 1 || bits == 4;
        check_one(Checkpoint(format, bits, 2, o, k, group, types[turn++ % 3], with_zeros, false, random), random);
        if (t.scales_are_1d || (size == 1 && f % 2 == 1)) continue;
        check_one(Checkpoint(format, bits, 2, o, k, group, types[turn % (size == 1 ? 3 : 2)], with_zeros, true, random), random);
      }
    }
  }
  check_act_order_spans(Format::compressed_tensors, random);
  check_act_order_spans(Format::gptq_v1, random);
  check_prepack(4, random);
  check_prepack(8, random);
}

}  // namespace selfcheck
