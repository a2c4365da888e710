"""The model families of other projects' tools through from_pretrained, against the tools' references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import int4_emu
from checkpoints import FAMILY_NAMES, reference_tensors, require_checkpoint
from int4_emu.integrations._modules import HostedExperts
from layers import relative_error

pytest.importorskip("transformers")

# The references took weights rounded once to bf16; exact weights differ by that rounding, and Quark's are exact.
BOUND = 4e-3
ACCUMULATION = 2e-6  # the same weights on both sides, in fp32


@pytest.fixture(params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> Path:
    """Each checkpoint in turn."""
    return require_checkpoint(f"families/{request.param}")


def load(path: Path, **options: Any) -> Any:
    return int4_emu.from_pretrained(path, progress=False, **options)


def hosted_experts(model: Any) -> dict[int, tuple[Any, HostedExperts]]:
    """Layer number to (MoE block, experts)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, HostedExperts):
            block = model.get_submodule(name.rpartition(".")[0])
            found[int(name.partition("layers.")[2].partition(".")[0])] = (block, module)
    return found


def experts_output(experts: HostedExperts, reference: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    x = reference[f"moe.{layer}.experts_in"].float()
    index = reference.get(f"moe.{layer}.top_k_index")
    with torch.inference_mode():
        if index is None:  # Llama-4 hands scaled rows over, expert by expert
            return experts(x)
        return experts(x, index, reference[f"moe.{layer}.top_k_weights"])


@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_loads_whole_and_computes_the_reference(family: Path, weights: str) -> None:
    model, info = load(family, weights=weights, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    reference = reference_tensors(family)
    experts = hosted_experts(model)
    layers = {int(key.split(".")[1]) for key in reference if key.startswith("moe.")}
    assert layers
    assert layers == set(experts)
    for layer, (_, module) in experts.items():
        assert module.experts is not None
        assert module.experts.is_packed == (weights == "packed")
        want = reference[f"moe.{layer}.experts_out"]
        assert relative_error(experts_output(module, reference, layer), want) < BOUND, f"layer {layer}"
    quantised = [m for m in model.modules() if isinstance(m, int4_emu.Int4Linear)]
    assert bool(quantised) == (weights == "packed")


def test_tool_rounded_weights_give_blocks_and_logits_in_fp32(family: Path) -> None:
    """Loaded in the dtype to which the tool rounded, then computed in fp32: routers, shared experts and biases
    included, only the accumulation differs.
    """
    rounded = torch.float32 if family.name.startswith("quark") else torch.bfloat16
    reference = reference_tensors(family)
    model = load(family, weights="dequantized", dtype=rounded).float()
    for layer, (block, module) in hosted_experts(model).items():
        got = experts_output(module, reference, layer)
        assert relative_error(got, reference[f"moe.{layer}.experts_out"]) < ACCUMULATION
        x = reference[f"moe.{layer}.input"].float()
        with torch.inference_mode():
            out = block(x if x.dim() == 3 else x[None])
        out = out[0] if isinstance(out, tuple) else out
        want = reference[f"moe.{layer}.output"]
        assert relative_error(out.reshape(want.shape), want) < 10 * ACCUMULATION, f"block {layer}"
    with torch.inference_mode():
        logits = model(input_ids=reference["input_ids"]).logits
    assert relative_error(logits, reference["logits"]) < 1e-3


def test_dequantised_saves_a_plain_checkpoint(family: Path, tmp_path: Path) -> None:
    model = load(family, weights="dequantized", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    stock, info = type(model).from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = reference_tensors(family)["input_ids"]
    with torch.inference_mode():
        got, want = stock(input_ids=ids).logits, model(input_ids=ids).logits
    assert relative_error(got, want) < 10 * ACCUMULATION


def swap_gate_and_up(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = experts.w13
    if experts.w13_order == int4_emu.W13Order.interleaved:
        return w13.unflatten(1, (-1, 2)).flip(2).flatten(1, 2), experts.w2
    return w13.roll(w13.shape[1] // 2, dims=1), experts.w2


def exchange_two_experts(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(experts.num_experts)
    order[:2] = torch.tensor([1, 0])
    return experts.w13[order], experts.w2


@pytest.mark.parametrize("mutate", [swap_gate_and_up, exchange_two_experts])
def test_the_bound_sees_a_fault(family: Path, mutate: Any) -> None:
    model = load(family, weights="dequantized", dtype=torch.float32)
    reference = reference_tensors(family)
    layer, (_, module) = next(iter(hosted_experts(model).items()))
    experts = module.experts
    assert experts is not None
    if mutate is swap_gate_and_up and not experts.activation.is_gated:
        pytest.skip("the experts have no gate")
    w13, w2 = mutate(experts)
    experts.w13, experts.w2 = (torch.nn.Parameter(w.clone(), requires_grad=False) for w in (w13, w2))
    got = experts_output(module, reference, layer)
    assert relative_error(got, reference[f"moe.{layer}.experts_out"]) > 2 * BOUND
