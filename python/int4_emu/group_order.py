"""act-order and tensor parallelism: the order in which a layer's columns and rows are stored and cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .act_order import group_permutation
from .errors import CheckpointError
from .layer_plan import LayerPlan
from .projection import Projection
from .projection_reader import ProjectionReader


@dataclass
class GroupOrders:
    """The g_idx of every act-order projection of the local experts, and the permutation that sorts it by
    group.

    Attributes:
        g_idx: (expert, role) to int32 [I]; trivial ones are absent.
        perms: (expert, role) to int32 [I]: sorted column j is stored column perm[j].
        refusal: why the layer cannot be packed because of them, or None.
    """

    g_idx: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    perms: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    refusal: str | None = None

    def w13_perm(self, expert: int, hidden_size: int) -> torch.Tensor:
        """int32 [H], the identity for an expert in group order."""
        perm = self.perms.get((expert, "up"), self.perms.get((expert, "gate_up")))
        return torch.arange(hidden_size, dtype=torch.int32) if perm is None else perm

    @property
    def permutes_input(self) -> bool:
        """Whether any expert's w13 needs its input gathered."""
        return any(role != "down" for _, role in self.perms)


def read_group_orders(plan: LayerPlan, reader: ProjectionReader, expert_ids: list[int]) -> GroupOrders:
    """Reads and validates g_idx of the local experts (all of it is small)."""
    orders = GroupOrders()
    roles, has_gate = plan.layer.roles, plan.layer.has_gate
    for expert in expert_ids:
        for role in roles:
            projection = plan.projections[expert, role]
            g_idx = reader.read_group_order(projection)
            if g_idx is None:
                continue
            orders.g_idx[expert, role] = g_idx
            perm = group_permutation(g_idx, projection.group_size)
            if perm is None:
                orders.refusal = (
                    f"{projection.module}: g_idx gives groups of other sizes than {projection.group_size}"
                )
            else:
                orders.perms[expert, role] = perm
        if has_gate and not _same(orders.g_idx.get((expert, "gate")), orders.g_idx.get((expert, "up"))):
            orders.refusal = (
                f"gate and up of expert {expert} in layer {plan.layer.number} have different act-orders"
            )
    return orders


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def intermediate_cut(plan: LayerPlan, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """This rank's range of the intermediate size; a cut takes whole groups of w2.

    Raises:
        ValueError: tp_size or tp_rank out of range.
        CheckpointError: the cut falls inside a group; the message has the sizes that would work.
    """
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(
            f"tp_rank must be in [0, tp_size) and tp_size >= 1, got tp_rank {tp_rank} and tp_size {tp_size}"
        )
    size = plan.intermediate_size
    if not _cut_fits(plan, tp_size):
        works = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if _cut_fits(plan, n))
        group = max(_column_unit(p) for p in plan.of_roles(("down",)))
        raise CheckpointError(
            f"layer {plan.layer.number}: intermediate_size / tp_size must be a multiple of w2's group, "
            f"{group}, got {size} / {tp_size} = {size / tp_size:g}; tp_size {works} would work"
        )
    part = size // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def _cut_fits(plan: LayerPlan, tp_size: int) -> bool:
    if plan.intermediate_size % tp_size:
        return False
    part = plan.intermediate_size // tp_size
    return tp_size == 1 or all(part % _column_unit(p) == 0 for p in plan.of_roles(("down",)))


def _column_unit(projection: Projection) -> int:
    """Columns of w2 that a cut must not part: a group, or the two of a byte in one per-channel group."""
    if projection.scheme is None:
        return 1
    return projection.scheme.group_size if projection.scheme.group_size != -1 else 8 // projection.scheme.bits
