"""The closed enums of the op schemas. Their numbers equal those of `csrc/core/types.h` (a test compares them)."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar


class Format(IntEnum):
    """How a checkpoint stores the codes, zero points and scales of one projection (see docs/formats.md)."""

    canonical = 0
    compressed_tensors = 1
    gptq_v1 = 2
    gptq_v2 = 3
    awq = 4
    quark_int_order = 5
    quark_int_reorder = 6
    quark_uint_order = 7
    quark_uint_reorder = 8
    quark_int_channel_order = 9
    quark_int_channel_reorder = 10
    quark_uint_channel_order = 11
    quark_uint_channel_reorder = 12
    gptq_v1_nibble = 13


class Activation(IntEnum):
    """The function between the two GEMMs. Names ending in `_no_mul` have no gate: w13 has I rows."""

    silu = 0
    gelu = 1
    gelu_tanh = 2
    relu2 = 3
    swigluoai = 4
    silu_no_mul = 16
    gelu_no_mul = 17
    gelu_tanh_no_mul = 18
    relu2_no_mul = 19

    @property
    def is_gated(self) -> bool:
        """Whether w13 holds gate and up rows (2I) rather than up rows alone (I)."""
        return self < 16


class W13Order(IntEnum):
    """Row order of w13: all gate rows then all up rows, or g0, u0, g1, u1, ..."""

    halves = 0
    interleaved = 1


class Layout(IntEnum):
    """Order of the packed codes in memory (`csrc/core/layout.h`)."""

    canonical = 0
    cpu_n16 = 1


E = TypeVar("E", bound=IntEnum)


def parse_enum(kind: type[E], value: E | int | str, name: str) -> E:
    """The member of `kind` that `value` (a member, its number or its name) stands for.

    Raises:
        ValueError: unknown name or number; the message lists the known ones.
    """
    if isinstance(value, kind):  # torch.compile before 2.12 traces no look-up by a member
        return value
    try:
        return kind[value] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        known = ", ".join(f"{m.name} ({m.value})" for m in kind)
        raise ValueError(f"{name} must be one of {known}, got {value!r}") from None
