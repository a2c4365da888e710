"""The quantization config `int4_emu` of vLLM: it serves every quantised layer of a checkpoint itself. Imports vLLM."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from ...errors import CheckpointError
from ...formats import ModelQuantization, parse_quantization_config
from ._captured import declared_scheme
from ._claims import check_claims
from ._linear_method import Int4EmuLinearMethod
from ._moe_method import Int4EmuMoEMethod
from ._names import expert_projections, map_names, part_names, renamings
from ._settings import expert_weights, parse_weights

logger = init_logger("vllm.int4_emu")


def weights_setting() -> str:
    """The setting of the engine that is being built."""
    return parse_weights(get_current_vllm_config().additional_config)


class Int4EmuConfig(QuantizationConfig):
    """Serves routed experts and Linears in every format that int4_emu reads."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        if config is None:
            raise CheckpointError(
                "int4_emu serves quantised checkpoints, and the model's config.json has no quantization_config"
            )
        self.renamings: dict[re.Pattern[str], str | None] = {}
        self.config = deepcopy(config)
        self.quantization: ModelQuantization = parse_quantization_config(self.config)

    # --- what vLLM asks of every quantization config ------------------------------------------------------------------------------

    def get_name(self) -> str:
        return "int4_emu"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # the backends say what they run on

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int4EmuConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """`--quantization int4_emu` takes a checkpoint of any method."""
        check_claims()
        return "int4_emu" if user_quant == "int4_emu" else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: Any = None) -> None:
        self.renamings = renamings(getattr(hf_config, "model_type", ""))

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops nothing, for g_idx of act-order matters here; brings other tools' names of a block to vLLM's."""
        return WeightsMapper(orig_to_new_regex=self.renamings)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.config = map_names(self.config, hf_to_vllm_mapper.map_name)
        self.quantization = parse_quantization_config(self.config)

    # --- layers -------------------------------------------------------------------------------------------------------------------

    def modules(self, layer: torch.nn.Module, prefix: str) -> tuple[str, ...]:
        """The checkpoint's Linears behind a layer of vLLM; none for layers that hold no int4."""
        if isinstance(layer, RoutedExperts):
            names = expert_projections(layer).values()
            return tuple(f"{prefix}.{e}.{n}" for e in range(_logical_experts(layer)) for n in names)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            return part_names(prefix, self.packed_modules_mapping)
        return ()

    def quantizes(self, layer: torch.nn.Module, prefix: str) -> bool:
        """Whether any Linear behind the layer is declared quantised."""
        return any(declared_scheme(self.quantization, m) is not None for m in self.modules(layer, prefix))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            if self.quantizes(layer, prefix):
                weights = expert_weights(weights_setting(), layer.moe_config.moe_backend)
                return Int4EmuMoEMethod(self.quantization, layer, prefix, weights)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, LinearBase):
            if self.quantizes(layer, prefix):
                names = self.modules(layer, prefix)
                return Int4EmuLinearMethod(self.quantization, prefix, names, weights_setting())
            return UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead) and self.quantizes(layer, prefix):
            raise CheckpointError(
                f"{prefix} is declared quantised, and int4_emu serves routed experts and Linears only"
            )
        return None


def _logical_experts(layer: RoutedExperts) -> int:
    return int(layer.moe_config.num_logical_experts)
