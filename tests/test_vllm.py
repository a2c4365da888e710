"""The vLLM plug-in without vLLM: names, versions and registration, activations.

Layers are in test_vllm_layers.py; the engine itself is driven by tests/hosts (make host-check).
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from checkpoints import BARD, require_checkpoint
from int4_emu import Activation, Checkpoint
from int4_emu.formats import parse_quantization_config
from int4_emu.integrations import vllm as plugin
from int4_emu.integrations.vllm._captured import declared_scheme, required_suffixes
from int4_emu.integrations.vllm._experts_intake import activation_spec
from int4_emu.integrations.vllm._names import expert_projections, map_names, part_names, renamings
from int4_emu.integrations.vllm._settings import expert_weights, parse_weights

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

# --- names -----------------------------------------------------------------------------------------------------------------------


def test_fused_layers_have_the_names_of_their_parts() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert part_names("model.layers.0.self_attn.qkv_proj", packed) == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    )
    assert part_names("model.layers.0.mlp.gate_up_proj", {}) == (
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    )
    assert part_names("lm_head", packed) == ("lm_head",)


def test_experts_without_gate_have_two_projections() -> None:
    layer = SimpleNamespace(
        ckpt_gate_proj_name="up_proj", ckpt_up_proj_name=None, ckpt_down_proj_name="down_proj"
    )
    assert expert_projections(layer) == {"up": "up_proj", "down": "down_proj"}
    layer = SimpleNamespace(ckpt_gate_proj_name="w1", ckpt_up_proj_name="w3", ckpt_down_proj_name="w2")
    assert expert_projections(layer) == {"gate": "w1", "up": "w3", "down": "w2"}


def test_lists_of_a_configuration_follow_the_hosts_names() -> None:
    def rename(name: str) -> str | None:
        return (
            None
            if name.startswith("vision")
            else name.replace("model.language_model", "language_model.model")
        )

    config = {
        "ignore": ["model.language_model.layers.0.mlp.gate", "re:.*lm_head", "lm_head", "vision.tower"],
        "config_groups": {"group_0": {"targets": ["Linear", "model.language_model.layers.1.mlp"]}},
        "layer_quant_config": {"model.language_model.layers.*.mlp": 1, "model.language_model.layers.2": 2},
    }
    mapped = map_names(config, rename)
    assert mapped["ignore"] == [
        "language_model.model.layers.0.mlp.gate",
        "re:.*lm_head",
        "lm_head",
        "vision.tower",
    ]
    assert mapped["config_groups"]["group_0"]["targets"] == ["Linear", "language_model.model.layers.1.mlp"]
    assert mapped["layer_quant_config"] == {
        "model.language_model.layers.*.mlp": 1,
        "language_model.model.layers.2": 2,
    }
    assert config["ignore"][0] == "model.language_model.layers.0.mlp.gate"  # the original is left alone


# --- versions and registration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+g123", "0.32.0+cpu"])
def test_tested_versions_are_served(version: str) -> None:
    assert plugin.version_refusal(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev", "0.3"])
def test_other_versions_are_refused_with_a_sentence(version: str) -> None:
    refusal = plugin.version_refusal(version)
    assert refusal == (
        "int4_emu's plug-in works with vLLM from 0.32 and below 0.33, which it was tested with, "
        f"and this is vLLM {version}"
    )


def test_an_untested_vllm_gets_a_method_that_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: dict[str, Any] = {}

    def module(name: str, **attributes: Any) -> None:
        stub = ModuleType(name)
        stub.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, stub)

    for name in ("vllm.model_executor", "vllm.model_executor.layers"):
        module(name)
    module("vllm", __version__="0.99.1")
    module(
        "vllm.model_executor.layers.quantization",
        register_quantization_config=lambda name: lambda cls: registered.setdefault(name, cls),
    )
    module("vllm.model_executor.layers.quantization.base_config", QuantizationConfig=object)
    monkeypatch.delitem(sys.modules, "int4_emu.integrations.vllm._refusing", raising=False)
    plugin.register()
    monkeypatch.delitem(sys.modules, "int4_emu.integrations.vllm._refusing")
    assert list(registered) == ["int4_emu"]
    assert "this is vLLM 0.99.1: nothing is overridden" in caplog.text
    method = registered["int4_emu"]
    assert method.override_quantization_method({"quant_method": "awq"}, "awq") is None
    with pytest.raises(ValueError, match=r"below 0\.33, .* and this is vLLM 0\.99\.1"):
        method.override_quantization_method({"quant_method": "awq"}, "int4_emu")
    with pytest.raises(ValueError, match=r"this is vLLM 0\.99\.1"):
        method.from_config({"quant_method": "awq"})


@pytest.mark.skipif(not PYPROJECT.is_file(), reason="runs in a source checkout")
def test_the_entry_point_is_the_register_function() -> None:
    """As it is declared; make host-check proves that vLLM finds the installed one."""
    group = PYPROJECT.read_text().partition('[project.entry-points."vllm.general_plugins"]')[2]
    found = re.match(r'\s*int4_emu = "([\w.]+):(\w+)"', group)
    assert found is not None
    assert getattr(importlib.import_module(found[1]), found[2]) is plugin.register


# --- activations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("silu", (None, None, None), (Activation.silu, None, None, None)),
        ("silu", (10.0, None, None), (Activation.silu, 10.0, None, None)),
        ("gelu_tanh", (None, None, None), (Activation.gelu_tanh, None, None, None)),
        ("relu2_no_mul", (None, None, None), (Activation.relu2_no_mul, None, None, None)),
        ("swigluoai", (None, None, None), (Activation.swigluoai, 7.0, 1.702, 1.0)),
        ("swigluoai_uninterleave", (7.0, 1.702, 1.0), (Activation.swigluoai, 7.0, 1.702, 1.0)),
    ],
)
def test_activations_keep_their_parameters(name: str, given: Any, want: Any) -> None:
    spec = activation_spec(name, *given)
    assert (spec.activation, spec.limit, spec.alpha, spec.beta) == want


def test_unknown_activations_and_dropped_parameters_are_refused() -> None:
    with pytest.raises(
        ValueError, match="int4_emu has no MoE activation 'situ': the known ones are silu, gelu"
    ):
        activation_spec("situ", None, None, None)
    with pytest.raises(ValueError, match="swigluoai needs limit, alpha, beta; missing alpha"):
        activation_spec("swigluoai_uninterleave", 7.0, None, 1.0)
    with pytest.raises(ValueError, match=r"activation gelu takes no parameter, got limit=7\.0"):
        activation_spec("gelu", 7.0, None, None)


# --- settings --------------------------------------------------------------------------------------------------------------------


def test_the_weights_setting() -> None:
    assert parse_weights({}) == parse_weights(None) == parse_weights({"other": {"weights": "x"}}) == "auto"
    assert parse_weights({"int4_emu": {"weights": "packed"}}) == "packed"
    with pytest.raises(ValueError, match="must be one of auto, packed, dequantized, got 'int4'"):
        parse_weights({"int4_emu": {"weights": "int4"}})
    with pytest.raises(
        ValueError, match=r"must be an object with the key .weights., got \{'weight': 'packed'\}"
    ):
        parse_weights({"int4_emu": {"weight": "packed"}})


def test_moe_backend_emulation_means_dequantized_weights() -> None:
    assert [expert_weights(w, "auto") for w in ("auto", "packed", "dequantized")] == [
        "auto",
        "packed",
        "dequantized",
    ]
    assert {expert_weights(w, "emulation") for w in ("auto", "dequantized")} == {"dequantized"}
    with pytest.raises(ValueError, match=r"--moe-backend emulation contradicts .* = .packed."):
        expert_weights("packed", "emulation")
    with pytest.raises(ValueError, match="--moe-backend marlin is a kernel of vLLM's own"):
        expert_weights("auto", "marlin")


def test_blocks_that_some_tools_call_mlp() -> None:
    ((pattern, new),) = renamings("mixtral").items()
    assert pattern.sub(new or "", "model.layers.0.mlp.experts.1.w1.qweight") == (
        "model.layers.0.block_sparse_moe.experts.1.w1.qweight"
    )
    assert pattern.sub(new or "", "model.layers.0.mlp.gate.weight") == (
        "model.layers.0.block_sparse_moe.gate.weight"
    )
    assert (
        pattern.sub(new or "", "model.layers.0.mlp.gate_proj.weight") == "model.layers.0.mlp.gate_proj.weight"
    )
    assert renamings("qwen3_moe") == {}


# --- formats ----------------------------------------------------------------------------------------------------------------------


def test_what_is_waited_for_is_what_writers_always_store() -> None:
    config = Checkpoint(require_checkpoint(BARD)).config["quantization_config"]
    quantization = parse_quantization_config(config)
    scheme = declared_scheme(quantization, "model.layers.1.mlp.experts.3.gate_proj")
    assert required_suffixes(scheme) == ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    assert declared_scheme(quantization, "lm_head") is None
    assert required_suffixes(None) == ("weight",)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    scheme = declared_scheme(parse_quantization_config(gptq), "model.layers.0.mlp.experts.0.up_proj")
    assert set(required_suffixes(scheme)) == {"qweight", "scales", "qzeros", "g_idx"}
