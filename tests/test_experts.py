"""The Experts module: numbers, state_dict, moves, copies, pickles, compile, formats, expert and tensor
parallelism."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import int4_emu
import oracle
from implementations import IMPLEMENTATIONS
from int4_emu import Experts
from layers import Layer, Quantised, make_layer, to_numpy, to_torch

pytestmark = pytest.mark.usefixtures("poison")

BACKENDS = sorted(IMPLEMENTATIONS.keys() - {"gpu"})  # modules on the CPU
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# Two shapes: one that the CPU kernels reorder into tiles, one that they cannot.
TILED = {"experts": 4, "hidden": 64, "intermediate": 48, "group_sizes": (32, 16)}
ODD = {"experts": 3, "hidden": 36, "intermediate": 20, "group_sizes": (12, 4)}


def build(layer: Layer, packed: bool, **options: Any) -> Experts:
    """An Experts of the layer; it takes tensors over, so it is given copies."""
    o = (
        {k: v for k, v in layer.options.items() if k != "apply_router_weight_on_input"}
        | {"dtype": layer.dtype}
        | options
    )
    if not packed:
        return Experts(*layer.dense_weights(), **o)
    a, b = layer.w13, layer.w2
    tensors = {
        "w13_scales": a.scales, "w2_scales": b.scales, "w13_qzeros": a.qzeros, "w2_qzeros": b.qzeros,
    }  # fmt: skip
    copies = {k: None if t is None else t.clone() for k, t in tensors.items()}
    return Experts(
        a.qweight.clone(),
        b.qweight.clone(),
        **copies,
        w13_group_size=a.group_size,
        w2_group_size=b.group_size,
        w13_bits=a.bits,
        w2_bits=b.bits,
        **o,
    )


def forward(experts: Experts, layer: Layer, **options: Any) -> torch.Tensor:
    return experts(layer.x, layer.topk_weights, layer.topk_ids, **options)


def judge(experts: Experts, layer: Layer, packed: bool, **options: Any) -> torch.Tensor:
    got = forward(experts, layer, **options)
    assert got.shape == layer.x.shape and got.dtype == layer.x.dtype
    oracle.check(to_numpy(got), layer.want(packed=packed))
    return got


# Numbers.


@pytest.mark.parametrize("shape", [TILED, ODD], ids=["tiled", "odd"])
@BOTH
def test_forward(
    backend: str, dtype: torch.dtype, shape: dict[str, Any], packed: bool, rng: np.random.Generator
) -> None:
    layer = make_layer(rng, dtype=dtype, **shape)
    experts = build(layer, packed, backend=backend)
    assert experts.selection.backend == backend
    judge(experts, layer, packed)


@pytest.mark.parametrize("options", [
    {"activation": "swigluoai", "limit": 0.9, "alpha": 1.702, "beta": 1.0, "w13_order": 1, "bias": True},
    {"activation": "silu", "limit": 0.7},
    {"activation": "relu2_no_mul"},
    {"bits": (8, 8)}, {"bits": (4, 8)}, {"symmetric": True}, {"group_sizes": (-1, -1)},
], ids=str)  # fmt: skip
def test_options_reach_the_op(backend: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    for packed in (False, True):
        layer = make_layer(rng, **(TILED | options))
        judge(build(layer, packed, backend=backend), layer, packed)


def test_leading_dimensions_and_weight_dtype(backend: str, rng: np.random.Generator) -> None:
    """[B, T, H] as models have it, and router weights in x's dtype, which are widened."""
    layer = make_layer(rng, tokens=6, dtype=torch.bfloat16, **TILED)
    experts = build(layer, True, backend=backend)
    weights = layer.topk_weights.bfloat16()
    got = experts(layer.x.view(2, 3, 64), weights, layer.topk_ids)
    assert got.shape == (2, 3, 64)
    oracle.check(to_numpy(got.view(6, 64)), layer.with_(topk_weights=weights.float()).want(packed=True))


def test_router_weight_on_input(backend: str, rng: np.random.Generator) -> None:
    layer = make_layer(rng, top_k=1, apply_router_weight_on_input=True, **TILED)
    judge(build(layer, True, backend=backend), layer, True, apply_router_weight_on_input=True)


def test_no_tokens(backend: str, rng: np.random.Generator) -> None:
    layer = make_layer(rng, **TILED)
    empty = layer.with_(x=layer.x[:0], topk_weights=layer.topk_weights[:0], topk_ids=layer.topk_ids[:0])
    experts = build(layer, True, backend=backend)
    assert forward(experts, empty).shape == (0, 64)
    judge(experts, layer, True)


# State.


@pytest.mark.parametrize("shape", [TILED, ODD], ids=["tiled", "odd"])
def test_state_dict_is_canonical_whatever_the_backend_keeps(
    backend: str, shape: dict[str, Any], rng: np.random.Generator
) -> None:
    layer = make_layer(rng, bias=True, **shape)
    state = build(layer, True, backend=backend).state_dict()
    for name in ("w13", "w2"):
        w: Quantised = getattr(layer, name)
        assert torch.equal(state[f"{name}_qweight"], w.qweight)
        assert torch.equal(state[f"{name}_scales"], w.scales)
        assert w.qzeros is not None and torch.equal(state[f"{name}_qzeros"], w.qzeros)
        assert torch.equal(state[f"{name}_bias"], layer.options[f"{name}_bias"])


@pytest.mark.parametrize("target", BACKENDS)
@BOTH
def test_state_dict_round_trip_into_another(
    backend: str, target: str, packed: bool, rng: np.random.Generator
) -> None:
    layer, other = make_layer(rng, **TILED), make_layer(rng, **TILED)
    source, sink = build(layer, packed, backend=backend), build(other, packed, backend=target)
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    result = sink.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    judge(sink, layer, packed)
    judge(source, layer, packed)
    again = sink.state_dict()
    assert all(torch.equal(v, again[k]) for k, v in source.state_dict().items())


def test_a_wrong_state_dict_is_refused(backend: str, rng: np.random.Generator) -> None:
    experts = build(make_layer(rng, **TILED), True, backend=backend)
    wrong = build(make_layer(rng, **(TILED | {"experts": 5})), True, backend=backend).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        experts.load_state_dict(wrong)
    missing = {k: v for k, v in experts.state_dict().items() if k != "w2_scales"}
    with pytest.raises(RuntimeError, match="w2_scales"):
        experts.load_state_dict(missing)


@pytest.mark.parametrize(
    "cast", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.float], ids=lambda c: c.__name__
)
def test_casts_leave_codes_and_scales_alone(backend: str, cast: Any, rng: np.random.Generator) -> None:
    """A blanket cast of a model must touch neither packed integers nor the checkpoint's scales."""
    layer = make_layer(rng, dtype=torch.bfloat16, scales_dtype=torch.float32, **TILED)
    experts = build(layer, True, backend=backend)
    before = experts.state_dict()
    cast(torch.nn.Sequential(experts))
    after = experts.state_dict()
    assert all(torch.equal(v, after[k]) and v.dtype == after[k].dtype for k, v in before.items())
    judge(experts, layer, True)


@BOTH
def test_to_and_back(backend: str, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, **TILED)
    experts = build(layer, packed, backend=backend)
    want = forward(experts, layer)
    assert experts.to("cpu") is experts
    assert torch.equal(forward(experts.to(device="cpu", dtype=layer.dtype), layer), want)


@BOTH
def test_copies_are_whole_and_separate(backend: str, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, bias=True, **TILED)
    experts = build(layer, packed, backend=backend)
    want = judge(experts, layer, packed)
    twin = copy.deepcopy(experts)
    revived = pickle.loads(pickle.dumps(experts))
    saved = io.BytesIO()
    torch.save(experts, saved)
    saved.seek(0)
    for other in (twin, revived, torch.load(saved, weights_only=False)):
        assert torch.equal(forward(other, layer), want)
        mine = {t.data_ptr() for t in [*experts.parameters(), *experts.buffers()] if t.numel()}
        theirs = {t.data_ptr() for t in [*other.parameters(), *other.buffers()] if t.numel()}
        assert not mine & theirs
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            tensor.zero_()
    assert torch.equal(forward(experts, layer), want)


@BOTH
def test_forward_writes_nothing(backend: str, packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, bias=True, **TILED)
    experts = build(layer, packed, backend=backend)
    tensors = [*experts.parameters(), *experts.buffers(), layer.x, layer.topk_weights, layer.topk_ids]
    before = [(t.data_ptr(), t._version, t.clone()) for t in tensors]
    forward(experts, layer)
    for tensor, (pointer, version, values) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == pointer and tensor._version == version and torch.equal(tensor, values)


@BOTH
def test_modes(backend: str, packed: bool, rng: np.random.Generator) -> None:
    """Inference mode, no_grad, plain grad mode and eval all give the same numbers; training is refused in
    backward."""
    layer = make_layer(rng, **TILED)
    experts = build(layer, packed, backend=backend)
    want = forward(experts, layer)
    with torch.inference_mode():
        assert torch.equal(forward(experts, layer), want)
        inside = build(layer, packed, backend=backend)
    assert torch.equal(forward(inside.eval(), layer), want)
    assert not any(p.requires_grad for p in experts.parameters())
    x = layer.x.clone().requires_grad_()
    got = experts(x, layer.topk_weights, layer.topk_ids)
    if got.requires_grad and backend != "reference":
        with pytest.raises(RuntimeError):
            got.sum().backward()
        assert x.grad is None


@BOTH
def test_compile(packed: bool, rng: np.random.Generator) -> None:
    layer = make_layer(rng, dtype=torch.bfloat16, **TILED)
    experts = build(layer, packed)
    if experts.selection.backend == "reference":
        pytest.skip("the reference reads data on the host; only compiled backends promise fullgraph")
    torch._dynamo.reset()
    graph = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 3, 5):
        part = layer.with_(
            x=layer.x[:tokens], topk_weights=layer.topk_weights[:tokens], topk_ids=layer.topk_ids[:tokens]
        )
        assert torch.equal(forward(graph, part), forward(experts, part))


def test_repr_and_bad_constructors(backend: str, rng: np.random.Generator) -> None:
    layer = make_layer(rng, **TILED)
    experts = build(layer, True, backend=backend)
    assert "4" in repr(experts) and "64" in repr(experts)
    with pytest.raises(ValueError, match="w13_scales"):
        build(layer.with_(w13=Quantised(**{**vars(layer.w13), "scales": layer.w13.scales[:, :, :1]})), True)
    with pytest.raises(ValueError, match="alpha"):
        build(layer, True, activation="swigluoai", limit=7.0, beta=1.0)
    with pytest.raises(ValueError, match="nonesuch"):
        build(layer, True, backend="nonesuch")


# From checkpoint tensors.


def stacked(name: str, w: Quantised, rows: slice, suffixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    parts = []
    for e in range(len(w.codes)):
        zeros = None if w.zero_values is None else w.zero_values[e, rows]
        parts.append(oracle.store(name, w.codes[e, rows], w.scale_values[e, rows], zeros, w.bits))
    tensors = [torch.from_numpy(np.stack([p[i] for p in parts])) for i in range(3) if parts[0][i] is not None]
    tensors[1] = to_torch(tensors[1].numpy(), w.scales.dtype)
    return dict(zip(suffixes, tensors, strict=False))


FORMAT_LIST = [
    ("gptq_v1", Experts.from_gptq, {}, ("qweight", "scales", "qzeros")),
    ("gptq_v2", Experts.from_gptq, {"version": 2}, ("qweight", "scales", "qzeros")),
    ("awq", Experts.from_awq, {}, ("qweight", "scales", "qzeros")),
    (
        "compressed_tensors",
        Experts.from_compressed_tensors,
        {},
        ("weight_packed", "weight_scale", "weight_zero_point"),
    ),
    ("gptq_v1", Experts.from_auto_round, {}, ("qweight", "scales", "qzeros")),
    (
        "awq",
        Experts.from_auto_round,
        {"packing_format": "auto_round:auto_awq"},
        ("qweight", "scales", "qzeros"),
    ),
    (
        "quark_uint_order",
        Experts.from_quark,
        {"dtype_name": "uint4", "pack_method": "order"},
        ("weight", "weight_scale", "weight_zero_point"),
    ),
    ("quark_int_reorder", Experts.from_quark, {}, ("weight", "weight_scale", "weight_zero_point")),
]


@pytest.mark.parametrize(
    ("name", "constructor", "options", "suffixes"), FORMAT_LIST, ids=lambda v: v if isinstance(v, str) else ""
)
@BOTH
def test_from_each_format(
    name: str,
    constructor: Any,
    options: dict[str, Any],
    suffixes: tuple[str, ...],
    packed: bool,
    rng: np.random.Generator,
) -> None:
    layer = make_layer(rng, dtype=torch.bfloat16, **(TILED | {"group_sizes": (16, 16)}))
    parts = [stacked(name, w, rows, suffixes) for w, rows in
             ((layer.w13, slice(0, 48)), (layer.w13, slice(48, 96)), (layer.w2, slice(0, 64)))]  # fmt: skip
    mode = "packed" if packed else "dequantized"
    experts = constructor(*parts, group_size=16, weights=mode, dtype=torch.bfloat16, **options)
    judge(experts, layer, packed)


@BOTH
def test_from_gptq_with_act_order(packed: bool, rng: np.random.Generator) -> None:
    """Permuted g_idx on both sides: w2's order folds into w13's rows (and bias), w13's becomes a gather of
    x."""
    layer = make_layer(rng, bias=True, **(TILED | {"group_sizes": (16, 16)}))
    orders = [np.stack([rng.permutation(n) for _ in range(4)]) for n in (64, 48)]
    suffixes = ("qweight", "scales", "qzeros")
    parts = []
    for w, rows, order in (
        (layer.w13, slice(0, 48), orders[0]),
        (layer.w13, slice(48, 96), orders[0]),
        (layer.w2, slice(0, 64), orders[1]),
    ):
        # Column j of the checkpoint is column order[j] of the sorted weight, so its group is order[j] // 16.
        shuffled = Quantised(**{**vars(w), "codes": np.stack([w.codes[e][:, order[e]] for e in range(4)])})
        part = stacked("gptq_v1", shuffled, rows, suffixes)
        parts.append(part | {"g_idx": torch.from_numpy((order // 16).astype(np.int32))})
    exact = {}
    for name, order in zip(("w13", "w2"), orders, strict=True):
        w = getattr(layer, name)
        exact[name] = Quantised(**{**vars(w), "exact": np.stack([w.exact[e][:, order[e]] for e in range(4)])})
    biases = {k: layer.options[k] for k in ("w13_bias", "w2_bias")}
    mode = "packed" if packed else "dequantized"
    experts = Experts.from_gptq(*parts, group_size=16, weights=mode, dtype=torch.float32, **biases)
    judge(experts, layer.with_(**exact), packed)


# Expert and tensor parallelism.


def take_experts(layer: Layer, mine: np.ndarray) -> Layer:
    fields = {
        n: Quantised(**{k: v[mine] if hasattr(v, "shape") else v for k, v in vars(getattr(layer, n)).items()})
        for n in ("w13", "w2")
    }
    return layer.with_(**fields)


@pytest.mark.parametrize(("total", "ranks"), [(7, 3), (2, 4), (4, 4)])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_expert_parallel_ranks_sum_to_one(
    backend: str, total: int, ranks: int, placement: str, rng: np.random.Generator
) -> None:
    """Remainders and ranks without any expert included; the map is a default of the module or an argument."""
    layer = make_layer(rng, tokens=9, **(TILED | {"experts": total}))
    summed = np.zeros(layer.x.shape)
    for rank in range(ranks):
        expert_map = int4_emu.make_expert_map(total, ranks, rank, placement)
        local = take_experts(layer, np.flatnonzero(expert_map.numpy() >= 0))
        own = build(local, True, backend=backend, expert_map=expert_map, global_num_experts=total)
        given = build(local, True, backend=backend)
        part = forward(own, layer)
        assert torch.equal(part, forward(given, layer, expert_map=expert_map, global_num_experts=total))
        summed += to_numpy(part)
    oracle.check(summed, layer.want(packed=True), slack=3.0)


def test_tensor_parallel_ranks_sum_to_one(ops: Any, rng: np.random.Generator) -> None:
    """Each of two ranks holds half of I: rows of gate and up, columns and scale groups of w2."""
    layer = make_layer(rng, tokens=9, **(TILED | {"intermediate": 64}))
    summed = np.zeros(layer.x.shape)
    for rank in range(2):
        inner = np.arange(rank * 32, rank * 32 + 32)
        rows, groups = np.concatenate([inner, inner + 64]), slice(rank * 2, rank * 2 + 2)
        a, b = layer.w13, layer.w2
        w13 = Quantised(
            a.codes[:, rows],
            a.scale_values[:, rows],
            a.zero_values[:, rows],
            a.qweight[:, rows],
            a.scales[:, rows],
            a.qzeros[:, rows],
            32,
            4,
            a.exact[:, rows],
        )
        w2 = Quantised(
            b.codes[..., inner],
            b.scale_values[..., groups],
            b.zero_values[..., groups],
            b.qweight[..., rank * 16 : rank * 16 + 16],
            b.scales[..., groups],
            b.qzeros[..., groups],
            16,
            4,
            b.exact[..., inner],
        )
        summed += to_numpy(layer.with_(w13=w13, w2=w2).run_packed(ops))
    oracle.check(summed, layer.want(packed=True), slack=3.0)
