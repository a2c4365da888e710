"""What the configurations say: per-module schemes, exclusions, overrides, and the refusal of what is
unknown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import (
    auto_round_config,
    awq_config,
    compressed_tensors_config,
    gptq_config,
    quark_config,
)
from checkpoints import CHECKPOINT_NAMES, require_checkpoint
from int4_emu import CheckpointError, Format
from int4_emu.formats import QuantScheme, parse_quantization_config

CT, V1, V2, AWQ = Format.compressed_tensors, Format.gptq_v1, Format.gptq_v2, Format.awq
INT4_REORDER = Format.quark_int_reorder
# Checkpoint to the schemes of (layer 0 gate, layer 1 down, layer 1 q_proj): format, bits, group, symmetric,
# act-order.
_CT4 = QuantScheme(CT, 4, 32, False, False)
EXPECTED: dict[str, Any] = {
    "autoround-qwen3moe-asym-g32-autogptq": QuantScheme(V1, 4, 32, False, False),
    "autoround-qwen3moe-sym-g128-autogptq": QuantScheme(V1, 4, 128, True, False),
    "awq-autoawq-qwen3moe-gemm-g128": QuantScheme(AWQ, 4, 128, False, False),
    "bard-moe-w4a16-asym-g32": _CT4,
    "ct-mixtral-mixed-int4asym-gateup-int8-down": (_CT4, QuantScheme(CT, 8, 128, True, False), None),
    "ct-mixtral-w4a16-asym-g32-actorder-group-gidx": QuantScheme(CT, 4, 32, False, True),
    "ct-mixtral-w4a16-sym-g128-gptq-actorder-weight": QuantScheme(CT, 4, 128, True, False),
    "ct-mixtral-w4a16-sym-g32-awq": QuantScheme(CT, 4, 32, True, False),
    "ct-mixtral-w8a16-sym-channel": QuantScheme(CT, 8, -1, True, False),
    "ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored": (
        None,
        QuantScheme(CT, 4, 32, True, False),
        QuantScheme(CT, 8, -1, True, False),
    ),
    "ct-qwen3moe-w4a16-asym-channel": QuantScheme(CT, 4, -1, False, False),
    "ct-qwen3moe-w4a16-asym-g32": _CT4,
    "ct-qwen3moe-w4a16-sym-channel": QuantScheme(CT, 4, -1, True, False),
    "ct-qwen3moe-w4a16-sym-g128": QuantScheme(CT, 4, 128, True, False),
    "ct-qwen3moe-w8a16-sym-g128": QuantScheme(CT, 8, 128, True, False),
    "gptq-mixtral-asym-g32-v1": QuantScheme(V1, 4, 32, False, False),
    "gptq-mixtral-asym-g64-v2": QuantScheme(V2, 4, 64, False, False),
    "gptq-mixtral-int8-sym-channel-v1": QuantScheme(V1, 8, -1, True, False),
    "gptq-mixtral-int8-sym-g32-descact-v1": QuantScheme(V1, 8, 32, True, True),
    "gptq-mixtral-sym-channel-v1": QuantScheme(V1, 4, -1, True, False),
    "gptq-qwen3moe-dynamic-mixed-v1": (
        QuantScheme(V1, 4, 128, True, False),
        QuantScheme(V1, 4, 128, True, False),
        QuantScheme(V1, 8, 64, True, False),
    ),
    "gptq-qwen3moe-int8-sym-g128-v1": QuantScheme(V1, 8, 128, True, False),
    "gptq-qwen3moe-sym-g128-v1": QuantScheme(V1, 4, 128, True, False),
    "gptq-qwen3moe-sym-g32-descact-v1": QuantScheme(V1, 4, 32, True, True),
    "quark-mixtral-int4-sym-channel-reorder": QuantScheme(
        Format.quark_int_channel_reorder, 4, -1, True, False
    ),
    "quark-mixtral-int4-sym-g32-reorder": QuantScheme(INT4_REORDER, 4, 32, True, False),
    "quark-mixtral-int8-sym-channel-order": QuantScheme(Format.quark_int_channel_order, 8, -1, True, False),
    "quark-qwen3moe-int4-sym-g128-order": QuantScheme(Format.quark_int_order, 4, 128, True, False),
    "quark-qwen3moe-int8-sym-g128-reorder": QuantScheme(INT4_REORDER, 8, 128, True, False),
    "quark-qwen3moe-uint4-asym-g32-order": QuantScheme(Format.quark_uint_order, 4, 32, False, False),
}


def _read(path: Path) -> Any:
    return parse_quantization_config(json.loads((path / "config.json").read_text())["quantization_config"])


def _experts(name: str) -> str:
    # GPTQModel and Quark write the names that modules have in memory.
    in_memory = "qwen3moe" in name or name.startswith(("gptq", "quark", "bard"))
    return "mlp.experts.5" if in_memory else "block_sparse_moe.experts.5"


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_schemes_of_each_checkpoint(name: str) -> None:
    quantization = _read(require_checkpoint(name))
    expected = EXPECTED[name]
    gate, down, query = expected if isinstance(expected, tuple) else (expected,) * 3
    experts = _experts(name)
    assert quantization.scheme_for(f"model.layers.0.{experts}.gate_proj") == gate
    assert quantization.scheme_for(f"model.layers.1.{experts}.down_proj") == down
    assert quantization.scheme_for("model.layers.1.self_attn.q_proj") == query
    assert quantization.scheme_for("lm_head") is None


def test_gptq_dynamic_rules_of_a_real_file() -> None:
    quantization = _read(require_checkpoint("gptq-qwen3moe-dynamic-mixed-v1"))
    scheme = {
        name: quantization.scheme_for(f"model.layers.{name}")
        for name in (
            "0.self_attn.o_proj",
            "0.mlp.experts.3.down_proj",
            "1.mlp.experts.3.up_proj",
            "0.self_attn.q_proj",
        )
    }
    assert scheme["0.self_attn.o_proj"] is None
    assert scheme["0.mlp.experts.3.down_proj"] == QuantScheme(V1, 8, 32, True, False)
    assert scheme["1.mlp.experts.3.up_proj"] == QuantScheme(V1, 4, 32, True, False)
    assert scheme["0.self_attn.q_proj"] == QuantScheme(V1, 4, 128, True, False)


@pytest.mark.parametrize(
    ("entry", "excluded"),
    [
        ("model.layers.1.", True),
        ("model.layers.1", True),
        ("layers.1", True),
        ("model.layers.1.mlp", True),
        ("mlp.experts", True),
        ("model.layers.1.mlp.experts.0.gate_proj", True),
        ("model.layers.10", False),
        ("layers", True),
        ("gate", False),
        ("experts.0.gate", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("family", ["awq", "compressed-tensors", "quark"])
def test_exclusions_name_whole_components(family: str, entry: str, excluded: bool) -> None:
    """Case 18: parents and leaves alike, and layers.1 is not layers.10."""
    config = {
        "awq": awq_config(modules_to_not_convert=[entry]),
        "compressed-tensors": compressed_tensors_config(ignore=[entry]),
        "quark": quark_config("int4", "order", exclude=[entry]),
    }[family]
    quantization = parse_quantization_config(config)
    assert (quantization.scheme_for("model.layers.1.mlp.experts.0.gate_proj") is None) == excluded


@pytest.mark.parametrize(
    "config",
    [
        awq_config(modules_to_not_convert=["layers.1"]),
        compressed_tensors_config(ignore=["model.layers.1"]),
        compressed_tensors_config(ignore=[r"re:.*layers\.1\."]),
        quark_config("int4", "order", exclude=["*layers.1.*"]),
        gptq_config(dynamic={r"-:.*layers\.1\.": {}}),
        auto_round_config("auto_round:auto_gptq", extra_config={r".*layers\.1\..*": {"bits": 16}}),
    ],
    ids=lambda c: c["quant_method"],
)
def test_layer_1_is_not_layer_10(config: dict[str, Any]) -> None:
    quantization = parse_quantization_config(config)
    assert quantization.scheme_for("model.layers.1.mlp.up_proj") is None
    assert quantization.scheme_for("model.layers.10.mlp.up_proj") is not None


def test_compressed_tensors_targets_by_precedence() -> None:
    def group(target: str, bits: int, size: int) -> dict[str, Any]:
        config = compressed_tensors_config(bits=bits, group_size=size)["config_groups"]["group_0"]
        return dict(config, targets=[target])

    groups = {
        "a": group("Linear", 4, 128),
        "b": group("re:.*down_proj", 8, 32),
        "c": group("m.1.down_proj", 4, 16),
    }
    quantization = parse_quantization_config(compressed_tensors_config(config_groups=groups))
    sizes = [
        quantization.scheme_for(name).group_size for name in ("m.1.down_proj", "m.2.down_proj", "m.2.up_proj")
    ]
    assert sizes == [16, 32, 128]


def test_gptq_first_matching_rule_decides() -> None:
    config = gptq_config(
        group_size=128,
        dynamic={r"+:.*\.0\.up": {"bits": 8}, r".*up": {"group_size": 32}, r"-:.*": {}},
    )
    quantization = parse_quantization_config(config)
    assert quantization.scheme_for("m.0.up") == QuantScheme(V1, 8, 128, True, False)
    assert quantization.scheme_for("m.1.up") == QuantScheme(V1, 4, 32, True, False)
    assert quantization.scheme_for("m.1.down") is None


def test_auto_round_exact_name_before_pattern() -> None:
    config = auto_round_config(
        "auto_round:auto_gptq",
        group_size=128,
        block_name_to_quantize="model.layers",
        extra_config={r".*\.up": {"group_size": 64}, "model.layers.0.up": {"bits": 8}},
    )
    quantization = parse_quantization_config(config)
    assert quantization.scheme_for("model.layers.0.up") == QuantScheme(V1, 8, 128, True, False)
    assert quantization.scheme_for("model.layers.1.up") == QuantScheme(V1, 4, 64, True, False)
    assert quantization.scheme_for("vision.layers.1.down") is None


def test_quark_layer_overrides() -> None:
    eight = quark_config("int8", "order", group_size=64)["global_quant_config"]
    config = quark_config(
        "int4",
        "order",
        group_size=128,
        layer_quant_config={"*.down_proj": eight, "*.v_proj": {"weight": None}},
    )
    quantization = parse_quantization_config(config)
    assert quantization.scheme_for("m.0.down_proj") == QuantScheme(Format.quark_int_order, 8, 64, True, False)
    assert quantization.scheme_for("m.0.v_proj") is None
    assert quantization.scheme_for("m.0.up_proj").bits == 4


def test_gptq_without_sym_reads_its_zero_points() -> None:
    config = gptq_config()
    del config["sym"]
    assert not parse_quantization_config(config).scheme_for("m.up").symmetric


def _with_weights(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors_config(group_size=32)
    config["config_groups"]["group_0"]["weights"].update(changes)
    return config


def _with_group(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors_config(group_size=32)
    config["config_groups"]["group_0"].update(changes)
    return config


def _quark_weight(**changes: Any) -> dict[str, Any]:
    config = quark_config("int4", "order", group_size=32)
    config["global_quant_config"]["weight"].update(changes)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "fp8"},
            "quant_method must be one of compressed-tensors, gptq, awq, auto-round, quark, got 'fp8'",
        ),
        ({}, "quant_method must be one of .* got None"),
        ({"quant_method": ["gptq"]}, "quant_method must be one of"),
        (
            gptq_config(checkpoint_format="marlin"),
            "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'",
        ),
        (gptq_config(bits=3), "bits must be one of 4, 8, got 3"),
        (gptq_config(bits="4"), "bits must be one of 4, 8, got '4'"),
        (gptq_config(bits=True), "bits must be one of 4, 8, got True"),
        (gptq_config(group_size=0), "group_size must be -1 or a positive whole number, got 0"),
        (gptq_config(group_size=-2), "group_size must be -1 or a positive whole number, got -2"),
        (gptq_config(group_size=None), "group_size must be -1 or a positive whole number, got None"),
        (gptq_config(group_size=32.0), "group_size must be -1 or a positive whole number, got 32.0"),
        (gptq_config(sym="yes"), "sym must be true or false, got 'yes'"),
        (gptq_config(pack_dtype="int16"), "pack_dtype must be one of int32, got 'int16'"),
        (gptq_config(is_marlin_format=True), "checkpoint_format must be one of gptq, gptq_v2, got marlin"),
        (gptq_config(dynamic={"+:(": {}}), "does not compile"),
        (gptq_config(dynamic={"up": {"bits": 2}}), "dynamic bits must be one of 4, 8, got 2"),
        (gptq_config(dynamic={"up": {"checkpoint_format": "gptq_v2"}}), "must not change checkpoint_format"),
        (gptq_config(dynamic=["up"]), "dynamic must be a JSON object, got list"),
        (awq_config(version="gemv"), "version must be one of gemm, got 'gemv'"),
        (awq_config(version="marlin"), "version must be one of gemm, got 'marlin'"),
        (awq_config(bits=8), "bits must be one of 4, got 8"),
        (awq_config(modules_to_not_convert=[1]), "modules_to_not_convert must be a list of strings"),
        (
            auto_round_config("auto_round:gptqmodel"),
            "packing_format must be one of auto_round:auto_gptq, auto_round:auto_awq",
        ),
        (
            auto_round_config("auto_round:auto_gptq", data_type="mx_fp"),
            "data_type must be one of int, got 'mx_fp'",
        ),
        (auto_round_config("auto_round:auto_gptq", act_bits=8), "act_bits must be 16 or absent"),
        (
            quark_config("int4", "interleave"),
            "export.pack_method must be one of reorder, order, got 'interleave'",
        ),
        (quark_config("mxfp4", "order"), "weight.dtype must be one of int4, uint4, int8, uint8, got 'mxfp4'"),
        (
            _quark_weight(qscheme="per_tensor"),
            "qscheme must be one of per_group, per_channel, got 'per_tensor'",
        ),
        (_quark_weight(ch_axis=0), "ch_axis"),
        (_with_weights(num_bits=2), "num_bits must be one of 4, 8, got 2"),
        (_with_weights(type="float"), "type must be one of int, got 'float'"),
        (_with_weights(strategy="tensor"), "strategy must be one of group, channel, got 'tensor'"),
        (_with_weights(symmetric=None), "symmetric must be true or false, got None"),
        (_with_weights(dynamic=True), "dynamic must be false"),
        (_with_weights(actorder="random"), "actorder must be one of"),
        (
            _with_group(format="nvfp4-pack-quantized"),
            "format must be one of pack-quantized, got 'nvfp4-pack-quantized'",
        ),
        (_with_group(input_activations={"num_bits": 8}), "input_activations must be null"),
        (compressed_tensors_config(config_groups={}), "at least one group"),
        (
            compressed_tensors_config(transform_config={"config_groups": {"u": 1}}),
            "transform_config must be empty",
        ),
        (
            compressed_tensors_config(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format must be dense",
        ),
        (compressed_tensors_config(ignore=["re:("]), "does not compile"),
    ],
)
def test_unknown_settings_raise(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_quantization_config(config)


def test_zero_point_format_is_checked() -> None:
    with pytest.raises(
        ValueError, match=r"zero_point_format must be one of gptq_v1, gptq_v2, gptq_v1_nibble, got awq"
    ):
        parse_quantization_config(gptq_config(), zero_point_format="awq")
    quantization = parse_quantization_config(awq_config(), zero_point_format="gptq_v2")
    with pytest.raises(CheckpointError, match=r"applies to GPTQ tensors only"):
        quantization.scheme_for("m.up")
