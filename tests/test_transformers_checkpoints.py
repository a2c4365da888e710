"""Every checkpoint of other projects' tools through from_pretrained, against the tools' references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import int4_emu
from checkpoints import BARD, CHECKPOINT_NAMES, reference_tensors, require_checkpoint
from int4_emu import ops
from layers import relative_error

pytest.importorskip("transformers")

# The references took weights rounded once to the dtype of the scales; exact weights differ by that rounding.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
FP32_BOUND = 1e-6  # the same weights in both: accumulation only
WEIGHTS = ["packed", "dequantized"]
FLOAT_ATTENTION = ("ct-mixtral-mixed-int4asym-gateup-int8-down",)
STOCK = ("compressed_tensors", "gptqmodel", "optimum", "awq", "auto_round", "quark")


def rounded_dtype(path: Path) -> torch.dtype:
    """The dtype to which the tool rounded the dequantised weights of its reference."""
    if path.name.startswith(("quark", "autoround")):
        return torch.float32
    with safe_open(path / "reference/reference.safetensors", "pt") as file:
        name = next(key for key in file.keys() if key.endswith("weight_dequant"))  # noqa: SIM118
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[
            file.get_slice(name).get_dtype()
        ]
    # bard's two matrices are stored in fp32; its reference used them rounded like its scales.
    return torch.bfloat16 if path.name.startswith(("bard", "ct-")) else kind


def path_and_reference(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    path = require_checkpoint(name)
    if not (path / "reference/reference.safetensors").is_file():
        pytest.skip(f"the reference of {name} is in the full set of checkpoints only")
    return path, reference_tensors(path)


def hosted(model: Any, layer: int) -> Any:
    return model.model.layers[layer].mlp.experts


def layer_numbers(reference: dict[str, torch.Tensor]) -> list[int]:
    return sorted({int(key.split(".")[1]) for key in reference if key.startswith("moe.")})


def routing(reference: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        reference[f"moe.{layer}.{part}"]
        for part in ("experts_in", "top_k_index", "top_k_weights", "experts_out")
    )


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_loads_whole_and_computes_the_reference(name: str, weights: str) -> None:
    path, reference = path_and_reference(name)
    model, info = int4_emu.from_pretrained(
        path, weights=weights, dtype=torch.float32, progress=False, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    bound = BOUND.get(rounded_dtype(path), FP32_BOUND)
    layers = layer_numbers(reference)
    assert layers == list(range(model.config.num_hidden_layers))
    for layer in layers:
        x, index, scores, want = routing(reference, layer)
        with torch.inference_mode():
            got = hosted(model, layer)(x.float(), index, scores)
        assert relative_error(got, want) < bound, f"layer {layer}"
    with torch.inference_mode():
        logits = model(input_ids=reference["input_ids"]).logits
    # Random weights route tokens by small margins: single tokens may differ much, so compare the whole.
    cosine = torch.nn.functional.cosine_similarity(
        logits.flatten().double(), reference["logits"].flatten().double(), dim=0
    )
    assert cosine > 0.97
    assert isinstance(hosted(model, 0).experts, int4_emu.Experts)
    linears = {type(layer.self_attn.q_proj) for layer in model.model.layers}
    in_float = weights == "dequantized" or path.name in FLOAT_ATTENTION
    assert linears == {torch.nn.Linear if in_float else int4_emu.Int4Linear}


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_tool_rounded_weights_give_the_reference_in_fp32(name: str) -> None:
    """Loaded in the dtype to which the tool rounded, then computed in fp32: only the accumulation differs."""
    path, reference = path_and_reference(name)
    model = int4_emu.from_pretrained(path, weights="dequantized", dtype=rounded_dtype(path), progress=False)
    for layer in layer_numbers(reference):
        x, index, scores, want = routing(reference, layer)
        experts = hosted(model, layer).experts
        got = ops.fused_moe(x.float(), experts.w13.float(), experts.w2.float(), scores.float(), index)
        assert relative_error(got, want) < FP32_BOUND, f"layer {layer}"


def swap_gate_and_up(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w13.roll(w13.shape[1] // 2, dims=1), w2


def permute_two_experts(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(len(w2))
    order[:2] = torch.tensor([1, 0])
    return w13[order], w2


def shift_one_group(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    changed = w2.clone()
    changed[:, :, :32] *= 1.1
    return w13, changed


@pytest.mark.parametrize("mutate", [swap_gate_and_up, permute_two_experts, shift_one_group])
def test_the_bound_sees_a_fault(mutate: Any) -> None:
    path, reference = path_and_reference("awq-autoawq-qwen3moe-gemm-g128")
    model = int4_emu.from_pretrained(path, weights="dequantized", dtype=torch.float32, progress=False)
    x, index, scores, want = routing(reference, 1)
    experts = hosted(model, 1).experts
    w13, w2 = mutate(experts.w13.detach(), experts.w2.detach())
    assert relative_error(ops.fused_moe(x.float(), w13, w2, scores.float(), index), want) > 2 * max(
        BOUND.values()
    )


def test_no_stock_quantiser_runs() -> None:
    import sys

    int4_emu.from_pretrained(require_checkpoint(BARD), weights="packed", progress=False)
    assert not [name for name in STOCK if name in sys.modules]
