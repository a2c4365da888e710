"""What ExpertParallel puts on the wire, and how the answers are summed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """What the ranks are about to send: row [r][d] and slot [r][d] counts from rank r to rank d, and each rank's tokens."""

    rows: list[list[int]]
    slots: list[list[int]]
    tokens: list[int]


def gathering_is_cheaper(sizes: Sizes, row: int, hidden: int) -> bool:
    """Whether the busiest rank sends fewer bytes with everyone's tokens and partial sums than with rows and slot outputs.

    Args:
        row: bytes of a packed row.
        hidden: H, float32 in the answers.
    """
    ranks = len(sizes.tokens)
    dispatched = [sum(r) - r[i] for i, r in enumerate(sizes.rows)]
    returned = [sum(s[i] for s in sizes.slots) - sizes.slots[i][i] for i in range(ranks)]
    swapping = max(row * d + 4 * hidden * b for d, b in zip(dispatched, returned, strict=True))
    return (ranks - 1) * max(sizes.tokens) * (row + 4 * hidden) < swapping


def pack(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rows of x [M, H], int32 ids and float32 weights [M, k] as one int32 tensor, for one collective; an odd row of x is filled up."""
    per_word = 4 // x.element_size()
    if x.shape[1] % per_word:
        x = nn.functional.pad(x, (0, per_word - x.shape[1] % per_word))
    elif not x.is_contiguous() or x.storage_offset() % per_word:
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.cat([x.view(torch.int32), ids, weights.view(torch.int32)], 1)


def unpack(rows: Tensor, dtype: torch.dtype, hidden: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of what `pack` put together."""
    x, ids, weights = rows.split([rows.shape[1] - 2 * k, k, k], 1)
    return x.view(dtype)[:, :hidden], ids, weights.view(torch.float32)


def padded_to(packed: Tensor, rows: int) -> Tensor:
    """More rows, whose ids are -1."""
    if packed.shape[0] == rows:
        return packed
    return nn.functional.pad(packed, (0, 0, 0, rows - packed.shape[0]), value=-1)


def slot_sums(rows: Tensor, at: Tensor) -> Tensor:
    """sum over j of rows[at[t, j]] in slot order, in float32: [M, H] of rows [N, H] and at [M, k].

    One kernel, which adds the rows of a bag one after the other. The rows hold the weighted outputs already: a product within the sum
    might be fused with it on one device and not on another.
    """
    if at.shape[1] == 1 or at.shape[0] == 0:
        return rows.index_select(0, at.flatten())
    return nn.functional.embedding_bag(at, rows, mode="sum")


def agreed_maps(everyone: list[dict[str, Any]]) -> list[list[int]]:
    """The ranks' expert maps, checked: one answer for everyone."""
    for r, rank in enumerate(everyone):
        if rank["refused"] is not None:
            raise ValueError(f"rank {r}: {rank['refused']}")
    for fact in everyone[0]:
        if fact in ("num_experts", "map"):
            continue
        values = [rank[fact] for rank in everyone]
        if len(set(values)) > 1:
            raise ValueError(f"the ranks must agree on {fact}, got {values} in rank order")
    counts = [rank["num_experts"] for rank in everyone]
    if everyone[0]["map"] is None:
        total = sum(counts)
        starts = [sum(counts[:r]) for r in range(len(counts))]
        maps = [
            [e - s if s <= e < s + n else -1 for e in range(total)]
            for s, n in zip(starts, counts, strict=True)
        ]
    else:
        maps = [rank["map"] for rank in everyone]
    sizes = {len(m) for m in maps}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"expert_map must have the same global E >= 1 entries on every rank, got {[len(m) for m in maps]} in rank order"
        )
    for e in range(len(maps[0])):
        holders = [r for r, m in enumerate(maps) if m[e] >= 0]
        if len(holders) != 1:
            raise ValueError(f"expert {e} must be held by exactly one rank, got {holders or 'none'}")
    for r, (m, n) in enumerate(zip(maps, counts, strict=True)):
        held = sorted(v for v in m if v >= 0)
        if held != list(range(len(held))) or len(held) > n:
            raise ValueError(f"expert_map of rank {r} must lead to slots 0..{n - 1}, each once, got {held}")
    return maps
