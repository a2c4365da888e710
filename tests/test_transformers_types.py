"""Every MoE model type of transformers: int4 experts in each tool's form against stock transformers, which loads
the dequantised weights from a plain checkpoint in the names that the family publishes.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import int4_emu
from int4_emu import CheckpointError, convert
from int4_emu.integrations._families import REFUSED, TESTED
from int4_emu.integrations._modules import HostedExperts
from int4_writer import FORMATS, write_pair
from layers import relative_error
from tiny_models import logits, tiny_model

transformers = pytest.importorskip("transformers")

# The families that people quantise: every format, both modes, mutants, saving.
FAMILIES = [
    "deepseek_v3", "deepseek_v4", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe", "llama4_text", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
]  # fmt: skip
# Of the others, those with something of their own: a layout, a limit, names, a model around the text model.
OWN_WAYS = {"aria_text", "dots3_note", "gemma4", "hy_v4", "inkling_text", "jamba", "kimi_k25", "kimi_linear", "lfm2_moe",
            "llama4", "minimax_m3_vl", "openai_privacy_filter", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "zaya"}  # fmt: skip
OTHERS = [
    kind if kind in OWN_WAYS else pytest.param(kind, marks=pytest.mark.slow)
    for kind in TESTED
    if kind not in FAMILIES
]
GROUP = 16
# The weights are the same float32 numbers on both sides: the order of additions is all that differs.
BOUND = 3e-6


def check_convert(model_type: str, plain: Path, quantised: Path, out: Path) -> None:
    """convert is refused for the types that transformers itself saves with all experts in one tensor."""
    with safe_open(plain / "model.safetensors", "pt") as file:
        stacked = not any(re.search(r"\.experts\.0\.", name) for name in file.keys())  # noqa: SIM118
    # As a part of the multimodal model its experts are published one by one, alone they are not.
    stacked |= model_type == "minimax_m3_vl"
    checkpoint = int4_emu.Checkpoint(quantised)
    if not stacked:
        assert checkpoint.model.model_type not in convert._STACKED_MODELS
        return
    with pytest.raises(CheckpointError, match=r"transformers reads \w+ with all experts in one tensor"):
        convert.convert_checkpoint(checkpoint, out)
    assert not out.exists()


def stock_logits(path: Path) -> torch.Tensor:
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model, info = kind.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return logits(model)


def load(path: Path, **options: Any) -> Any:
    return int4_emu.from_pretrained(path, **{"dtype": torch.float32, "progress": False, **options})


def hosted(model: Any) -> list[HostedExperts]:
    return [module for module in model.modules() if isinstance(module, HostedExperts)]


def swap_gate_and_up(experts: int4_emu.Experts) -> None:
    half = experts.w13.shape[1] // 2
    experts.w13.copy_(experts.w13.roll(half, dims=1))


def exchange_two_experts(experts: int4_emu.Experts) -> None:
    experts.w13[:2] = experts.w13[:2].flip(0)


def drop_limit(experts: int4_emu.Experts) -> None:
    experts.limit = 1e9


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_family_gives_the_logits_of_stock_transformers(model_type: str, format: str, tmp_path: Path) -> None:
    plain, quantised = write_pair(tiny_model(model_type), tmp_path, format, GROUP)
    want = stock_logits(plain)
    for weights in ("packed", "dequantized"):
        model, info = load(quantised, weights=weights, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        experts = [module.experts for module in hosted(model)]
        assert experts
        assert all(e.is_packed == (weights == "packed") for e in experts)
        sizes = (experts[0].hidden_size, experts[0].intermediate_size, 2 * experts[0].intermediate_size)
        assert len(set(sizes)) == 3
        assert relative_error(logits(model), want) < BOUND, weights
    if format == "compressed_tensors":
        check_convert(model_type, plain, quantised, tmp_path / "converted")
        model.save_pretrained(tmp_path / "saved")
        assert relative_error(stock_logits(tmp_path / "saved"), want) < BOUND
        assert relative_error(logits(load(tmp_path / "saved")), want) < BOUND
    first = experts[0]
    mutants = [exchange_two_experts]
    mutants += [swap_gate_and_up] if first.activation.is_gated else []
    mutants += [drop_limit] if first.limit is not None else []
    before = first.w13.clone(), first.limit
    for mutate in mutants:
        with torch.no_grad():
            mutate(first)
            assert relative_error(logits(model), want) > 1000 * BOUND, mutate.__name__
            first.w13.copy_(before[0])
            first.limit = before[1]


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_types_give_the_logits_of_stock_transformers(model_type: str, tmp_path: Path) -> None:
    plain, quantised = write_pair(tiny_model(model_type), tmp_path, "compressed_tensors", GROUP)
    model = load(quantised, weights="packed")
    assert hosted(model)
    assert relative_error(logits(model), stock_logits(plain)) < BOUND
    check_convert(model_type, plain, quantised, tmp_path / "converted")
    # Not every configuration names its class.
    config = json.loads((quantised / "config.json").read_text())
    architecture = config.pop("architectures")
    (quantised / "config.json").write_text(json.dumps(config))
    model = load(quantised, dtype=torch.bfloat16)
    assert [type(model).__name__] == architecture
    assert (
        relative_error(logits(model), stock_logits(plain)) < 0.5
    )  # few random experts: bfloat16 sends some tokens elsewhere


def test_kimi_k2_is_deepseek_v3_under_its_own_name(tmp_path: Path) -> None:
    plain, quantised = write_pair(tiny_model("deepseek_v3"), tmp_path, "compressed_tensors", GROUP)
    config = json.loads((quantised / "config.json").read_text())
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (quantised / "config.json").write_text(json.dumps(config | own))
    model = load(quantised, use_cache=False)
    assert model.config.use_cache is False
    assert relative_error(logits(model), stock_logits(plain)) < BOUND


def test_an_activation_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    _, quantised = write_pair(tiny_model("qwen3_moe"), tmp_path, "compressed_tensors", GROUP)
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"hidden_act": "tanh"}))
    with pytest.raises(
        CheckpointError, match=r"must be one of silu, .* got 'tanh'; .*no known activation gives"
    ):
        load(quantised)


def types_with_experts() -> set[str]:
    """The model types of the installed transformers that generate and whose code has a class of experts."""
    from transformers.models.auto import configuration_auto, modeling_auto

    folder = Path(transformers.__file__).parent / "models"
    tasks = (
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "TOKEN_CLASSIFICATION",
    )
    found = set()
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        mappings = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks)
        names = [mapping[kind] for mapping in mappings if kind in mapping]
        if not names:
            continue
        module = configuration_auto.model_type_to_module_name(kind)
        file = folder / module / f"modeling_{module}.py"
        if not file.is_file():  # run by the class of another type
            file = Path(inspect.getfile(getattr(transformers, names[0])))
        if re.search(r"class \w*Experts?\(", file.read_text(encoding="utf-8")):
            found.add(kind)
    return found


@pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="the lists are those of transformers 5.24")
def test_every_type_is_tested_or_refused() -> None:
    # Kimi-K2.5 has DeepSeek-V3 in it, and no experts of its own.
    assert types_with_experts() | {"kimi_k25"} == set(TESTED) | set(REFUSED)
    assert not set(TESTED) & set(REFUSED)


@pytest.mark.parametrize("inner", [False, True])
def test_refused_types_say_why(inner: bool, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for kind, reason in REFUSED.items():
        config = (
            {"model_type": "wrapper", "text_config": {"model_type": kind}} if inner else {"model_type": kind}
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path)
        assert str(raised.value) == f"int4_emu does not run model_type {kind!r}: {reason}"


def test_the_lists_are_documented() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    part = text.partition("#### Model types")[2].partition("ExpertParallel")[0]
    tested, _, refused = part.partition("| model type |")
    assert set(re.findall(r"`([a-z0-9_]+)`", tested)) == {*TESTED, "kimi_k2"}
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", refused, re.MULTILINE)) == REFUSED
