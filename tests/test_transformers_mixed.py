"""Checkpoints that mix floating point, int4 and int8 by every means that the configurations have, whole models
against stock transformers on the dequantised weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import int4_emu
from checkpoint_files import awq_config, compressed_tensors_config, gptq_config
from int4_emu import CheckpointError
from int4_emu.integrations._modules import HostedExperts
from int4_writer import round_to_int4, write_mixed
from layers import relative_error
from tiny_models import logits, tiny_model

transformers = pytest.importorskip("transformers")

BOUND = 3e-6
Choose = Callable[[str], tuple[int, int] | None]


def stock_logits(path: Path) -> torch.Tensor:
    auto = transformers.AutoModelForCausalLM
    return logits(auto.from_pretrained(path, dtype=torch.float32, experts_implementation="eager"))


def load(path: Path, weights: str = "auto", **options: Any) -> Any:
    return int4_emu.from_pretrained(path, weights=weights, dtype=torch.float32, progress=False, **options)


def packed_layers(model: Any) -> list[bool]:
    return [module.experts.is_packed for module in model.modules() if isinstance(module, HostedExperts)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    tiny_model("qwen3_moe").save_pretrained(folder)
    return folder


def by_pattern(*rules: tuple[str, tuple[int, int] | None]) -> Choose:
    """The first pattern found in the name decides; `*_proj` matches nothing else than Linears."""

    def choose(module: str) -> tuple[int, int] | None:
        if not module.endswith("_proj"):
            return None
        return next((scheme for pattern, scheme in rules if re.search(pattern, module)), None)

    return choose


def groups(*schemes: tuple[list[str], int, int]) -> dict[str, Any]:
    """compressed-tensors with one config group for each (targets, bits, group size)."""
    config = compressed_tensors_config(symmetric=False)
    config["config_groups"] = {
        f"group_{i}": compressed_tensors_config(bits=bits, group_size=size, symmetric=False)["config_groups"][
            "group_0"
        ]
        | {"targets": targets}
        for i, (targets, bits, size) in enumerate(schemes)
    }
    return config


# Name to (format, what is stored how, the configuration that says so, which layers stay packed under "auto").
CASES: dict[str, tuple[str, Choose, dict[str, Any], list[bool]]] = {
    "ignored at layer level": (
        "compressed_tensors",
        by_pattern((r"layers\.0\.", None), ("", (4, 16))),
        groups((["Linear"], 4, 16)) | {"ignore": ["model.layers.0", "lm_head"]},
        [False, True],
    ),
    "ignored at block level, and by pattern": (
        "compressed_tensors",
        by_pattern((r"layers\.0\.mlp|layers\.1\.self_attn\.[qk]_proj", None), ("", (4, 16))),
        groups((["Linear"], 4, 16))
        | {"ignore": ["model.layers.0.mlp", r"re:.*layers\.1\.self_attn\.(q|k)_proj$", "lm_head"]},
        [False, True],
    ),
    "ignored leaf by leaf": (
        "compressed_tensors",
        by_pattern((r"layers\.0\.mlp", None), ("", (4, 16))),
        groups((["Linear"], 4, 16))
        | {
            "ignore": [
                f"model.layers.0.mlp.experts.{expert}.{leaf}_proj"
                for expert in range(4)
                for leaf in ("gate", "up", "down")
            ]
        },
        [False, True],
    ),
    "several groups, int4 beside int8": (
        "compressed_tensors",
        by_pattern((r"experts.*down", (8, 16)), ("experts", (4, 16)), ("", (8, -1))),
        groups(
            ([r"re:.*experts\.\d+\.(gate|up)_proj$"], 4, 16),
            ([r"re:.*experts\.\d+\.down_proj$"], 8, 16),
            (["Linear"], 8, -1),
        ),
        [True, True],
    ),
    "some experts in floating point": (
        "compressed_tensors",
        by_pattern((r"layers\.1\.mlp\.experts\.2\.", None), ("", (4, 16))),
        groups((["Linear"], 4, 16)) | {"ignore": [r"re:.*layers\.1\.mlp\.experts\.2\..*", "lm_head"]},
        [True, False],
    ),
    "some experts int8": (
        "compressed_tensors",
        by_pattern((r"layers\.1\.mlp\.experts\.2\.", (8, 16)), ("", (4, 16))),
        groups(([r"re:.*layers\.1\.mlp\.experts\.2\..*"], 8, 16), (["Linear"], 4, 16)),
        [True, False],
    ),
    "dynamic": (
        "gptq_v1",
        by_pattern(
            (r"layers\.0\.self_attn", None),
            (r"experts\.\d+\.down_proj", (8, 16)),
            (r"layers\.1\.mlp\.experts\.1\.", None),
            ("", (4, 16)),
        ),
        gptq_config(
            group_size=16,
            sym=False,
            dynamic={
                r"-:.*layers\.0\.self_attn.*": {},
                r"+:.*experts\.\d+\.down_proj": {"bits": 8},
                r"-:.*layers\.1\.mlp\.experts\.1\..*": {},
            },
        ),
        [True, False],
    ),
    "modules not to convert": (
        "awq",
        by_pattern((r"self_attn|layers\.1\.mlp", None), ("", (4, 16))),
        awq_config(group_size=16, modules_to_not_convert=["self_attn", "model.layers.1.mlp", "gate"]),
        [True, False],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mixed_checkpoints(case: str, qwen: Path, tmp_path: Path) -> None:
    format, choose, quantization, packed = CASES[case]
    plain, mixed = write_mixed(qwen, tmp_path, format, choose, quantization)
    want = stock_logits(plain)
    model = load(mixed)
    if int4_emu.is_compiled():
        assert packed_layers(model) == packed
    assert relative_error(logits(model), want) < BOUND
    assert relative_error(logits(load(mixed, "dequantized")), want) < BOUND


def test_a_layer_partly_float_cannot_be_asked_to_stay_packed(qwen: Path, tmp_path: Path) -> None:
    format, choose, quantization, _ = CASES["some experts in floating point"]
    _, mixed = write_mixed(qwen, tmp_path, format, choose, quantization)
    with pytest.raises(CheckpointError, match=r"3 projections of layer 1 are in floating point.*experts\.2"):
        load(mixed, "packed")


@pytest.mark.parametrize(
    ("ignore", "name"),
    [
        (
            ["model.layers.0", "model.layers.1.mlp"],
            r"layers\.1\.mlp\.experts\.\d\.\w+_proj is quantised on disk",
        ),
        (["lm_head"], r"layers\.0\.\S+_proj is in floating point on disk"),
    ],
)
def test_a_list_that_contradicts_the_files_raises(
    ignore: list[str], name: str, qwen: Path, tmp_path: Path
) -> None:
    format, choose, quantization, _ = CASES["ignored at layer level"]
    _, mixed = write_mixed(qwen, tmp_path, format, choose, quantization | {"ignore": ignore})
    with pytest.raises(CheckpointError, match=name):
        load(mixed)


# Dense first layers and layers that predict further tokens, as DeepSeek-V3 has them.


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    tiny_model("deepseek_v3", first_k_dense_replace=1).save_pretrained(folder)
    return folder


def predicting_layer(prefix: str) -> dict[str, torch.Tensor]:
    """Tensors such as a further layer has: its experts in int4, and a matrix that no list leaves out in float."""
    rng = torch.Generator().manual_seed(2)
    tensors = {f"{prefix}.enorm.weight": torch.ones(64), f"{prefix}.eh_proj.weight": torch.zeros(64, 128)}
    sizes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    for leaf, (rows, columns) in sizes.items():
        for module in [f"{prefix}.mlp.experts.{e}.{leaf}" for e in range(4)] + [
            f"{prefix}.mlp.shared_experts.{leaf}"
        ]:
            rounded = round_to_int4(torch.randn(rows, columns, generator=rng), "compressed_tensors", 16)
            tensors |= {f"{module}.{suffix}": part for suffix, part in rounded.tensors.items()}
    return tensors


def write_deepseek(
    deepseek: Path, folder: Path, prefix: str, *ignore: str, **config: Any
) -> tuple[Path, Path]:
    choose = by_pattern((r"layers\.0\.mlp", None), ("", (4, 16)))
    quantization = groups((["Linear"], 4, 16)) | {"ignore": ["model.layers.0.mlp", "lm_head", *ignore]}
    return write_mixed(
        deepseek, folder, "compressed_tensors", choose, quantization, predicting_layer(prefix), **config
    )


@pytest.mark.parametrize("prefix", ["model.layers.2", "mtp.layers.0"])
@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_dense_first_and_predicting_layers(
    prefix: str, weights: str, deepseek: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, mixed = write_deepseek(deepseek, tmp_path, prefix, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO, logger="int4_emu"):
        model, info = load(mixed, weights, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert f"tensors of layers that predict further tokens are not loaded: {prefix}" in caplog.text
    assert isinstance(model.model.layers[0].mlp.gate_proj, torch.nn.Linear)
    assert relative_error(logits(model), stock_logits(plain)) < BOUND


@pytest.mark.parametrize(
    ("prefix", "count"),
    [("model.layers.2", "num_mtp_modules"), ("mtp_dspark.layers.0", None), ("model.mtp_block.0", None)],
)
def test_predicting_layers_in_other_families_words(
    prefix: str, count: str | None, deepseek: Path, tmp_path: Path
) -> None:
    """MiniMax's count, and the stacks of Mistral Large 4 and Ernie 4.5."""
    own = {"num_nextn_predict_layers": 0} | ({count: 1} if count else {})
    plain, mixed = write_deepseek(deepseek, tmp_path, prefix, **own)
    assert relative_error(logits(load(mixed, "packed")), stock_logits(plain)) < BOUND


def test_layers_past_the_models_own_must_be_declared(deepseek: Path, tmp_path: Path) -> None:
    _, mixed = write_deepseek(
        deepseek, tmp_path, "model.layers.2", "re:.*eh_proj", num_nextn_predict_layers=0
    )
    with pytest.raises(
        CheckpointError, match=r"has experts in layers \[1\], the checkpoint in layers \[1, 2\]"
    ):
        load(mixed)


# Linears that the model keeps as one and the checkpoint as two, as MiniMax-M3 does with its shared experts.


@pytest.fixture(scope="module")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minimax")
    tiny_model("minimax_m3_vl").save_pretrained(folder)
    return folder


def write_joined(minimax: Path, folder: Path, gate: Any, up: Any) -> tuple[Path, Path]:
    """Shared experts of a MiniMax-M3, gate and up projection stored as (bits, group size) say; None = float."""
    choose = by_pattern((r"shared_experts\.gate", gate), (r"shared_experts\.up", up))
    named = {"gate_proj": gate, "up_proj": up}
    targets = [([rf"re:.*shared_experts\.{leaf}"], *scheme) for leaf, scheme in named.items() if scheme]
    return write_mixed(minimax, folder, "compressed_tensors", choose, groups(*targets))


def joined_linears(model: Any) -> list[torch.nn.Module]:
    return [m for name, m in model.named_modules() if name.endswith("shared_experts.gate_up_proj")]


def test_parts_of_one_linear_are_joined(minimax: Path, tmp_path: Path) -> None:
    plain, mixed = write_joined(minimax, tmp_path, (4, 16), (4, 16))
    auto = transformers.AutoModelForImageTextToText
    want = logits(auto.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager"))
    for weights, kind in (("packed", int4_emu.Int4Linear), ("dequantized", torch.nn.Linear)):
        model = load(mixed, weights)
        assert {type(linear) for linear in joined_linears(model)} == {kind}
        assert relative_error(logits(model), want) < BOUND


def test_parts_of_several_widths_are_dequantised(minimax: Path, tmp_path: Path) -> None:
    plain, mixed = write_joined(minimax, tmp_path, (4, 16), (8, 16))
    auto = transformers.AutoModelForImageTextToText
    want = logits(auto.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager"))
    model = load(mixed)
    assert {type(linear) for linear in joined_linears(model)} == {torch.nn.Linear}
    assert relative_error(logits(model), want) < BOUND
    with pytest.raises(
        CheckpointError, match=r"gate_proj and \S+up_proj are one Linear .* bits differs: 4 and 8"
    ):
        load(mixed, "packed")


def test_a_part_left_in_floating_point_is_named(minimax: Path, tmp_path: Path) -> None:
    _, mixed = write_joined(minimax, tmp_path, (4, 16), None)
    with pytest.raises(
        CheckpointError, match=r"joins 2 tensors in \S+gate_up_proj, of which .*gate_proj quantised"
    ):
        load(mixed)
