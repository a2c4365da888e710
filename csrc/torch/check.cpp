#include "check.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "../core/layout.h"
#include "device.h"

namespace int4_emu::binding {

Tensor allocate(const Tensor& like, const std::vector<int64_t>& dims, ScalarType dtype, const char* what) {
  try {
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(dims.data(), dims.size()), dtype);
  } catch (const std::runtime_error&) {
    // Sizes are checked before: only memory can be short. torch's own words do not survive its stable interface before 2.13.
    double bytes = dtype == ScalarType::Byte ? 1 : (dtype == ScalarType::Float || dtype == ScalarType::Int ? 4 : 2);
    for (int64_t d : dims) bytes *= static_cast<double>(d);
    std::ostringstream text;
    text.precision(4);
    text << "out of memory: no " << bytes / (1 << 20) << " MiB of " << what << " on " << device_name(like);
    throw std::runtime_error(text.str());
  }
}

void raise_if_error(const Status& status, const char* op) {
  if (status) return;
  const std::string text = std::string(op) + ": " + status.message;
  if (status.code == Code::invalid_value) throw std::invalid_argument(text);
  throw std::runtime_error(text);
}

std::string shape_text(const std::vector<int64_t>& dims) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < dims.size(); ++i) text << (i ? ", " : "") << dims[i];
  text << ']';
  return text.str();
}

std::string shape_text(const Tensor& t) {
  const auto sizes = t.sizes();
  return shape_text(std::vector<int64_t>(sizes.begin(), sizes.end()));
}

const char* dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

DType to_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    default: fail("internal: no kernel dtype for ", dtype_name(t));
  }
}

void check_device(const Tensor& t, const char* name) {
  const Tensor& first = DeviceScope::first();
  if (t.device() != first.device()) fail(name, " must be on ", device_name(first), " like the op's first argument, got ", device_name(t));
}

std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

void check_dim(const Tensor& t, const char* name, std::initializer_list<int64_t> allowed, const char* meaning) {
  for (int64_t d : allowed)
    if (t.dim() == d) return;
  fail(name, " must be ", meaning, ", got ", t.dim(), " dimensions ", shape_text(t));
}

void check_dtype(const Tensor& t, const char* name, std::initializer_list<ScalarType> allowed) {
  check_device(t, name);
  std::string names;
  for (ScalarType a : allowed) {
    if (t.scalar_type() == a) return;
    names += std::string(names.empty() ? "" : " or ") + dtype_name(a);
  }
  fail(name, " must be ", names, ", got ", dtype_name(t.scalar_type()));
}

void check_float(const Tensor& t, const char* name) {
  check_dtype(t, name, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
}

void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& want, const char* formula, const std::string& context) {
  const auto sizes = t.sizes();
  if (sizes.size() == want.size() && std::equal(want.begin(), want.end(), sizes.begin())) return;
  fail(name, " must be ", formula, " = ", shape_text(want), ", got ", shape_text(t), context.empty() ? "" : " (" + context + ")");
}

void check_out(const Tensor& out, const std::vector<int64_t>& want, const char* formula, const std::string& context, const char* name) {
  check_device(out, name);
  check_shape(out, name, want, formula, context);
  if (!out.is_contiguous()) fail(name, " must be contiguous, got shape ", shape_text(out), " with other strides");
}

void check_disjoint(const Tensor& out, std::initializer_list<NamedTensor> others, const char* out_name) {
  // The span of a strided tensor: from its first element to its last.
  const auto span = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const char* begin = static_cast<const char*>(t.const_data_ptr());
    return std::pair<const char*, const char*>(begin, begin + (last + 1) * static_cast<int64_t>(t.element_size()));
  };
  if (out.numel() == 0) return;
  const auto a = span(out);
  for (const NamedTensor& in : others) {
    if (in.tensor == nullptr || in.tensor->numel() == 0) continue;
    const auto b = span(*in.tensor);
    if (a.first < b.second && b.first < a.second) fail(out_name, " must not share memory with ", in.name);
  }
}

void check_bits(int64_t bits, const char* name) {
  if (bits != 4 && bits != 8) fail(name, " must be 4 or 8, got ", bits);
}

void check_group_size(int64_t group_size, int64_t k, const char* name, const char* k_name) {
  if (group_size < 1 || (group_size > k && k > 0))
    fail(name, " must be 1..", k_name, " = 1..", k, " (per-channel is ", k_name, " itself), got ", group_size);
}

Format check_format(int64_t format) {
  if (format >= 0 && format < kFormatCount) return static_cast<Format>(format);
  std::string known;
  for (int i = 0; i < kFormatCount; ++i)
    known += std::string(i ? ", " : "") + format_name(static_cast<Format>(i)) + " (" + std::to_string(i) + ")";
  fail("format must be one of ", known, ", got ", format);
}

Layout check_layout(int64_t layout, int64_t n, int64_t k, int bits, const char* name) {
  if (layout != 0 && layout != 1) fail("layout must be canonical (0) or cpu_n16 (1), got ", layout);
  const Layout l = static_cast<Layout>(layout);
  if (!layout_fits(l, n, k, bits))
    fail("layout cpu_n16 needs N % 16 == 0 and K % ", 32 / bits, " == 0, got N=", n, ", K=", k, " (", name, ", ", bits, " bits)");
  return l;
}

void check_index_range(const Tensor& t, const char* name, int64_t end, const char* end_name) {
  if (!device::kHostReadsValues) return;
  const int32_t* v = static_cast<const int32_t*>(t.const_data_ptr());
  const int64_t n = t.numel();
  int32_t low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    low = v[i] < low ? v[i] : low;
    high = v[i] > high ? v[i] : high;
  }
  if (n > 0 && (low < 0 || high >= end))
    fail(name, " values must be 0..", end_name, "-1 = 0..", end - 1, ", got ", low < 0 ? low : high);
}

void check_offsets(const Tensor& offsets, int64_t rows) {
  if (!device::kHostReadsValues) return;
  int64_t last = 0;
  for (int64_t e = 0; e < offsets.numel(); ++e) {
    const int64_t v = read_index(offsets, e);
    if (v < last || v > rows)
      fail("expert_offsets must ascend within 0..R = 0..", rows, ", got ", v, " at ", e, e ? " after " + std::to_string(last) : "");
    last = v;
  }
}

int64_t read_index(const Tensor& t, int64_t i) {
  return t.scalar_type() == ScalarType::Long ? static_cast<const int64_t*>(t.const_data_ptr())[i] : static_cast<const int32_t*>(t.const_data_ptr())[i];
}

bool is_gated(Activation kind) { return static_cast<int32_t>(kind) < static_cast<int32_t>(Activation::silu_no_mul); }

ActivationSpec check_activation(int64_t activation, std::optional<double> limit, std::optional<double> alpha, std::optional<double> beta) {
  static const struct { Activation kind; const char* name; } known[] = {
      {Activation::silu, "silu"}, {Activation::gelu, "gelu"}, {Activation::gelu_tanh, "gelu_tanh"}, {Activation::relu2, "relu2"},
      {Activation::swigluoai, "swigluoai"}, {Activation::silu_no_mul, "silu_no_mul"}, {Activation::gelu_no_mul, "gelu_no_mul"},
      {Activation::gelu_tanh_no_mul, "gelu_tanh_no_mul"}, {Activation::relu2_no_mul, "relu2_no_mul"}};
  const char* name = nullptr;
  std::string names;
  for (const auto& k : known) {
    if (static_cast<int64_t>(k.kind) == activation) name = k.name;
    names += std::string(names.empty() ? "" : ", ") + k.name + " (" + std::to_string(static_cast<int>(k.kind)) + ")";
  }
  if (name == nullptr) fail("activation must be one of ", names, ", got ", activation);
  const Activation kind = static_cast<Activation>(activation);
  if (kind == Activation::swigluoai) {
    std::string missing;
    if (!limit) missing += " limit";
    if (!alpha) missing += " alpha";
    if (!beta) missing += " beta";
    if (!missing.empty()) fail("activation swigluoai needs limit, alpha, beta; missing", missing);
  } else if (alpha || beta || (limit && kind != Activation::silu)) {
    fail("activation ", name, " takes ", kind == Activation::silu ? "limit" : "no parameter", ", got ", limit ? "limit " : "",
         alpha ? "alpha " : "", beta ? "beta " : "");
  }
  for (const auto& [value, what] : {std::pair(alpha, "alpha"), std::pair(beta, "beta")})
    if (value && !std::isfinite(*value)) fail(what, " must be finite, got ", *value, " (activation ", name, ")");
  if (limit && !(*limit > 0)) fail("limit must be > 0, got ", *limit, " (activation ", name, ")");
  ActivationSpec spec;
  spec.kind = kind;
  spec.has_limit = limit.has_value();
  spec.limit = static_cast<float>(limit.value_or(0.0));
  spec.alpha = static_cast<float>(alpha.value_or(0.0));
  spec.beta = static_cast<float>(beta.value_or(0.0));
  return spec;
}

void check_ids(const Tensor& ids, int64_t global_experts) {
  if (!device::kHostReadsValues) return;
  const char* mode = std::getenv("INT4_EMU_CHECK_IDS");
  if (mode == nullptr || std::strcmp(mode, "1") != 0) return;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int64_t id = read_index(ids, i);
    if (id < -1 || id >= global_experts)
      fail("topk_ids must be -1 (unrouted) or 0..E-1 = 0..", global_experts - 1, ", got ", id, " at slot ", i, " (INT4_EMU_CHECK_IDS=1)");
  }
}

}  // namespace int4_emu::binding
