"""The compiled CUDA and ROCm kernels."""

from __future__ import annotations

import torch

from .. import _library
from ..quant_config import MoEConfig
from .base import WeightsMode
from .compiled import CompiledBackend


class GpuBackend(CompiledBackend):
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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
