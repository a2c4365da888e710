"""The PyTorch reference as a backend: any device, every option, no speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks_moe, reference
from .._autocast import autocast_input, without_autocast
from ..quant_config import MoEConfig
from .base import Backend, MoEWeights, WeightsMode, op_arguments


class ReferenceBackend(Backend):
    """`int4_emu.reference`, with the same argument checks as the ops."""

    name = "reference"
    is_compiled = False

    def is_supported(self, config: MoEConfig, weights: WeightsMode) -> list[str]:
        # Its loop over experts reads the routing on the host.
        return (
            ["it synchronises with the device, which a capturing stream forbids"] if config.capturing else []
        )

    def describe(self, config: MoEConfig, weights: WeightsMode) -> str:
        return "PyTorch, one expert after another" + (", exact weights" if weights == "packed" else "")

    def run(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        hidden_states, dtype = autocast_input(hidden_states, weights.w13)
        return _run(weights, hidden_states, topk_weights, topk_ids, options, hidden_states.dtype).to(dtype)

    def run_float32(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        return _run(weights, hidden_states, topk_weights, topk_ids, options, torch.float32)


def _run(
    weights: MoEWeights,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> Tensor:
    arguments = op_arguments(weights, hidden_states, topk_weights, topk_ids, options)
    _checks_moe.check_fused_moe(**arguments)
    _checks_moe.check_known_ids(topk_ids, weights.w13.shape[0], options.get("expert_map"))
    run = reference.fused_moe if weights.w13_scales is None else reference.fused_moe_packed
    with without_autocast(hidden_states.device):
        return run(**arguments, dtype=dtype)
