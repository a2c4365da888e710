"""Random small layers: whatever the shapes, types, options and layout, the layer is the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import int4_emu
import oracle
from implementations import IMPLEMENTATIONS
from int4_emu import Activation, Format, W13Order
from layers import NAMES, Layer, make_layer, to_numpy


@st.composite
def layer_strategy(draw: st.DrawFn) -> Layer:
    """H and I up to a few tiles, odd ones too; groups that divide them; every activation; ids on both sides of the
    range."""
    hidden, intermediate = (draw(st.integers(1, 80)) for _ in range(2))
    groups = tuple(
        draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0])) for n in (hidden, intermediate)
    )
    activation = draw(st.sampled_from(oracle.GATED + oracle.PLAIN))
    options: dict[str, object] = {}
    if activation == "swigluoai":
        options = {"limit": 1.5, "alpha": 1.3, "beta": draw(st.sampled_from([0.0, 1.0]))}
    elif activation == "silu" and draw(st.booleans()):
        options = {"limit": 0.8}
    if not activation.endswith("_no_mul"):
        options["w13_order"] = draw(st.integers(0, 1))
    top_k = draw(st.integers(1, 5))
    if top_k == 1:
        options["apply_router_weight_on_input"] = draw(st.booleans())
    experts = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layer = make_layer(
        rng, experts=experts, hidden=hidden, intermediate=intermediate, tokens=draw(st.integers(0, 20)), top_k=top_k,
        dtype=draw(st.sampled_from(list(NAMES))), scales_dtype=draw(st.sampled_from(list(NAMES))), group_sizes=groups,
        bits=(draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8]))), symmetric=draw(st.booleans()),
        activation=activation, bias=draw(st.booleans()), **options,
    )  # fmt: skip
    return layer.with_(topk_ids=torch.from_numpy(rng.integers(-1, experts + 1, layer.topk_ids.shape)))


@settings(max_examples=80, deadline=None)
@given(layer=layer_strategy())
def test_any_layer(layer: Layer) -> None:
    want = {packed: layer.want(packed=packed) for packed in (False, True)}
    for module in IMPLEMENTATIONS.values():
        oracle.check(to_numpy(layer.run_dense(module)), want[False], slack=3.0)
        oracle.check(to_numpy(layer.run_packed(module)), want[True], slack=3.0)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 12), bits=st.sampled_from([4, 8]), tokens=st.integers(1, 40),
    dtype=st.sampled_from(list(NAMES)), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_tiled_layer(
    rows: int, columns: int, bits: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    """H and I in whole tiles: the prepacked order gives the same layer."""
    layer = make_layer(
        np.random.default_rng(seed), hidden=16 * columns, intermediate=16 * rows, tokens=tokens, dtype=dtype, experts=3,
        bits=(bits, bits), group_sizes=(8, 16),
    )  # fmt: skip
    _, w13, w2, *rest = layer.packed_args()
    for name, module in IMPLEMENTATIONS.items():
        if name == "gpu":  # reads canonical codes
            with pytest.raises(RuntimeError, match=r"layout must be 0 \(canonical\) on a GPU, got 1"):
                module.fused_moe_packed(layer.x, w13, w2, *rest, layout=1, **layer.packed_options())
            continue
        tiles = [module.prepack(w, layout=1, bits=bits) for w in (w13, w2)]
        got = module.fused_moe_packed(layer.x, *tiles, *rest, layout=1, **layer.packed_options())
        oracle.check(to_numpy(got), layer.want(packed=True), slack=3.0)


def test_enums_names_and_numbers_are_one() -> None:
    """The numbers are the ops' ABI; a wrapper takes the member, its name or its number."""
    assert {f.name: int(f) for f in Format} == oracle.FORMAT_IDS
    assert {a.name: int(a) for a in Activation} == oracle.ACTIVATION_IDS
    assert {o.name: int(o) for o in W13Order} == {"halves": 0, "interleaved": 1}
    layer = make_layer(np.random.default_rng(0))
    for member in (Activation.gelu_tanh, Activation.relu2):
        for order in W13Order:
            results = [
                int4_emu.ops.fused_moe_packed(
                    *layer.packed_args(), **(layer.packed_options() | {"activation": a, "w13_order": o})
                )
                for a, o in ((member, order), (member.name, order.name), (int(member), int(order)))
            ]
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    for format in (Format.awq, "awq", 4):
        assert int4_emu.ops.unpack(word, format=format).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
