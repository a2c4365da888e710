// Argument checks of every op. Each failure is one sentence: the name, the rule with its numbers, what came, the context.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/problem.h"
#include "../core/status.h"

namespace int4_emu::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Raises ValueError in Python.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Turns a kernel's Status into an exception that names the op.
void raise_if_error(const Status& status, const char* op);

std::string shape_text(const std::vector<int64_t>& dims);
std::string shape_text(const Tensor& t);
const char* dtype_name(ScalarType t);
DType to_dtype(ScalarType t);

std::string device_name(const Tensor& t);
// Like the first tensor of the op (DeviceScope).
void check_device(const Tensor& t, const char* name);
void check_dim(const Tensor& t, const char* name, std::initializer_list<int64_t> allowed, const char* meaning);
void check_dtype(const Tensor& t, const char* name, std::initializer_list<ScalarType> allowed);
void check_float(const Tensor& t, const char* name);  // float32, float16 or bfloat16
// `formula` spells the dimensions, `context` the sizes they come from.
void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& want, const char* formula, const std::string& context);
void check_out(const Tensor& out, const std::vector<int64_t>& want, const char* formula, const std::string& context, const char* name = "out");
struct NamedTensor {
  const Tensor* tensor;  // null: not given
  const char* name;
  NamedTensor(const Tensor& t, const char* n) : tensor(&t), name(n) {}
  NamedTensor(const OptionalTensor& t, const char* n) : tensor(t ? &*t : nullptr), name(n) {}
};
// The memory of `out` must overlap none of the others.
void check_disjoint(const Tensor& out, std::initializer_list<NamedTensor> others, const char* out_name = "out");
void check_bits(int64_t bits, const char* name = "bits");
void check_group_size(int64_t group_size, int64_t k, const char* name, const char* k_name);
Format check_format(int64_t format);
Layout check_layout(int64_t layout, int64_t n, int64_t k, int bits, const char* name);
// The next three look at values, and do nothing where the host cannot without synchronising: there the kernels test the bounds.
void check_index_range(const Tensor& contiguous_int32, const char* name, int64_t end, const char* end_name);
void check_offsets(const Tensor& contiguous_offsets, int64_t rows);
void check_ids(const Tensor& contiguous_topk_ids, int64_t global_experts);  // only under INT4_EMU_CHECK_IDS=1
int64_t read_index(const Tensor& contiguous, int64_t i);  // int32 or int64, on the host
ActivationSpec check_activation(int64_t activation, std::optional<double> limit, std::optional<double> alpha, std::optional<double> beta);
bool is_gated(Activation kind);

template <class T>
const T* data_or_null(const OptionalTensor& t) {
  return t.has_value() ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

}  // namespace int4_emu::binding
