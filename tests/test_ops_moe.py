"""fused_moe and fused_moe_packed against float64, on every implementation: types, shapes, routing, options."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from implementations import IMPLEMENTATIONS, OnGpu
from layers import NAMES, Layer, make_layer, to_numpy, to_torch

pytestmark = pytest.mark.usefixtures("poison")

BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
ACTIVATION_LIST: list[dict[str, Any]] = [
    *({"activation": name} for name in oracle.GATED + oracle.PLAIN if name != "swigluoai"),
    {"activation": "silu", "limit": 0.7},
    {"activation": "swigluoai", "limit": 0.9, "alpha": 1.702, "beta": 1.0},
    {"activation": "swigluoai", "limit": 7.0, "alpha": 1.1, "beta": 0.25, "w13_order": 1},
    {"activation": "silu", "w13_order": 1},
    {"activation": "gelu", "w13_order": 1, "bias": True},
    {"activation": "relu2_no_mul", "bias": True},
]


def judge(layer: Layer, ops: ModuleType, packed: bool, **extra: Any) -> torch.Tensor:
    got = (layer.run_packed if packed else layer.run_dense)(ops, **extra)
    assert got.dtype == layer.x.dtype and got.shape == layer.x.shape
    oracle.check(to_numpy(got), layer.want(packed=packed))
    return got


# Types, bits, groups.


@pytest.mark.parametrize(
    "scales_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["sbf16", "sfp16", "sfp32"]
)
@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@BOTH
def test_types(
    ops: ModuleType,
    dtype: torch.dtype,
    scales_dtype: torch.dtype,
    symmetric: bool,
    packed: bool,
    rng: np.random.Generator,
) -> None:
    """x and scales in any pair of types; ids in both widths."""
    ids_dtype = torch.int64 if symmetric else torch.int32
    judge(
        make_layer(rng, dtype=dtype, scales_dtype=scales_dtype, symmetric=symmetric, ids_dtype=ids_dtype),
        ops,
        packed,
    )


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (8, 4)])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@BOTH
def test_int8_and_mixed_widths(
    ops: ModuleType,
    dtype: torch.dtype,
    bits: tuple[int, int],
    symmetric: bool,
    packed: bool,
    rng: np.random.Generator,
) -> None:
    judge(make_layer(rng, dtype=dtype, bits=bits, symmetric=symmetric), ops, packed)


@pytest.mark.parametrize("groups", [(-1, -1), (64, 32), (8, 8), (16, 2), (2, 16), (64, -1)])
def test_group_sizes(ops: ModuleType, groups: tuple[int, int], rng: np.random.Generator) -> None:
    """Per-channel, whole rows, and groups smaller than any tile, each projection with its own."""
    for dtype in (torch.float32, torch.bfloat16):
        judge(make_layer(rng, dtype=dtype, group_sizes=groups), ops, True)


@pytest.mark.parametrize(("hidden", "intermediate", "groups"), [
    (90, 90, (30, 18)),  # 2880 scaled down: no multiple of 16 or 32
    (34, 22, (2, 2)),
        (35, 21, (7, 7)),  # odd: half a byte is left over
    (2, 2, (2, 2)),
    (72, 40, (24, 8)),
    (48, 200, (48, 40)),
    (256, 136, (32, 8)),
])  # fmt: skip
@BOTH
def test_awkward_shapes(
    ops: ModuleType,
    hidden: int,
    intermediate: int,
    groups: tuple[int, int],
    packed: bool,
    rng: np.random.Generator,
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        judge(
            make_layer(rng, hidden=hidden, intermediate=intermediate, group_sizes=groups, dtype=dtype),
            ops,
            packed,
        )


def test_short_last_group_is_right_or_refused_with_the_numbers(
    ops: ModuleType, rng: np.random.Generator
) -> None:
    """H=80 with groups of 32: three groups, the last of 16."""
    layer = make_layer(rng, hidden=80, intermediate=48, group_sizes=(32, 32))
    judge(layer, ops, False)
    try:
        got = layer.run_packed(ops)
    except ValueError as error:
        sentence = str(error)
        assert "80" in sentence and "32" in sentence
    else:
        oracle.check(to_numpy(got), layer.want(packed=True))


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (5, 13), (40, 9)])
@BOTH
def test_tokens_top_k_and_experts(
    ops: ModuleType, tokens: int, experts: int, top_k: int, packed: bool, rng: np.random.Generator
) -> None:
    judge(
        make_layer(
            rng, tokens=tokens, experts=experts, top_k=top_k, hidden=48, intermediate=24, group_sizes=(16, 8)
        ),
        ops,
        packed,
    )


@BOTH
def test_more_than_1024_experts(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, experts=1500, hidden=16, intermediate=8, tokens=9, top_k=4, group_sizes=(8, 8))
    ids = layer.topk_ids.clone()
    ids[0, 0] = 1499
    judge(layer.with_(topk_ids=ids), ops, packed)


@BOTH
def test_a_batch_larger_than_any_tile(
    ops: ModuleType, dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    """300 tokens, most of them for one expert: full tiles, a remainder, and experts with one row or none."""
    layer = make_layer(rng, tokens=300, experts=6, top_k=1, hidden=64, intermediate=32, dtype=dtype)
    ids = torch.zeros(300, 1, dtype=torch.int32)
    ids[17], ids[40:44] = 3, 5
    judge(layer.with_(topk_ids=ids), ops, packed)


# Activations.


@pytest.mark.parametrize(
    "options",
    ACTIVATION_LIST,
    ids=lambda o: "-".join(f"{k}={v}" if k != "activation" else v for k, v in o.items()),
)
@BOTH
def test_activations(
    ops: ModuleType, options: dict[str, Any], dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    judge(make_layer(rng, dtype=dtype, **options), ops, packed)


@BOTH
def test_activation_tails(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    """Pre-activations near +-40, where exp and tanh must saturate and not overflow into NaN."""
    for name in oracle.GATED[:4] + oracle.PLAIN:
        layer = make_layer(rng, activation=name)
        got = judge(layer.with_(x=layer.x * 32), ops, packed)
        assert got.isfinite().all()


@BOTH
def test_biases_in_float32_beside_bf16_x(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, bias=True, dtype=torch.bfloat16)
    layer.options["w13_bias"], layer.options["w2_bias"] = (
        layer.options[n].float() for n in ("w13_bias", "w2_bias")
    )
    judge(layer, ops, packed)


@BOTH
def test_one_bias_without_the_other(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    for missing in ("w13_bias", "w2_bias"):
        layer = make_layer(rng, bias=True)
        layer.options[missing] = None
        judge(layer, ops, packed)


# Routing.


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@BOTH
def test_unrouted_slots(
    ops: ModuleType, ids_dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    """-1 and ids past the end are skipped by mask: their weight is NaN here, and no row of theirs is read."""
    layer = make_layer(rng, experts=5, tokens=6, top_k=3, ids_dtype=ids_dtype, dtype=torch.bfloat16)
    ids, weights = layer.topk_ids.clone(), layer.topk_weights.clone()
    for slot, bad in {
        (0, 0): -1,
        (1, 2): 5,
        (2, 1): 2**31 - 1,
        (3, 0): -(2**31),
        (5, 0): -1,
        (5, 1): 7,
        (5, 2): -9,
    }.items():
        ids[slot], weights[slot] = bad, float("nan")
    if ids_dtype == torch.int64:
        ids[3, 0], ids[4, 1], weights[4, 1] = 2**32 + 2, -(2**63), float("nan")
    got = judge(layer.with_(topk_ids=ids, topk_weights=weights), ops, packed)
    assert (got[5] == 0).all(), "a token without any expert is exactly zero"


@BOTH
def test_duplicate_ids_sum(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, top_k=4)
    ids = torch.tensor([[2, 2, 2, 2], [0, 1, 0, 1]] + [[3, 3, 4, -1]] * 5, dtype=torch.int32)
    judge(layer.with_(topk_ids=ids), ops, packed)


@BOTH
def test_expert_map(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    """Five local experts out of nine; global ids are bounded by the map, local slots come from it."""
    expert_map = torch.tensor([-1, 4, 0, -1, 2, 1, -1, -1, 3], dtype=torch.int32)
    layer = make_layer(rng, expert_map=expert_map, global_num_experts=9, tokens=12, top_k=3)
    ids = torch.from_numpy(rng.integers(-1, 10, (12, 3)).astype(np.int32))
    judge(layer.with_(topk_ids=ids), ops, packed)


@BOTH
def test_router_weight_on_input(
    ops: ModuleType, dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    """The weight scales x once, before a nonlinear layer, and is not applied again to the result."""
    judge(make_layer(rng, top_k=1, tokens=9, dtype=dtype, apply_router_weight_on_input=True), ops, packed)


@BOTH
def test_negative_zero_and_large_router_weights(
    ops: ModuleType, packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(rng, top_k=3)
    weights = layer.topk_weights.clone()
    weights[:, 0], weights[:, 1], weights[:, 2] = -0.5, 0.0, 2.5
    judge(layer.with_(topk_weights=weights), ops, packed)


# Act-order, layouts, views.


def test_act_order_gather(ops: ModuleType, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """w13_perm [E, H] gathers x: column j of w13 meets x[perm[j]]; each expert has its own order."""
    layer = make_layer(rng, dtype=dtype)
    perm = np.stack([rng.permutation(64) for _ in range(5)])
    exact = np.empty_like(layer.w13.exact)
    for e in range(5):
        exact[e][:, perm[e]] = layer.w13.exact[e]
    got = layer.run_packed(ops, w13_perm=torch.from_numpy(perm.astype(np.int32)))
    want = layer.with_(w13=layer.w13.__class__(**{**vars(layer.w13), "exact": exact})).want(packed=True)
    oracle.check(to_numpy(got), want)


@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (4, 8)])
def test_prepacked_layout(
    ops: ModuleType, dtype: torch.dtype, bits: tuple[int, int], rng: np.random.Generator
) -> None:
    """Layout 1 holds the same weights in tile order: the oracle's answer, and the canonical call's closely."""
    if isinstance(ops, OnGpu):
        pytest.skip("the tile order is the CPU's; a GPU refuses it")
    layer = make_layer(
        rng, dtype=dtype, bits=bits, experts=3, hidden=96, intermediate=48, group_sizes=(32, 24)
    )
    _, w13, w2, *rest = layer.packed_args()
    args = [ops.prepack(w, layout=1, bits=b) for w, b in zip((w13, w2), bits, strict=True)]
    got = ops.fused_moe_packed(layer.x, *args, *rest, layout=1, **layer.packed_options())
    oracle.check(to_numpy(got), layer.want(packed=True))


def test_transposed_dense_weights(ops: ModuleType, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """The transposed view of contiguous [E, K, N], as some models store their experts; both, and one of
    each."""
    layer = make_layer(rng, dtype=dtype, hidden=72, intermediate=40, group_sizes=(8, 8))
    w13, w2 = layer.dense_weights()
    views = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2)]
    for a, b in [(views[0], views[1]), (w13, views[1]), (views[0], w2)]:
        got = ops.fused_moe(layer.x, a, b, layer.topk_weights, layer.topk_ids, **layer.options)
        oracle.check(to_numpy(got), layer.want(packed=False))


@BOTH
def test_strided_and_misaligned_inputs(
    ops: ModuleType, dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    """Every view gives what its contiguous copy gives, bit for bit."""
    layer = make_layer(rng, dtype=dtype, tokens=4)
    want = (layer.run_packed if packed else layer.run_dense)(ops)

    def columns(t: torch.Tensor) -> torch.Tensor:
        wide = t.repeat_interleave(2, -1)
        return wide[..., ::2]

    def rows(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, t], -1)[..., : t.shape[-1]]

    def offset(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape)

    for view in (columns, rows, offset):
        moved = layer.with_(
            x=view(layer.x), topk_ids=view(layer.topk_ids), topk_weights=view(layer.topk_weights)
        )
        assert torch.equal((moved.run_packed if packed else moved.run_dense)(ops), want), view.__name__


def test_misaligned_and_strided_packed_weights(ops: ModuleType, rng: np.random.Generator) -> None:
    """Storage offset 1 for every weight tensor; scales expanded with stride 0."""
    layer = make_layer(rng, dtype=torch.bfloat16)
    want = layer.run_packed(ops)
    fields = {}
    for name in ("w13", "w2"):
        w = getattr(layer, name)
        moved = {
            part: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape)
            for part in ("qweight", "scales", "qzeros")
            if (t := getattr(w, part)) is not None
        }
        fields[name] = w.__class__(**{**vars(w), **moved})
    assert torch.equal(layer.with_(**fields).run_packed(ops), want)
    expanded = layer.w2.scales[:, :, :1].expand(-1, -1, layer.w2.scales.shape[2])
    results = []
    for scales in (expanded, expanded.contiguous()):
        args = list(layer.packed_args())
        args[6] = scales
        results.append(ops.fused_moe_packed(*args, **layer.packed_options()))
    assert torch.equal(*results)


# Numerics that the two modes promise.


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_and_dequantised_agree(ops: ModuleType, bits: int, rng: np.random.Generator) -> None:
    """One GEMM: |packed - dense(dequantised)| <= u * sum |x||w| + accumulation + one output rounding each."""
    for dtype in (torch.bfloat16, torch.float16):
        name = NAMES[dtype]
        layer = make_layer(rng, dtype=dtype, bits=(bits, bits), experts=2, tokens=24, hidden=128)
        w, offsets = layer.w13, torch.tensor([0, 11, 24], dtype=torch.int32)
        dense = ops.dequantize(w.qweight, w.scales, w.qzeros, group_size=w.group_size, bits=bits, dtype=dtype)
        a = to_numpy(ops.grouped_gemm(layer.x, dense, offsets))
        b = to_numpy(ops.grouped_gemm(
            layer.x, w.qweight, offsets, scales=w.scales, qzeros=w.qzeros, group_size=w.group_size, bits=bits,
        ))  # fmt: skip
        owners = np.repeat([0, 1], [11, 13])
        magnitude = np.einsum("rk,rnk->rn", np.abs(to_numpy(layer.x)), np.abs(w.exact)[owners])
        u = oracle.UNIT_ROUNDOFF[name]
        bound = (u + 2 * 128 * 2.0**-24) * magnitude + oracle.WORST_ROUNDOFF[name] * (np.abs(a) + np.abs(b))
        assert (np.abs(a - b) <= bound).all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_fp32_reaches_1e6(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, tokens=16, hidden=128, intermediate=64)
    got, want = (
        to_numpy((layer.run_packed if packed else layer.run_dense)(ops)),
        layer.want(packed=packed).value,
    )
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)


@BOTH
def test_sum_over_slots_is_in_fp32(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    """Weights 1, -1 and 2^-12 on one expert and its copy: rounding between the slots would lose the small
    term."""
    layer = make_layer(rng, dtype=torch.bfloat16, tokens=3, top_k=3)
    ids = torch.tensor([[1, 1, 2]] * 3, dtype=torch.int32)
    weights = torch.tensor([[1.0, -1.0, 2.0**-12]] * 3)
    got = (layer.with_(topk_ids=ids, topk_weights=weights).run_packed if packed else
           layer.with_(topk_ids=ids, topk_weights=weights).run_dense)(ops)  # fmt: skip
    alone = layer.with_(topk_ids=ids[:, 2:], topk_weights=weights[:, 2:])
    oracle.check(to_numpy(got), alone.want(packed=packed))


@BOTH
def test_repeated_calls_are_bit_identical(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, tokens=33, top_k=4, dtype=torch.bfloat16)
    run = layer.run_packed if packed else layer.run_dense
    assert torch.equal(run(ops), run(ops))


@BOTH
def test_out_variant(compiled: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, dtype=torch.bfloat16)
    want = (layer.run_packed if packed else layer.run_dense)(compiled)
    out = torch.full_like(layer.x, float("nan"))
    result = (layer.run_packed if packed else layer.run_dense)(compiled, out=out)
    assert result is out and torch.equal(out, want)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_out_is_the_sum_before_its_rounding(
    ops: ModuleType, dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(rng, tokens=9, hidden=68, group_sizes=(34, 16), dtype=dtype, bias=True)
    run = layer.run_packed if packed else layer.run_dense
    has_out = ops is not IMPLEMENTATIONS["reference"]
    out = run(ops, **({"out": torch.full(layer.x.shape, float("nan"))} if has_out else {"dtype": torch.float32}))
    assert torch.equal(out.to(dtype), run(ops)) and not torch.equal(out, run(ops).float())


@BOTH
def test_inputs_are_not_written(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, top_k=1, bias=True, apply_router_weight_on_input=True)
    tensors = [
        t for t in [*layer.packed_args(), *layer.packed_options().values()] if isinstance(t, torch.Tensor)
    ]
    copies = [t.clone() for t in tensors]
    (layer.run_packed if packed else layer.run_dense)(ops)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_identity_weights_pass_x_through(ops: ModuleType, dtype: torch.dtype) -> None:
    """A probe for lost rows or columns: gate-less relu2 of x = 1, 2, .. through identities gives squares
    exactly."""
    size = 48
    eye = np.eye(size, dtype=np.int64)[None] + 8
    qweight = torch.from_numpy(oracle.pack_bytes(eye))
    scales = torch.ones(1, size, size // 8, dtype=dtype)
    x = to_torch(np.arange(size, dtype=np.float64)[None] % 16, dtype)
    got = ops.fused_moe_packed(
        x, qweight, qweight, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), scales, scales, 8, 8,
        activation=oracle.ACTIVATION_IDS["relu2_no_mul"],
    )  # fmt: skip
    assert torch.equal(got, x * x)
