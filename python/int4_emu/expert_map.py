"""Which experts an expert-parallel rank holds."""

from __future__ import annotations

import torch


def make_expert_map(num_experts: int, ep_size: int, ep_rank: int, placement: str = "linear") -> torch.Tensor:
    """Maps global expert ids to the local slots of one rank.

    The first `num_experts % ep_size` ranks hold one expert more than the others; a rank may hold none.

    Args:
        num_experts: experts of the layer.
        ep_size: number of ranks.
        ep_rank: this rank, 0 <= ep_rank < ep_size.
        placement: `linear` gives each rank a run of ids, `round_robin` every ep_size-th id. Local slots
            follow the ids.

    Returns:
        int32 [num_experts]: the local slot, or -1 where another rank holds the expert.

    Raises:
        ValueError: a size, rank or placement out of range.
    """
    if num_experts < 1 or ep_size < 1:
        raise ValueError(f"num_experts and ep_size must be >= 1, got {num_experts} and {ep_size}")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank must be in [0, {ep_size}), got {ep_rank}")
    base, extra = divmod(num_experts, ep_size)
    count = base + (ep_rank < extra)
    if placement == "linear":
        start = ep_rank * base + min(ep_rank, extra)
        ids = torch.arange(start, start + count)
    elif placement == "round_robin":
        ids = torch.arange(count) * ep_size + ep_rank
    else:
        raise ValueError(f"placement must be linear or round_robin, got {placement!r}")
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[ids] = torch.arange(count, dtype=torch.int32)
    return expert_map
