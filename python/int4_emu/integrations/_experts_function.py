"""The experts function for transformers models that keep their weights in floating point."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import ops
from .._enums import W13Order
from ._gating import gating_of


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs a transformers experts module through `int4_emu.ops.fused_moe`, on its own parameters.

    Args:
        self: the experts module: E experts with `gate_up_proj` [E, 2I, H] or `up_proj` [E, I, H], and
            `down_proj` [E, H, I]; each stored transposed where `is_transposed`.
        hidden_states: [M, H].
        top_k_index: [M, k]; ids that are not below `num_experts` mark slots of other ranks and are skipped.
        top_k_weights: [M, k].

    Returns:
        [M, H] in the dtype of `hidden_states`.

    Raises:
        ValueError: the module norms each expert's output, or its activation is not one of int4_emu's.
    """
    gating = gating_of(self)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    w13, w2 = getattr(self, up), self.down_proj
    if self.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return ops.fused_moe(
        hidden_states,
        w13,
        w2,
        top_k_weights.float(),
        top_k_index,
        w13_bias=getattr(self, f"{up}_bias") if self.has_bias else None,
        w2_bias=self.down_proj_bias if self.has_bias else None,
        activation=gating.activation,
        limit=gating.limit,
        alpha=gating.alpha,
        beta=gating.beta,
        w13_order=W13Order.halves if self.is_concatenated else W13Order.interleaved,
    )
