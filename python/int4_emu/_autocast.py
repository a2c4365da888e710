"""torch.autocast over the layers: their input is cast as a Linear's is, and the weights stay as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ._checks import FLOATS


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region in which sums stay in fp32, whatever the caller has on."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def autocast_input(x: Tensor, weight: Tensor) -> tuple[Tensor, torch.dtype]:
    """x as the kernels are to get it, and the dtype of the result.

    That is autocast's dtype for both. Dense weights of another dtype are not cast, a copy of every expert: x is fp32 beside them.
    """
    kind = x.device.type
    if (
        not torch.amp.is_autocast_available(kind)
        or not torch.is_autocast_enabled(kind)
        or x.dtype not in FLOATS
    ):
        return x, x.dtype
    dtype = torch.get_autocast_dtype(kind)
    differs = weight.is_floating_point() and weight.dtype != dtype
    return x.to(torch.float32 if differs else dtype), dtype
