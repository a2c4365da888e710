"""Arguments of a type that no schema takes: one sentence with the name, the rule and what came, never a page of schema."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import int4_emu
from int4_emu import ops

pytestmark = pytest.mark.usefixtures("compiled")

CODES, SCALES = torch.zeros(16, 8, dtype=torch.uint8), torch.ones(16, 1)


def moe(**changes: Any) -> torch.Tensor:
    arguments = {
        "hidden_states": torch.ones(2, 16), "w13": torch.zeros(3, 32, 8, dtype=torch.uint8),
        "w2": torch.zeros(3, 16, 8, dtype=torch.uint8), "topk_weights": torch.ones(2, 1),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int64), "w13_scales": torch.ones(3, 32, 1),
        "w2_scales": torch.ones(3, 16, 1), "w13_group_size": 16, "w2_group_size": 16,
    }  # fmt: skip
    return ops.fused_moe_packed(**(arguments | changes))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("hidden_states", None, "Tensor"),
        ("w13", None, "Tensor"),
        ("topk_ids", [[0], [1]], "Tensor"),
        ("w13_group_size", 16.0, "int"),
        ("w2_bits", 4.0, "int"),
        ("limit", "7", "float"),
    ],
)
def test_moe(name: str, value: Any, kind: str) -> None:
    with pytest.raises(TypeError) as caught:
        moe(**{name: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} must be of type ") and kind in sentence and "\n" not in sentence
    assert sentence.endswith(f"got {type(value).__name__}") or isinstance(value, list)


def test_other_ops() -> None:
    with pytest.raises(TypeError, match=r"^qweight must be of type Tensor, got NoneType$"):
        ops.unpack(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^group_size must be of type int, got float$"):
        ops.dequantize(CODES, SCALES, group_size=16.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^scales must be of type Tensor, got int$"):
        ops.dequantize(CODES, 1, group_size=16)  # type: ignore[arg-type]
    assert torch.equal(ops.dequantize(CODES, SCALES, group_size=16), torch.full((16, 16), -8.0))


def test_experts() -> None:
    experts = int4_emu.Experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4), dtype=torch.float32)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with pytest.raises(
        ValueError, match=r"^hidden_states must be \[\.\.\., H\] with H = 4, got no dimension$"
    ):
        experts(torch.tensor(1.0), weights, ids)
    with pytest.raises(ValueError, match=r"^top_k must be >= 1, got 0$"):
        int4_emu.Experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4), dtype=torch.float32, top_k=0)


def test_an_instruction_set_that_cannot_serve() -> None:
    """The choice by environment variable is a backend's: raw ops say so with the type of the layers' refusal."""
    program = (
        "import torch, int4_emu\n"
        "try: int4_emu.ops.dequantize(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), group_size=8)\n"
        "except int4_emu.BackendError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "INT4_EMU_CPU_ISA": "sse9"}, capture_output=True,
        text=True, check=True, timeout=120,
    )  # fmt: skip
    assert 'INT4_EMU_CPU_ISA must be portable, avx2, avx512 or amx, got "sse9"' in done.stdout
