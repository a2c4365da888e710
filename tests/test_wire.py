"""docs/expert-parallel.md: its numbers are those of benchmarks/wire.py, whose formulas agree with drawn routings."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("runs in a source checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import wire  # noqa: E402


def drawn(model: wire.Model, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[tokens, k] different experts, of the chosen groups alone."""
    scores = rng.random((tokens, model.groups, model.experts // model.groups))
    order = rng.random((tokens, model.groups)).argsort(1)
    scores[order >= model.chosen_groups] = -1
    return scores.reshape(tokens, model.experts).argsort(1)[:, -model.top_k :]


@pytest.mark.parametrize("model", [wire.KIMI_K2, wire.DEEPSEEK_V3], ids=lambda m: m.name)
@pytest.mark.parametrize("ranks", [8, 64])
def test_ranks_of_a_token(model: wire.Model, ranks: int, rng: np.random.Generator) -> None:
    owner = drawn(model, 4000, rng) // (model.experts // ranks)
    found = np.mean([len(set(row)) for row in owner.tolist()])
    assert found == pytest.approx(wire.ranks_of_token(model, ranks), rel=0.02)


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_experts_that_a_batch_reads(tokens: int, rng: np.random.Generator) -> None:
    batches = [len(np.unique(drawn(wire.KIMI_K2, tokens, rng))) for _ in range(200)]
    assert np.mean(batches) == pytest.approx(wire.experts_read(wire.KIMI_K2, tokens), rel=0.02)


def test_the_models_are_those_of_their_names() -> None:
    """The published totals, 1.04 and 0.671 trillion parameters."""
    for model, total in ((wire.KIMI_K2, 1.04e12), (wire.DEEPSEEK_V3, 0.671e12)):
        assert model.layers * model.experts * model.weights + model.rest == pytest.approx(total, rel=0.02)


def test_the_document_holds_the_tables() -> None:
    lines = (ROOT / "docs/expert-parallel.md").read_text().splitlines()
    assert [line for line in wire.table() if lines.count(line) != 1] == []
