"""What a checkpoint format is: names of tensors, their axes, and the scheme of each module."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .._enums import Format
from ..errors import CheckpointError


@dataclass(frozen=True)
class QuantScheme:
    """How one module's weight is stored.

    Attributes:
        format: the storage format of its tensors.
        bits: 4 or 8.
        group_size: inputs per scale; -1 is one group per output channel.
        symmetric: declared symmetric: the zero point is the midpoint, 8 (128).
        act_order: a permuted g_idx may be present.
    """

    format: Format
    bits: int
    group_size: int
    symmetric: bool
    act_order: bool

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric weight."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class TensorNames:
    """Suffixes of one projection's tensors, below the module's name; None: the format has no such tensor."""

    qweight: str
    scales: str
    qzeros: str
    g_idx: str | None = None
    shape: str | None = None

    def all(self) -> tuple[str, ...]:
        """Every suffix that the format knows."""
        names = (self.qweight, self.scales, self.qzeros, self.g_idx, self.shape)
        return tuple(n for n in names if n is not None)


@dataclass(frozen=True)
class TensorAxes:
    """Axes of one projection's tensors. "O" output rows, "I" input columns, "C" groups.

    A star marks the axis along which a 32-bit word holds 32 / bits neighbours: ("I*", "O") is [I / 8, O] for
    int4.
    """

    qweight: tuple[str, ...]
    scales: tuple[str, ...]
    qzeros: tuple[str, ...]


COMPRESSED_TENSORS_NAMES = TensorNames(
    "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
)
GPTQ_NAMES = TensorNames("qweight", "scales", "qzeros", "g_idx")
QUARK_NAMES = TensorNames("weight", "weight_scale", "weight_zero_point")

_QUARK_CHANNEL = (
    Format.quark_int_channel_order,
    Format.quark_int_channel_reorder,
    Format.quark_uint_channel_order,
    Format.quark_uint_channel_reorder,
)


@cache
def tensor_names(fmt: Format) -> TensorNames:
    """The tensor suffixes of a storage format."""
    if fmt is Format.compressed_tensors:
        return COMPRESSED_TENSORS_NAMES
    if fmt.name.startswith("quark"):
        return QUARK_NAMES
    if fmt is Format.canonical:
        raise ValueError("the canonical layout is not a checkpoint format")
    return GPTQ_NAMES


@cache
def tensor_axes(fmt: Format, bits: int) -> TensorAxes:
    """The axes of a storage format's tensors, which fix every shape and every legal cut."""
    if fmt is Format.compressed_tensors:
        return TensorAxes(("O", "I*"), ("O", "C"), ("O*", "C"))
    if fmt in _QUARK_CHANNEL:
        star = "*" if bits == 4 else ""
        return TensorAxes(("O", "I" + star), ("O",), ("O" + star,))
    if fmt.name.startswith("quark"):
        star = "*" if bits == 4 else ""
        return TensorAxes(("I", "O" + star), ("C", "O"), ("C", "O" + star))
    if fmt is Format.awq:
        return TensorAxes(("I", "O*"), ("C", "O"), ("C", "O*"))
    if fmt is Format.canonical:
        raise ValueError("the canonical layout is not a checkpoint format")
    return TensorAxes(("I*", "O"), ("C", "O"), ("C", "O*"))


class ModelQuantization(ABC):
    """The quantisation of a whole model, as its configuration declares it.

    Attributes:
        method: the `quant_method` of the configuration.
        zeros_ignored_if_symmetric: the writer leaves zero tensors of symmetric weights uninitialised, so that
            they are not compared with the midpoint.
    """

    method: str = ""
    zeros_ignored_if_symmetric: bool = False

    def excludes(self, module: str) -> bool:
        """Whether the configuration names this module, or a parent of it, as left in floating point."""
        return False

    @abstractmethod
    def scheme_for(self, module: str) -> QuantScheme | None:
        """The scheme of a Linear by its full name; None where the configuration leaves it in floating
        point.
        """

    @property
    @abstractmethod
    def names(self) -> TensorNames:
        """Tensor suffixes of the family."""


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """`value` as a mapping with string keys; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def as_names(value: Any, what: str) -> tuple[str, ...]:
    """`value` as a tuple of strings; None is empty, a single string is a list of one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{what} must be a list of strings, got {value!r}")
    return tuple(value)


def as_flag(value: Any, what: str) -> bool:
    """`value` as true or false; nothing else passes."""
    if not isinstance(value, bool):
        raise CheckpointError(f"{what} must be true or false, got {value!r}")
    return value


def known_value(value: Any, known: Iterable[Any], what: str) -> Any:
    """`value` where it is one of `known`; the error lists them."""
    choices = tuple(known)
    # A JSON true equals 1 in Python and must not pass for a number.
    is_stray_flag = isinstance(value, bool) and not any(isinstance(c, bool) for c in choices)
    if is_stray_flag or value not in choices:
        raise CheckpointError(f"{what} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def check_group_size(value: Any, what: str) -> int:
    """A group size: -1 (one group per channel) or a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < 1):
        raise CheckpointError(f"{what} must be -1 or a positive whole number, got {value!r}")
    return value


def compile_pattern(pattern: str, what: str) -> re.Pattern[str]:
    """A regular expression of a configuration, compiled."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{what} holds the regular expression {pattern!r}, which does not compile: {error}"
        ) from None


class NamedModules:
    """A list of a configuration, whose entries name modules or their parents.

    Whole components are compared, as a run anywhere in the name: "layers.1" is `model.layers.1.mlp` and not
    `model.layers.10.mlp`; "gate" is the router `mlp.gate` and not `mlp.experts.0.gate_proj`.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        # Lists may name every expert of every layer: look-ups must not walk them.
        self._runs = frozenset(e.strip(".") for e in entries) - {""}

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        return any(
            ".".join(parts[start:end]) in self._runs
            for start in range(len(parts))
            for end in range(start + 1, len(parts) + 1)
        )
