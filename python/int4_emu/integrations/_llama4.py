"""Llama-4's MoE block, with the routed experts in one call. Imports transformers: import it lazily."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from ._modules import HostedLlama4Experts


class RoutedMoe(Llama4TextMoe):
    """The host's block without its copy of every token for every expert."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs router, routed experts and shared expert.

        Args:
            hidden_states: [..., H].

        Returns:
            The sum of the routed and the shared experts [M, H], and the router's logits [M, E].
        """
        x = hidden_states.reshape(-1, self.hidden_dim)
        _, logits = self.router(x)
        top, ids = torch.topk(logits, self.top_k, dim=1)
        # Rounded as the host's weights are.
        weights = torch.sigmoid(top.float()).to(x.dtype)
        out = self.shared_expert(x)
        routed: HostedLlama4Experts = self.experts  # type: ignore[assignment]
        return out + routed.route(x, ids, weights), logits
