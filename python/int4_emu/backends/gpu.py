"""The compiled CUDA and ROCm kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library, ops
from ..quant_config import MoEConfig
from .base import Backend, MoEWeights, WeightsMode, op_arguments


class GpuBackend(Backend):
    """Every format, activation and option, packed or dequantised, on the GPUs that the library was compiled for."""

    name = "gpu"

    def is_supported(self, config: MoEConfig, weights: WeightsMode) -> list[str]:
        device = torch.device(config.device)
        if device.type != "cuda":
            return [f"it runs on CUDA and ROCm GPUs, and the layer is on {config.device}"]
        architectures, why = _library.gpu_architectures()
        if architectures is None:
            return [str(why)]
        if not torch.cuda.is_available():
            return ["torch sees no GPU"]
        atom, why_not = _library.gpu_atom(_index(device), config.dtype)
        return [] if atom is not None else [f"{why_not} (built for {architectures})"]

    def describe(self, config: MoEConfig, weights: WeightsMode) -> str:
        return _library.gpu_atom(_index(torch.device(config.device)), config.dtype)[0] or ""

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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
