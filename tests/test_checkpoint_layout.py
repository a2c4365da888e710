"""Names of experts in the field, and what a model configuration says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import gptq_config, random_gptq_layers, write_checkpoint
from int4_emu import Activation, Checkpoint, CheckpointError
from int4_emu.model_config import ActivationSpec, parse_model_config
from int4_emu.moe_layout import discover_moe_layers

SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def names(prefix: str, projections: list[str], experts: int = 2, layers: tuple[int, ...] = (1,)) -> list[str]:
    return [
        f"{prefix.format(layer)}.experts.{expert}.{projection}.qweight"
        for layer in layers
        for expert in range(experts)
        for projection in projections
    ]


LONG_NAMES = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "prefix",
    [
        "model.layers.{}.mlp",
        "model.layers.{}.block_sparse_moe",
        "model.layers.{}.feed_forward",
        "backbone.layers.{}.mixer",
        "model.language_model.layers.{}.mlp",
        "language_model.model.layers.{}.block_sparse_moe",
        "layers.{}.mlp",
    ],
)
@pytest.mark.parametrize("projections", [LONG_NAMES, ["w1", "w3", "w2"]], ids=["long", "short"])
def test_namings(prefix: str, projections: list[str]) -> None:
    found = discover_moe_layers(names(prefix, projections, experts=12, layers=(0, 10)))
    assert list(found) == [0, 10]
    layer = found[10]
    assert layer.block == prefix.format(10)
    assert layer.expert_ids == set(range(12))
    assert layer.roles == ("gate", "up", "down")
    roles = dict(zip(("gate", "up", "down"), projections, strict=True))
    assert {r: layer.modules[11, r].rpartition(".")[2] for r in roles} == roles


def test_experts_without_a_gate() -> None:
    layer = discover_moe_layers(names("backbone.layers.{}.mixer", ["up_proj", "down_proj"]))[1]
    assert layer.roles == ("up", "down")


def test_shared_experts_and_other_tensors_are_not_routed() -> None:
    others = [
        "model.layers.1.mlp.shared_expert.gate_proj.qweight",
        "model.layers.1.mlp.shared_experts.gate_proj.qweight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.qweight",
        "model.layers.2.self_attn.q_proj.qweight",
        "mtp.layers.0.mlp.experts.0.up_proj.qweight",
        "model.embed_tokens.weight",
    ]
    found = discover_moe_layers(others + names("model.layers.{}.mlp", LONG_NAMES))
    assert list(found) == [1]
    assert len(found[1].modules) == 6


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["model.layers.3.mlp.gate.weight"],
            "layer 3 has the router of model.layers.3.mlp but no tensor of its experts",
        ),
        (["model.layers.1.mlp.experts.down_proj"], "do not belong to one numbered expert"),
        (["model.layers.1.mlp.experts.x.down_proj.qweight"], "do not belong to one numbered expert"),
        (
            ["model.layers.1.brain.experts.0.down_proj.qweight"],
            "the MoE block must be one of mlp, block_sparse_moe",
        ),
        (
            ["model.layers.1.feed_forward.experts.0.w1.qweight"],
            "layer 1 has experts under .*mlp and under .*feed_forward",
        ),
        (["vision.layers.1.mlp.experts.0.w1.qweight"], "two stacks hold experts of layer 1"),
    ],
)
def test_layouts_that_are_not_understood(extra: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        discover_moe_layers(names("model.layers.{}.mlp", LONG_NAMES) + extra)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("short", [False, True])
def test_configuration_and_disk_may_name_experts_differently(block: str, short: bool, tmp_path: Path) -> None:
    """Targets and exclusions say `mlp.experts.N.gate_proj` where the file says
    `block_sparse_moe.experts.N.w1`.
    """
    tensors, weights = random_gptq_layers(1, experts=2, block=block, bits=4)
    if short:
        for long, name in SHORT.items():
            tensors = {k.replace(long, name): v for k, v in tensors.items()}
    config = gptq_config(
        group_size=-1, sym=False, dynamic={r"+:.*mlp\.experts\.\d+\.(gate|up|down)_proj": {"group_size": 16}}
    )
    config["dynamic"]["-:.*"] = {}
    path = write_checkpoint(tmp_path, tensors, config, num_experts=2, hidden_size=64)
    experts = Checkpoint(path).load_experts(0, weights="dequantized", dtype=torch.float32)
    want = weights[f"model.layers.0.{block}.experts.1.down_proj"]
    assert torch.equal(experts.w2[1], want)


CONFIGS: list[tuple[dict[str, Any], bool, ActivationSpec]] = [
    ({"hidden_act": "silu"}, True, ActivationSpec(Activation.silu)),
    ({"hidden_act": "swish"}, True, ActivationSpec(Activation.silu)),
    ({"hidden_act": "gelu"}, True, ActivationSpec(Activation.gelu)),
    ({"hidden_act": "gelu_pytorch_tanh"}, True, ActivationSpec(Activation.gelu_tanh)),
    ({"hidden_activation": "gelu_pytorch_tanh"}, True, ActivationSpec(Activation.gelu_tanh)),
    ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, False, ActivationSpec(Activation.relu2_no_mul)),
    ({"hidden_act": "silu"}, False, ActivationSpec(Activation.silu_no_mul)),
    ({"hidden_act": "silu", "swiglu_limit": 10.0}, True, ActivationSpec(Activation.silu, 10.0)),
    (
        {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        True,
        ActivationSpec(Activation.swigluoai, 7.0, 1.702, 1.0),
    ),
    (
        {"model_type": "gpt_oss", "hidden_act": "silu"},
        True,
        ActivationSpec(Activation.swigluoai, 7.0, 1.702, 1.0),
    ),
]


@pytest.mark.parametrize(("config", "gated", "want"), CONFIGS)
def test_activations(config: dict[str, Any], gated: bool, want: ActivationSpec) -> None:
    assert parse_model_config(config).activation(gated=gated) == want


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("nested", [False, True])
def test_expert_counts(key: str, nested: bool) -> None:
    text = {"model_type": "x", key: 6, "num_experts_per_tok": 3, "hidden_size": 8, "moe_intermediate_size": 4}
    model = parse_model_config({"model_type": "outer", "text_config": text} if nested else text)
    assert (model.num_experts, model.top_k, model.hidden_size, model.intermediate_size) == (6, 3, 8, 4)
    assert model.model_type == "x"
    assert not model.apply_router_weight_on_input


def test_llama4_puts_the_router_weight_on_the_input() -> None:
    assert parse_model_config(
        {"text_config": {"model_type": "llama4_text", "num_local_experts": 2}}
    ).apply_router_weight_on_input


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_gated_model_without_any_gate_is_refused(model_type: str) -> None:
    model = parse_model_config({"model_type": model_type, "hidden_act": "silu", "num_experts": 4})
    assert model.activation(gated=True).activation is Activation.silu
    with pytest.raises(CheckpointError, match=f"experts of {model_type} have a gate projection"):
        model.activation(gated=False)
