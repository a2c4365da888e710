"""Llama-4's MoE block, with the routed experts in one call. Imports transformers: import it lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel, Llama4TextExperts, Llama4TextMoe

from .. import ops
from ._gating import gating_of

_host_forward = Llama4TextMoe.forward


class RoutedMoe(Llama4TextMoe):
    """The host's block without its copy of every token for every expert."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs router, routed experts and shared expert.

        Args:
            hidden_states: [..., H].

        Returns:
            The sum of the routed and the shared experts [M, H], and the router's logits [M, E].
        """
        experts: Any = self.experts  # a HostedLlama4Experts
        return _forward(self, hidden_states, experts.route)


def let_choose_experts(implementation: str) -> None:
    """Makes `experts_implementation` count for Llama-4, whose blocks call their experts without asking for it.

    The host's block takes the place of the experts in this: it alone knows the routing. Any other choice is what it was.
    """
    if hasattr(Llama4TextExperts, "_apply_gate"):
        return  # a later transformers, which asks

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.shared_expert.config._experts_implementation != implementation:
            return _host_forward(self, hidden_states)
        return _forward(self, hidden_states, lambda *routing: _float_experts(self.experts, *routing))

    def no_grouped_mm(self: Any) -> bool:
        # Otherwise it would be the default now, and do nothing.
        raise ValueError(f"{type(self).__name__} calls its experts without grouped_mm.")

    block: Any = Llama4TextMoe
    block.forward = forward
    model: Any = Llama4PreTrainedModel
    model._can_set_experts_implementation = classmethod(lambda cls: True)
    model._grouped_mm_can_dispatch = no_grouped_mm


def _forward(
    block: Any, hidden_states: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The block around `experts`, which takes x [S, H], weights [S, 1] and ids [S, 1] and returns [S, H]."""
    x = hidden_states.reshape(-1, block.hidden_dim)
    _, logits = block.router(x)
    top, ids = torch.topk(logits, block.top_k, dim=1)
    # Rounded as the host's weights are.
    weights = torch.sigmoid(top.float()).to(x.dtype)
    # The weight is on the input, so that each slot is a row of its own.
    rows = x.repeat_interleave(block.top_k, dim=0)
    routed = experts(rows, weights.reshape(-1, 1).float(), ids.reshape(-1, 1))
    return block.shared_expert(x) + routed.view(len(x), block.top_k, -1).sum(dim=1), logits


def _float_experts(module: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The host's parameters through the op: `gate_up_proj` [E, H, 2I] and `down_proj` [E, I, H]."""
    gating = gating_of(module)
    return ops.fused_moe(
        x,
        module.gate_up_proj.transpose(1, 2),
        module.down_proj.transpose(1, 2),
        weights,
        ids,
        activation=gating.activation,
        apply_router_weight_on_input=True,
    )
