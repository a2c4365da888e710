"""Layers that live on a GPU from the start, their truth in float64, and what the GPU tests skip without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from implementations import IMPLEMENTATIONS
from int4_emu import _library, ops


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return str(_library.gpu_architectures()[1])


needs_gpu = pytest.mark.skipif("gpu" not in IMPLEMENTATIONS, reason=f"GPU kernels: {_missing()}")
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])

# Relative L2 error: weights with any zero point, the intermediate and the result are each rounded once.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}


def to_gpu(value: Any, device: str = "cuda") -> Any:
    """Tensors inside tuples and dicts too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_gpu(v, device) for v in value)
    return {k: to_gpu(v, device) for k, v in value.items()} if isinstance(value, dict) else value


def poison_allocator() -> None:
    """Leaves NaN patterns (0xff bytes) in the caching allocator's blocks of every size that a small layer asks for."""
    blocks = [
        torch.full((1 << power,), 255, dtype=torch.uint8, device="cuda")
        for power in range(9, 27)
        for _ in range(1 if power > 20 else 8)
    ]
    del blocks


@dataclass(frozen=True)
class Packed:
    """int4 codes [E, N, K / 2], bf16 scales and uint8 zeros [E, N, K / G] on the GPU."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int

    def exact(self, expert: int) -> Tensor:
        """(q - z) * s of one expert, float64 [N, K], unpacked here and not by the kernels."""
        q, k = self.codes[expert], 2 * self.codes.shape[-1]
        both = torch.stack((q & 15, q >> 4), dim=-1).flatten(-2).double()
        wide = [
            t[expert].double().repeat_interleave(self.group_size, -1)[:, :k]
            for t in (self.zeros, self.scales)
        ]
        return (both - wide[0]) * wide[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[E, N, K], each expert rounded once from float64."""
        out = torch.empty(*self.codes.shape[:2], 2 * self.codes.shape[2], dtype=dtype, device="cuda")
        for e in range(len(out)):
            out[e] = self.exact(e).to(dtype)
        return out


def random_packed(experts: int, n: int, k: int, group_size: int, rng: torch.Generator) -> Packed:
    """Uniform codes and zero points; scales keep x @ w of order one."""
    groups = -(-k // group_size)

    def bytes_(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        words = torch.empty(-(-count // 4), dtype=torch.int32, device="cuda").random_(
            -(2**31), 2**31, generator=rng
        )
        return words.view(torch.uint8)[:count].view(shape)

    scales = torch.rand(experts, n, groups, device="cuda", generator=rng) + 0.3
    return Packed(
        bytes_(experts, n, k // 2),
        (scales / (6.4 * k**0.5)).bfloat16(),
        bytes_(experts, n, groups) & 15,
        group_size,
    )


@dataclass(frozen=True)
class GpuLayer:
    """A silu layer on the GPU: x [M, H], ids and weights [M, k], packed weights, and dense ones where asked for."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Packed
    w2: Packed
    dense: tuple[Tensor, Tensor] | None = None

    def with_(self, **changes: Any) -> GpuLayer:
        return replace(self, **changes)

    def run(self, **extra: Any) -> Tensor:
        """Through the dense op where there are dense weights, else through the packed one."""
        a, b = self.w13, self.w2
        if self.dense is not None:
            return ops.fused_moe(self.x, *self.dense, self.weights, self.ids, **extra)
        return ops.fused_moe_packed(
            self.x, a.codes, b.codes, self.weights, self.ids, a.scales, b.scales, a.group_size, b.group_size,
            w13_qzeros=a.zeros, w2_qzeros=b.zeros, **extra,
        )  # fmt: skip

    def truth(self, tokens: list[int]) -> Tensor:
        """Some rows of the layer in float64; ids out of range are unrouted."""
        experts = len(self.w13.codes)
        out = torch.zeros(len(tokens), self.x.shape[1], dtype=torch.float64, device="cuda")
        x, ids, weights = self.x[tokens].double(), self.ids[tokens].tolist(), self.weights[tokens].tolist()
        for e in {i for row in ids for i in row if 0 <= i < experts}:
            w13, w2 = self.w13.exact(e), self.w2.exact(e)
            for t, row in enumerate(ids):
                for id_, weight in zip(row, weights[t], strict=True):
                    if id_ == e:
                        gate, up = (w13 @ x[t]).chunk(2)
                        out[t] += weight * (w2 @ (torch.nn.functional.silu(gate) * up))
        return out

    def check(self, got: Tensor, tokens: list[int] | None = None) -> None:
        """Fails unless these rows of `got` (default: all) are finite and within the bound."""
        tokens = list(range(len(got))) if tokens is None else tokens
        want, rows = self.truth(tokens), got[tokens].double()
        assert torch.isfinite(rows).all()
        norm = want.norm()
        error = ((rows - want).norm() / norm).item() if norm else rows.norm().item()
        assert error < BOUND[self.x.dtype], f"relative error {error:.3g}"
        unrouted = (want == 0).all(-1)
        assert (rows[unrouted] == 0).all(), "a token without any expert must be exactly zero"


def gpu_layer(
    *,
    tokens: int,
    experts: int = 8,
    hidden: int = 128,
    intermediate: int = 64,
    top_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int = 32,
    packed: bool = True,
    ids_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> GpuLayer:
    """Random weights, distinct experts per token."""
    rng = torch.Generator("cuda").manual_seed(seed)
    w13 = random_packed(experts, 2 * intermediate, hidden, group_size, rng)
    w2 = random_packed(experts, hidden, intermediate, group_size, rng)
    scores = torch.rand(tokens, experts, device="cuda", generator=rng)
    weights, ids = scores.topk(top_k, dim=-1)
    x = torch.randn(tokens, hidden, device="cuda", generator=rng).to(dtype)
    dense = None if packed else (w13.dense(dtype), w2.dense(dtype))
    return GpuLayer(x, ids.to(ids_dtype), weights, w13, w2, dense)


def routings(ids: Tensor, experts: int) -> dict[str, Tensor]:
    """What may come after a capture, each like `ids` [M, k]: balanced, skewed, degenerate, out of range."""
    rng = torch.Generator("cuda").manual_seed(7)

    def random(low: int, high: int) -> Tensor:
        return torch.randint(low, high, ids.shape, device="cuda", generator=rng).to(ids.dtype)

    rare = torch.rand(ids.shape, device="cuda", generator=rng) < 0.1
    beyond = torch.tensor([experts, 1_000_000, -(2**31), -1], device="cuda", dtype=ids.dtype)
    return {
        "uniform": random(0, experts),
        "skewed": torch.where(rare, random(0, experts), torch.full_like(ids, experts - 1)),
        "all to one": torch.full_like(ids, 1),
        "half unrouted": random(-experts, experts),
        "out of range": beyond[torch.arange(ids.numel(), device="cuda") % 4].view_as(ids),
        "mixed": random(-3, experts + 3),
        "none": torch.full_like(ids, -1),
    }


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph, its outputs) of `call`, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
