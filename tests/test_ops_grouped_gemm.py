"""grouped_gemm: ragged row groups by dense or packed weights; an int4 Linear is the case of one group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

import oracle
from implementations import OnGpu
from layers import NAMES, Quantised, make_layer, quantise, random_floats, to_numpy, to_torch

pytestmark = pytest.mark.usefixtures("poison")

RAGGED_LIST = [[0, 3, 3, 10], [0, 0, 0, 0], [0, 10, 10, 10], [0, 1, 2, 10], [0, 2, 4, 7], [3, 5, 5, 9]]


def want_rows(
    x: torch.Tensor, exact: np.ndarray, offsets: list[int], packed: bool, bias: np.ndarray | None
) -> oracle.Judged:
    name = NAMES[x.dtype]
    value, error = (np.zeros((x.shape[0], exact.shape[1])) for _ in range(2))
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        part = oracle.gemm(
            to_numpy(x[start:end]), exact[e], dtype=name, bias=None if bias is None else bias[e],
            weight_rounding=oracle.UNIT_ROUNDOFF[name] if packed else 0.0,
        )  # fmt: skip
        value[start:end], error[start:end] = part.value, part.error
    return oracle.Judged(value, error)


def run_packed(
    ops: ModuleType, x: torch.Tensor, w: Quantised, offsets: list[int], **options: object
) -> torch.Tensor:
    return ops.grouped_gemm(
        x, w.qweight, torch.tensor(offsets, dtype=torch.int32), scales=w.scales, qzeros=w.qzeros,
        group_size=w.codes.shape[-1] if w.group_size == -1 else w.group_size, bits=w.bits, **options,
    )  # fmt: skip


@pytest.mark.parametrize("offsets", RAGGED_LIST, ids=str)
def test_ragged_groups(
    ops: ModuleType, offsets: list[int], dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """Experts with no rows, with all rows, and rows outside all groups, which are exactly zero."""
    x = to_torch(random_floats(rng, (10, 48), dtype), dtype)
    w = quantise(rng, 3, 40, 48, 16)
    got = run_packed(ops, x, w, offsets)
    assert got.dtype == dtype
    oracle.check(to_numpy(got), want_rows(x, w.exact, offsets, True, None))
    rounded = oracle.round_to(w.exact, NAMES[dtype])
    got = ops.grouped_gemm(x, to_torch(rounded, dtype), torch.tensor(offsets, dtype=torch.int32))
    oracle.check(to_numpy(got), want_rows(x, rounded, offsets, False, None))
    outside = [r for r in range(10) if not offsets[0] <= r < offsets[-1]]
    assert (got[outside] == 0).all()


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"), [(4, -1, True), (8, 16, False), (8, -1, True), (4, 4, False)]
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_packed_options(
    ops: ModuleType, bits: int, group_size: int, symmetric: bool, with_bias: bool, rng: np.random.Generator
) -> None:
    offsets = [0, 4, 9]
    for dtype in (torch.float32, torch.bfloat16):
        x = to_torch(random_floats(rng, (9, 64), dtype), dtype)
        w = quantise(rng, 2, 24, 64, group_size, bits=bits, symmetric=symmetric, scales_dtype=torch.float16)
        bias = random_floats(rng, (2, 24), dtype) if with_bias else None
        got = run_packed(ops, x, w, offsets, bias=None if bias is None else to_torch(bias, dtype))
        oracle.check(to_numpy(got), want_rows(x, w.exact, offsets, True, bias))


@pytest.mark.parametrize("group_size", [32, 96, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_few_rows_over_long_rows_of_codes(
    ops: ModuleType, dtype: torch.dtype, bits: int, group_size: int, rng: np.random.Generator
) -> None:
    """1 to 9 rows of an expert, each number a way of its own, over rows of codes that go in several pieces and end inside a block."""
    offsets = np.cumsum([0, *range(1, 10)]).tolist()
    columns = 2208 if group_size == 96 else 2208 + 32 if group_size != 128 else 2304
    x = to_torch(random_floats(rng, (offsets[-1], columns), dtype), dtype)
    for symmetric in (True, False):
        w = quantise(
            rng, 9, 11, columns, group_size, bits=bits, symmetric=symmetric, scales_dtype=torch.bfloat16
        )
        oracle.check(to_numpy(run_packed(ops, x, w, offsets)), want_rows(x, w.exact, offsets, True, None))


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 64)])
def test_many_rows_of_an_expert_over_many_columns(
    ops: ModuleType, bits: int, group_size: int, with_bias: bool, rng: np.random.Generator
) -> None:
    """Rows and columns enough for the widest tasks, with ends inside a tile of rows, a strip of columns and a task."""
    offsets = [0, 170, 170, 331]
    x = to_torch(random_floats(rng, (331, 640), torch.bfloat16), torch.bfloat16)
    w = quantise(rng, 3, 1106, 640, group_size, bits=bits, symmetric=False, scales_dtype=torch.bfloat16)
    bias = random_floats(rng, (3, 1106), torch.bfloat16) if with_bias else None
    options = {} if bias is None else {"bias": to_torch(bias, torch.bfloat16)}
    oracle.check(to_numpy(run_packed(ops, x, w, offsets, **options)), want_rows(x, w.exact, offsets, True, bias))


@pytest.mark.parametrize("order", [0, 1], ids=["halves", "interleaved"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_many_rows_of_a_whole_layer_over_many_columns(
    ops: ModuleType, group_size: int, order: int, rng: np.random.Generator
) -> None:
    """The same in both projections of a layer, gate and up side by side in a task."""
    layer = make_layer(
        rng, tokens=340, experts=2, top_k=1, hidden=1152, intermediate=1152, dtype=torch.bfloat16,
        group_sizes=(group_size, group_size), bias=True, w13_order=order,
    )  # fmt: skip
    oracle.check(to_numpy(layer.run_packed(ops)), layer.want(packed=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("columns", "group_size"), [(192, 32), (256, 32), (256, 128)])
def test_rows_far_from_one(
    ops: ModuleType, bits: int, rows: int, columns: int, group_size: int, rng: np.random.Generator
) -> None:
    """Zeros, tiny, huge, infinite and NaN rows beside ordinary ones: each gets its own numbers, and none touches another."""
    x = random_floats(rng, (7, columns), torch.bfloat16)
    x[1], x[3], x[4, 5], x[5, 7] = 0, np.ldexp(x[3], 110), np.inf, np.nan
    x[2] = oracle.round_to(np.ldexp(x[2], -122), "bfloat16")
    w = quantise(rng, 7, 11, columns, group_size, bits=bits, symmetric=False)
    offsets = [*range(8)] if rows == 1 else [0, 7, 7, 7, 7, 7, 7, 7]
    w = replace(w, scales=w.scales * 64, exact=w.exact * 64)
    got = to_numpy(run_packed(ops, to_torch(x, torch.bfloat16), w, offsets))
    finite = np.isfinite(x).all(1)
    want = want_rows(to_torch(np.where(np.isfinite(x), x, 0), torch.bfloat16), w.exact, offsets, True, None)
    # Matrix units take a bf16 number below 2^-126 for zero.
    subnormal = np.where(np.abs(x) < 2.0**-126, x, 0)
    experts = np.arange(7) if rows == 1 else np.zeros(7, dtype=int)
    flushed = np.sqrt(np.einsum("rk,rnk->rn", subnormal**2, w.exact[experts] ** 2))
    oracle.check(got[finite], oracle.Judged(want.value[finite], want.error[finite] + flushed[finite]))
    # An infinity stays one, with the weight's sign; times zero, and where a GPU's kernels keep none, it is NaN.
    weights = w.exact[4 if rows == 1 else 0][:, 5]
    infinite = np.where(weights == 0, np.nan, np.copysign(np.inf, weights))
    np.testing.assert_array_equal(got[4], np.where(np.isnan(got[4]) & isinstance(ops, OnGpu), np.nan, infinite))
    assert np.isnan(got[5]).all()


def test_no_scale_of_the_next_row_is_met(ops: ModuleType, rng: np.random.Generator) -> None:
    """Five groups of 32 end inside a block of 64 codes, and every other row has no numbers for scales."""
    x = to_torch(random_floats(rng, (3, 160), torch.bfloat16), torch.bfloat16)
    w = quantise(rng, 1, 12, 160, 32)
    w.scales[:, 1::2] = float("nan")
    for rows in (1, 3):
        got = run_packed(ops, x[:rows], w, [0, rows])
        want = want_rows(x[:rows], w.exact, [0, rows], True, None)
        oracle.check(to_numpy(got)[:, ::2], oracle.Judged(want.value[:, ::2], want.error[:, ::2]))
        assert got[:, 1::2].isnan().all()


def test_act_order_gather(ops: ModuleType, rng: np.random.Generator) -> None:
    """perm [E, K]: column j of the weight meets x[:, perm[e, j]]."""
    x = to_torch(random_floats(rng, (6, 32), torch.float32), torch.float32)
    w = quantise(rng, 2, 16, 32, 8)
    perm = np.stack([rng.permutation(32) for _ in range(2)])
    exact = np.empty_like(w.exact)
    for e in range(2):
        exact[e][:, perm[e]] = w.exact[e]
    got = run_packed(ops, x, w, [0, 2, 6], perm=torch.from_numpy(perm.astype(np.int32)))
    oracle.check(to_numpy(got), want_rows(x, exact, [0, 2, 6], True, None))


@pytest.mark.parametrize("bits", [4, 8])
def test_prepacked_layout(ops: ModuleType, bits: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    if isinstance(ops, OnGpu):
        pytest.skip("the tile order is the CPU's; a GPU refuses it")
    x = to_torch(random_floats(rng, (7, 72), dtype), dtype)
    w = quantise(rng, 2, 48, 72, 24, bits=bits)
    tiles = ops.prepack(w.qweight, layout=1, bits=bits)
    got = run_packed(ops, x, Quantised(**{**vars(w), "qweight": tiles}), [0, 5, 7], layout=1)
    oracle.check(to_numpy(got), want_rows(x, w.exact, [0, 5, 7], True, None))


def test_one_group_is_a_linear_layer(ops: ModuleType, rng: np.random.Generator) -> None:
    """A single expert over all rows, at sizes that no tile divides."""
    for rows, columns in ((1, 2), (17, 90), (33, 130)):
        x = to_torch(random_floats(rng, (5, columns), torch.float32), torch.float32)
        w = quantise(rng, 1, rows, columns, columns)
        oracle.check(to_numpy(run_packed(ops, x, w, [0, 5])), want_rows(x, w.exact, [0, 5], True, None))


def test_transposed_and_strided_operands(
    ops: ModuleType, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    rounded = random_floats(rng, (2, 24, 40), dtype, 0.2)
    weight = to_torch(rounded, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    x = to_torch(random_floats(rng, (8, 80), dtype), dtype)[:, ::2]
    got = ops.grouped_gemm(x, weight, torch.tensor([0, 3, 8], dtype=torch.int32))
    oracle.check(to_numpy(got), want_rows(x, rounded, [0, 3, 8], False, None))


def test_no_rows_and_no_experts(ops: ModuleType) -> None:
    weight = torch.zeros(2, 8, 16)
    assert ops.grouped_gemm(torch.zeros(0, 16), weight, torch.zeros(3, dtype=torch.int32)).shape == (0, 8)
    got = ops.grouped_gemm(torch.ones(4, 16), weight[:0], torch.zeros(1, dtype=torch.int32))
    assert got.shape == (4, 8) and (got == 0).all()


def test_align_then_gemm_composes_to_the_layer(ops: ModuleType, rng: np.random.Generator) -> None:
    """The reason for moe_align: its offsets drive grouped_gemm over gathered rows, padding rows included."""
    x = to_torch(random_floats(rng, (9, 32), torch.float32), torch.float32)
    ids = torch.from_numpy(rng.integers(-1, 4, (9, 2)).astype(np.int32))
    w = quantise(rng, 4, 16, 32, 16)
    slots, _, offsets, _ = ops.moe_align(ids, 4, 4)
    padded = torch.cat([x, torch.zeros(1, 32)])
    rows = torch.where(slots < 18, slots // 2, 9).long()
    got = to_numpy(
        ops.grouped_gemm(padded[rows], w.qweight, offsets, scales=w.scales, qzeros=w.qzeros, group_size=16)
    )
    for position, slot in enumerate(slots.tolist()):
        expert = -1 if slot == 18 else int(ids.flatten()[slot])
        want = to_numpy(x[slot // 2]) @ w.exact[expert].T if expert >= 0 else np.zeros(16)
        assert np.linalg.norm(got[position] - want) <= 1e-6 * np.linalg.norm(want)
