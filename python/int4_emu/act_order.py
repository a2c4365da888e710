"""act-order: the permutation that brings a weight's input columns into group order."""

from __future__ import annotations

import numpy as np
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
    # NumPy on one thread, whose stable sort of 16 bits is a radix sort. What does not fit them is no group, and fails the check.
    groups = g_idx.cpu().numpy()
    regular = np.arange(groups.size, dtype=np.int32) // group_size
    narrow = groups.astype(np.uint16) if groups.size // group_size < 1 << 16 else groups
    perm = np.argsort(narrow, kind="stable")
    if not np.array_equal(groups[perm], regular):
        return None
    return torch.from_numpy(perm.astype(np.int32)).to(g_idx.device)


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
    groups = g_idx.cpu().numpy()
    return bool((groups == np.arange(groups.shape[-1], dtype=groups.dtype) // group_size).all())
