"""Packed or dequantised: the choice for one layer, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ._memory import available_bytes
from .errors import BackendError, CheckpointError
from .group_order import GroupOrders
from .layer_plan import LayerPlan

_MODES = ("auto", "packed", "dequantized")


@dataclass(frozen=True)
class WeightsChoice:
    """How a layer is held, and why; `reason` completes "... because"."""

    weights: Literal["packed", "dequantized"]
    reason: str


def choose_weights(
    plan: LayerPlan,
    orders: GroupOrders,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    expert_ids: list[int],
    tp_size: int,
    top_k: int | None,
    backend: str | None,
) -> WeightsChoice:
    """Decides for one layer.

    Raises:
        ValueError: unknown mode.
        CheckpointError: `packed` was asked for and the layer's tensors do not allow it.
        BackendError: `auto`: no compiled backend serves it packed, and dequantised it does not fit.
    """
    if weights not in _MODES:
        raise ValueError(f"weights must be one of {', '.join(_MODES)}, got {weights!r}")
    if not plan.is_quantized:
        # There is nothing to unpack: a floating-point layer is dense in every mode.
        return WeightsChoice("dequantized", "the layer is stored in floating point")
    refusal = plan.packed_refusal() or orders.refusal
    if weights == "packed":
        if refusal is not None:
            raise CheckpointError(
                f"weights='packed' is not possible since {refusal}; weights='dequantized' is"
            )
        return WeightsChoice("packed", "it was asked for")
    if weights == "dequantized":
        return WeightsChoice("dequantized", "it was asked for")
    if refusal is None:
        refusal, served = _packed_backend(
            plan, orders, dtype, device, len(expert_ids), tp_size, top_k, backend
        )
        if served is not None:
            return WeightsChoice("packed", f"backend {served} runs it packed")
    need = plan.dense_bytes(dtype, len(expert_ids), tp_size)
    free = available_bytes(device)
    if free is not None and need > free:
        packed = plan.packed_bytes(len(expert_ids), tp_size)
        raise BackendError(
            f"layer {plan.layer.number} fits in no mode: packed would need {_mib(packed)} but is not possible "
            f"since {refusal}; dequantised needs {_mib(need)}, and {_mib(free)} are available"
        )
    return WeightsChoice("dequantized", f"packed is not possible since {refusal}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _packed_backend(
    plan: LayerPlan,
    orders: GroupOrders,
    dtype: torch.dtype,
    device: torch.device,
    experts: int,
    tp_size: int,
    top_k: int | None,
    backend: str | None,
) -> tuple[str | None, str | None]:
    """(why no compiled backend runs the layer packed, None) or (None, the backend's name)."""
    raise NotImplementedError
