"""Int4Linear: the module for the int4 Linears that are no experts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from int4_emu import Int4Linear
from layers import NAMES, quantise, random_floats, to_numpy, to_torch


def build(
    rng: np.random.Generator, rows: int = 40, columns: int = 96, group: int = 32, **options: Any
) -> tuple[Int4Linear, np.ndarray]:
    w = quantise(rng, 1, rows, columns, group, **options)
    zeros = None if w.qzeros is None else w.qzeros[0].clone()
    return Int4Linear(
        w.qweight[0].clone(), w.scales[0].clone(), zeros, bits=w.bits, group_size=group
    ), w.exact[0]


def judge(
    linear: Int4Linear, x: torch.Tensor, exact: np.ndarray, bias: np.ndarray | None = None
) -> torch.Tensor:
    name = NAMES[x.dtype]
    got = linear(x)
    assert got.dtype == x.dtype and got.shape == (*x.shape[:-1], len(exact))
    want = oracle.gemm(
        to_numpy(x).reshape(-1, x.shape[-1]),
        exact,
        dtype=name,
        weight_rounding=oracle.UNIT_ROUNDOFF[name],
        bias=bias,
    )
    oracle.check(to_numpy(got).reshape(-1, len(exact)), want)
    return got


@pytest.mark.parametrize("options", [
    {}, {"bits": 8}, {"symmetric": True}, {"group": -1}, {"rows": 18, "columns": 90, "group": 18}, {"rows": 1, "columns": 2, "group": 2},
], ids=str)  # fmt: skip
def test_forward(dtype: torch.dtype, options: dict[str, Any], rng: np.random.Generator) -> None:
    linear, exact = build(rng, **options)
    for shape in ((exact.shape[1],), (5, exact.shape[1]), (2, 3, exact.shape[1]), (0, exact.shape[1])):
        judge(linear, to_torch(random_floats(rng, shape, dtype), dtype), exact)


def test_bias_and_act_order(rng: np.random.Generator) -> None:
    w = quantise(rng, 1, 24, 64, 16)
    bias, perm = random_floats(rng, (24,), torch.float32), rng.permutation(64)
    linear = Int4Linear(
        w.qweight[0].clone(), w.scales[0].clone(), w.qzeros[0].clone(), bias=to_torch(bias, torch.float32),
        perm=torch.from_numpy(perm.astype(np.int32)), group_size=16,
    )  # fmt: skip
    exact = np.empty_like(w.exact[0])
    exact[:, perm] = w.exact[0]
    judge(linear, to_torch(random_floats(rng, (7, 64), torch.float32), torch.float32), exact, bias)
    assert np.array_equal(to_numpy(linear.dequantized(torch.bfloat16)), oracle.round_to(exact, "bfloat16"))


def test_dequantized_is_rounded_once(rng: np.random.Generator) -> None:
    linear, exact = build(rng)
    for dtype, name in NAMES.items():
        assert np.array_equal(to_numpy(linear.dequantized(dtype)), oracle.round_to(exact, name))


def test_state_moves_and_copies(rng: np.random.Generator) -> None:
    linear, exact = build(rng, scales_dtype=torch.float32)
    x = to_torch(random_floats(rng, (5, 96), torch.bfloat16), torch.bfloat16)
    want = judge(linear, x, exact)
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    torch.nn.Sequential(linear).half()
    assert all(
        torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in linear.state_dict().items()
    )
    other, _ = build(rng, scales_dtype=torch.float32)
    other.load_state_dict(before)
    for twin in (other, copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(twin(x), want)
    with torch.inference_mode():
        assert torch.equal(linear(x), want)


def test_compile(rng: np.random.Generator) -> None:
    linear, _ = build(rng)
    torch._dynamo.reset()
    graph = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 1, 9):
        x = to_torch(random_floats(rng, (rows, 96), torch.bfloat16), torch.bfloat16)
        assert torch.equal(graph(x), linear(x))


def test_gradients_stop_with_an_error(rng: np.random.Generator) -> None:
    linear, _ = build(rng)
    x = torch.randn(2, 96, requires_grad=True)
    with pytest.raises(RuntimeError):
        linear(x).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize(("change", "error", "fragments"), [
    ({"group_size": 0}, ValueError, ("group_size", "0")),
    ({"group_size": 16}, ValueError, ("scales", "40, 6]", "40, 3]")),
    ({"bits": 3}, ValueError, ("bits", "3")),
    ({"bias": torch.zeros(39)}, ValueError, ("bias", "40", "39")),
    ({"perm": torch.zeros(95, dtype=torch.int32)}, ValueError, ("perm", "96", "95")),
    ({"perm": torch.full((96,), 96, dtype=torch.int32)}, ValueError, ("perm", "96")),
], ids=str)  # fmt: skip
def test_bad_constructors(change: dict[str, Any], error: type[Exception], fragments: tuple[str, ...]) -> None:
    w = quantise(np.random.default_rng(0), 1, 40, 96, 32, symmetric=True)
    with pytest.raises(error) as caught:
        Int4Linear(w.qweight[0], w.scales[0], **({"group_size": 32} | change))
    assert all(f in str(caught.value) for f in fragments), str(caught.value)


def test_refuses_rows_of_another_width(rng: np.random.Generator) -> None:
    # 95 and 96 codes take 48 bytes and 3 groups alike: only the module knows that 95 columns are one too few.
    linear, _ = build(rng, columns=96, group=32)
    for x in (torch.ones(2, 95), torch.ones(3, 97), torch.ones(2, 0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"^x must be \[\.\.\., I\] with I = 96, got \[") as caught:
            linear(x)
        assert str(list(x.shape)) in str(caught.value)
