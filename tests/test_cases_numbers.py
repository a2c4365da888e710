"""requirements cases 1-6, wrong numbers: public failures of other projects, by their numbers."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from layers import Layer, Quantised, make_layer, quantise, to_numpy

pytestmark = pytest.mark.usefixtures("poison")

BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
GPTQ_V1, GPTQ_V2 = 2, 3


def run(layer: Layer, ops: ModuleType, packed: bool, **extra: Any) -> torch.Tensor:
    return (layer.run_packed if packed else layer.run_dense)(ops, **extra)


@pytest.mark.parametrize(
    ("zeros", "format", "want"),
    [
        (0x77777777, GPTQ_V1, 0.0),
        (0x88888888, GPTQ_V2, 0.0),
        (0x77777777, GPTQ_V2, 0.5),
        (0x88888888, GPTQ_V1, -0.5),
    ],
)
def test_case_01_gptq_zero_conventions(ops: ModuleType, zeros: int, format: int, want: float) -> None:
    def as_words(word: int, n: int) -> torch.Tensor:
        return torch.from_numpy(np.full((1, n), word, np.uint32).view(np.int32))

    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    got = ops.dequantize(as_words(0x88888888, 8), scales, as_words(zeros, 1), group_size=8, format=format)
    assert (got == want).all()


@pytest.mark.parametrize(
    ("format", "columns"), [(7, [0, 1, 2, 3, 4, 5, 6, 7]), (4, [0, 4, 1, 5, 2, 6, 3, 7])]
)
def test_case_02_nibble_order(ops: ModuleType, format: int, columns: list[int]) -> None:
    got = ops.dequantize(
        torch.tensor([[0x76543210]], dtype=torch.int32), torch.ones(1, 8, dtype=torch.float16),
        torch.zeros(1, 1, dtype=torch.int32), group_size=1, format=format,
    )  # fmt: skip
    assert got.flatten().tolist() == columns


@pytest.mark.parametrize("name", ["gemv", "marlin"])
def test_case_02_unknown_order_raises_with_the_known(compiled: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*awq)(?=.*gptq_v1)(?=.*quark_int_order)"):
        compiled.unpack(torch.zeros(1, 1, dtype=torch.int32), format=name)


def test_case_03_group_size_minus_one_is_k(compiled: ModuleType, rng: np.random.Generator) -> None:
    """K=192: more than any K tile and no power of two; -1 must give the very bits of group_size=K."""
    w = quantise(rng, 1, 8, 192, -1)
    x = torch.ones(1, 192)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    marked, plain = (
        compiled.grouped_gemm(x, w.qweight, offsets, scales=w.scales, qzeros=w.qzeros, group_size=g)
        for g in (-1, 192)
    )
    assert torch.equal(marked, plain)
    oracle.check(to_numpy(marked), oracle.gemm(np.ones((1, 192)), w.exact[0], dtype="float32"))
    matrices = [compiled.dequantize(w.qweight, w.scales, w.qzeros, group_size=g) for g in (-1, 192)]
    assert torch.equal(*matrices) and np.array_equal(
        to_numpy(matrices[0]), oracle.round_to(w.exact, "bfloat16")
    )
    layer = make_layer(rng, hidden=192, intermediate=96, group_sizes=(-1, -1))
    args = layer.packed_args()
    got = compiled.fused_moe_packed(*args[:7], -1, -1, **layer.packed_options())
    assert torch.equal(got, layer.run_packed(compiled))


@pytest.mark.parametrize("group_size", [0, -2, 193])
def test_case_03_other_group_sizes_raise(
    compiled: ModuleType, group_size: int, rng: np.random.Generator
) -> None:
    w = quantise(rng, 1, 8, 192, -1)
    for call in (
        lambda: compiled.dequantize(w.qweight, w.scales, group_size=group_size),
        lambda: compiled.grouped_gemm(
            torch.ones(1, 192),
            w.qweight,
            torch.tensor([0, 1], dtype=torch.int32),
            scales=w.scales,
            group_size=group_size,
        ),
    ):
        with pytest.raises(ValueError, match=f"group_size.*{group_size}"):
            call()


def test_case_04_bf16_does_not_pass_through_fp16(ops: ModuleType) -> None:
    """(15 - 7) * 548 = 4384, times 16 times 8 = 561152: exact in bf16, inf in fp16 (and there never NaN)."""
    qweight = torch.full((1, 1, 4), 0xFF, dtype=torch.uint8)
    scales, zeros = (
        torch.full((1, 1, 1), 548.0, dtype=torch.float16),
        torch.full((1, 1, 1), 7, dtype=torch.uint8),
    )
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    options = {"scales": scales, "qzeros": zeros, "group_size": 8}
    got = ops.grouped_gemm(torch.full((1, 8), 16.0, dtype=torch.bfloat16), qweight, offsets, **options)
    assert got.item() == 561152.0
    assert ops.dequantize(qweight, scales, zeros, group_size=8, dtype=torch.bfloat16).eq(4384).all()
    assert (
        ops.grouped_gemm(torch.full((1, 8), 16.0, dtype=torch.float16), qweight, offsets, **options)
        .isinf()
        .all()
    )


@BOTH
def test_case_04_bf16_between_the_gemms(ops: ModuleType, packed: bool) -> None:
    """The same 561152 as a pre-activation and beyond it: relu2 then squares it, far outside fp16."""
    w13 = Quantised(
        np.full((1, 1, 8), 15),
        np.full((1, 1, 1), 548.0),
        np.full((1, 1, 1), 7),
        torch.full((1, 1, 4), 255, dtype=torch.uint8),
        torch.full((1, 1, 1), 548.0, dtype=torch.float16),
        torch.full((1, 1, 1), 7, dtype=torch.uint8),
        8,
        4,
        np.full((1, 1, 8), 4384.0),
    )
    x = torch.full((1, 8), 16.0, dtype=torch.bfloat16)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 2.0**-30)
    if packed:  # int8 with I = 1: one byte a weight
        w2, scales = torch.full((1, 8, 1), 129, dtype=torch.uint8), torch.ones(1, 8, 1, dtype=torch.float16)
        got = ops.fused_moe_packed(
            x, w13.qweight, w2, weights, ids, w13.scales, scales, 8, 1, w13_qzeros=w13.qzeros, w2_bits=8,
            activation=oracle.ACTIVATION_IDS["relu2_no_mul"],
        )  # fmt: skip
    else:
        dense = torch.full((1, 1, 8), 4384.0, dtype=torch.bfloat16), torch.ones(1, 8, 1, dtype=torch.bfloat16)
        got = ops.fused_moe(x, *dense, weights, ids, activation=oracle.ACTIVATION_IDS["relu2_no_mul"])
    h = oracle.round_to(np.array([561152.0**2]), "bfloat16")[0]
    assert got.tolist() == [[h * 2.0**-30] * 8]


@BOTH
def test_case_05_clamped_swiglu(ops: ModuleType, packed: bool) -> None:
    """gate 20, up 50, limit 10: silu(10) * 10; gate -20 is not capped from below."""
    x = torch.tensor([[20.0, 50.0], [-20.0, 50.0]])
    w13 = np.array([[[9, 8], [8, 9]]])  # identity around the midpoint: gate = x0, up = x1
    w2 = np.array([[[9, 8], [8, 8]]])
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    if packed:
        w2 = w2[:, :, :1] + 120  # int8: I = 1
        got = ops.fused_moe_packed(
            x, torch.from_numpy(oracle.pack_bytes(w13)), torch.from_numpy(w2.astype(np.uint8)), weights, ids,
            torch.ones(1, 2, 1), torch.ones(1, 2, 1), 2, 1, w2_bits=8, limit=10.0,
        )  # fmt: skip
    else:
        got = ops.fused_moe(x, torch.eye(2)[None], torch.tensor([[[1.0], [0.0]]]), weights, ids, limit=10.0)
    assert got[0, 0].item() == pytest.approx(99.99546, abs=1e-4)  # silu(10) * 10
    assert got[1, 0].item() == pytest.approx(-20 / (1 + math.exp(20)) * 10, rel=1e-5)
    assert (got[:, 1] == 0).all()


@BOTH
def test_case_06_experts_without_tokens(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, experts=4, tokens=2, top_k=1, hidden=16, intermediate=16, group_sizes=(8, 8))
    layer = layer.with_(topk_ids=torch.tensor([[2], [2]], dtype=torch.int32))
    first, second = run(layer, ops, packed), run(layer, ops, packed)
    oracle.check(to_numpy(first), layer.want(packed=packed))
    assert torch.equal(first, second)


@BOTH
def test_rule_04_nothing_is_narrower_than_fp32_around_the_biases(ops: ModuleType, packed: bool) -> None:
    """1 + 2^-10 - 1 before the activation and 1 + 2^-20 - 1 after it: a bf16 in between would leave zero."""
    x = torch.tensor([[1.0, 2.0**-10, 0.0, 0.0]], dtype=torch.bfloat16)
    w13 = np.array([[[1, 1, 0, 0], [0, 0, 0, 0]]])
    w2 = np.array([[[1, 1], [0, 0], [0, 0], [0, 0]]])
    options = {
        "activation": oracle.ACTIVATION_IDS["relu2_no_mul"],
        "w13_bias": torch.tensor([[-1.0, 1.0]], dtype=torch.bfloat16),
        "w2_bias": torch.tensor([[-1.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16),
    }
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.5)
    if packed:
        codes = [torch.from_numpy(oracle.pack_bytes(w + 8)) for w in (w13, w2)]
        scales = torch.ones(1, 2, 1), torch.ones(1, 4, 1)
        got = ops.fused_moe_packed(x, *codes, weights, ids, *scales, 4, 2, **options)
    else:
        dense = [torch.from_numpy(w).bfloat16() for w in (w13, w2)]
        got = ops.fused_moe(x, *dense, weights, ids, **options)
    assert got.tolist() == [[2.0**-21, 0.0, 0.0, 0.0]]
