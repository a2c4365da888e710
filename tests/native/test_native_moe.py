"""The MoE driver over std::thread, and offsets beyond 2^31."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from halves import decode, encode

HUGE = 2**31 + 64  # no 32-bit offset holds it


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("n", "grain"), [(0, 1), (1, 1), (100, 1), (100, 33), (5, 100)])
def test_parallel_visits_each_index_once(native: ModuleType, threads: int, n: int, grain: int) -> None:
    assert native.visits(threads, n, grain) == [1] * n


def test_result_does_not_depend_on_the_number_of_threads(native: ModuleType) -> None:
    experts, hidden, intermediate, tokens, topk = 5, 72, 48, 23, 2
    rng = np.random.default_rng(1)
    x = encode(rng.standard_normal((tokens, hidden)), "bf16")
    w13 = encode(rng.standard_normal((experts, 2 * intermediate, hidden)) * 0.1, "bf16")
    w2 = encode(rng.standard_normal((experts, hidden, intermediate)) * 0.1, "bf16")
    ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, topk)).astype(np.float32)
    bound13 = native.dense_weight(
        w13, native.DType.bf16, experts, 2 * intermediate, hidden, 2 * intermediate * hidden, hidden
    )
    bound2 = native.dense_weight(
        w2, native.DType.bf16, experts, hidden, intermediate, hidden * intermediate, intermediate
    )
    outs = [
        native.moe(x, native.DType.bf16, bound13, bound2, weights, ids, native.Activation.silu, threads)
        for threads in (1, 2, 5)
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])

    xs, a, b = decode(x, "bf16"), decode(w13, "bf16"), decode(w2, "bf16")
    expected = np.zeros((tokens, hidden))
    for t in range(tokens):
        for j in range(topk):
            gate, up = np.split(a[ids[t, j]] @ xs[t], 2)
            expected[t] += weights[t, j] * (b[ids[t, j]] @ (gate / (1 + np.exp(-gate)) * up))
    relative = np.linalg.norm(decode(outs[0], "bf16") - expected) / np.linalg.norm(expected)
    assert relative < 2.0**-8


def test_workspace_of_a_huge_problem(native: ModuleType) -> None:
    # Tokens go in chunks, so that the workspace grows with neither M nor E beyond bookkeeping.
    small = native.moe_workspace_bytes(2**16, 8, 256, 7168, 2048, 64)
    large = native.moe_workspace_bytes(2**24, 8, 256, 7168, 2048, 64)
    assert 0 < small <= large < 2**30


def test_packed_x_bytes_beyond_32_bits(native: ModuleType, table: str) -> None:
    assert native.packed_x_bytes(table, native.DType.f32, 2**20, 2**14) >= 2**36


def test_dense_expert_beyond_32_bits(native: ModuleType, table: str) -> None:
    n, k = 17, 64
    x = encode(np.random.default_rng(1).standard_normal((3, k)), "bf16")
    w = encode(np.random.default_rng(2).standard_normal((n, k)), "bf16")
    near = native.dense_weight(w, native.DType.bf16, 1, n, k, n * k, k)
    far = native.dense_weight(w, native.DType.bf16, 4, n, k, HUGE, k, base=3)
    compute = native.DType.bf16 if native.has_bf16(table) else native.DType.f32
    arguments = (x, native.DType.bf16)
    np.testing.assert_array_equal(
        native.product(table, compute, *arguments, far, 3, 0, n),
        native.product(table, compute, *arguments, near, 0, 0, n),
    )


@pytest.mark.parametrize("layout", ["canonical", "cpu_n16"])
def test_packed_expert_beyond_32_bits(native: ModuleType, table: str, layout: str) -> None:
    k, group_size, rows = 64, 32, 16
    # n * groups * expert is beyond 2^32 as well: the scales' offset.
    n, base = 2**28, 9
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, rows * k // 2, dtype=np.uint8)
    scales = encode(rng.standard_normal((rows, k // group_size)), "bf16")
    zeros = rng.integers(0, 16, (rows, k // group_size), dtype=np.uint8)
    x = encode(rng.standard_normal((2, k)), "bf16")
    common = (codes, scales, zeros, native.DType.bf16)
    near = native.packed_weight(*common, 1, rows, k, 4, group_size, layout=getattr(native.Layout, layout))
    far = native.packed_weight(
        *common, base + 1, n, k, 4, group_size, layout=getattr(native.Layout, layout), base=base
    )
    got = native.product(table, native.DType.f32, x, native.DType.bf16, far, base, 0, rows)
    np.testing.assert_array_equal(
        got, native.product(table, native.DType.f32, x, native.DType.bf16, near, 0, 0, rows)
    )
