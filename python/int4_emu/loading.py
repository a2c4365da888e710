"""Converts a layer's experts, one at a time and straight into their place, to the tensors that `Experts`
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import ops
from ._enums import W13Order
from ._memory import empty
from .errors import CheckpointError
from .group_order import GroupOrders
from .layer_plan import LayerPlan
from .projection import Bounds, Projection
from .projection_reader import ProjectionReader


@dataclass(frozen=True)
class LoadRequest:
    """Which part of a layer to load, and in which form.

    Attributes:
        expert_ids: global ids in the order of the local slots.
        intermediate: this rank's range of the intermediate size.
        dtype: of dequantised weights and biases.
        device: where the result lives.
        strict: NaN and infinite scales raise.
        keep_w2_bias: w2's bias is added once over all tensor-parallel ranks.
    """

    expert_ids: list[int]
    intermediate: Bounds
    dtype: torch.dtype
    device: torch.device
    strict: bool
    keep_w2_bias: bool


class _Stack:
    """The canonical tensors of w13 or w2 for all local experts: codes, scales (NaN until filled), zero
    points.
    """

    def __init__(
        self,
        plan: LayerPlan,
        roles: tuple[str, ...],
        experts: int,
        rows: int,
        columns: int,
        device: torch.device,
    ) -> None:
        self.bits = plan.bits(roles)
        self.group_size = min(plan.group_size(roles), columns)
        groups = -(-columns // self.group_size) if columns else 0
        self.qweight = empty((experts, rows, -(-columns * self.bits // 8)), torch.uint8, device)
        self.scales = empty((experts, rows, groups), plan.scales_dtype(roles), device).fill_(float("nan"))
        self.qzeros: torch.Tensor | None = None
        if plan.has_qzeros(roles):
            midpoint = 1 << (self.bits - 1)
            self.qzeros = empty((experts, rows, groups), torch.uint8, device).fill_(midpoint)

    def slot(self, expert: int, rows: Bounds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Views of some rows of one expert."""
        part = slice(*rows)
        qzeros = None if self.qzeros is None else self.qzeros[expert, part]
        return self.qweight[expert, part], self.scales[expert, part], qzeros


@dataclass(frozen=True)
class _Piece:
    """Rows of w13 and where they are stored: `rows` of w13 are rows `source` of the projection `role`."""

    role: str
    rows: Bounds
    source: Bounds


def _w13_pieces(plan: LayerPlan, low: int, high: int) -> list[_Piece]:
    """The rows of w13 for the rank that holds [low, high) of the intermediate size."""
    part = high - low
    if plan.layer.joins_gate_and_up:
        if plan.w13_order == W13Order.interleaved:
            return [_Piece("gate_up", (0, 2 * part), (2 * low, 2 * high))]
        size = plan.intermediate_size
        return [
            _Piece("gate_up", (0, part), (low, high)),
            _Piece("gate_up", (part, 2 * part), (size + low, size + high)),
        ]
    return [
        _Piece(role, (index * part, (index + 1) * part), (low, high))
        for index, role in enumerate(plan.w13_roles)
    ]


class LayerLoader:
    """Loads one planned layer. `bytes_read` counts the stored bytes that were converted."""

    def __init__(
        self, plan: LayerPlan, reader: ProjectionReader, orders: GroupOrders, request: LoadRequest
    ) -> None:
        self.plan = plan
        self.reader = reader
        self.orders = orders
        self.request = request
        self.bytes_read = 0
        # The coverage table over (local slot, role): a gap cannot pass as a small error.
        self._filled: set[tuple[int, str]] = set()

    def load_packed(self) -> dict[str, Any]:
        """Canonical stacks, as keyword arguments of `Experts`. Act-order is sorted before anything is cut."""
        plan, request = self.plan, self.request
        low, high = request.intermediate
        part, roles = high - low, plan.w13_roles
        pieces = _w13_pieces(plan, low, high)
        count = len(request.expert_ids)
        w13 = _Stack(plan, roles, count, plan.w13_parts * part, plan.hidden_size, request.device)
        w2 = _Stack(plan, ("down",), count, plan.hidden_size, part, request.device)
        perm = torch.empty(count, plan.hidden_size, dtype=torch.int32) if self.orders.permutes_input else None

        def convert(slot: int, expert: int) -> None:
            down_perm = self.orders.perms.get((expert, "down"))
            for piece in pieces:
                # Rows of w13 follow the columns of w2, which act-order has sorted.
                self._repack(
                    expert,
                    piece.role,
                    w13.slot(slot, piece.rows),
                    self.orders.perms.get((expert, piece.role)),
                    self._row_order(expert, piece.role),
                    piece.source,
                    None,
                )
            self._repack(
                expert, "down", w2.slot(slot, (0, plan.hidden_size)), down_perm, None, None, (low, high)
            )
            if perm is not None:
                perm[slot] = self.orders.w13_perm(expert, plan.hidden_size)

        self._for_each_expert(convert)
        return {
            "w13": w13.qweight, "w13_scales": w13.scales, "w13_qzeros": w13.qzeros,
            "w13_group_size": w13.group_size, "w13_bits": w13.bits,
            "w2": w2.qweight, "w2_scales": w2.scales, "w2_qzeros": w2.qzeros,
            "w2_group_size": w2.group_size, "w2_bits": w2.bits,
            "w13_perm": None if perm is None else perm.to(request.device),
            **self._biases(sort_rows=True),
        }  # fmt: skip

    def load_dense(self) -> dict[str, Any]:
        """Dequantised (or stored floating-point) stacks in the request's dtype, in the stored order of rows
        and columns.
        """
        plan, request = self.plan, self.request
        low, high = request.intermediate
        part, pieces = high - low, _w13_pieces(plan, low, high)
        count = len(request.expert_ids)
        w13 = empty((count, plan.w13_parts * part, plan.hidden_size), request.dtype, request.device)
        w2 = empty((count, plan.hidden_size, part), request.dtype, request.device)

        def convert(slot: int, expert: int) -> None:
            for piece in pieces:
                self._dequantize(expert, piece.role, w13[slot, slice(*piece.rows)], piece.source, None)
            self._dequantize(expert, "down", w2[slot], None, (low, high))

        self._for_each_expert(convert)
        return {"w13": w13, "w2": w2, **self._biases(sort_rows=False)}

    def _row_order(self, expert: int, role: str) -> torch.Tensor | None:
        """The order of a w13 projection's rows that act-order of w2 asks for, or None."""
        perm = self.orders.perms.get((expert, "down"))
        if perm is None or role != "gate_up":
            return perm
        if self.plan.w13_order == W13Order.interleaved:
            return torch.stack([2 * perm, 2 * perm + 1], dim=1).flatten()
        return torch.cat([perm, perm + self.plan.intermediate_size])

    def _for_each_expert(self, convert: Callable[[int, int], None]) -> None:
        """Runs shard by shard, so that each file's pages are used once; then checks the coverage table."""
        infos, roles = self.reader.files.infos, self.plan.layer.roles

        def first_shard(item: tuple[int, int]) -> str:
            first = self.plan.projections[item[1], roles[0]]
            module, suffixes = first.module, self.reader.suffixes_used(first)
            return min(infos[f"{module}.{s}"].shard for s in suffixes if f"{module}.{s}" in infos)

        slots = list(enumerate(self.request.expert_ids))
        if len(self.reader.files.shards) > 1:
            slots.sort(key=first_shard)
        for slot, expert in slots:
            convert(slot, expert)
            self._filled.update((slot, role) for role in roles)
        wanted = {(slot, role) for slot, _ in slots for role in roles}
        if gaps := sorted(wanted - self._filled):
            raise CheckpointError(
                f"layer {self.plan.layer.number}: not loaded (local expert, projection): {gaps}"
            )
        for expert in self.request.expert_ids:
            for role in roles:
                self.reader.consume(self.plan.projections[expert, role])

    def _repack(
        self,
        expert: int,
        role: str,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        in_perm: torch.Tensor | None,
        out_perm: torch.Tensor | None,
        rows: Bounds | None,
        columns: Bounds | None,
    ) -> None:
        """One projection to canonical rows of a stack; reads the rank's part only where no boundary is inside
        a word or a sort.
        """
        projection = self.plan.projections[expert, role]
        scheme = projection.scheme
        assert scheme is not None
        rows, columns = _part(rows, projection.out_features), _part(columns, projection.in_features)
        whole = (in_perm is not None and columns is not None) or (out_perm is not None and rows is not None)
        whole = whole or not self.reader.can_cut(projection, rows, columns)
        read_rows, read_columns = (None, None) if whole else (rows, columns)
        height, width = _size(read_rows, projection.out_features), _size(read_columns, projection.in_features)
        qweight, scales, qzeros = self._read(projection, read_rows, read_columns)
        options: dict[str, Any] = {"format": scheme.format, "bits": scheme.bits, "in_features": width}
        options |= {"in_perm": in_perm, "out_perm": out_perm}
        out_qweight, out_scales, out_qzeros = out
        scales = scales.to(out_scales.dtype)
        shape = (height, -(-width * scheme.bits // 8))
        in_place = out_qweight.device.type == "cpu" and tuple(out_qweight.shape) == shape
        if in_place:
            zeros_out = out_qzeros if qzeros is not None else None
            ops.repack_out(
                qweight,
                scales,
                qzeros,
                **options,
                out_qweight=out_qweight,
                out_scales=out_scales,
                out_qzeros=zeros_out,
            )
            return
        codes, scales, zeros = ops.repack(qweight, scales, qzeros, **options)
        cut_rows = slice(*rows) if whole and rows is not None else slice(None)
        cut = columns if whole else None
        per_byte = 8 // scheme.bits
        cut_bytes = slice(None) if cut is None else slice(cut[0] // per_byte, -(-cut[1] // per_byte))
        group = projection.group_size
        cut_groups = slice(None) if cut is None else slice(cut[0] // group, -(-cut[1] // group))
        out_qweight.copy_(codes[cut_rows, cut_bytes])
        out_scales.copy_(scales[cut_rows, cut_groups])
        if zeros is not None and out_qzeros is not None:
            out_qzeros.copy_(zeros[cut_rows, cut_groups])

    def _dequantize(
        self, expert: int, role: str, out: torch.Tensor, rows: Bounds | None, columns: Bounds | None
    ) -> None:
        projection = self.plan.projections[expert, role]
        scheme = projection.scheme
        if scheme is None:
            cuts = (slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None))
            stored = self.reader.files.get_slice(f"{projection.module}.weight", cuts)
            self.bytes_read += stored.numel() * stored.element_size()
            out.copy_(stored)
            return
        g_idx = self.orders.g_idx.get((expert, role))
        rows, columns = _part(rows, projection.out_features), _part(columns, projection.in_features)
        whole = (g_idx is not None and columns is not None) or not self.reader.can_cut(
            projection, rows, columns
        )
        read_rows, read_columns = (None, None) if whole else (rows, columns)
        width = _size(read_columns, projection.in_features)
        qweight, scales, qzeros = self._read(projection, read_rows, read_columns)
        options: dict[str, Any] = {
            "group_size": min(projection.group_size, width),
            "format": scheme.format,
            "bits": scheme.bits,
        }
        options["in_features"] = width
        if out.device.type == "cpu" and not whole and out.is_contiguous():
            ops.dequantize(qweight, scales, qzeros, g_idx, **options, dtype=out.dtype, out=out)
            return
        weight = ops.dequantize(qweight, scales, qzeros, g_idx, **options, dtype=out.dtype)
        if whole:
            weight = weight[
                slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None)
            ]
        out.copy_(weight)

    def _read(
        self, projection: Projection, rows: Bounds | None, columns: Bounds | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        raw = self.reader.read(projection, rows, columns)
        tensors = [raw.qweight, raw.scales] + ([raw.qzeros] if raw.qzeros is not None else [])
        self.bytes_read += sum(t.nbytes for t in tensors)
        if self.request.strict:
            check_scales(projection, raw.scales)
        return raw.qweight, raw.scales, raw.qzeros

    def _biases(self, *, sort_rows: bool) -> dict[str, torch.Tensor | None]:
        """w13_bias [E, rows of w13] and w2_bias [E, H]; zero for a projection without one."""
        if not self.plan.has_bias:
            return {}
        plan, request = self.plan, self.request
        low, high = request.intermediate
        part, pieces = high - low, _w13_pieces(plan, low, high)
        w13 = torch.zeros(len(request.expert_ids), plan.w13_parts * part, dtype=request.dtype)
        w2 = torch.zeros(len(request.expert_ids), plan.hidden_size, dtype=request.dtype)
        for slot, expert in enumerate(request.expert_ids):
            for piece in pieces:
                bias = self._bias(expert, piece.role)
                order = self._row_order(expert, piece.role) if sort_rows else None
                if bias is not None:
                    bias = bias if order is None else bias[order.long()]
                    w13[slot, slice(*piece.rows)] = bias[slice(*piece.source)]
            bias = self._bias(expert, "down")
            if bias is not None and request.keep_w2_bias:
                w2[slot] = bias
        return {"w13_bias": w13.to(request.device), "w2_bias": w2.to(request.device)}

    def _bias(self, expert: int, role: str) -> torch.Tensor | None:
        projection = self.plan.projections[expert, role]
        return self.reader.files.get(f"{projection.module}.bias") if projection.has_bias else None


def _part(bounds: Bounds | None, whole: int) -> Bounds | None:
    """None, too, for bounds that leave nothing out."""
    return None if bounds == (0, whole) else bounds


def _size(bounds: Bounds | None, whole: int) -> int:
    return whole if bounds is None else bounds[1] - bounds[0]


# Exponent bits, all of which are set in NaN and infinity only; the integer type of the same width.
_EXPONENT = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}


def check_scales(projection: Projection, scales: torch.Tensor) -> None:
    """Stops at NaN and infinite scales; zero and denormal ones are those of experts that saw no data."""
    integer, exponent = _EXPONENT[scales.dtype]
    # NumPy on one thread: a tensor this small is not worth waking torch's threads for.
    bits = scales.contiguous().view(integer).numpy()
    bad = np.count_nonzero((bits & exponent) == exponent)
    if bad:
        raise CheckpointError(
            f"{projection.module}: scales must be finite, got {bad} NaN or infinite of {scales.numel()}"
        )
