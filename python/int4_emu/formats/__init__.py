"""Checkpoint formats: what a `quantization_config` says, and how the tensors of each format lie.

A new format is a module here with a `ModelQuantization` subclass, a line in `_METHODS`, and, where it brings
a storage format of its own, the axes in `base.tensor_axes` and the unpacking in the ops. No kernel changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._enums import Format, parse_enum
from ..errors import CheckpointError
from .auto_round import AutoRoundQuantization
from .awq import AwqQuantization
from .base import ModelQuantization, QuantScheme, TensorAxes, TensorNames, tensor_axes, tensor_names
from .compressed_tensors import CompressedTensorsQuantization
from .gptq import GptqQuantization
from .quark import QuarkQuantization

__all__ = [
    "ModelQuantization",
    "QuantScheme",
    "TensorAxes",
    "TensorNames",
    "known_methods",
    "parse_quantization_config",
    "tensor_axes",
    "tensor_names",
]

_METHODS: dict[str, Callable[[Mapping[str, Any]], ModelQuantization]] = {
    "compressed-tensors": CompressedTensorsQuantization,
    "gptq": GptqQuantization,
    "awq": AwqQuantization,
    "auto-round": AutoRoundQuantization,
    "quark": QuarkQuantization,
}
# Formats that differ in nothing but the reading of the stored zero points.
_ZERO_POINT_CONVENTIONS = (Format.gptq_v1, Format.gptq_v2, Format.gptq_v1_nibble)


def known_methods() -> tuple[str, ...]:
    """The values of `quant_method` that are understood."""
    return tuple(_METHODS)


class _OtherZeroPoints(ModelQuantization):
    """A model whose GPTQ tensors are read with a zero-point convention of the caller's choice."""

    def __init__(self, inner: ModelQuantization, convention: Format) -> None:
        self.method = inner.method
        self.zeros_ignored_if_symmetric = inner.zeros_ignored_if_symmetric
        self._inner = inner
        self._convention = convention

    @property
    def names(self) -> TensorNames:
        return self._inner.names

    def scheme_for(self, module: str) -> QuantScheme | None:
        scheme = self._inner.scheme_for(module)
        if scheme is None:
            return None
        if scheme.format not in _ZERO_POINT_CONVENTIONS:
            raise CheckpointError(
                f"zero_point_format {self._convention.name} applies to GPTQ tensors only, "
                f"{module} is {scheme.format.name}"
            )
        return replace(scheme, format=self._convention)


def parse_quantization_config(
    config: Mapping[str, Any], *, zero_point_format: Format | int | str | None = None
) -> ModelQuantization:
    """Reads the object under `quantization_config` of a model's config.json.

    Args:
        config: the object.
        zero_point_format: reads GPTQ zero points by another convention than the declared one: `gptq_v1`,
            `gptq_v2` or `gptq_v1_nibble` (each stored nibble plus one, for files of other writers). None: as
            declared.

    Raises:
        CheckpointError: an unknown quant_method, format, packing, width or setting; the message lists the
            known ones.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"quantization_config must be a JSON object, got {type(config).__name__}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(f"quant_method must be one of {', '.join(_METHODS)}, got {method!r}")
    quantization = _METHODS[method](config)
    if zero_point_format is None:
        return quantization
    convention = parse_enum(Format, zero_point_format, "zero_point_format")
    if convention not in _ZERO_POINT_CONVENTIONS:
        known = ", ".join(f.name for f in _ZERO_POINT_CONVENTIONS)
        raise ValueError(f"zero_point_format must be one of {known}, got {convention.name}")
    return _OtherZeroPoints(quantization, convention)
