// Ops over checkpoint tensors: unpack, dequantize, repack, prepack.

#include "../core/layout.h"
#include "device.h"
#include "ops.h"

namespace int4_emu::binding {
namespace {

// The checked arguments of one op; holds the contiguous copies that `m` points into.
struct Matrix {
  PackedMatrix m;
  std::vector<int64_t> batch;  // [] or [E]
  Tensor qweight;
  OptionalTensor scales, qzeros, g_idx;
  std::string context;

  std::vector<int64_t> with_batch(std::initializer_list<int64_t> tail) const {
    std::vector<int64_t> dims = batch;
    dims.insert(dims.end(), tail);
    return dims;
  }
};

std::vector<int64_t> batch_of(const Tensor& t, int64_t matrix_dims) {
  return t.dim() == matrix_dims ? std::vector<int64_t>{} : std::vector<int64_t>{t.size(0)};
}

void check_code_dtype(const Tensor& t, const char* name, Format format, int bits) {
  if (format == Format::canonical) {
    check_dtype(t, name, {ScalarType::Byte});
  } else if (format_traits(format).plain_int8 && bits == 8) {
    if (format_traits(format).is_signed) check_dtype(t, name, {ScalarType::Char});
    else check_dtype(t, name, {ScalarType::Byte});
  } else {
    check_dtype(t, name, {ScalarType::Int});
  }
}

// Codes in one element of the packed axis.
int64_t codes_per_element(Format format, int bits) {
  if (format == Format::canonical) return 8 / bits;
  if (format_traits(format).plain_int8 && bits == 8) return 1;
  return 32 / bits;
}

Matrix codes_of(const Tensor& qweight, int64_t format_id, int64_t bits, int64_t in_features) {
  Matrix a{{}, {}, qweight, {}, {}, {}, {}};
  const Format format = check_format(format_id);
  check_bits(bits);
  const FormatTraits traits = format_traits(format);
  check_code_dtype(qweight, "qweight", format, static_cast<int>(bits));
  check_dim(qweight, "qweight", {2, 3}, "a matrix or a stack [E, ...] of matrices");
  a.batch = batch_of(qweight, 2);
  const int64_t rows = qweight.size(-2), columns = qweight.size(-1), per = codes_per_element(format, static_cast<int>(bits));
  int64_t o, i;  // capacity of the tensor
  bool along_out = traits.packed_along_out;
  if (traits.plain_int8 && bits == 8) along_out = !traits.scales_are_1d;
  if (along_out) o = columns * per, i = rows;
  else if (traits.transposed) o = columns, i = rows * per;
  else o = rows, i = columns * per;
  const int64_t slack = along_out ? 1 : per;
  if (in_features != -1 && (in_features > i || in_features <= i - slack))
    fail("in_features must be ", slack == 1 ? std::to_string(i) : std::to_string(i - slack + 1) + ".." + std::to_string(i), ", got ", in_features,
         " (qweight ", shape_text(qweight), ", format ", format_name(format), ", ", bits, " bits)");
  a.qweight = as_contiguous(qweight);
  a.m.format = format;
  a.m.bits = static_cast<int>(bits);
  a.m.batch = a.batch.empty() ? 1 : a.batch[0];
  a.m.out_features = o;
  a.m.in_features = in_features == -1 ? i : in_features;
  a.m.qweight = a.qweight.const_data_ptr();
  return a;
}

void add_scales(Matrix& a, const Tensor& scales) {
  const FormatTraits traits = format_traits(a.m.format);
  check_float(scales, "scales");
  const int64_t dims = (traits.scales_are_1d ? 1 : 2) + static_cast<int64_t>(a.batch.size());
  check_dim(scales, "scales", {dims}, dims == 1 ? "[O]" : dims == 3 ? "[E, O, C] or its transposed form" : "2-dimensional");
  int64_t o;
  if (traits.scales_are_1d) a.m.groups = 1, o = scales.size(-1);
  else if (traits.transposed) a.m.groups = scales.size(-2), o = scales.size(-1);
  else a.m.groups = scales.size(-1), o = scales.size(-2);
  // The last word along O may be padded; the scales then say how many rows are real.
  const int64_t slack = traits.packed_along_out && !(traits.plain_int8 && a.m.bits == 8) ? 32 / a.m.bits : 1;
  if (o > a.m.out_features || o <= a.m.out_features - slack || (!a.batch.empty() && scales.size(0) != a.batch[0]))
    fail("scales must have O = ", a.m.out_features, " output rows like qweight ", shape_text(a.qweight), ", got ", shape_text(scales), " (format ",
         format_name(a.m.format), ")");
  a.m.out_features = o;
  a.scales = as_contiguous(scales);
  a.m.scales = a.scales->const_data_ptr();
  a.m.scale_dtype = to_dtype(scales.scalar_type());
  a.context = "O=" + std::to_string(o) + ", I=" + std::to_string(a.m.in_features) + ", C=" + std::to_string(a.m.groups) + ", format " +
              format_name(a.m.format) + ", " + std::to_string(a.m.bits) + " bits";
}

void add_zeros(Matrix& a, const OptionalTensor& qzeros) {
  if (!qzeros.has_value()) return;
  const FormatTraits traits = format_traits(a.m.format);
  check_code_dtype(*qzeros, "qzeros", a.m.format, a.m.bits);
  const int64_t o = a.m.out_features, c = a.m.groups;
  const int64_t packed_o = a.m.format == Format::canonical ? o : ceil_div(o, codes_per_element(a.m.format, a.m.bits));
  if (traits.scales_are_1d) check_shape(*qzeros, "qzeros", a.with_batch({packed_o}), "[..., ceil(O / codes per word)]", a.context);
  else if (traits.transposed) check_shape(*qzeros, "qzeros", a.with_batch({c, packed_o}), "[..., C, ceil(O / codes per word)]", a.context);
  else check_shape(*qzeros, "qzeros", a.with_batch({packed_o, c}), "[..., ceil(O / codes per word), C]", a.context);
  a.qzeros = as_contiguous(qzeros);
  a.m.qzeros = a.qzeros->const_data_ptr();
}

Matrix dequantize_arguments(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, const OptionalTensor& g_idx,
                            int64_t group_size, int64_t format, int64_t bits, int64_t in_features) {
  Matrix a = codes_of(qweight, format, bits, in_features);
  add_scales(a, scales);
  check_group_size(group_size, a.m.in_features, "group_size", "I");
  a.m.group_size = group_size;
  if (g_idx.has_value()) {
    check_dtype(*g_idx, "g_idx", {ScalarType::Int});
    check_shape(*g_idx, "g_idx", a.with_batch({a.m.in_features}), "[..., I]", a.context);
    a.g_idx = as_contiguous(g_idx);
    check_index_range(*a.g_idx, "g_idx", a.m.groups, "C");
    a.m.g_idx = static_cast<const int32_t*>(a.g_idx->const_data_ptr());
  } else if (a.m.groups != ceil_div(a.m.in_features, group_size)) {
    fail("scales must have C = ceil(I / group_size) = ", ceil_div(a.m.in_features, group_size), " groups, got ", a.m.groups, " in ",
         shape_text(scales), " (I=", a.m.in_features, ", group_size=", group_size, ", format ", format_name(a.m.format), ")");
  }
  add_zeros(a, qzeros);
  return a;
}

void check_perm(const OptionalTensor& perm, const char* name, int64_t n, const char* n_name) {
  if (!perm.has_value()) return;
  check_dtype(*perm, name, {ScalarType::Int});
  check_shape(*perm, name, {n}, (std::string("[") + n_name + "]").c_str(), "");
}

struct Repack {
  Matrix a;
  OptionalTensor in_perm, out_perm;
  void run(uint8_t* qweight, void* scales, uint8_t* zeros) const {
    const RepackOut out{qweight, scales, zeros};
    raise_if_error(device::repack(a.m, data_or_null<int32_t>(in_perm), data_or_null<int32_t>(out_perm), out), "repack");
  }
};

Repack repack_arguments(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, int64_t format, int64_t bits,
                        int64_t in_features, const OptionalTensor& in_perm, const OptionalTensor& out_perm) {
  Repack r{codes_of(qweight, format, bits, in_features), {}, {}};
  add_scales(r.a, scales);
  add_zeros(r.a, qzeros);
  check_perm(in_perm, "in_perm", r.a.m.in_features, "I");
  check_perm(out_perm, "out_perm", r.a.m.out_features, "O");
  r.in_perm = as_contiguous(in_perm);
  r.out_perm = as_contiguous(out_perm);
  if (in_perm) check_index_range(*r.in_perm, "in_perm", r.a.m.in_features, "I");
  if (out_perm) check_index_range(*r.out_perm, "out_perm", r.a.m.out_features, "O");
  return r;
}

Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& dims, ScalarType dtype) { return allocate(like, dims, dtype, "output"); }

Tensor reorder(const Tensor& qweight, int64_t layout, int64_t bits, bool forward) {
  check_bits(bits);
  check_dtype(qweight, "qweight", {ScalarType::Byte});
  check_dim(qweight, "qweight", {2, 3}, "canonical codes [..., N, K * bits / 8]");
  const int64_t n = qweight.size(-2), width = qweight.size(-1), k = width * 8 / bits;
  const Layout l = check_layout(layout, n, k, static_cast<int>(bits), "qweight");
  const Tensor in = as_contiguous(qweight);
  const auto sizes = in.sizes();
  Tensor out = new_tensor(in, std::vector<int64_t>(sizes.begin(), sizes.end()), ScalarType::Byte);
  const int64_t batch = qweight.dim() == 3 ? qweight.size(0) : 1;
  const auto* from = static_cast<const uint8_t*>(in.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int b = static_cast<int>(bits);
  raise_if_error(forward ? device::prepack(from, to, batch, n, k, b, l) : device::unprepack(from, to, batch, n, k, b, l),
                 forward ? "prepack" : "unprepack");
  return out;
}

}  // namespace

Tensor unpack(const Tensor& qweight, int64_t format, int64_t bits, int64_t in_features) {
  const DeviceScope scope(qweight);
  Matrix a = codes_of(qweight, format, bits, in_features);
  Tensor out = new_tensor(qweight, a.with_batch({a.m.out_features, a.m.in_features}), ScalarType::Byte);
  raise_if_error(device::unpack(a.m, static_cast<uint8_t*>(out.mutable_data_ptr())), "unpack");
  return out;
}

Tensor unpack_zeros(const Tensor& qzeros, int64_t format_id, int64_t bits, int64_t out_features) {
  const DeviceScope scope(qzeros);
  const Format format = check_format(format_id);
  check_bits(bits);
  const FormatTraits traits = format_traits(format);
  check_code_dtype(qzeros, "qzeros", format, static_cast<int>(bits));
  const int64_t dims = traits.scales_are_1d ? 1 : 2;
  check_dim(qzeros, "qzeros", {dims, dims + 1}, dims == 1 ? "[..., O]" : "a matrix or a stack [E, ...] of matrices");
  Matrix a{{}, batch_of(qzeros, dims), qzeros, {}, {}, {}, {}};
  const int64_t per = format == Format::canonical ? 1 : codes_per_element(format, static_cast<int>(bits));
  const bool o_last = traits.scales_are_1d || traits.transposed;
  const int64_t o = qzeros.size(o_last ? -1 : -2) * per;
  if (out_features != -1 && (out_features > o || out_features <= o - per))
    fail("out_features must be ", o - per + 1, "..", o, ", got ", out_features, " (qzeros ", shape_text(qzeros), ", format ", format_name(format), ")");
  a.qzeros = as_contiguous(qzeros);
  a.m.format = format;
  a.m.bits = static_cast<int>(bits);
  a.m.batch = a.batch.empty() ? 1 : a.batch[0];
  a.m.out_features = out_features == -1 ? o : out_features;
  a.m.groups = traits.scales_are_1d ? 1 : qzeros.size(o_last ? -2 : -1);
  a.m.qzeros = a.qzeros->const_data_ptr();
  Tensor out = new_tensor(qzeros, a.with_batch({a.m.out_features, a.m.groups}), ScalarType::Byte);
  raise_if_error(device::unpack_zeros(a.m, static_cast<uint8_t*>(out.mutable_data_ptr())), "unpack_zeros");
  return out;
}

Tensor dequantize(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, const OptionalTensor& g_idx, int64_t group_size,
                  int64_t format, int64_t bits, int64_t in_features, std::optional<ScalarType> dtype) {
  const DeviceScope scope(qweight);
  const Matrix a = dequantize_arguments(qweight, scales, qzeros, g_idx, group_size, format, bits, in_features);
  const ScalarType t = dtype.value_or(scales.scalar_type());
  if (t != ScalarType::BFloat16 && t != ScalarType::Half && t != ScalarType::Float)
    fail("dtype must be bfloat16 or float16 or float32, got ", dtype_name(t));
  Tensor out = new_tensor(qweight, a.with_batch({a.m.out_features, a.m.in_features}), t);
  raise_if_error(device::dequantize(a.m, to_dtype(t), out.mutable_data_ptr()), "dequantize");
  return out;
}

void dequantize_out(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, const OptionalTensor& g_idx, int64_t group_size,
                    int64_t format, int64_t bits, int64_t in_features, Tensor out) {
  const DeviceScope scope(qweight);
  const Matrix a = dequantize_arguments(qweight, scales, qzeros, g_idx, group_size, format, bits, in_features);
  check_float(out, "out");
  check_out(out, a.with_batch({a.m.out_features, a.m.in_features}), "[..., O, I]", a.context);
  check_disjoint(out, {{qweight, "qweight"}, {scales, "scales"}, {qzeros, "qzeros"}, {g_idx, "g_idx"}});
  raise_if_error(device::dequantize(a.m, to_dtype(out.scalar_type()), out.mutable_data_ptr()), "dequantize_out");
}

std::tuple<Tensor, Tensor, Tensor> repack(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, int64_t format, int64_t bits,
                                          int64_t in_features, const OptionalTensor& in_perm, const OptionalTensor& out_perm) {
  const DeviceScope scope(qweight);
  const Repack r = repack_arguments(qweight, scales, qzeros, format, bits, in_features, in_perm, out_perm);
  const PackedMatrix& m = r.a.m;
  Tensor q = new_tensor(qweight, r.a.with_batch({m.out_features, row_bytes(m.in_features, m.bits)}), ScalarType::Byte);
  Tensor s = new_tensor(qweight, r.a.with_batch({m.out_features, m.groups}), scales.scalar_type());
  Tensor z = new_tensor(qweight, qzeros ? r.a.with_batch({m.out_features, m.groups}) : std::vector<int64_t>{0}, ScalarType::Byte);
  r.run(static_cast<uint8_t*>(q.mutable_data_ptr()), s.mutable_data_ptr(), qzeros ? static_cast<uint8_t*>(z.mutable_data_ptr()) : nullptr);
  return {q, s, z};
}

void repack_out(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, int64_t format, int64_t bits, int64_t in_features,
                const OptionalTensor& in_perm, const OptionalTensor& out_perm, Tensor out_qweight, Tensor out_scales, OptionalTensor out_qzeros) {
  const DeviceScope scope(qweight);
  const Repack r = repack_arguments(qweight, scales, qzeros, format, bits, in_features, in_perm, out_perm);
  const PackedMatrix& m = r.a.m;
  check_dtype(out_qweight, "out_qweight", {ScalarType::Byte});
  check_out(out_qweight, r.a.with_batch({m.out_features, row_bytes(m.in_features, m.bits)}), "[..., O, I * bits / 8]", r.a.context, "out_qweight");
  check_dtype(out_scales, "out_scales", {scales.scalar_type()});
  check_out(out_scales, r.a.with_batch({m.out_features, m.groups}), "[..., O, C]", r.a.context, "out_scales");
  if (qzeros.has_value() != out_qzeros.has_value()) fail("out_qzeros must be given exactly when qzeros is");
  if (out_qzeros) {
    check_dtype(*out_qzeros, "out_qzeros", {ScalarType::Byte});
    check_out(*out_qzeros, r.a.with_batch({m.out_features, m.groups}), "[..., O, C]", r.a.context, "out_qzeros");
  }
  const auto check_apart = [&](const Tensor& out, const char* name) {
    check_disjoint(out, {{qweight, "qweight"}, {scales, "scales"}, {qzeros, "qzeros"}, {in_perm, "in_perm"}, {out_perm, "out_perm"}}, name);
  };
  check_apart(out_qweight, "out_qweight");
  check_apart(out_scales, "out_scales");
  if (out_qzeros) check_apart(*out_qzeros, "out_qzeros");
  check_disjoint(out_qweight, {{out_scales, "out_scales"}, {out_qzeros, "out_qzeros"}}, "out_qweight");
  check_disjoint(out_scales, {{out_qzeros, "out_qzeros"}}, "out_scales");
  r.run(static_cast<uint8_t*>(out_qweight.mutable_data_ptr()), out_scales.mutable_data_ptr(),
        out_qzeros ? static_cast<uint8_t*>(out_qzeros->mutable_data_ptr()) : nullptr);
}

Tensor prepack(const Tensor& qweight, int64_t layout, int64_t bits) {
  const DeviceScope scope(qweight);
  return reorder(qweight, layout, bits, true);
}
Tensor unprepack(const Tensor& qweight, int64_t layout, int64_t bits) {
  const DeviceScope scope(qweight);
  return reorder(qweight, layout, bits, false);
}

}  // namespace int4_emu::binding
