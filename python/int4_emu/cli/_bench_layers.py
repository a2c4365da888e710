"""The layers that `bench` measures: shapes of real models, random weights, routing, and the peers that are always there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops, reference
from .._enums import Activation, Layout
from ..experts import Experts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """One MoE layer: H, I, local experts E, k, group size, activation."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    group_size: int
    activation: Activation = Activation.silu

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2I, or I without a gate."""
        return self.intermediate_size * (2 if self.activation.is_gated else 1)

    @property
    def weights_per_expert(self) -> int:
        """Weights of one expert."""
        return self.hidden_size * (self.w13_rows + self.intermediate_size)

    def __str__(self) -> str:
        return (
            f"H={self.hidden_size} I={self.intermediate_size} E={self.num_experts} k={self.top_k} "
            f"g{self.group_size} {self.activation.name}"
        )


_OAI: dict[str, Any] = {"activation": Activation.swigluoai}
# Expert counts of the largest are those of one rank of eight.
MODELS = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 128),
    "qwen3.5-35b-a3b": Shape(2048, 512, 256, 8, 128),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2, 128),
    "deepseek-v3": Shape(7168, 2048, 32, 8, 128),
    "kimi-k2": Shape(7168, 2048, 48, 8, 32),
    "minimax-m2": Shape(3072, 1536, 32, 8, 128),
    "glm-4.5-air": Shape(4096, 1408, 128, 8, 128),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, 32, **_OAI),
    "llama-4-scout": Shape(5120, 8192, 16, 1, 128),
    "nemotron-h": Shape(4096, 7688, 8, 2, 8, Activation.relu2_no_mul),
    # One that fits into a cache: for tests and for a first look.
    "tiny": Shape(256, 128, 16, 4, 32),
}
_PARAMETERS: dict[Activation, dict[str, float]] = {
    Activation.swigluoai: {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
}


def shape_of(model: str, experts: int | None, group_size: int | None) -> Shape:
    """A model's layer with the caller's changes.

    Raises:
        ValueError: an unknown model, or fewer experts than a token is routed to.
    """
    if model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {model!r}")
    shape = MODELS[model]
    if experts is not None:
        if experts < shape.top_k:
            raise ValueError(f"--experts must be at least top-k = {shape.top_k} of {model}, got {experts}")
        shape = replace(shape, num_experts=experts)
    if group_size is not None:
        shape = replace(shape, group_size=group_size)
    return shape


@dataclass
class Problem:
    """Codes and scales of one layer, and what is made of them.

    Attributes:
        codes: canonical w13 and w2, uint8.
        scales: bf16, [E, O, C] each.
        zeros: uint8, [E, O, C] each, or None twice: symmetric.
        packed, dense: the modules, None where that mode is not measured.
        w13, w2: the dense weights that the F.linear loop shares with `dense`; None without any dense peer.
    """

    shape: Shape
    dtype: torch.dtype
    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    zeros: tuple[Tensor | None, Tensor | None] = (None, None)
    packed: Experts | None = None
    dense: Experts | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the activation."""
        return _PARAMETERS.get(self.shape.activation, {})

    def weights(self, dtype: torch.dtype, expert: int | slice = slice(None)) -> list[Tensor]:
        """w13 and w2, dequantised."""
        return [
            ops.dequantize(
                q[expert],
                s[expert],
                None if z is None else z[expert],
                group_size=self.shape.group_size,
                dtype=dtype,
            )
            for q, s, z in zip(self.codes, self.scales, self.zeros, strict=True)
        ]


def make_problem(
    shape: Shape,
    dtype: torch.dtype,
    modes: list[str],
    *,
    peer: bool,
    device: torch.device = CPU,
    seed: int = 0,
    symmetric: bool = True,
) -> Problem:
    """Random int4 weights of the layer, in the forms that will be measured."""
    rng = torch.Generator().manual_seed(seed)

    def codes(rows: int, columns: int) -> Tensor:
        words = torch.empty(shape.num_experts, rows, columns // 8, dtype=torch.int32)
        return words.random_(-(2**31), 2**31, generator=rng).view(torch.uint8).to(device)

    def scales(rows: int, columns: int) -> Tensor:
        spread = torch.rand(shape.num_experts, rows, -(-columns // shape.group_size), generator=rng)
        return ((spread + 0.5) / (4 * columns**0.5)).bfloat16().to(device)

    def zeros(like: Tensor) -> Tensor | None:
        return (
            None
            if symmetric
            else torch.randint(4, 12, like.shape, dtype=torch.uint8, generator=rng).to(device)
        )

    hidden, inner, rows = shape.hidden_size, shape.intermediate_size, shape.w13_rows
    problem = Problem(
        shape,
        dtype,
        (codes(rows, hidden), codes(hidden, inner)),
        (scales(rows, hidden), scales(hidden, inner)),
    )
    problem.zeros = (zeros(problem.scales[0]), zeros(problem.scales[1]))
    options: dict[str, Any] = {
        "activation": shape.activation, "dtype": dtype, "top_k": shape.top_k, **problem.parameters
    }  # fmt: skip
    if "packed" in modes:
        # Cloned: prepacking reorders in place, and the exact weights are read from the canonical codes.
        problem.packed = Experts(
            problem.codes[0].clone(),
            problem.codes[1].clone(),
            w13_scales=problem.scales[0],
            w2_scales=problem.scales[1],
            w13_qzeros=problem.zeros[0],
            w2_qzeros=problem.zeros[1],
            w13_group_size=shape.group_size,
            w2_group_size=shape.group_size,
            **options,
        )
    if "dequantized" in modes or peer:
        problem.w13, problem.w2 = problem.weights(dtype)
        if "dequantized" in modes:
            problem.dense = Experts(problem.w13, problem.w2, **options)
    return problem


@dataclass(frozen=True)
class Batch:
    """x [M, H], topk_weights float32 [M, k], topk_ids int32 [M, k] of uniform random routing."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    @property
    def experts_hit(self) -> int:
        """Experts with at least one token."""
        return self.topk_ids.unique().numel()


def make_batch(
    shape: Shape, tokens: int, dtype: torch.dtype, rng: torch.Generator, device: torch.device = CPU
) -> Batch:
    """A fresh batch: another routing each time, so that no expert's weights are left in a cache."""
    x = torch.randn(tokens, shape.hidden_size, generator=rng).to(dtype)
    scores = torch.rand(tokens, shape.num_experts, generator=rng)
    weights, ids = scores.topk(shape.top_k, dim=-1)
    return Batch(x.to(device), weights.softmax(-1).to(device), ids.to(device, torch.int32))


def linear_loop(problem: Problem) -> Callable[[Batch], Tensor]:
    """The peer that is always there: torch's F.linear, one expert that was hit after another."""
    w13, w2, shape = problem.w13, problem.w2, problem.shape
    assert w13 is not None
    assert w2 is not None

    def run(batch: Batch) -> Tensor:
        out = torch.zeros_like(batch.x)
        for e in batch.topk_ids.unique().tolist():
            token, slot = (batch.topk_ids == e).nonzero(as_tuple=True)
            h = F.linear(batch.x[token], w13[e])
            if shape.activation is Activation.silu:
                gate, up = h.chunk(2, dim=-1)
                h = F.silu(gate) * up
            else:
                h = reference.activate(h, activation=shape.activation, **problem.parameters)
            y = F.linear(h, w2[e]) * batch.topk_weights[token, slot].unsqueeze(1).to(batch.x.dtype)
            out.index_add_(0, token, y)
        return out

    return run


def exact_rows(problem: Problem, batch: Batch, rows: Tensor) -> Tensor:
    """Some rows of the layer in double precision on the exact weights, float64 [len(rows), H]."""
    shape = problem.shape
    x, weights, ids = batch.x[rows].double(), batch.topk_weights[rows].double(), batch.topk_ids[rows]
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        w13, w2 = (w.double() for w in problem.weights(torch.float32, e))
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = reference.activate(x[token] @ w13.t(), activation=shape.activation, **problem.parameters)
        out.index_add_(0, token, (h @ w2.t()) * weights[token, slot].unsqueeze(1))
    return out


def layout_name(experts: Experts) -> str:
    """The order of the packed codes, for the record."""
    return Layout(experts.layout).name
