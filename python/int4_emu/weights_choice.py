"""Packed or dequantised: the choice for one layer, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ._memory import available_bytes
from .errors import BackendError, CheckpointError
from .group_order import GroupOrders
from .layer_plan import LayerPlan
from .oracle import select_backend
from .quant_config import MoEConfig, QuantConfig

WEIGHTS_MODES = ("auto", "packed", "dequantized")


@dataclass(frozen=True)
class WeightsChoice:
    """How a layer is held, and why; `reason` completes "... because"."""

    weights: Literal["packed", "dequantized"]
    reason: str


@dataclass(frozen=True)
class Placement:
    """Where a layer goes: compute dtype, device, local experts, tensor-parallel ranks, a backend to insist
    on.
    """

    dtype: torch.dtype
    device: torch.device
    num_experts: int
    tp_size: int = 1
    expert_parallel: bool = False
    top_k: int | None = None
    backend: str | None = None


def moe_config(plan: LayerPlan, orders: GroupOrders, placement: Placement, *, packed: bool) -> MoEConfig:
    """The layer as backend selection sees it.

    Args:
        packed: with quantised weights; the layer's `packed_refusal` must be None.
    """
    spec = plan.activation
    intermediate = plan.intermediate_size // placement.tp_size
    quant = None
    if packed:
        roles = plan.w13_roles
        quant = QuantConfig(
            w13_bits=plan.bits(roles),
            w2_bits=plan.bits(("down",)),
            w13_group_size=min(plan.group_size(roles), plan.hidden_size),
            w2_group_size=min(plan.group_size(("down",)), intermediate),
            symmetric=not (plan.has_qzeros(roles) or plan.has_qzeros(("down",))),
            act_order=orders.permutes_input,
            gemm1_clamp_limit=spec.limit,
            gemm1_alpha=spec.alpha,
            gemm1_beta=spec.beta,
        )
    return MoEConfig(
        hidden_size=plan.hidden_size,
        intermediate_size=intermediate,
        num_experts=placement.num_experts,
        # Selection needs a number; a configuration that is silent routes in the caller.
        top_k=placement.top_k or 1,
        dtype=placement.dtype,
        device=placement.device,
        quant=quant,
        activation=spec.activation,
        has_bias=plan.has_bias,
        expert_parallel=placement.expert_parallel,
        limit=spec.limit,
        alpha=spec.alpha,
        beta=spec.beta,
    )


def choose_weights(plan: LayerPlan, orders: GroupOrders, weights: str, placement: Placement) -> WeightsChoice:
    """Decides for one layer.

    Raises:
        ValueError: unknown mode.
        CheckpointError: `packed` was asked for and the layer's tensors do not allow it.
        BackendError: `auto`: no compiled backend serves it packed, and dequantised it does not fit.
    """
    if weights not in WEIGHTS_MODES:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS_MODES)}, got {weights!r}")
    if not plan.is_quantized:
        # There is nothing to unpack: a floating-point layer is dense in every mode.
        return WeightsChoice("dequantized", "the layer is stored in floating point")
    refusal = plan.packed_refusal() or orders.refusal
    if weights == "packed" and refusal is not None:
        raise CheckpointError(f"weights='packed' is not possible since {refusal}; weights='dequantized' is")
    if weights != "auto":
        return WeightsChoice("packed" if weights == "packed" else "dequantized", "it was asked for")
    if refusal is None:
        served, refusal = _packed_backend(moe_config(plan, orders, placement, packed=True), placement.backend)
        if served is not None:
            return WeightsChoice("packed", f"backend {served} runs it")
    need = plan.dense_bytes(placement.dtype, placement.num_experts, placement.tp_size)
    free = available_bytes(placement.device)
    if free is not None and need > free:
        packed = plan.packed_bytes(placement.num_experts, placement.tp_size)
        raise BackendError(
            f"layer {plan.layer.number} fits in no mode: packed needs {_mib(packed)} but is not possible "
            f"since {refusal}; dequantised needs {_mib(need)} and {_mib(free)} are available"
        )
    return WeightsChoice("dequantized", f"packed is not possible since {refusal}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _packed_backend(config: MoEConfig, backend: str | None) -> tuple[str | None, str]:
    """(the compiled backend that runs the layer packed, "") or (None, why there is none)."""
    try:
        selection = select_backend(config, weights="packed", backend=backend)
    except BackendError as error:
        return None, str(error)
    if selection.implementation.is_compiled:
        return selection.backend, ""
    told = "; ".join(f"{name} not used since {reason}" for name, reason in selection.rejections)
    return None, f"no compiled backend serves it ({told or 'the reference backend was asked for'})"
