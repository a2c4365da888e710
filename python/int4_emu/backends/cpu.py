"""The compiled CPU kernels: AMX, AVX-512, AVX2 or portable C++, chosen at run time."""

from __future__ import annotations

import os

import torch

from .. import _library
from ..quant_config import MoEConfig
from .base import WeightsMode
from .compiled import CompiledBackend


class CpuBackend(CompiledBackend):
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
