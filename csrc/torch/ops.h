// The op implementations, one function a schema of python/int4_emu/schemas.inc, registered in library.cpp.
#pragma once

#include <tuple>

#include "check.h"

namespace int4_emu::binding {

using Float = std::optional<double>;

Tensor unpack(const Tensor& qweight, int64_t format, int64_t bits, int64_t in_features);
Tensor unpack_zeros(const Tensor& qzeros, int64_t format, int64_t bits, int64_t out_features);
Tensor dequantize(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, const OptionalTensor& g_idx, int64_t group_size,
                  int64_t format, int64_t bits, int64_t in_features, std::optional<ScalarType> dtype);
void dequantize_out(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, const OptionalTensor& g_idx, int64_t group_size,
                    int64_t format, int64_t bits, int64_t in_features, Tensor out);
std::tuple<Tensor, Tensor, Tensor> repack(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, int64_t format, int64_t bits,
                                          int64_t in_features, const OptionalTensor& in_perm, const OptionalTensor& out_perm);
void repack_out(const Tensor& qweight, const Tensor& scales, const OptionalTensor& qzeros, int64_t format, int64_t bits, int64_t in_features,
                const OptionalTensor& in_perm, const OptionalTensor& out_perm, Tensor out_qweight, Tensor out_scales, OptionalTensor out_qzeros);
Tensor prepack(const Tensor& qweight, int64_t layout, int64_t bits);
Tensor unprepack(const Tensor& qweight, int64_t layout, int64_t bits);

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_align(const Tensor& topk_ids, int64_t num_experts, int64_t block_size, const OptionalTensor& expert_map);
Tensor grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const OptionalTensor& scales, const OptionalTensor& qzeros,
                    const OptionalTensor& perm, const OptionalTensor& bias, int64_t group_size, int64_t bits, int64_t layout);
void grouped_gemm_out(const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const OptionalTensor& scales, const OptionalTensor& qzeros,
                      const OptionalTensor& perm, const OptionalTensor& bias, int64_t group_size, int64_t bits, int64_t layout, Tensor out);
Tensor fused_moe(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                 const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                 int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input);
void fused_moe_out(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                   const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                   int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input, Tensor out);
Tensor fused_moe_packed(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                        const Tensor& w13_scales, const Tensor& w2_scales, int64_t w13_group_size, int64_t w2_group_size,
                        const OptionalTensor& w13_qzeros, const OptionalTensor& w2_qzeros, const OptionalTensor& w13_perm,
                        const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map, int64_t global_num_experts,
                        int64_t intermediate_size, int64_t w13_bits, int64_t w2_bits, int64_t layout, int64_t activation, Float limit, Float alpha,
                        Float beta, int64_t w13_order, bool apply_router_weight_on_input);
void fused_moe_packed_out(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights, const Tensor& topk_ids,
                          const Tensor& w13_scales, const Tensor& w2_scales, int64_t w13_group_size, int64_t w2_group_size,
                          const OptionalTensor& w13_qzeros, const OptionalTensor& w2_qzeros, const OptionalTensor& w13_perm,
                          const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map,
                          int64_t global_num_experts, int64_t intermediate_size, int64_t w13_bits, int64_t w2_bits, int64_t layout,
                          int64_t activation, Float limit, Float alpha, Float beta, int64_t w13_order, bool apply_router_weight_on_input, Tensor out);

}  // namespace int4_emu::binding
