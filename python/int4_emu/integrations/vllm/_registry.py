"""Registers the method `int4_emu`, and classes that stand in for vLLM's own where those refuse a layer. Imports vLLM."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from ._claims import claim
from ._config import Int4EmuConfig

logger = init_logger("vllm.int4_emu")


class _Overriding:
    """Mixed into a config class of vLLM: its layers stay its own, but for those that it refuses and int4_emu serves.

    `int4_emu` is None for checkpoints in formats that are none of ours (fp8, ...), where nothing is changed.
    """

    int4_emu: Int4EmuConfig | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        try:
            ours = Int4EmuConfig(config)
        except ValueError as error:
            logger.debug("int4_emu leaves this checkpoint alone: %s", error)
            return cast(Any, super()).from_config(config)
        try:
            stock = cast(Any, super()).from_config(deepcopy(config))
        except Exception as error:
            _log_once("every int4 and int8 layer", error)
            return ours
        stock.int4_emu = ours
        return stock

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        own: list[torch.dtype] = cast(Any, super()).get_supported_act_dtypes()
        return own if self.int4_emu is None else self.int4_emu.get_supported_act_dtypes()

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        if self.int4_emu is None:
            return cast(Any, super()).get_checkpoint_weight_mapper()
        # vLLM drops g_idx; layers of its own have no use for it and may find it in the file.
        self._ignore_unexpected_suffixes = (*self.int4_emu._ignore_unexpected_suffixes, ".g_idx")
        return self.int4_emu.get_checkpoint_weight_mapper()

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        cast(Any, super()).maybe_update_config(*args, **kwargs)
        if self.int4_emu is not None:
            self.int4_emu.maybe_update_config(*args, **kwargs)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        cast(Any, super()).apply_vllm_mapper(hf_to_vllm_mapper)
        if self.int4_emu is not None:
            self.int4_emu.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        ours = self.int4_emu
        if ours is None:
            return cast(Any, super()).get_quant_method(layer, prefix)
        ours.packed_modules_mapping = cast(Any, self).packed_modules_mapping
        if not ours.quantizes(layer, prefix):
            return cast(Any, super()).get_quant_method(layer, prefix)
        kind = type(layer).__name__
        dtype = get_current_vllm_config().model_config.dtype
        supported = cast(Any, super()).get_supported_act_dtypes()
        try:
            method = cast(Any, super()).get_quant_method(layer, prefix)
            if dtype not in supported:
                raise TypeError(f"{dtype} is none of {supported}")
            if lacks := _lacks(layer, dtype):
                raise NotImplementedError(lacks)
        except Exception as error:
            if _asks_for_kernel(layer):
                raise
            _log_once(kind, error)
            return ours.get_quant_method(layer, prefix)
        if method is not None:
            _watch_creation(method, ours, prefix)
        return method


def _asks_for_kernel(layer: torch.nn.Module) -> bool:
    """Whether `--moe-backend` names one of vLLM's kernels for these experts: its refusal then stands."""
    return isinstance(layer, RoutedExperts) and layer.moe_config.moe_backend not in ("auto", "emulation")


def _lacks(layer: torch.nn.Module, dtype: torch.dtype) -> str | None:
    """What vLLM's build for this CPU lacks for a layer and its activations: it finds out only when the layer runs."""
    if not current_platform.is_cpu():
        return None
    name = "convert_weight_packed_scale_zp" if isinstance(layer, RoutedExperts) else "cpu_gemm_wna16"
    if not hasattr(torch.ops._C, name):
        return f"its build for this CPU has no {name}"
    return "its int4 kernels for CPUs take no float32" if dtype == torch.float32 else None


def _watch_creation(method: Any, ours: Int4EmuConfig, prefix: str) -> None:
    """Lets int4_emu have the layer where vLLM's method refuses it while it creates its weights."""
    create = method.create_weights

    def create_weights(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = set(layer._parameters)
        try:
            create(layer, *args, **kwargs)
        except Exception as error:
            if _asks_for_kernel(layer):
                raise
            _log_once(type(layer).__name__, error)
            for name in set(layer._parameters) - before:
                del layer._parameters[name]
            mine = ours.get_quant_method(layer, prefix)
            layer.quant_method = mine
            mine.create_weights(layer, *args, **kwargs)

    method.create_weights = create_weights


def _log_once(what: str, error: Exception) -> None:
    reason = " ".join(str(error).split()) or f"{type(error).__name__} without a message"
    logger.info_once("int4_emu serves %s, since vLLM's own method refuses: %s", what, reason)


class CompressedTensorsOrInt4Emu(_Overriding, CompressedTensorsConfig):
    """compressed-tensors."""


class GPTQOrInt4Emu(_Overriding, AutoGPTQConfig):
    """GPTQ."""


class AWQOrInt4Emu(_Overriding, AutoAWQConfig):
    """AWQ."""


class AutoRoundOrInt4Emu(_Overriding, INCConfig):
    """AutoRound, which vLLM calls inc."""


class QuarkOrInt4Emu(_Overriding, QuarkConfig):
    """AMD Quark."""


def register() -> None:
    """Registers every name, once a process.

    Raises:
        ValueError: another plug-in has one of them.
    """
    # The method comes first: vLLM asks it before its own ones whether it takes a checkpoint.
    claim(
        {
            "int4_emu": Int4EmuConfig,
            "compressed-tensors": CompressedTensorsOrInt4Emu,
            "auto_gptq": GPTQOrInt4Emu,
            "gptq": GPTQOrInt4Emu,
            "gptq_marlin": GPTQOrInt4Emu,
            "auto_awq": AWQOrInt4Emu,
            "awq": AWQOrInt4Emu,
            "awq_marlin": AWQOrInt4Emu,
            "inc": AutoRoundOrInt4Emu,
            "quark": QuarkOrInt4Emu,
        }
    )
