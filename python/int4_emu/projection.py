"""One projection as it is stored: its sizes, the shapes that follow from them, and the cuts that its words
and groups allow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ._shards import TensorInfo
from .formats import QuantScheme, TensorAxes, tensor_axes

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A range of rows or columns: [low, high).
Bounds = tuple[int, int]

# The same modules under the names that other files and in-memory models give them; a configuration may use
# either.
_ALIASES = (
    (".block_sparse_moe.", ".mlp."), (".mlp.", ".block_sparse_moe."),
    (".w1", ".gate_proj"), (".w3", ".up_proj"), (".w2", ".down_proj"),
    (".gate_proj", ".w1"), (".up_proj", ".w3"), (".down_proj", ".w2"),
)  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """A Linear's weight as it lies on disk, checked: every tensor has the shape that the others imply.

    Attributes:
        module: full module name.
        scheme: how it is quantised; None for a floating-point weight [O, I].
        out_features, in_features, num_groups: O, I and C.
        dtype: of the scales, or of the floating-point weight.
        has_qzeros: zero points are stored and not empty.
        has_g_idx: g_idx is stored and not empty (it may still be trivial).
        has_bias: a `.bias` [O] is stored.
        in_features_assumed: I is another expert's; its own `weight_shape` has yet to agree.
    """

    module: str
    scheme: QuantScheme | None
    out_features: int
    in_features: int
    num_groups: int
    dtype: torch.dtype
    has_qzeros: bool = False
    has_g_idx: bool = False
    has_bias: bool = False
    in_features_assumed: bool = False

    @property
    def group_size(self) -> int:
        """Resolved group size: -1 becomes I."""
        if self.scheme is None or self.scheme.group_size == -1:
            return self.in_features
        return self.scheme.group_size


@dataclass(frozen=True)
class RawTensors:
    """A projection's tensors as stored, or the part of them that was asked for."""

    qweight: torch.Tensor
    scales: torch.Tensor
    qzeros: torch.Tensor | None


def storage_cuts(
    projection: Projection, rows: Bounds | None, columns: Bounds | None
) -> dict[str, slice] | None:
    """Slices by axis name; empty for the whole; None where a boundary falls inside a word or a group."""
    scheme = projection.scheme
    cuts: dict[str, slice] = {}
    if rows is not None and rows != (0, projection.out_features):
        cuts["O"] = slice(*rows)
    if columns is not None and columns != (0, projection.in_features):
        cuts["I"] = slice(*columns)
        if scheme is not None and scheme.group_size != -1:
            groups = _unit_slice(columns, projection.group_size, projection.in_features)
            if groups is None:
                return None
            cuts["C"] = groups
    if scheme is None or not cuts:
        return cuts
    axes = tensor_axes(scheme.format, scheme.bits)
    starred = {
        d
        for dims in (axes.qweight, axes.qzeros if projection.has_qzeros else ())
        for d in dims
        if d.endswith("*")
    }
    for dim, bounds, size in (
        ("O", rows, projection.out_features),
        ("I", columns, projection.in_features),
    ):
        if dim in cuts and bounds is not None and dim + "*" in starred:
            words = _unit_slice(bounds, 32 // scheme.bits, size)
            if words is None:
                return None
            cuts[dim + "*"] = words
    return cuts


def names_of(module: str) -> list[str]:
    """The module's name, then the names that it has elsewhere."""
    names = [module]
    for old, new in _ALIASES:
        # The block and the leaf may both be spelled otherwise.
        for name in list(names):
            inner = old.endswith(".")
            changed = name.replace(old, new, 1) if inner else re.sub(re.escape(old) + "$", new, name)
            if changed not in names:
                names.append(changed)
    return names


def _unit_slice(bounds: tuple[int, int], unit: int, size: int) -> slice | None:
    """[lo, hi) in units, where both ends are whole units or the end of the axis."""
    low, high = bounds
    if low % unit or (high % unit and high != size):
        return None
    return slice(low // unit, -(-high // unit))


def check_dtypes(
    scheme: QuantScheme, axes: TensorAxes, qweight: TensorInfo, scales: TensorInfo, problems: list[str]
) -> None:
    packed = any(d.endswith("*") for d in axes.qweight)
    if qweight.dtype not in ((torch.int32,) if packed else (torch.int8, torch.uint8)):
        wanted = "int32" if packed else "int8 or uint8"
        problems.append(
            f"{qweight.name} must be {wanted} ({scheme.format.name}, {scheme.bits} bits), "
            f"got {qweight.stored_dtype}"
        )
    if scales.dtype not in FLOAT_DTYPES:
        problems.append(f"{scales.name} must be float16, bfloat16 or float32, got {scales.stored_dtype}")
    for info, dims in ((qweight, axes.qweight), (scales, axes.scales)):
        if len(info.shape) != len(dims):
            problems.append(
                f"{info.name} must have {len(dims)} dimensions [{', '.join(dims)}], got {list(info.shape)}"
            )


def check_shape(
    info: TensorInfo,
    dims: tuple[str, ...],
    sizes: dict[str, int],
    scheme: QuantScheme,
    columns: int,
    problems: list[str],
) -> None:
    per_word = 32 // scheme.bits
    wanted = tuple(sizes[d] for d in dims)
    if info.shape != wanted:
        formula = ", ".join(d.replace("*", f"/{per_word}") for d in dims)
        problems.append(
            f"{info.name} must be [{formula}] = {list(wanted)}, got {list(info.shape)} "
            f"(O={sizes['O']}, I={columns}, group_size={scheme.group_size})"
        )
