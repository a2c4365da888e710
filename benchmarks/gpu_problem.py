"""A whole MoE layer on a GPU, its batches, its exact value, and what its time cannot be below."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from int4_emu import Experts, ops


@dataclass(frozen=True)
class Shape:
    """H, I, local experts E, k and the group size; silu, symmetric int4, bf16 in and out."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group_size: int

    @property
    def weights_per_expert(self) -> int:
        """Of both projections."""
        return 3 * self.hidden * self.intermediate


SHAPES = {
    s.name: s
    for s in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8, 32),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2, 128),
        Shape("deepseek-v3", 7168, 2048, 32, 8, 32),
        Shape("tiny", 256, 128, 16, 4, 32),
    )
}


@dataclass(frozen=True)
class Batch:
    """x [M, H] bf16, router weights [M, k] fp32, ids [M, k] int32."""

    x: Tensor
    weights: Tensor
    ids: Tensor

    @property
    def experts_hit(self) -> int:
        """Experts with at least one row."""
        return self.ids.unique().numel()


class Problem:
    """Random weights of one layer: canonical codes and scales, dense bf16 ones, and the two modules over them."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        rng = torch.Generator("cuda").manual_seed(seed)
        sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
        self.codes, self.scales = [], []
        for n, k in sizes:
            words = torch.empty(shape.experts, n, k // 8, dtype=torch.int32, device="cuda")
            self.codes.append(words.random_(-(2**31), 2**31, generator=rng).view(torch.uint8))
            spread = torch.rand(shape.experts, n, k // shape.group_size, device="cuda", generator=rng)
            self.scales.append(((spread + 0.5) / (4 * k**0.5)).bfloat16())
        self.dense = [
            ops.dequantize(q, s, group_size=shape.group_size)
            for q, s in zip(self.codes, self.scales, strict=True)
        ]
        # Cloned: a backend may reorder the codes in place.
        self.packed_experts = Experts(
            self.codes[0].clone(), self.codes[1].clone(), w13_scales=self.scales[0], w2_scales=self.scales[1],
            w13_group_size=shape.group_size, w2_group_size=shape.group_size, top_k=shape.top_k,
        )  # fmt: skip
        self.dense_experts = Experts(*self.dense, top_k=shape.top_k)

    def batch(self, tokens: int, seed: int) -> Batch:
        """Uniform random routing, another one for each seed."""
        shape, rng = self.shape, torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, shape.hidden, device="cuda", generator=rng).bfloat16()
        scores = torch.rand(tokens, shape.experts, device="cuda", generator=rng)
        weights, ids = scores.topk(shape.top_k, dim=-1)
        return Batch(x, weights.softmax(-1), ids.to(torch.int32))

    def exact(self, batch: Batch, rows: list[int]) -> Tensor:
        """Some rows of the layer in float64 on the exact weights (q - 8) * s, unpacked here."""
        out = torch.zeros(len(rows), self.shape.hidden, dtype=torch.float64, device="cuda")
        x, weights, ids = batch.x[rows].double(), batch.weights[rows].double(), batch.ids[rows]
        for e in ids.unique().tolist():
            w13, w2 = (
                (torch.stack((q[e] & 15, q[e] >> 4), -1).flatten(-2).double() - 8)
                * s[e].double().repeat_interleave(self.shape.group_size, -1)
                for q, s in zip(self.codes, self.scales, strict=True)
            )
            token, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ w13.t()).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ w2.t()
            out.index_add_(0, token, y * weights[token, slot].unsqueeze(1))
        return out

    def bytes_touched(self, batch: Batch, *, packed: bool) -> float:
        """Weights of the experts hit, and x and the result once."""
        size = 0.5 + 2 / self.shape.group_size if packed else 2.0
        return batch.experts_hit * self.shape.weights_per_expert * size + 4.0 * batch.x.numel()

    def operations(self, tokens: int) -> float:
        """Floating-point operations of both products."""
        return 2.0 * tokens * self.shape.top_k * self.shape.weights_per_expert
