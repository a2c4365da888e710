"""What the backends over the compiled ops share: the dispatcher picks the device's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from .base import Backend, MoEWeights, op_arguments


class CompiledBackend(Backend):
    """Runs a layer through `ops.fused_moe` or `ops.fused_moe_packed`."""

    def run(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        arguments = op_arguments(weights, hidden_states, topk_weights, topk_ids, options)
        run = ops.fused_moe if weights.w13_scales is None else ops.fused_moe_packed
        return run(**arguments)

    def run_float32(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        out = hidden_states.new_empty(hidden_states.shape, dtype=torch.float32)
        arguments = op_arguments(weights, hidden_states, topk_weights, topk_ids, options)
        run = ops.fused_moe if weights.w13_scales is None else ops.fused_moe_packed
        return run(**arguments, out=out)
