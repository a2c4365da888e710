"""Tiny random transformers models of every MoE family: other sizes everywhere, weights of other statistics."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from int4_writer import biases_of, experts_of, projections_of

# By the names that the configurations use. H = 64; I is 48, or 96 where `intermediate_size` is the experts'.
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80, "moe_shared_expert_intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "max_position_embeddings": 128, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# What the sizes above do not make small, or leave without experts.
_LATENT_ATTENTION = {"head_dim": 8, "num_key_value_heads": 4}
_MIXED_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_ATTENTION,
    "axk2": _LATENT_ATTENTION,
    "bailing_hybrid": {**_MIXED_ATTENTION, "num_key_value_heads": 4},
    "beam": {"mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "deepseek_v32": _LATENT_ATTENTION,
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 24, "index_head_dim": 16, "index_n_heads": 2},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {
        "enable_moe_block": True, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
    },
    "glm4_moe_lite": _LATENT_ATTENTION,
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "glm_moe_dsa": _LATENT_ATTENTION,
    "hy_v4_vl_text": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling_text": {"unpadded_vocab_size": 96, "dense_intermediate_size": 96},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "kimi_linear": {**_MIXED_ATTENTION, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "minimax_m3_vl_text": {"shared_intermediate_size": 80, "dense_intermediate_size": 112},
    "qwen3_5_moe_text": _MIXED_ATTENTION,
    "qwen3_next": _MIXED_ATTENTION,
    "qwen4_exp_text": {
        **_MIXED_ATTENTION, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0], "vision_output_dim": 64, "projector_input_dim": 32,
    "projector_output_dim": 64, "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
# Models around a text model, and its type.
COMPOSITE = {
    "gemma4": "gemma4_text",
    "glm4v_moe": "glm4v_moe_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}


def _tiny_vision(kind: Any) -> Any:
    vision = kind.sub_configs["vision_config"]
    known = {field.name for field in dataclasses.fields(vision)} if dataclasses.is_dataclass(vision) else set()
    known |= set(inspect.signature(vision.__init__).parameters)
    return vision(**{name: value for name, value in _VISION.items() if name in known})


def tiny_config(model_type: str, **options: Any) -> Any:
    """A configuration of that model type; `options` are its attributes."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type}")
    kind = transformers.CONFIG_MAPPING[model_type]
    if model_type in COMPOSITE:
        parts = {"text_config": tiny_config(COMPOSITE[model_type]), "vision_config": _tiny_vision(kind)}
        return kind(**{name: part.to_dict() for name, part in parts.items()})
    known = set(inspect.signature(kind.__init__).parameters)
    if dataclasses.is_dataclass(kind):
        known |= {field.name for field in dataclasses.fields(kind)}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return kind(**(sizes | SPECIAL.get(model_type, {}) | options))


def tiny_model(model_type: str, **options: Any) -> Any:
    """A model in float32 whose gate, up and down projections differ in spread and mean, and whose activations
    pass the limits that some families have.
    """
    import transformers

    torch.manual_seed(0)
    config = tiny_config(model_type, **options)
    auto = transformers.AutoModelForCausalLM
    if model_type in COMPOSITE:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, experts_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                )
        for module in experts_of(model).values():
            for role, stack in projections_of(module).items():
                spread, mean = {"gate": (0.8, 0.05), "up": (0.5, -0.02), "down": (0.1, 0.01)}[role]
                stack.copy_(torch.randn(stack.shape, generator=generator) * spread + mean)
            for bias in biases_of(module).values():
                bias.copy_(torch.randn(bias.shape, generator=generator))
    return model
