"""moe_align: integers, so equal to the oracle element by element."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

import int4_emu
import oracle

pytestmark = pytest.mark.usefixtures("poison")


def assert_aligned(
    ops: ModuleType, ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None = None
) -> None:
    slots, owners, offsets, used = oracle.align(
        ids.numpy(), experts, block, None if expert_map is None else expert_map.numpy()
    )
    got = ops.moe_align(ids, experts, block, expert_map=expert_map)
    assert [t.dtype for t in got] == [torch.int32] * 4
    assert [t.shape for t in got] == [slots.shape, owners.shape, offsets.shape, (1,)]
    for tensor, want in zip(got, (slots, owners, offsets, np.array([used])), strict=True):
        assert np.array_equal(tensor.numpy(), want)


def test_golden_written_by_hand(ops: ModuleType) -> None:
    """Slot = token * 2 + j. Expert 0: slots 1, 4; expert 2: 0, 3, 5; slot 2 is unrouted; blocks of two."""
    ids = torch.tensor([[2, 0], [-1, 2], [0, 2]], dtype=torch.int32)
    slots, owners, offsets, used = ops.moe_align(ids, 3, 2)
    assert slots.tolist() == [
        1,
        4,
        0,
        3,
        5,
        6,
        6,
        6,
        6,
        6,
    ]  # capacity: 6 slots + 3 * (2 - 1), in whole blocks
    assert owners.tolist() == [0, 2, 2, -1, -1]
    assert offsets.tolist() == [0, 2, 2, 6] and used.tolist() == [6]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 1), (9, 3, 7), (33, 8, 60), (5, 4, 1500)]
)
def test_random_routing(
    ops: ModuleType,
    tokens: int,
    top_k: int,
    experts: int,
    block: int,
    ids_dtype: torch.dtype,
    rng: np.random.Generator,
) -> None:
    ids = torch.from_numpy(rng.integers(-1, experts + 1, (tokens, top_k))).to(ids_dtype)
    assert_aligned(ops, ids, experts, block)


@pytest.mark.parametrize("fill", [-1, 3, 4, 2**31 - 1, -(2**31)])
def test_all_slots_alike(ops: ModuleType, fill: int) -> None:
    """All to one expert, or all outside [0, E) on either side."""
    assert_aligned(ops, torch.full((6, 2), fill, dtype=torch.int32), 4, 4)


def test_64_bit_ids_are_bounded_at_full_width(ops: ModuleType) -> None:
    """2^32 + 1 cut to 32 bits would be expert 1."""
    ids = torch.tensor([[2**32 + 1, 1], [-(2**32) + 1, 2**62], [-(2**63), 0]])
    assert_aligned(ops, ids, 4, 2)


def test_expert_map(ops: ModuleType, rng: np.random.Generator) -> None:
    """Global ids through the map; -1 there is another rank's; the last entry valid, so that index -1 would
    show."""
    expert_map = torch.tensor([-1, 2, -1, 0, 3, 1], dtype=torch.int32)
    ids = torch.from_numpy(rng.integers(-2, 8, (20, 3)).astype(np.int32))
    assert_aligned(ops, ids, 4, 4, expert_map)


def test_no_local_expert(ops: ModuleType) -> None:
    assert_aligned(
        ops, torch.tensor([[0, 1]], dtype=torch.int32), 0, 4, torch.tensor([-1, -1], dtype=torch.int32)
    )


def test_strided_ids(ops: ModuleType, rng: np.random.Generator) -> None:
    big = torch.from_numpy(rng.integers(0, 5, (12, 6)))
    for ids in (big[:, :2], big[::2, ::3], big.t()):
        got, want = ops.moe_align(ids, 5, 4), ops.moe_align(ids.contiguous(), 5, 4)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refuses_offsets_that_int32_cannot_hold() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32)
    for experts, block in ((4, 2**62), (2**31, 2**40)):
        with pytest.raises(
            ValueError, match=rf"^num_experts \* block_size must be .*2\^31.*{experts} \* {block}$"
        ):
            int4_emu.ops.moe_align(ids, experts, block)
