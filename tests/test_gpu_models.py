"""Whole models on a GPU in both modes, bf16 and fp16, against the references that were computed on a CPU.

Greedy text may leave the reference at a tie only: where the CPU's fp32 margin between its token and the one taken is at most one unit
roundoff of the compute type, relative to the logit itself. There both logits are the same number to that type.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import int4_emu
from checkpoints import CHECKPOINT_NAMES
from int4_emu.data import BARD, BARD_PROMPT
from int4_emu.generation import greedy_ids, perplexity
from layers import relative_error
from on_gpu import needs_gpu
from test_transformers_checkpoints import (
    BOUND,
    hosted,
    layer_numbers,
    path_and_reference,
    rounded_dtype,
    routing,
)

transformers = pytest.importorskip("transformers")

pytestmark = [needs_gpu, pytest.mark.gpu]

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
MODES = pytest.mark.parametrize("weights", ["packed", "dequantized"])
# x, weights, intermediate and result are rounded once each.
LAYER_BOUND = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
PERPLEXITY_BOUND = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

REFERENCE = json.loads((BARD / "reference/reference.json").read_text())


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
@MODES
@DTYPES
def test_checkpoint_computes_the_reference(name: str, weights: str, dtype: torch.dtype) -> None:
    path, reference = path_and_reference(name)
    model: Any = int4_emu.from_pretrained(path, weights=weights, dtype=dtype, device="cuda", progress=False)
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"cuda"}
    # The tool's own rounding of its weights, and ours.
    bound = BOUND.get(rounded_dtype(path), 0.0) + LAYER_BOUND[dtype]
    for layer in layer_numbers(reference):
        x, index, scores, want = routing(reference, layer)
        experts = hosted(model, layer)
        with torch.inference_mode():
            got = experts(x.to("cuda", dtype), index.cuda(), scores.to("cuda"))
        assert relative_error(got.cpu(), want) < bound, f"layer {layer}"
        if isinstance(getattr(experts, "experts", None), int4_emu.Experts):
            assert "gpu" in str(experts.experts.selection)
    with torch.inference_mode():
        logits = model(input_ids=reference["input_ids"].cuda()).logits.cpu()
    # Random weights route tokens by small margins: single tokens may differ much, so compare the whole.
    cosine = torch.nn.functional.cosine_similarity(
        logits.flatten().double(), reference["logits"].flatten().double(), dim=0
    )
    assert cosine > 0.97


def bard(weights: str, dtype: torch.dtype) -> Any:
    return int4_emu.from_pretrained(BARD, weights=weights, dtype=dtype, device="cuda", progress=False)


@MODES
@DTYPES
def test_bard_perplexity(weights: str, dtype: torch.dtype) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BARD)
    text = (BARD / "reference/eval.txt").read_text()
    found = perplexity(bard(weights, dtype), tokenizer, text, max_rows=63)
    assert 44.0 < found.value < 44.3
    assert found.value == pytest.approx(REFERENCE["perplexity_val_16k_tokens"], rel=PERPLEXITY_BOUND[dtype])


@pytest.fixture(scope="module")
def margins() -> Any:
    """(position, token) -> how far below the top the CPU's fp32 logit of this token lies, relative to the top, on the reference text."""
    model = int4_emu.from_pretrained(BARD, weights="packed", dtype=torch.float32, progress=False)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([REFERENCE["greedy_ids"]])).logits[0].double()

    def margin(position: int, token: int) -> float:
        top = logits[position].max()
        return ((top - logits[position, token]) / top.abs()).item()

    return margin


@MODES
@DTYPES
def test_bard_greedy_text(weights: str, dtype: torch.dtype, margins: Any) -> None:
    """Each step on the reference text, and the text that it writes by itself up to the first tie."""
    model, want = bard(weights, dtype), REFERENCE["greedy_ids"]
    prompt = transformers.AutoTokenizer.from_pretrained(BARD)(BARD_PROMPT)["input_ids"]
    with torch.inference_mode():
        steps = model(input_ids=torch.tensor([want], device="cuda")).logits[0].argmax(-1).tolist()
    for position in range(len(prompt) - 1, len(want) - 1):
        assert steps[position] == want[position + 1] or margins(position, steps[position]) <= ROUNDOFF[dtype]
    got = prompt + list(greedy_ids(model, prompt, max_new_tokens=len(want) - len(prompt)))
    differs = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    assert differs is None or margins(differs - 1, got[differs]) <= ROUNDOFF[dtype]
    assert got[: len(prompt) + 1] == want[: len(prompt) + 1]
