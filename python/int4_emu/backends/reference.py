"""The PyTorch reference as a backend: any device, every option, no speed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _checks, reference
from ..quant_config import MoEConfig
from .base import Backend, MoEWeights, WeightsMode, packed_arguments


class ReferenceBackend(Backend):
    """`int4_emu.reference`, with the same argument checks as the ops."""

    name = "reference"
    is_compiled = False

    def is_supported(self, config: MoEConfig, weights: WeightsMode) -> list[str]:
        # Its loop over experts reads the routing on the host.
        return ["it synchronises with the device, which a capturing stream forbids"] if config.capturing else []

    def describe(self, config: MoEConfig, weights: WeightsMode) -> str:
        return "PyTorch, one expert after another" + (", exact weights" if weights == "packed" else "")

    def run(self, weights: MoEWeights, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, options: dict[str, Any]) -> Tensor:
        shared = options | {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias}
        args: tuple[Any, ...] = (hidden_states, weights.w13, weights.w2, topk_weights, topk_ids)
        if weights.w13_scales is None:
            _checks.check_fused_moe(*args, **shared)
            return reference.fused_moe(*args, **shared)
        more, quantization = packed_arguments(weights)
        _checks.check_fused_moe(*args, *more, **quantization, **shared)
        return reference.fused_moe_packed(*args, *more, **quantization, **shared)
