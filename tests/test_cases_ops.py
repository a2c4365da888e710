"""requirements cases 7-16 and 25-27 where ops can show them: public failures of other projects, by their
numbers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import int4_emu
import oracle
from layers import Layer, Quantised, make_layer, quantise, random_floats, to_numpy, to_torch

pytestmark = pytest.mark.usefixtures("poison")

BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
GPTQ_V2 = 3


def run(layer: Layer, ops: ModuleType, packed: bool, **extra: Any) -> torch.Tensor:
    return (layer.run_packed if packed else layer.run_dense)(ops, **extra)


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def needs_memory(gigabytes: float) -> None:
    if available_memory() < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free memory")


# (b) shapes.


def test_case_07_row_offsets_past_2_31(compiled: ModuleType, rng: np.random.Generator) -> None:
    """grouped_gemm writes R * N = 2^31 + 2^15 elements (4.3 GB); its one group is the last 16 rows of them."""
    needs_memory(7)
    torch.utils.deterministic.fill_uninitialized_memory = False  # the fill would double the time
    rows, columns = 2**20 + 16, 2048
    x = torch.zeros(rows, 2, dtype=torch.bfloat16)
    x[-16:] = to_torch(random_floats(rng, (16, 2), torch.bfloat16), torch.bfloat16)
    weight = to_torch(random_floats(rng, (1, columns, 2), torch.bfloat16), torch.bfloat16)
    got = compiled.grouped_gemm(x, weight, torch.tensor([rows - 16, rows], dtype=torch.int32))
    assert torch.equal(
        got[-16:], compiled.grouped_gemm(x[-16:], weight, torch.tensor([0, 16], dtype=torch.int32))
    )
    assert got[-16:].abs().max() > 0
    assert (got[:64] == 0).all()


@pytest.mark.slow
def test_case_07_the_layer_itself(compiled: ModuleType, rng: np.random.Generator) -> None:
    """M=65537, k=4, 2I=8192: R * 2I is just past 2^31."""
    needs_memory(12)
    torch.utils.deterministic.fill_uninitialized_memory = False
    w13, w2 = (quantise(rng, 1, n, k, 32, symmetric=True) for n, k in ((8192, 64), (64, 4096)))
    x = torch.randn(65537, 64, dtype=torch.bfloat16)
    args = w13.scales, w2.scales, 32, 32
    ids, weights = torch.zeros(65537, 4, dtype=torch.int32), torch.full((65537, 4), 0.25)
    got = compiled.fused_moe_packed(x, w13.qweight, w2.qweight, weights, ids, *args)
    for part in (slice(0, 16), slice(65521, 65537)):
        want = compiled.fused_moe_packed(x[part], w13.qweight, w2.qweight, weights[part], ids[part], *args)
        torch.testing.assert_close(got[part], want, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("experts", [160, 320])
def test_case_08_expert_offsets_past_2_31(
    compiled: ModuleType, experts: int, rng: np.random.Generator
) -> None:
    """E * N * K past 2^31 in codes (160) and in bytes (320). Untouched experts are zero pages that cost
    nothing."""
    needs_memory(6)
    torch.utils.deterministic.fill_uninitialized_memory = False
    hidden, inter, last = 4096, 2048, experts - 1

    def zeros(*shape: int, dtype: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, dtype))  # untouched pages: torch.zeros would write them all

    w13 = zeros(experts, 2 * inter, hidden // 2, dtype=np.uint8)
    w2 = zeros(experts, hidden, inter // 2, dtype=np.uint8)
    s13, s2 = zeros(experts, 2 * inter, hidden // 128), zeros(experts, hidden, inter // 128)
    for tensor in (w13, w2):
        tensor[last] = torch.from_numpy(rng.integers(0, 256, tensor.shape[1:], np.uint8))
    for tensor in (s13, s2):
        tensor[last] = torch.rand(tensor.shape[1:]) * 2.0**-8
    x = torch.randn(1, hidden)
    one = torch.ones(1, 1)
    got = compiled.fused_moe_packed(x, w13, w2, one, torch.tensor([[last]]), s13, s2, 128, 128)
    alone = (t[last:].clone() for t in (w13, w2, s13, s2))
    a, b, c, d = alone
    assert got.abs().max() > 0
    assert torch.equal(got, compiled.fused_moe_packed(x, a, b, one, torch.tensor([[0]]), c, d, 128, 128))


@BOTH
def test_case_09_counts_past_65535(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    """R = 65536 slots, then E = 65600 experts."""
    layer = make_layer(rng, tokens=16, top_k=8, experts=8, hidden=16, intermediate=16, group_sizes=(8, 8))
    want = layer.want(packed=packed)
    tiled = layer.with_(**{n: getattr(layer, n).repeat(512, 1) for n in ("x", "topk_weights", "topk_ids")})
    oracle.check(
        to_numpy(run(tiled, ops, packed)),
        oracle.Judged(np.tile(want.value, (512, 1)), np.tile(want.error, (512, 1))),
    )


def test_case_09_experts_past_65535(compiled: ModuleType, rng: np.random.Generator) -> None:
    layer = make_layer(
        rng, tokens=1, top_k=2, experts=65600, hidden=8, intermediate=4, group_sizes=(8, 4), symmetric=True
    )
    layer = layer.with_(topk_ids=torch.tensor([[65599, 3]]))
    oracle.check(to_numpy(layer.run_packed(compiled)), layer.want(packed=True))


@BOTH
def test_case_10_no_tokens(
    ops: ModuleType, dtype: torch.dtype, packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(rng, dtype=dtype)
    empty = layer.with_(x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    got = run(empty, ops, packed)
    assert got.shape == (0, 64) and got.dtype == dtype
    oracle.check(to_numpy(run(layer, ops, packed)), layer.want(packed=packed))


@BOTH
def test_case_10_a_rank_without_experts(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, experts=1, top_k=1)
    none = {
        n: Quantised(**{k: v[:0] if hasattr(v, "shape") else v for k, v in vars(getattr(layer, n)).items()})
        for n in ("w13", "w2")
    }
    layer.options.update(expert_map=torch.tensor([-1, -1], dtype=torch.int32), global_num_experts=2)
    got = run(layer.with_(**none), ops, packed)
    assert got.shape == layer.x.shape and (got == 0).all()


@BOTH
def test_case_10_all_slots_unrouted(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    assert (run(layer.with_(topk_ids=torch.full_like(layer.topk_ids, -1)), ops, packed) == 0).all()


@BOTH
def test_case_11_strided_views(ops: ModuleType, packed: bool, rng: np.random.Generator) -> None:
    """x = base[:, ::2], x = base[:, :64], ids = big[:, :2], scales with stride 0, storage offset 1."""
    layer = make_layer(rng, tokens=4, dtype=torch.bfloat16)
    base = to_torch(random_floats(rng, (4, 128), torch.bfloat16), torch.bfloat16)
    flat = torch.cat([base.new_zeros(1), base.flatten()])
    ids = torch.from_numpy(rng.integers(0, 5, (4, 6)).astype(np.int32))[:, :2]
    for x in (base[:, ::2], base[:, :64], flat[1:257].view(4, 64)):
        got = run(layer.with_(x=x, topk_ids=ids), ops, packed)
        assert torch.equal(got, run(layer.with_(x=x.contiguous(), topk_ids=ids.contiguous()), ops, packed))


def test_case_11_transposed_qweight(ops: ModuleType, rng: np.random.Generator) -> None:
    w = quantise(rng, 1, 16, 32, 8)
    view = w.qweight[0].t().contiguous().t()
    got = ops.dequantize(view, w.scales[0], w.qzeros[0], group_size=8)
    assert np.array_equal(to_numpy(got), oracle.round_to(w.exact[0], "bfloat16"))


# (c) routing and expert parallelism.


@pytest.mark.parametrize(
    ("expert_map", "ids"), [([0, 1, -1, -1], [[0, -1], [2, 1]]), ([-1, -1, 0, 1], [[3, -1], [-1, -1]])]
)
@BOTH
def test_case_12_minus_one_beside_an_expert_map(
    ops: ModuleType, expert_map: list[int], ids: list[list[int]], packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(
        rng, experts=2, tokens=2, expert_map=torch.tensor(expert_map, dtype=torch.int32), global_num_experts=4
    )
    layer = layer.with_(topk_ids=torch.tensor(ids), topk_weights=torch.full((2, 2), 0.5))
    got = run(layer, ops, packed)
    oracle.check(to_numpy(got), layer.want(packed=packed))
    if ids[1] == [-1, -1]:
        assert (got[1] == 0).all()


@pytest.mark.parametrize("mapped", [False, True])
@BOTH
def test_case_13_ids_out_of_range(
    ops: ModuleType, mapped: bool, packed: bool, rng: np.random.Generator
) -> None:
    options = {"expert_map": torch.tensor([3, 1, 0, 2], dtype=torch.int32)} if mapped else {}
    layer = make_layer(rng, experts=4, tokens=3, **options)
    ids = torch.tensor([[0, 4], [1, 1000000], [-2147483648, 2]], dtype=torch.int32)
    oracle.check(
        to_numpy(run(layer.with_(topk_ids=ids), ops, packed)), layer.with_(topk_ids=ids).want(packed=packed)
    )


@BOTH
def test_case_13_the_checked_mode_raises(
    compiled: ModuleType, packed: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """-1 stays legal; columns that a view skips are not looked at."""
    layer = make_layer(rng, experts=4, tokens=3)
    monkeypatch.setenv("INT4_EMU_CHECK_IDS", "1")
    wide = torch.tensor([[0, 99, 3, 99], [1, 99, -1, 99], [2, 99, 2, 99]], dtype=torch.int32)
    legal = layer.with_(topk_ids=wide[:, ::2])
    oracle.check(to_numpy(run(legal, compiled, packed)), legal.want(packed=packed))
    for bad in (4, -2, 2**31 - 1):
        ids = layer.topk_ids.clone()
        ids[1, 1] = bad
        for tensor in (ids, ids.long()):
            with pytest.raises(ValueError, match=rf"topk_ids.*3.*{bad}"):
                run(layer.with_(topk_ids=tensor), compiled, packed)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [(30, 8, [4] * 6 + [3] * 2), (3, 2, [2, 1]), (2, 4, [1, 1, 0, 0]), (7, 7, [1] * 7), (5, 1, [5])],
)
def test_case_14_each_expert_on_one_rank(experts: int, ranks: int, counts: list[int], placement: str) -> None:
    maps = [int4_emu.make_expert_map(experts, ranks, r, placement) for r in range(ranks)]
    assert [int((m >= 0).sum()) for m in maps] == counts
    assert torch.stack(maps).ge(0).sum(0).eq(1).all()
    for m in maps:
        assert m.dtype == torch.int32 and sorted(m[m >= 0].tolist()) == list(range(int((m >= 0).sum())))


@pytest.mark.parametrize(("experts", "ranks"), [(7, 3), (2, 4), (3, 2)])
@BOTH
def test_case_14_ranks_sum_to_one_rank(
    ops: ModuleType, experts: int, ranks: int, packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(rng, experts=experts, top_k=2, tokens=9)
    total = np.zeros(layer.x.shape)
    for rank in range(ranks):
        expert_map = int4_emu.make_expert_map(experts, ranks, rank)
        mine = np.flatnonzero(expert_map.numpy() >= 0)
        part = {
            n: Quantised(
                **{k: v[mine] if hasattr(v, "shape") else v for k, v in vars(getattr(layer, n)).items()}
            )
            for n in ("w13", "w2")
        }
        options = layer.options | {"expert_map": expert_map, "global_num_experts": experts}
        total += to_numpy(run(layer.with_(options=options, **part), ops, packed))
    oracle.check(total, layer.want(packed=packed), slack=3.0)


def test_case_14_global_count_must_match_the_map(compiled: ModuleType, rng: np.random.Generator) -> None:
    layer = make_layer(
        rng, experts=2, expert_map=torch.tensor([0, 1, -1], dtype=torch.int32), global_num_experts=4
    )
    with pytest.raises(ValueError, match=r"(?s)(?=.*global_num_experts)(?=.*3)(?=.*4)"):
        layer.run_packed(compiled)


# (d) compile and aliasing.


def test_case_15_compile_over_one_dequantize(compiled: ModuleType, rng: np.random.Generator) -> None:
    w = quantise(rng, 1, 64, 64, 32)
    torch._dynamo.reset()

    def f(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return compiled.dequantize(q, s, group_size=32)

    graph = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(w.qweight[0], w.scales[0]), f(w.qweight[0], w.scales[0]))


def test_case_16_nothing_to_do_still_returns_fresh_memory(compiled: ModuleType) -> None:
    """Codes that are plain already, int8 with scale 1, a canonical layout, all slots -1: never the input
    itself."""
    plain = torch.zeros(16, 16, dtype=torch.uint8)
    ones = torch.ones(16, 1)
    ids = torch.full((4, 1), -1, dtype=torch.int32)
    results = [
        compiled.unpack(plain, bits=8),
        compiled.unpack_zeros(plain, bits=8),
        compiled.prepack(plain, layout=0),
        compiled.unprepack(plain, layout=0),
        *compiled.repack(plain, ones, plain[:, :1], format=0, bits=8),
        *compiled.moe_align(ids, 4, 1),
        compiled.dequantize(plain, ones, group_size=16, bits=8),
    ]
    pointers = [
        t.untyped_storage().data_ptr() for t in [plain, ones, ids, *results] if t is not None and t.numel()
    ]
    assert len(set(pointers)) == len(pointers)


# (g) device, (h) security.


def test_case_25_mixed_devices_are_named(compiled: ModuleType, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    moved = layer.with_(x=layer.x.to("meta"))
    with pytest.raises(TypeError, match=r"(?s)(?=.*meta)(?=.*cpu)"):
        moved.run_packed(compiled)
    with pytest.raises(TypeError, match=r"(?s)(?=.*topk_ids)(?=.*meta)(?=.*cpu)"):
        layer.with_(topk_ids=layer.topk_ids.to("meta")).run_packed(compiled)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (40, 96), (96, 40)])
@pytest.mark.parametrize("bits", [4, 8])
def test_case_26_identity_weights(ops: ModuleType, rows: int, columns: int, bits: int) -> None:
    """x = 1..K through the identity pattern: out is x's first N entries, then zeros, exactly, in every type."""
    half = 1 << (bits - 1)
    codes = np.eye(rows, columns, dtype=np.int64)[None] + half
    x = np.arange(1, columns + 1, dtype=np.float64)[None]
    want = np.concatenate([x, np.zeros((1, max(rows - columns, 0)))], 1)[:, :rows]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        got = ops.grouped_gemm(
            to_torch(x, dtype),
            torch.from_numpy(oracle.pack_bytes(codes, bits)),
            torch.tensor([0, 1], dtype=torch.int32),
            scales=torch.ones(1, rows, columns // 8, dtype=dtype),
            group_size=8,
            bits=bits,
        )
        assert np.array_equal(to_numpy(got), want)


@pytest.mark.parametrize(("g_idx", "error", "fragment"), [
    ([0, 0, 0, 0, 1, 1, 1, 2], ValueError, "2"),
    ([0, 0, 0, 0, 1, 1, 1, -1], ValueError, "-1"),
    ([0, 0, 0, 0, 1, 1, 1, 2**31 - 1], ValueError, "2147483647"),
    ([0, 0, 0, 0, 1, 1, 1], ValueError, "7"),
    ([0, 0, 0, 0, 1, 1, 1, 1, 1], ValueError, "9"),
    (torch.zeros(8, dtype=torch.int64), TypeError, "int64"),
    (torch.zeros(8), TypeError, "float32"),
])  # fmt: skip
def test_case_27_g_idx_is_validated(
    compiled: ModuleType, g_idx: Any, error: type[Exception], fragment: str
) -> None:
    """K=8, two groups: a crafted index must not reach the scales; negatives are errors, not wrap-around."""
    index = g_idx if isinstance(g_idx, torch.Tensor) else torch.tensor(g_idx, dtype=torch.int32)
    qweight, scales = torch.zeros(1, 8, dtype=torch.int32), torch.ones(2, 8, dtype=torch.float16)
    with pytest.raises(error, match=f"(?s)(?=.*g_idx)(?=.*{fragment})"):
        compiled.dequantize(qweight, scales, None, index, group_size=4, format=GPTQ_V2)
