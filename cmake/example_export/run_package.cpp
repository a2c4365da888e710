// Runs an AOTInductor package of a MoE layer: run_package PACKAGE LIBRARY TOKENS [OUT]. LIBRARY, the compiled op library of int4_emu,
// registers torch.ops.int4_emu; OUT gets the result as raw float32.
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

namespace {

// Input that any language can make without rounding: small integers over 64.
at::Tensor numbers(int64_t rows, int64_t columns, int64_t step, int64_t modulus) {
  at::Tensor t = at::empty({rows, columns}, at::kFloat);
  float* data = t.mutable_data_ptr<float>();
  for (int64_t i = 0; i < t.numel(); ++i) data[i] = static_cast<float>(i * step % modulus - modulus / 2) / 64;
  return t;
}

int run(const char* package, const char* library, int64_t tokens, const char* out) {
  if (dlopen(library, RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "error: %s\n", dlerror());
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader loader(package);
  auto facts = loader.get_metadata();
  const int64_t hidden = std::stoll(facts.at("hidden_size")), experts = std::stoll(facts.at("num_experts"));
  const int64_t top_k = std::stoll(facts.at("top_k"));
  at::Tensor ids = at::empty({tokens, top_k}, at::kLong);
  for (int64_t i = 0; i < ids.numel(); ++i) ids.mutable_data_ptr<int64_t>()[i] = (i * 3 + i / top_k) % experts;
  const at::Tensor x = numbers(tokens, hidden, 37, 101).to(at::kBFloat16);
  const at::Tensor y = loader.run({x, numbers(tokens, top_k, 5, 7), ids}).at(0).to(at::kFloat).contiguous();
  const float* values = y.const_data_ptr<float>();
  std::printf("[%ld, %ld], out[0] = %.6f\n", static_cast<long>(y.size(0)), static_cast<long>(y.size(1)), values[0]);
  if (out != nullptr) std::ofstream(out, std::ios::binary).write(reinterpret_cast<const char*>(values), y.numel() * 4);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: run_package PACKAGE LIBRARY TOKENS [OUT]\n");
    return 2;
  }
  try {
    return run(argv[1], argv[2], std::atoll(argv[3]), argc > 4 ? argv[4] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
