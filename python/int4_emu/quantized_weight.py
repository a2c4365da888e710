"""One int4 or int8 Linear of a checkpoint in the canonical layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import ops
from .act_order import group_permutation, in_input_order
from .loading import check_scales
from .projection import Projection
from .projection_reader import ProjectionReader


@dataclass(frozen=True)
class QuantizedWeight:
    """A Linear's weight in canonical tensors (see docs/design.md).

    Attributes:
        qweight: uint8 [O, ceil(I * bits / 8)].
        scales: floating point [O, C].
        qzeros: uint8 [O, C] true zero points, or None (the midpoint).
        perm: int32 [I] for act-order: column j of `qweight` is input perm[j]; None in input order.
        g_idx: int32 [I], where groups have other sizes than group_size and cannot be sorted; then `qweight`
            is in input order.
        bits, group_size, in_features: 4 or 8, resolved (never -1), I.
        bias: [O] or None.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    qzeros: torch.Tensor | None
    perm: torch.Tensor | None
    g_idx: torch.Tensor | None
    bits: int
    group_size: int
    in_features: int
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """O."""
        return self.qweight.shape[0]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight [O, I], columns in input order."""
        # g_idx and perm exclude each other: with g_idx the columns are in input order already.
        dense = ops.dequantize(
            self.qweight,
            self.scales,
            self.qzeros,
            self.g_idx,
            group_size=self.group_size,
            bits=self.bits,
            in_features=self.in_features,
            dtype=dtype,
        )
        return in_input_order(dense, self.perm)


def load_quantized_weight(
    projection: Projection, reader: ProjectionReader, *, strict: bool
) -> QuantizedWeight:
    """Reads and converts one quantised projection."""
    scheme = projection.scheme
    assert scheme is not None, "a quantised projection"
    g_idx = reader.read_group_order(projection)
    perm = None if g_idx is None else group_permutation(g_idx, projection.group_size)
    raw = reader.read(projection)
    if strict:
        check_scales(projection, raw.scales)
    qweight, scales, qzeros = ops.repack(
        raw.qweight,
        raw.scales,
        raw.qzeros,
        format=scheme.format,
        bits=scheme.bits,
        in_features=projection.in_features,
        in_perm=perm,
    )
    bias = reader.files.get(f"{projection.module}.bias").clone() if projection.has_bias else None
    reader.consume(projection)
    return QuantizedWeight(
        qweight=qweight,
        scales=scales,
        qzeros=qzeros,
        perm=perm,
        g_idx=g_idx.clone() if g_idx is not None and perm is None else None,
        bits=scheme.bits,
        group_size=projection.group_size,
        in_features=projection.in_features,
        bias=bias,
    )


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | str:
    """Several weights over the same input as one, its rows those of all parts in turn; or why they cannot be."""
    first = parts[0]
    for part in parts[1:]:
        for name in ("bits", "group_size", "in_features"):
            if getattr(part, name) != getattr(first, name):
                return f"{name} differs: {getattr(first, name)} and {getattr(part, name)}"
        if not (_same(part.perm, first.perm) and _same(part.g_idx, first.g_idx)):
            return "their act-orders differ"
    if len({part.bias is None for part in parts}) > 1:
        return "not all of them have a bias"
    scales_dtype = first.scales.dtype
    if any(part.scales.dtype != scales_dtype for part in parts):
        scales_dtype = torch.float32
    qzeros = None
    if any(part.qzeros is not None for part in parts):
        midpoint = 1 << (first.bits - 1)
        qzeros = torch.cat(
            [
                torch.full_like(p.scales, midpoint, dtype=torch.uint8) if p.qzeros is None else p.qzeros
                for p in parts
            ]
        )
    biases = [part.bias for part in parts if part.bias is not None]
    return replace(
        first,
        qweight=torch.cat([part.qweight for part in parts]),
        scales=torch.cat([part.scales.to(scales_dtype) for part in parts]),
        qzeros=qzeros,
        bias=torch.cat(biases) if biases else None,
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
