"""Ops hold no hidden state: threads may call them at once, and the thread count does not change a bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import torch

from layers import Layer, make_layer


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_all(layer: Layer, ops: ModuleType) -> list[torch.Tensor]:
    w = layer.w13
    offsets = torch.linspace(0, len(layer.x), len(w.codes) + 1).int()
    return [
        layer.run_dense(ops),
        layer.run_packed(ops),
        ops.dequantize(w.qweight, w.scales, w.qzeros, group_size=w.group_size),
        ops.grouped_gemm(
            layer.x, w.qweight, offsets, scales=w.scales, qzeros=w.qzeros, group_size=w.group_size
        ),
        *ops.moe_align(layer.topk_ids, len(w.codes), 4),
    ]


def test_threads_calling_at_once_get_their_own_results(compiled: ModuleType) -> None:
    """Eight layers of different shapes, four threads, several rounds: each result equals the lonely call's."""
    layer_list = [
        make_layer(
            np.random.default_rng(i),
            tokens=3 + 5 * i,
            hidden=32 + 16 * (i % 3),
            experts=3 + i,
            dtype=torch.bfloat16,
        )
        for i in range(8)
    ]
    want = [run_all(layer, compiled) for layer in layer_list]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda layer: run_all(layer, compiled), layer_list))
            for a, b in zip(got, want, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_threads_sharing_one_layer(compiled: ModuleType) -> None:
    layer = make_layer(np.random.default_rng(0), tokens=64, top_k=4)
    want = layer.run_packed(compiled)
    with ThreadPoolExecutor(4) as pool:
        assert all(
            torch.equal(out, want) for out in pool.map(lambda _: layer.run_packed(compiled), range(32))
        )


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thread_count_changes_no_bit(
    compiled: ModuleType, tokens: int, dtype: torch.dtype, restore_threads: None
) -> None:
    """Work is split over rows and columns, never over a sum."""
    layer = make_layer(
        np.random.default_rng(1),
        tokens=tokens,
        top_k=3,
        hidden=96,
        intermediate=80,
        group_sizes=(32, 16),
        dtype=dtype,
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_all(layer, compiled))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
