"""Tensors that a host hands over one by one, seen as a checkpoint: what `ProjectionReader` needs of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._shards import TensorInfo
from ...errors import CheckpointError
from ...formats import ModelQuantization, QuantScheme, tensor_names
from ...projection import names_of


class CapturedTensors:
    """Holds what has arrived, by full name, until it is converted."""

    shards: tuple[str, ...] = ()  # of no files

    def __init__(self) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor as the checkpoint stores it.

        Raises:
            CheckpointError: a second tensor of that name.
        """
        if name in self.infos:
            raise CheckpointError(f"{name} is in the checkpoint twice")
        # Converted on the CPU, wherever a loader has put it; scales are looked at there.
        tensor = tensor.detach().cpu()
        stored = str(tensor.dtype).removeprefix("torch.")
        self.infos[name] = TensorInfo(name, "", tensor.dtype, tuple(tensor.shape), stored)
        self._tensors[name] = tensor

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        return self._tensors[name]

    def get_slice(self, name: str, cuts: tuple[slice, ...]) -> torch.Tensor:
        """A part of it."""
        return self._tensors[name][cuts]


def declared_scheme(quantization: ModelQuantization, module: str) -> QuantScheme | None:
    """What the configuration says of a module, under this name or one that it has elsewhere."""
    if quantization.excludes(module):
        return None
    schemes = (quantization.scheme_for(name) for name in names_of(module))
    return next((s for s in schemes if s is not None), None)


def required_suffixes(scheme: QuantScheme | None) -> tuple[str, ...]:
    """The tensors without which a projection cannot be read, or which its writers always store.

    What is optional (g_idx without act-order, zero points that compressed-tensors leaves out) is waited for until the host has no more.
    """
    if scheme is None:
        return ("weight",)
    names = tensor_names(scheme.format)
    wanted = [names.qweight, names.scales]
    if names.shape is not None:
        wanted.append(names.shape)
    # compressed-tensors has no zero points where they are the midpoint; the others store them all the same.
    if names.shape is None or not scheme.symmetric:
        wanted.append(names.qzeros)
    if names.g_idx is not None and scheme.act_order:
        wanted.append(names.g_idx)
    return tuple(wanted)


def known_suffixes(quantization: ModelQuantization) -> tuple[str, ...]:
    """Every tensor that a projection of this model may have, in floating point too."""
    return tuple(dict.fromkeys((*quantization.names.all(), "weight")))


def placeholder_dtype(suffix: str) -> torch.dtype:
    """The widest dtype that a tensor of this suffix may have, so that the host sees nothing lost in handing it over."""
    if suffix in ("qweight", "qzeros", "g_idx", "weight_packed", "weight_zero_point", "weight_g_idx"):
        return torch.int32
    return torch.int64 if suffix == "weight_shape" else torch.float32


def placeholder(suffix: str, loader: Callable[..., Any]) -> torch.nn.Parameter:
    """An empty parameter that a host's loader finds by its name; it hands the tensor of that name to `loader`."""
    parameter = torch.nn.Parameter(torch.empty(0, dtype=placeholder_dtype(suffix)), requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    return parameter


def take_intake(layer: Any, prefix: str) -> Any:
    """The intake that collected the tensors of a host's layer, which then holds it no longer.

    Raises:
        CheckpointError: it was taken before.
    """
    intake = layer.__dict__.pop("int4_emu_intake", None)
    if intake is None:
        raise CheckpointError(f"{prefix}: int4_emu cannot load the weights of a layer a second time")
    return intake


def check_complete(names: Iterable[str], captured: CapturedTensors) -> None:
    """Stops where the host had no more to give.

    Raises:
        CheckpointError: names that never came.
    """
    missing = [n for n in names if n not in captured.infos]
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise CheckpointError(f"the checkpoint has no {shown}")
