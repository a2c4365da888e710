"""Layers of other libraries over the weights of a `Problem`: torch's own grouped product, and humming-kernels where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_problem import Batch, Problem
from int4_emu import ops

Run = Callable[[Batch], Tensor]


@torch.compile(dynamic=True)
def silu_mul(h: Tensor) -> Tensor:
    """[R, 2I] -> [R, I], one kernel."""
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(h.dtype)


@torch.compile(dynamic=True)
def weighted_sum(y: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [M, k] of y [R, H] times weights [M, k], summed over k in fp32, one kernel."""
    return (y[rows].float() * weights.unsqueeze(-1)).sum(1).to(y.dtype)


def grouped_mm(problem: Problem) -> Run:
    """bf16: gather, `torch._grouped_mm`, activation, `torch._grouped_mm`, weighted sum."""
    w13, w2 = (w.transpose(1, 2) for w in problem.dense)
    experts = torch.arange(problem.shape.experts, device="cuda", dtype=torch.int32)
    top_k = problem.shape.top_k

    def run(batch: Batch) -> Tensor:
        owners, order = batch.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(owners, experts, right=True).to(torch.int32)
        h = silu_mul(torch._grouped_mm(batch.x[order // top_k], w13, offs=ends))
        y = torch._grouped_mm(h, w2, offs=ends)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
        return weighted_sum(y, rows.view_as(batch.ids), batch.weights)

    return run


class Humming:
    """humming-kernels' indexed int4 GEMM, twice, with its own tuning; routing by `ops.moe_align`.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self, problem: Problem, tokens: list[int]) -> None:
        from humming.kernel.humming import HummingKernel
        from humming.layer import HummingLayer, HummingMethod

        shape = problem.shape
        self.shape = shape
        self.compute = json.dumps({"gemm_type": "indexed"})
        self.layers, self.tuning = [], []
        for codes, scales in zip(problem.codes, problem.scales, strict=True):
            experts, n, width = codes.shape
            with torch.device("cuda"):
                layer = HummingLayer(
                    shape_n=n, shape_k=2 * width, num_experts=experts, torch_dtype=torch.bfloat16,
                    weight_config={"dtype": "uint4", "group_size": shape.group_size},
                )  # fmt: skip
            layer.load_from_tensors({"weight": codes.view(torch.int32), "weight_scale": scales})
            layer.transform()
            offered = HummingMethod.get_default_tuning_configs(layer, gemm_type="indexed")
            chosen: dict[int, Any] = {}
            for count in tokens:
                rows = count * shape.top_k
                chosen[count] = next(c for low, high, c in offered if low < rows <= high)
            # All kernels of the layer in one parallel compilation.
            together = [[0, 1 << 30, c] for c in chosen.values()]
            HummingKernel.prepare_kernels(layer.humming_config.to_str(), self.compute, json.dumps(together))
            self.layers.append(layer)
            self.tuning.append(chosen)

    def __call__(self, batch: Batch) -> Tensor:
        tokens, top_k = batch.ids.shape
        x, aligned = batch.x, {}
        for number, (layer, tuning) in enumerate(zip(self.layers, self.tuning, strict=True)):
            config = tuning[tokens]
            block = config["block_shape"][0]
            if block not in aligned:
                aligned[block] = ops.moe_align(batch.ids, self.shape.experts, block)
            slots, owners, _, total = aligned[block]
            y = x.new_empty(tokens * top_k, layer.shape_n)
            layer(
                x, outputs=y, sorted_ids=slots, expert_ids=owners, num_tokens_padded=total,
                top_k=1 if number else top_k, valid_shape_m=tokens * top_k, compute_config=self.compute,
                tuning_config=json.dumps([[0, 1 << 30, config]]),
            )  # fmt: skip
            x = y if number else silu_mul(y)
        rows = torch.arange(tokens * top_k, device="cuda").view_as(batch.ids)
        return weighted_sum(x, rows, batch.weights)
