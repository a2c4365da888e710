"""Experts whose gate and up projection are one tensor, rows alternating or halves, sliced and act-ordered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import gptq_config, random_gptq_linear, write_checkpoint
from int4_emu import Checkpoint, CheckpointError, Experts, W13Order

HIDDEN, INTER, EXPERTS, GROUP = 64, 48, 3, 16
# Which rows of gate_up_proj are the gate's and which up's.
ORDER_LIST = [
    ("gpt_oss", slice(0, None, 2), slice(1, None, 2)),
    ("qwen3_moe", slice(0, INTER), slice(INTER, None)),
]


def joined_file(folder: Path, model_type: str, act_order: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GPTQ file with biases, and its exact tensors by name."""
    rng = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        sizes = {"gate_up_proj": (2 * INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
        for name, (rows, columns) in sizes.items():
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            linear, weight = random_gptq_linear(rng, rows, columns, group_size=GROUP, act_order=act_order)
            bias = torch.randn(rows, generator=rng)
            tensors |= {f"{module}.{k}": v for k, v in linear.items()} | {f"{module}.bias": bias}
            exact |= {f"{expert}.{name}": weight, f"{expert}.{name}.bias": bias}
    config = gptq_config(group_size=GROUP, sym=False, desc_act=act_order)
    return write_checkpoint(folder, tensors, config, model_type=model_type), exact


def expected(
    exact: dict[str, torch.Tensor], gate: slice, up: slice, x: torch.Tensor, **act: Any
) -> torch.Tensor:
    """Every expert on every row of x, in float64: [EXPERTS, M, H]."""
    outputs = []
    for expert in range(EXPERTS):
        w13, b13 = (exact[f"{expert}.gate_up_proj{s}"].double() for s in ("", ".bias"))
        w2, b2 = (exact[f"{expert}.down_proj{s}"].double() for s in ("", ".bias"))
        g, u = (x.double() @ w13[rows].T + b13[rows] for rows in (gate, up))
        if act:
            g, u = g.clamp(max=act["limit"]), u.clamp(-act["limit"], act["limit"])
            h = g * torch.sigmoid(act["alpha"] * g) * (u + act["beta"])
        else:
            h = torch.nn.functional.silu(g) * u
        outputs.append(h @ w2.T + b2)
    return torch.stack(outputs)


def each_expert(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    ids = [torch.full((len(x), 1), expert) for expert in range(EXPERTS)]
    return torch.stack([experts(x, torch.ones(len(x), 1), i) for i in ids]).double()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("weights", ["packed", "dequantized"])
@pytest.mark.parametrize("order", ORDER_LIST, ids=lambda o: o[0])
def test_rows_find_their_places(tmp_path: Path, order: Any, weights: str, act_order: bool) -> None:
    model_type, gate, up = order
    path, exact = joined_file(tmp_path, model_type, act_order)
    checkpoint = Checkpoint(path)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    act = {"limit": 7.0, "alpha": 1.702, "beta": 1.0} if model_type == "gpt_oss" else {}
    want = expected(exact, gate, up, x, **act)
    assert not torch.allclose(want, expected(exact, up, gate, x, **act), rtol=0.1, atol=0.1)
    experts = checkpoint.load_experts(0, weights=weights, dtype=torch.float32)
    interleaved = model_type == "gpt_oss"
    assert experts.w13_order == (W13Order.interleaved if interleaved else W13Order.halves)
    assert torch.allclose(each_expert(experts, x), want, rtol=1e-4, atol=1e-4)
    ranks = [
        checkpoint.load_experts(0, weights=weights, dtype=torch.float32, tp_rank=rank, tp_size=3)
        for rank in range(3)
    ]
    summed = sum(each_expert(rank, x) for rank in ranks)
    assert torch.allclose(summed, want, rtol=1e-4, atol=1e-4)
    described = checkpoint.describe()[0]
    assert {role for p in described.projections for role in p.roles} == {"gate_up", "down"}
    assert described.dequantized_bytes == EXPERTS * 3 * HIDDEN * INTER * 2


def test_half_the_rows_are_missed(tmp_path: Path) -> None:
    path, _ = joined_file(tmp_path, "qwen3_moe", act_order=False)
    (path / "model.safetensors").unlink()
    rng = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in {"gate_up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}.items():
        linear, _ = random_gptq_linear(rng, rows, columns, group_size=GROUP)
        tensors |= {f"model.layers.0.mlp.experts.0.{name}.{k}": v for k, v in linear.items()}
    write_checkpoint(path, tensors, gptq_config(group_size=GROUP, sym=False))
    with pytest.raises(CheckpointError, match=r"gate_up_proj must be \[O, I\] = \[96, 64\], got \[48, 64\]"):
        Checkpoint(path).load_experts(0)
