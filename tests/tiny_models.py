"""Tiny random transformers models of every MoE family: other sizes everywhere, weights of other statistics."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from int4_writer import biases_of, experts_of, projections_of

IDS = torch.arange(3, 27).view(2, 12)

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
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_ATTENTION,
    "axk2": _LATENT_ATTENTION,
    "bailing_hybrid": {**_MIXED_ATTENTION, "num_key_value_heads": 4},
    "beam": {"mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "deepseek_v32": _LATENT_ATTENTION,
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 24, **_INDEXER},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {
        "enable_moe_block": True, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
    },
    "glm4_moe_lite": _LATENT_ATTENTION,
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "glm5_next_text": {
        "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["sparse", "sparse"],
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "linear_num_heads": 2, "linear_head_dim": 16,
        **_INDEXER, "index_kpool": 2,
    },
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
    "mistral4": _LATENT_ATTENTION,
    "mistral_large4_text": {**_LATENT_ATTENTION, **_INDEXER},
    "qwen3_5_moe_text": _MIXED_ATTENTION,
    "qwen3_next": _MIXED_ATTENTION,
    "qwen4_exp_text": {
        **_MIXED_ATTENTION, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "sarvam_mla": _LATENT_ATTENTION,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


# Towers for images and sound: no test runs them, but they are built, saved and loaded.
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0], "vision_output_dim": 64, "projector_input_dim": 32,
    "projector_output_dim": 64, "pos_emb_height": 4, "pos_emb_width": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "mlp_dim": 48, "downsample_channels": [32, 32], "global_attn_indexes": [0],
    "head_dim": 16, "position_embedding_size": 16, "text_hidden_size": 64, "encoder_layers": 1, "d_model": 32,
    "encoder_ffn_dim": 48, "encoder_attention_heads": 2, "downsample_hidden_size": 16, "output_dim": 64,
    "moe_intermediate_size": 24, "num_local_experts": 2, "num_experts_per_tok": 1, "adapter_in_dim": 32,
    "adapter_out_dim": 64, "adapter_input_size": 32, "projection_intermediate_size": 48,
    "mlp_layer_types": ["sparse"], "layer_types": ["full_attention"],
}  # fmt: skip
# With fewer layers than its patches have prime factors, this one asks for scipy.
_SPECIAL_TOWER = {"inkling_vision": {"num_hidden_layers": 4, "patch_size": 4}}
# Models around a text model, and its type.
COMPOSITE = {
    "aria": "aria_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "dots3_note": "dots3_note_text",
    "gemma4": "gemma4_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "inkling_mm_model": "inkling_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral_large4_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "unlimited_ocr": "unlimited_ocr_text",
}


def _fields(kind: Any) -> set[str]:
    """The names of a configuration's attributes."""
    named = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return named | set(inspect.signature(kind.__init__).parameters)


def _tiny_tower(kind: Any) -> Any:
    parts = {name: _tiny_tower(part).to_dict() for name, part in kind.sub_configs.items()}
    sizes = {name: value for name, value in _TOWER.items() if name in _fields(kind)}
    return kind(**(sizes | _SPECIAL_TOWER.get(kind.model_type, {}) | parts))


def tiny_config(model_type: str, **options: Any) -> Any:
    """A configuration of that model type; `options` are its attributes."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type}")
    if model_type == "aria_text" and hasattr(transformers.models.aria.modeling_aria, "AriaGroupedExpertsGemm"):
        # An experts module of its own, which experts_implementation does not reach and which stores fc1 and fc2.
        pytest.skip(f"transformers {transformers.__version__} has no common experts module in aria_text")
    kind = transformers.CONFIG_MAPPING[model_type]
    if model_type in COMPOSITE:
        default = kind()
        towers = {name: getattr(default, name) for name in kind.sub_configs if name != "text_config"}
        parts = {name: _tiny_tower(type(tower)) for name, tower in towers.items() if tower is not None}
        parts["text_config"] = tiny_config(COMPOSITE[model_type])
        return kind(**{name: part.to_dict() for name, part in parts.items()})
    sizes = {name: value for name, value in _SIZES.items() if name in _fields(kind)}
    return kind(**(sizes | SPECIAL.get(model_type, {}) | options))


def _auto_class(model_type: str, config: Any) -> Any:
    """The first that knows the configuration; a text model alone comes last for what is around one."""
    import transformers

    tasks = ["CausalLM", "ImageTextToText", "MultimodalLM", "TokenClassification"]
    tasks = tasks[1:] if model_type in COMPOSITE else tasks
    kinds = [getattr(transformers, f"AutoModelFor{task}") for task in tasks]
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


def tiny_model(model_type: str, **options: Any) -> Any:
    """A model in float32 whose gate, up and down projections differ in spread and mean, and whose activations
    pass the limits that some families have.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type, **options)
    model = _auto_class(model_type, config).from_config(config, experts_implementation="eager").float().eval()
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


def logits(model: Any) -> torch.Tensor:
    """Those of IDS, in float64."""
    # Llama-4's multimodal class in transformers 5.24 fails on text alone; the text model in it does not.
    model = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
    with torch.inference_mode():
        return model(input_ids=IDS.to(model.device)).logits.double()
