// Binds the torch-free C++ for tests/native/test_native_*.py. 16-bit floats travel as uint16 arrays with a DType number beside them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/core/layout.h"
#include "../../csrc/cpu/api.h"
#include "../../csrc/cpu/features.h"
#include "../../csrc/cpu/select.h"
#include "../../csrc/gpu/architecture.h"

namespace py = pybind11;
using namespace int4_emu;

namespace {

const cpu::TileTable& table_of(const std::string& name) {
  const char* why = nullptr;
  const cpu::TileTable* t = cpu::find_table(name.c_str(), &why);
  if (t == nullptr) throw std::invalid_argument(name + " cannot be used: " + why);
  return *t;
}

const cpu::ComputeFunctions& functions_of(const cpu::TileTable& t, DType compute) {
  const cpu::ComputeFunctions& f = compute == DType::bf16 ? t.bf16 : t.f32;
  if (f.gemm == nullptr) throw std::invalid_argument(std::string(t.name) + " has no bf16 dot product");
  return f;
}

void check(const Status& s) {
  if (!s) throw std::runtime_error(s.message);
}

// Begin and end of a table's use by this thread.
struct Session {
  const cpu::TileTable& table;
  explicit Session(const cpu::TileTable& t) : table(t) {
    if (table.begin_thread) table.begin_thread();
  }
  ~Session() {
    if (table.end_thread) table.end_thread();
  }
};

struct Buffer64 {  // 64-byte aligned
  std::vector<char> bytes;
  explicit Buffer64(size_t n) : bytes(n + 64) {}
  void* data() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~uintptr_t{63}); }
};

py::array new_array(DType t, std::vector<py::ssize_t> shape) {
  if (t == DType::f32) return py::array_t<float>(shape);
  return py::array_t<uint16_t>(shape);
}

// A Weight together with the arrays that it points into.
struct BoundWeight {
  Weight w;
  std::vector<py::array> owners;

  const void* keep(const py::array& a) {
    owners.push_back(a);
    return a.data();
  }
  // So that expert `base` is the one stored: the pointer is moved back by integer arithmetic and never read below the array.
  static const void* moved_back(const void* p, int64_t bytes) { return reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(p) - bytes); }
};

BoundWeight dense_weight(py::array data, DType dtype, int64_t experts, int64_t n, int64_t k, int64_t expert_stride, int64_t n_stride,
                         int64_t k_stride, int64_t base) {
  BoundWeight b;
  b.w.experts = experts, b.w.n = n, b.w.k = k;
  b.w.dtype = dtype;
  b.w.expert_stride = expert_stride, b.w.n_stride = n_stride, b.w.k_stride = k_stride;
  b.w.data = BoundWeight::moved_back(b.keep(data), base * expert_stride * dtype_bytes(dtype));
  return b;
}

BoundWeight packed_weight(py::array qweight, py::array scales, std::optional<py::array> zeros, DType scale_dtype, int64_t experts, int64_t n,
                          int64_t k, int bits, int64_t group_size, Layout layout, int64_t base, int64_t expert_stride) {
  BoundWeight b;
  b.w.packed = true;
  b.w.experts = experts, b.w.n = n, b.w.k = k;
  b.w.bits = bits, b.w.layout = layout;
  b.w.group_size = group_size, b.w.groups = ceil_div(k, group_size);
  b.w.n_stride = row_bytes(k, bits);
  b.w.expert_stride = expert_stride > 0 ? expert_stride : n * b.w.n_stride;
  b.w.data = BoundWeight::moved_back(b.keep(qweight), base * b.w.expert_stride);
  b.w.scale_dtype = scale_dtype;
  b.w.scales = BoundWeight::moved_back(b.keep(scales), base * n * b.w.groups * dtype_bytes(scale_dtype));
  if (zeros) b.w.zeros = static_cast<const uint8_t*>(BoundWeight::moved_back(b.keep(*zeros), base * n * b.w.groups));
  return b;
}

// Rows of x times rows n0..n0 + n of one expert, k in blocks of k_block (a multiple of the table's k_multiple): fp32 [m, n].
py::array product(const std::string& name, DType compute, py::array x, DType dtype, const BoundWeight& bound, int64_t expert, int64_t n0, int64_t n,
                  int64_t k_block, std::optional<std::vector<int64_t>> rows, std::optional<std::vector<float>> row_scale,
                  std::optional<std::vector<int32_t>> perm) {
  const cpu::TileTable& t = table_of(name);
  const cpu::ComputeFunctions& f = functions_of(t, compute);
  const Weight& w = bound.w;
  const int64_t m = rows ? static_cast<int64_t>(rows->size()) : x.shape(0), block = k_block > 0 ? k_block : round_up(w.k, t.k_multiple);
  Buffer64 packed(f.packed_x_bytes(m, w.k)), panel(static_cast<size_t>(n * block) * 4);
  py::array_t<float> c({m, n});
  Session session(t);
  f.pack_x({x.data(), dtype, x.shape(1), rows ? rows->data() : nullptr, row_scale ? row_scale->data() : nullptr, perm ? perm->data() : nullptr, m,
            w.k, packed.data()});
  for (int64_t k0 = 0; k0 < w.k; k0 += block) {
    const int64_t k = w.k - k0 < block ? w.k - k0 : block, ld = round_up(k, t.k_multiple);
    f.load_panel({&w, expert, n0, n, k0, k, panel.data(), ld});
    f.gemm({packed.data(), m, w.k, panel.data(), n, ld, k0, k, c.mutable_data(), n, k0 > 0});
  }
  return c;
}

py::array activate(const std::string& name, Activation kind, py::array_t<float, py::array::c_style> gate,
                   std::optional<py::array_t<float, py::array::c_style>> up, std::optional<float> limit, float alpha, float beta, DType dtype) {
  const ActivationSpec spec{kind, limit.has_value(), limit.value_or(0.f), alpha, beta};
  const int64_t m = gate.shape(0), n = gate.shape(1);
  py::array out = new_array(dtype, {m, n});
  table_of(name).activate(spec, gate.data(), up ? up->data() : nullptr, n, m, n, out.mutable_data(), n, dtype);
  return out;
}

py::array combine(const std::string& name, py::array_t<float, py::array::c_style> y, const std::vector<int64_t>& rows,
                  const std::vector<float>& weight, DType dtype) {
  py::array out = new_array(dtype, {y.shape(1)});
  table_of(name).combine(y.data(), y.shape(1), rows.data(), weight.data(), static_cast<int64_t>(rows.size()), y.shape(1), out.mutable_data(), dtype);
  return out;
}

py::array dequantize_row(const std::string& name, py::array_t<uint8_t> codes, int bits, py::array scales, DType scale_dtype,
                         std::optional<py::array_t<uint8_t>> zeros, int64_t k, int64_t group_size, DType dtype) {
  py::array out = new_array(dtype, {k});
  table_of(name).dequantize_row(codes.data(), bits, scales.data(), scale_dtype, zeros ? zeros->data() : nullptr, k, group_size, out.mutable_data(),
                                dtype, nullptr);
  return out;
}

// A Parallel over std::thread: one chunk a thread.
void run_threads(void* context, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* argument) {
  const int64_t threads = *static_cast<int64_t*>(context), chunk = std::max(grain, ceil_div(n, threads));
  std::vector<std::thread> pool;
  for (int64_t begin = 0; begin < n; begin += chunk) pool.emplace_back(body, argument, begin, std::min(n, begin + chunk));
  for (std::thread& t : pool) t.join();
}

std::vector<int> visits(int64_t threads, int64_t n, int64_t grain) {
  std::vector<int> seen(n);
  Parallel parallel{static_cast<int>(threads), &threads, run_threads};
  parallel.for_each(n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++seen[i];
  });
  return seen;
}

MoeProblem moe_problem(int64_t tokens, int64_t topk, const Weight& w13, const Weight& w2, DType dtype) {
  MoeProblem p;
  p.tokens = tokens, p.topk = topk, p.hidden = w2.n, p.intermediate = w2.k;
  p.dtype = dtype;
  p.w13 = w13, p.w2 = w2;
  p.global_experts = w13.experts;
  return p;
}

py::array moe(py::array x, DType dtype, const BoundWeight& w13, const BoundWeight& w2, py::array_t<float, py::array::c_style> topk_weights,
              py::array_t<int32_t, py::array::c_style> topk_ids, Activation kind, int64_t threads) {
  MoeProblem p = moe_problem(x.shape(0), topk_ids.shape(1), w13.w, w2.w, dtype);
  p.x = x.data(), p.x_stride = x.shape(1);
  p.topk_weights = topk_weights.data(), p.topk_ids = topk_ids.data();
  p.activation.kind = kind;
  py::array out = new_array(dtype, {p.tokens, p.hidden});
  p.out = out.mutable_data();
  const size_t bytes = cpu::moe_workspace_bytes(p, static_cast<int>(threads));
  std::vector<char> workspace(bytes, 0x7f);  // not zeros: nothing may rely on them
  const Parallel parallel{static_cast<int>(threads), &threads, run_threads};
  {
    py::gil_scoped_release release;
    check(cpu::fused_moe(p, workspace.data(), bytes, parallel));
  }
  return out;
}

py::array prepack(py::array_t<uint8_t, py::array::c_style> in, int64_t n, int64_t k, int bits, Layout layout, bool inverse) {
  py::array_t<uint8_t> out(in.size());
  const int64_t batch = in.size() / (n * row_bytes(k, bits));
  check((inverse ? cpu::unprepack : cpu::prepack)(in.data(), out.mutable_data(), batch, n, k, bits, layout, Parallel{}));
  return out;
}

py::object text(const char* s) { return s ? py::object(py::str(s)) : py::object(py::none()); }

}  // namespace

PYBIND11_MODULE(int4_emu_native, m) {
  py::enum_<DType>(m, "DType").value("f32", DType::f32).value("f16", DType::f16).value("bf16", DType::bf16);
  py::enum_<Layout>(m, "Layout").value("canonical", Layout::canonical).value("cpu_n16", Layout::cpu_n16);
  py::class_<BoundWeight>(m, "Weight");
  using namespace py::literals;

  m.def("arch_is_served", [](const std::string& compiled, const std::string& device) { return gpu::arch_is_served(compiled, device); });
  m.def("family_for", [](const std::string& device) { return gpu::family_for(device); });
  m.def("ceil_div", &ceil_div);
  m.def("round_up", &round_up);
  m.def("row_bytes", &row_bytes);
  m.def("layout_fits", &layout_fits);
  m.def("format_count", [] { return kFormatCount; });
  m.def("format_name", [](int f) { return format_name(static_cast<Format>(f)); });
  m.def("format_traits", [](int f) {
    const FormatTraits t = format_traits(static_cast<Format>(f));
    return py::dict("transposed"_a = t.transposed, "packed_along_out"_a = t.packed_along_out, "interleaved"_a = t.interleaved,
                    "is_signed"_a = t.is_signed, "plain_int8"_a = t.plain_int8, "scales_are_1d"_a = t.scales_are_1d,
                    "zeros"_a = static_cast<int>(t.zeros));
  });
  m.def("prepack", &prepack, "codes"_a, "n"_a, "k"_a, "bits"_a, "layout"_a, "inverse"_a = false);

  m.def("select_isa", [] {
    const cpu::IsaChoice c = cpu::select_isa();
    return py::make_tuple(text(c.name), std::string(c.rejections));
  });
  m.def("check_isa", [] { check(cpu::check_isa()); });
  m.def("active_table", [] { return cpu::active_table().name; });
  m.def("packed_numerics", [](DType t) { return cpu::packed_numerics(t); });
  m.def("features", [] {
    const cpu::Features f = cpu::detect_features();
    return py::dict("avx2"_a = text(f.avx2), "avx512"_a = text(f.avx512), "amx"_a = text(f.amx));
  });
  m.def("why_not", [](const std::string& name) {
    const char* why = nullptr;
    cpu::find_table(name.c_str(), &why);
    return text(why);
  });
  m.def("has_bf16", [](const std::string& name) { return table_of(name).bf16.gemm != nullptr; });
  m.def("k_multiple", [](const std::string& name) { return table_of(name).k_multiple; });
  m.def("packed_x_bytes", [](const std::string& name, DType c, int64_t rows, int64_t k) {
    return functions_of(table_of(name), c).packed_x_bytes(rows, k);
  });

  m.def("dense_weight", &dense_weight, "data"_a, "dtype"_a, "experts"_a, "n"_a, "k"_a, "expert_stride"_a, "n_stride"_a, "k_stride"_a = 1, "base"_a = 0);
  m.def("packed_weight", &packed_weight, "qweight"_a, "scales"_a, "zeros"_a, "scale_dtype"_a, "experts"_a, "n"_a, "k"_a, "bits"_a, "group_size"_a,
        "layout"_a = Layout::canonical, "base"_a = 0, "expert_stride"_a = 0);
  m.def("product", &product, "table"_a, "compute"_a, "x"_a, "dtype"_a, "weight"_a, "expert"_a, "n0"_a, "n"_a, "k_block"_a = 0,
        "rows"_a = py::none(), "row_scale"_a = py::none(), "perm"_a = py::none());
  m.def("activate", &activate, "table"_a, "kind"_a, "gate"_a, "up"_a, "limit"_a, "alpha"_a, "beta"_a, "dtype"_a);
  m.def("combine", &combine);
  m.def("dequantize_row", &dequantize_row, "table"_a, "codes"_a, "bits"_a, "scales"_a, "scale_dtype"_a, "zeros"_a, "k"_a, "group_size"_a, "dtype"_a);
  py::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("relu2", Activation::relu2)
      .value("swigluoai", Activation::swigluoai)
      .value("silu_no_mul", Activation::silu_no_mul)
      .value("gelu_no_mul", Activation::gelu_no_mul)
      .value("gelu_tanh_no_mul", Activation::gelu_tanh_no_mul)
      .value("relu2_no_mul", Activation::relu2_no_mul);

  m.def("visits", &visits);
  m.def("moe", &moe, "x"_a, "dtype"_a, "w13"_a, "w2"_a, "topk_weights"_a, "topk_ids"_a, "kind"_a, "threads"_a);
  m.def("moe_workspace_bytes", [](int64_t tokens, int64_t topk, int64_t experts, int64_t hidden, int64_t intermediate, int threads) {
    Weight w13, w2;
    w13.experts = w2.experts = experts;
    w13.n = 2 * intermediate, w13.k = hidden, w2.n = hidden, w2.k = intermediate;
    return cpu::moe_workspace_bytes(moe_problem(tokens, topk, w13, w2, DType::bf16), threads);
  });
}
