"""Takes the tensors of a Linear, or of several that the host runs as one, and turns them into modules for this rank's part."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ..._shards import TensorFiles, listed
from ...errors import CheckpointError
from ...formats import ModelQuantization
from ...projection import Bounds, Projection
from ...projection_reader import ProjectionReader
from ...quantized_weight import QuantizedWeight, join_rows, load_quantized_weight
from .._linears import load_linear, plain_linear
from ._captured import CapturedTensors, check_complete, declared_scheme, required_suffixes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinearRequest:
    """What the host knows of a Linear before any tensor comes.

    Attributes:
        modules: full names of the checkpoint's Linears that are stacked in it, in row order.
        rows: this rank's output rows of each.
        fused_rows: output rows of each in a checkpoint that stores them stacked; None where it is one.
        in_features: input columns of the whole Linear.
        columns: this rank's range of them.
        tp_rank, tp_size: which rank this is.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    fused_rows: tuple[int, ...] | None
    in_features: int
    columns: Bounds
    tp_rank: int
    tp_size: int
    dtype: torch.dtype
    device: torch.device
    weights: str


class LinearIntake:
    """Collects one Linear; `modules` are there after `finish`."""

    def __init__(self, request: LinearRequest, quantization: ModelQuantization, fused: str) -> None:
        """`fused` is the name under which a checkpoint would store all parts in one."""
        self.request = request
        self.quantization = quantization
        self._fused = fused
        self._captured = CapturedTensors()

    def put(self, part: int | None, suffix: str, tensor: Tensor) -> None:
        """Takes one tensor of a part; None = of all parts, stored as one.

        Raises:
            CheckpointError: it comes twice.
        """
        names = self.request.modules
        module = self._fused if part is None and len(names) > 1 else names[part or 0]
        self._captured.put(f"{module}.{suffix}", tensor)

    def finish(self) -> list[nn.Module]:
        """The parts, one after the other in row order; parts that are alike are one module.

        Raises:
            CheckpointError: tensors are missing or contradict each other or the configuration.
        """
        reader = ProjectionReader(cast(TensorFiles, self._captured), self.quantization)
        loaded = [self._load(reader, *piece) for piece in self._pieces(reader)]
        self._captured = CapturedTensors()
        name = ", ".join(self.request.modules)
        modules: list[nn.Module] = []
        for weight in _merged(loaded):
            if isinstance(weight, Tensor):
                modules.append(plain_linear(weight.contiguous()))
                continue
            weights, dtype, device = self.request.weights, self.request.dtype, self.request.device
            modules.append(load_linear([weight], name, weights=weights, dtype=dtype, device=device))
        return modules

    def _pieces(self, reader: ProjectionReader) -> list[tuple[Projection, Bounds]]:
        """Each part's stored projection and the rows of it that are this rank's."""
        request = self.request
        stored_as_one = any(n.startswith(self._fused + ".") for n in self._captured.infos)
        if stored_as_one and request.fused_rows is not None:
            whole = self._inspect(reader, self._fused)
            if whole.out_features != sum(request.fused_rows):
                raise CheckpointError(
                    f"{self._fused} must have {sum(request.fused_rows)} output rows, got {whole.out_features}"
                )
            pieces, start = [], 0
            for size, rows in zip(request.fused_rows, request.rows, strict=True):
                low, high = self._own_rows(self._fused, size, rows)
                pieces.append((whole, (start + low, start + high)))
                start += size
            return pieces
        projections = [self._inspect(reader, module) for module in request.modules]
        return [
            (p, self._own_rows(p.module, p.out_features, rows))
            for p, rows in zip(projections, request.rows, strict=True)
        ]

    def _own_rows(self, module: str, stored: int, rows: int) -> Bounds:
        """This rank's rows: an equal share of them, shared with other ranks where there are fewer shares than ranks."""
        shares = stored // rows if rows else 0
        if shares == 0 or stored % rows or self.request.tp_size % shares:
            raise CheckpointError(
                f"{module} has {stored} output rows, which {self.request.tp_size} ranks of {rows} rows do not share evenly"
            )
        low = self.request.tp_rank // (self.request.tp_size // shares) * rows
        return low, low + rows

    def _inspect(self, reader: ProjectionReader, module: str) -> Projection:
        kind = reader.stored_kind(module)
        problems: list[str] = []
        if kind is None:
            scheme = declared_scheme(self.quantization, module)
            check_complete([f"{module}.{s}" for s in required_suffixes(scheme)], self._captured)
        # A Linear that the configuration does not list and the tool left alone (a router) is what the file says it is.
        plain = reader if kind == "quantized" else ProjectionReader(reader.files, None)
        projection = plain.inspect(module, problems)
        if projection is None or problems:
            raise CheckpointError(listed(problems))
        if projection.in_features != self.request.in_features:
            raise CheckpointError(
                f"{module} must have {self.request.in_features} input columns, got {projection.in_features}"
            )
        return projection

    def _load(
        self, reader: ProjectionReader, projection: Projection, rows: Bounds
    ) -> QuantizedWeight | Tensor:
        columns = self.request.columns
        if projection.scheme is None:
            stored = reader.files.get(f"{projection.module}.weight")
            return stored[slice(*rows), slice(*columns)].to(self.request.device, self.request.dtype)
        weight = load_quantized_weight(projection, reader, strict=True)
        cut = cut_weight(weight, rows, columns)
        if cut is not None:
            return cut
        if self.request.weights == "packed":
            raise CheckpointError(
                f"weights='packed' is not possible since columns {columns[0]} to {columns[1]} of {projection.module} "
                f"are no whole groups of {weight.group_size}; weights='dequantized' is"
            )
        logger.debug("%s: dequantized weights, because its columns are cut inside a group", projection.module)
        return weight.dequantized(self.request.dtype)[slice(*rows), slice(*columns)].to(self.request.device)


def cut_weight(weight: QuantizedWeight, rows: Bounds, columns: Bounds) -> QuantizedWeight | None:
    """Some rows and columns of a canonical weight; None where the columns are no whole groups of it."""
    low, high = columns
    out = slice(*rows)
    whole = (low, high) == (0, weight.in_features)
    qweight, scales = weight.qweight[out], weight.scales[out]
    qzeros = None if weight.qzeros is None else weight.qzeros[out]
    if not whole:
        group, per_byte = weight.group_size, 8 // weight.bits
        one_group = group >= weight.in_features
        in_groups = low % group == 0 and (high % group == 0 or high == weight.in_features)
        if weight.perm is not None or weight.g_idx is not None or low % per_byte or high % per_byte:
            return None
        if not (one_group or in_groups):
            return None
        qweight = qweight[:, low // per_byte : high // per_byte]
        groups = slice(0, 1) if one_group else slice(low // group, -(-high // group))
        scales = scales[:, groups]
        qzeros = None if qzeros is None else qzeros[:, groups]
    return replace(
        weight,
        qweight=qweight.contiguous(),
        scales=scales.contiguous(),
        qzeros=None if qzeros is None else qzeros.contiguous(),
        group_size=min(weight.group_size, high - low),
        in_features=high - low,
        bias=None,
    )


def _merged(parts: list[QuantizedWeight | Tensor]) -> list[QuantizedWeight | Tensor]:
    """Neighbours that one call can run, stacked."""
    merged: list[QuantizedWeight | Tensor] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Tensor) and isinstance(last, Tensor):
            merged[-1] = torch.cat([last, part])
            continue
        if isinstance(part, QuantizedWeight) and isinstance(last, QuantizedWeight):
            joined = join_rows([last, part])
            if isinstance(joined, QuantizedWeight):
                merged[-1] = joined
                continue
        merged.append(part)
    return merged
