"""The embedded bard model end to end: perplexity and greedy text against independent references."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import int4_emu
from int4_emu.data import BARD, BARD_PROMPT
from int4_emu.generation import greedy_ids, perplexity, stream_text

transformers = pytest.importorskip("transformers")

REFERENCE = json.loads((BARD / "reference/reference.json").read_text())
ROWS = 63  # the reference is over the first 16128 tokens
FP32_BOUND, BF16_BOUND = 2e-4, 3e-3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BARD)


@pytest.fixture(scope="module")
def text() -> str:
    return (BARD / "reference/eval.txt").read_text()


@pytest.fixture(scope="module")
def bard() -> Any:
    """fp32, packed: the mode whose greedy text must equal the reference."""
    return int4_emu.from_pretrained(BARD, weights="packed", dtype=torch.float32, progress=False)


def test_perplexity_fp32(bard: Any, tokenizer: Any, text: str) -> None:
    found = perplexity(bard, tokenizer, text, max_rows=ROWS)
    assert found.rows == ROWS
    assert found.value == pytest.approx(REFERENCE["perplexity_val_16k_tokens"], rel=FP32_BOUND)


def test_perplexity_bf16(tokenizer: Any, text: str) -> None:
    model = int4_emu.from_pretrained(BARD, weights="packed", progress=False)
    found = perplexity(model, tokenizer, text, max_rows=ROWS)
    assert found.value == pytest.approx(REFERENCE["perplexity_val_16k_tokens"], rel=BF16_BOUND)


def test_perplexity_of_the_modes_agrees_in_bf16(bard: Any, tokenizer: Any, text: str) -> None:
    model = int4_emu.from_pretrained(BARD, weights="dequantized", progress=False)
    rows = 4
    exact = perplexity(bard, tokenizer, text, max_rows=rows).value
    assert perplexity(model, tokenizer, text, max_rows=rows).value == pytest.approx(exact, rel=BF16_BOUND)


def test_perplexity_sees_a_fault(tokenizer: Any, text: str) -> None:
    """Zero points off by one in one layer's gate and up projections: far outside the fp32 bound."""
    model = int4_emu.from_pretrained(BARD, weights="dequantized", dtype=torch.float32, progress=False)
    rows = 4
    right = perplexity(model, tokenizer, text, max_rows=rows).value
    w13 = model.model.layers[1].mlp.experts.experts.w13
    scales = int4_emu.Checkpoint(BARD).load_experts(1, weights="packed", dtype=torch.float32).w13_scales
    with torch.no_grad():
        w13.add_(scales.float().repeat_interleave(w13.shape[-1] // scales.shape[-1], dim=-1))
    assert abs(perplexity(model, tokenizer, text, max_rows=rows).value / right - 1) > 5 * FP32_BOUND


@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_greedy_continuation_equals_the_reference(weights: str, bard: Any, tokenizer: Any) -> None:
    model = bard
    if weights == "dequantized":
        model = int4_emu.from_pretrained(BARD, weights=weights, dtype=torch.float32, progress=False)
    want = REFERENCE["greedy_ids"]
    prompt = tokenizer(BARD_PROMPT)["input_ids"]
    assert want[: len(prompt)] == prompt
    ids = list(greedy_ids(model, prompt, max_new_tokens=len(want) - len(prompt)))
    assert prompt + ids == want


def test_generate_equals_greedy_ids(bard: Any, tokenizer: Any) -> None:
    prompt = tokenizer(BARD_PROMPT, return_tensors="pt")
    out = bard.generate(**prompt, max_new_tokens=64, do_sample=False)
    assert out[0].tolist() == REFERENCE["greedy_ids"]
    assert bard.generation_config.eos_token_id == 0  # read from the folder's generation_config.json


def test_streamed_pieces_join_to_the_text(bard: Any, tokenizer: Any) -> None:
    pieces = list(stream_text(bard, tokenizer, BARD_PROMPT, max_new_tokens=64))
    assert len(pieces) > 50
    assert BARD_PROMPT + "".join(pieces) == REFERENCE["greedy_text"]


def test_stop_ids_end_the_text(bard: Any, tokenizer: Any) -> None:
    prompt = tokenizer(BARD_PROMPT)["input_ids"]
    stop = REFERENCE["greedy_ids"][len(prompt) + 3]
    ids = list(greedy_ids(bard, prompt, max_new_tokens=20, stop_ids=[stop]))
    assert ids == REFERENCE["greedy_ids"][len(prompt) : len(prompt) + 3]


def test_perplexity_counts_whole_rows_only(bard: Any, tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    short = tokenizer.decode(ids[:100])
    tokens = len(tokenizer(short)["input_ids"])
    found = perplexity(bard, tokenizer, short, context=48, batch=1)
    assert (found.rows, found.dropped, found.context) == (tokens // 48, tokens % 48, 48)
    # Each row is its own context: the batch does not matter, and a row alone gives the same losses.
    assert perplexity(bard, tokenizer, short, context=48, batch=2).value == pytest.approx(
        found.value, rel=1e-5
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": 1}, "context must be from 2 to the model's 512 positions, got 1"),
        ({"context": 513}, "context must be from 2 to the model's 512 positions, got 513"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"context": 256}, "the text has 5 tokens, one row of context=256 needs as many"),
    ],
)
def test_perplexity_refuses(bard: Any, tokenizer: Any, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        perplexity(bard, tokenizer, tokenizer.decode(REFERENCE["greedy_ids"][:5]), **options)


def test_greedy_refuses_what_does_not_fit(bard: Any) -> None:
    with pytest.raises(ValueError, match=r"512 positions, got 3 \+ 510"):
        next(greedy_ids(bard, [1, 2, 3], max_new_tokens=510))
    with pytest.raises(ValueError, match="at least one token"):
        next(greedy_ids(bard, [], max_new_tokens=5))
