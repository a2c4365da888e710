"""act-order: the permutation that brings a weight's input columns into group order."""

from __future__ import annotations

import torch
from torch import Tensor


def group_permutation(g_idx: Tensor, group_size: int) -> Tensor | None:
    """The stable permutation int32 [I] that sorts columns by group.

    Args:
        g_idx: int32 [I], the group of each input column.
        group_size: columns per group.

    Returns:
        perm, sorted column j is stored column perm[j]; None where the groups do not hold group_size columns each.
    """
    perm = torch.argsort(g_idx, stable=True).to(torch.int32)
    regular = torch.arange(g_idx.numel(), dtype=torch.int32, device=g_idx.device) // group_size
    return perm if torch.equal(g_idx[perm.long()], regular) else None


def in_input_order(dense: Tensor, perm: Tensor | None) -> Tensor:
    """[O, I] whose columns `group_permutation` sorted, with each column back in its place; itself where perm is None."""
    if perm is None:
        return dense
    out = torch.empty_like(dense)
    out[:, perm.long()] = dense
    return out


def is_trivial(g_idx: Tensor | None, group_size: int) -> bool:
    """Absent, empty and `column // group_size` are one and the same."""
    if g_idx is None or g_idx.numel() == 0:
        return True
    columns = torch.arange(g_idx.shape[-1], dtype=g_idx.dtype, device=g_idx.device)
    return bool((g_idx == columns // group_size).all())
