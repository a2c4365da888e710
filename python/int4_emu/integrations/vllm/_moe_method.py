"""vLLM's routed experts on int4_emu. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from ...errors import CheckpointError
from ...formats import ModelQuantization
from ._captured import known_suffixes, placeholder, take_intake
from ._experts_intake import ExpertsIntake, ExpertsRequest, activation_spec
from ._names import expert_projections

_ROLES = {"w1": "gate", "w3": "up", "w2": "down"}


class Int4EmuMoEMethod(FusedMoEMethodBase):
    """Collects a layer's tensors through placeholders that vLLM's loader finds by name, and runs `int4_emu.Experts`.

    The name must hold neither "ModelOpt" nor "compressed": vLLM's loader branches on them.
    """

    def __init__(self, quantization: ModelQuantization, layer: Any, prefix: str, weights: str) -> None:
        super().__init__(layer.moe_config)
        self.quantization = quantization
        self.prefix = prefix
        self.weights = weights
        # Asked here, so that what cannot be served is refused before anything is loaded.
        self.activation = activation_spec(
            layer.activation.value, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
        )
        if layer.moe_config.num_experts != layer.moe_config.num_logical_experts:
            raise ValueError(f"{prefix}: int4_emu has no redundant experts (EPLB)")
        if layer.expert_map_manager.num_fused_shared_experts:
            raise ValueError(
                f"{prefix}: int4_emu does not fuse shared experts into the routed ones: set VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0"
            )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        moe = layer.moe_config
        if moe.intermediate_size % moe.tp_size:
            raise CheckpointError(
                f"{self.prefix}: the intermediate size {moe.intermediate_size} is no multiple of the {moe.tp_size} tensor-parallel ranks"
            )
        device = torch.empty(0).device  # vLLM builds models under the target device
        request = ExpertsRequest(
            prefix=self.prefix,
            projections=expert_projections(layer),
            expert_ids=tuple(layer.expert_map_manager.get_local_expert_ids()),
            hidden_size=moe.hidden_dim_unpadded,
            intermediate_size=moe.intermediate_size,
            tp_rank=moe.tp_rank,
            tp_size=moe.tp_size,
            activation=self.activation,
            top_k=moe.experts_per_token,
            dtype=params_dtype,
            device=device,
            weights=self.weights,
            has_bias=moe.has_bias,
        )
        layer.int4_emu_intake = ExpertsIntake(request, self.quantization)
        # "bias" too where the model declares none: a GPTQ file may hold them all the same.
        for suffix in (*known_suffixes(self.quantization), "bias"):
            for stack in ("w13", "w2"):
                layer.register_parameter(f"{stack}_{suffix}", placeholder(suffix, _loader(layer, suffix)))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.int4_emu_experts = take_intake(layer, self.prefix).finish()
        for name in [n for n, p in layer._parameters.items() if p is not None and p.numel() == 0]:
            del layer._parameters[name]

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Tensor:
        """The routed sum of this rank's experts and slice; vLLM adds shared experts and reduces over ranks."""
        experts = layer.int4_emu_experts
        hidden = experts.hidden_size
        expert_map = layer.expert_map
        y = experts(
            x[..., :hidden],
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            global_num_experts=-1 if expert_map is None else expert_map.shape[0],
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        return y if x.shape[-1] == hidden else F.pad(y, (0, x.shape[-1] - hidden))


def _loader(layer: Any, suffix: str) -> Any:
    """vLLM's `weight_loader` of one placeholder."""

    def load(
        param: Any,
        loaded_weight: Tensor,
        weight_name: str = "",
        shard_id: str = "",
        expert_id: int = -1,
        return_success: bool = False,
    ) -> bool | None:
        if shard_id not in _ROLES:
            raise CheckpointError(f"shard_id must be one of {', '.join(_ROLES)}, got {shard_id!r}")
        intake: ExpertsIntake = layer.int4_emu_intake
        role = _ROLES[shard_id]
        if role == "gate" and "gate" not in intake.request.projections:
            role = "up"
        found = intake.put(expert_id, role, suffix, loaded_weight)
        return found if return_success else None

    load.supports_moe_loading = True  # type: ignore[attr-defined]
    return load
