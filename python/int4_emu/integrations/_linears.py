"""The quantised Linears beside the experts: packed, or dequantised to plain ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import BackendError, CheckpointError
from ..formats import QuantScheme
from ..linear import Int4Linear
from ..oracle import select_backend
from ..quant_config import MoEConfig, QuantConfig
from ..quantized_weight import QuantizedWeight, join_rows

logger = logging.getLogger(__name__)


def packed_linear_bytes(weights: int, scheme: QuantScheme) -> int:
    """About how many bytes a Linear of that many weights takes packed: codes, 16-bit scales, zero points."""
    groups = 0 if scheme.group_size == -1 else weights // scheme.group_size
    return weights * scheme.bits // 8 + groups * (2 if scheme.symmetric else 3)


def load_linear(
    parts: Sequence[QuantizedWeight],
    module: str,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Turns a checkpoint's Linear into a module on its device.

    Args:
        parts: canonical tensors, on the CPU; several are the rows of one Linear.
        module: its name, for messages.
        weights: "packed", "dequantized", or "auto": packed where a compiled backend serves it.
        dtype: dtype of a dequantised weight and of the bias.

    Returns:
        `Int4Linear` or `torch.nn.Linear`.

    Raises:
        CheckpointError: packed was asked for and the weight's groups cannot be sorted, or its parts not joined.
    """
    weight, refusal = join_rows(parts), None
    if isinstance(weight, str):
        if weights == "packed":
            raise CheckpointError(
                f"weights='packed' is not possible since {module} are one Linear of the model and {weight}; "
                "weights='dequantized' is"
            )
        logger.debug("%s: dequantized weights, because %s", module, weight)
        return _joined(parts, dtype, device)
    if weight.g_idx is not None:
        refusal = f"g_idx of {module} gives groups of other sizes than {weight.group_size}"
    elif weights == "auto":
        refusal = _backend_refusal(weight, dtype, device)
    if weights == "packed" and refusal is not None:
        raise CheckpointError(f"weights='packed' is not possible since {refusal}; weights='dequantized' is")
    if weights == "dequantized" or refusal is not None:
        logger.debug("%s: dequantized weights, because %s", module, refusal or "it was asked for")
        return _dense(weight, dtype, device)
    logger.debug("%s: packed weights", module)
    bias = None if weight.bias is None else weight.bias.to(dtype)
    linear = Int4Linear(
        weight.qweight,
        weight.scales,
        weight.qzeros,
        perm=weight.perm,
        bias=bias,
        bits=weight.bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
    )
    return linear.to(device)


def _backend_refusal(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no compiled backend runs the weight packed: the question of one expert of the same shape."""
    quant = QuantConfig(
        weight.bits, weight.bits, weight.group_size, -1, weight.qzeros is None, weight.perm is not None
    )
    config = MoEConfig(weight.in_features, weight.out_features, 1, 1, dtype, device, quant)
    try:
        selection = select_backend(config)
    except BackendError as error:
        return str(error)
    return None if selection.implementation.is_compiled else str(selection)


def _joined(parts: Sequence[QuantizedWeight], dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """The rows of several weights as one plain Linear; a part without a bias has zeros."""
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(p.out_features) if p.bias is None else p.bias for p in parts]).to(dtype)
    weight = torch.cat([part.dequantized(dtype) for part in parts])
    return plain_linear(weight.to(device), None if bias is None else bias.to(device))


def _dense(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    bias = None if weight.bias is None else weight.bias.to(device, dtype)
    return plain_linear(weight.dequantized(dtype).to(device), bias)


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A Linear that holds these tensors, without the ones that its constructor would make."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
