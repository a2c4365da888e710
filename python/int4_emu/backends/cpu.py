"""The compiled CPU kernels: AMX, AVX-512, AVX2 or portable C++, chosen at run time."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .. import _library, ops
from ..quant_config import MoEConfig
from .base import Backend, MoEWeights, WeightsMode, op_arguments


class CpuBackend(Backend):
    """Every format, activation and option, packed or dequantised."""

    name = "cpu"

    def is_supported(self, config: MoEConfig, weights: WeightsMode) -> list[str]:
        reasons = []
        if torch.device(config.device).type != "cpu":
            reasons.append(f"it runs on the CPU, and the layer is on {config.device}")
        if not _library.is_compiled():
            reasons.append(str(_library.load_error()))
        else:
            isa, why = _library.cpu_isa()
            if isa is None:
                reasons.append(why)
        return reasons

    def broken_choice(self, config: MoEConfig) -> str | None:
        if torch.device(config.device).type != "cpu" or not os.environ.get("INT4_EMU_CPU_ISA"):
            return None
        isa, why = _library.cpu_isa()
        return why if _library.is_compiled() and isa is None else None

    def describe(self, config: MoEConfig, weights: WeightsMode) -> str:
        isa = _library.cpu_isa()[0]
        return f"{isa}, {_library.packed_numerics(config.dtype)} weights" if weights == "packed" else f"{isa}"

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
