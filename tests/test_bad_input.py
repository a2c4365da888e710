"""One bad argument at a time: one clear sentence with the name and the numbers, the right type, nothing
written."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from layers import make_layer

Change = Callable[[Any], Any]
pytestmark = pytest.mark.usefixtures("compiled")

MOE_NAMES = ["hidden_states", "w13", "w2", "topk_weights", "topk_ids"]
PACKED_NAMES = [*MOE_NAMES, "w13_scales", "w2_scales", "w13_group_size", "w2_group_size"]


def base(packed: bool) -> dict[str, Any]:
    """A valid call by name: E=3, H=32, I=16, M=4, k=2, groups 16 and 8, zero points, biases."""
    layer = make_layer(
        np.random.default_rng(3),
        experts=3,
        hidden=32,
        intermediate=16,
        tokens=4,
        group_sizes=(16, 8),
        bias=True,
        dtype=torch.bfloat16,
    )
    if packed:
        return dict(zip(PACKED_NAMES, layer.packed_args(), strict=True)) | layer.packed_options()
    tensors = (layer.x, *layer.dense_weights(), layer.topk_weights, layer.topk_ids)
    return dict(zip(MOE_NAMES, tensors, strict=True)) | layer.options


def call(op: Callable[..., Any], arguments: dict[str, Any], names: list[str], **extra: Any) -> Any:
    rest = {k: v for k, v in arguments.items() if k not in names}
    return op(*[arguments[n] for n in names], **rest, **extra)


def assert_refused(
    op: Callable[..., Any], error: type[Exception], fragments: tuple[str, ...], *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(error) as caught:
        op(*args, **kwargs)
    assert type(caught.value) is error
    sentence = str(caught.value)
    missing = [f for f in fragments if f not in sentence]
    assert not missing, f"{missing} not in {sentence!r}"
    assert "\n" not in sentence.strip() and "Exception raised from" not in sentence, sentence


def cut(dim: int, size: int = -1) -> Change:
    return lambda t: t.narrow(dim, 0, size if size >= 0 else t.shape[dim] - 1)


def to(dtype: torch.dtype) -> Change:
    return lambda t: t.to(dtype)


def value(v: Any) -> Change:
    return lambda _: v


def on_meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


# (argument, change, error, what the sentence must hold)
SHARED_LIST: list[tuple[str, Change, type[Exception], tuple[str, ...]]] = [
    ("hidden_states", to(torch.float64), TypeError, ("hidden_states", "float64")),
    ("hidden_states", to(torch.int32), TypeError, ("hidden_states", "int32")),
    ("hidden_states", lambda t: t[0], ValueError, ("hidden_states", "[32]")),
    ("hidden_states", lambda t: t[None], ValueError, ("hidden_states", "[1, 4, 32]")),
    ("hidden_states", cut(1, 30), ValueError, ("32", "30")),
    ("hidden_states", on_meta, TypeError, ("hidden_states", "meta", "cpu")),
    ("topk_weights", to(torch.float16), TypeError, ("topk_weights", "float32", "float16")),
    ("topk_weights", cut(1), ValueError, ("topk_weights", "[4, 2]", "[4, 1]")),
    ("topk_weights", cut(0), ValueError, ("topk_weights", "[4, 2]", "[3, 2]")),
    ("topk_weights", torch.flatten, ValueError, ("topk_weights", "[8]")),
    ("topk_weights", on_meta, TypeError, ("topk_weights", "meta", "cpu")),
    ("topk_ids", to(torch.float32), TypeError, ("topk_ids", "float32")),
    ("topk_ids", to(torch.int16), TypeError, ("topk_ids", "int16")),
    ("topk_ids", cut(0), ValueError, ("topk_ids", "4", "3")),
    ("topk_ids", lambda t: t[:, 0], ValueError, ("topk_ids", "[4]")),
    ("topk_ids", on_meta, TypeError, ("topk_ids", "meta", "cpu")),
    ("w13", lambda t: t[0], ValueError, ("w13", "3")),
    ("w2", cut(0), ValueError, ("w2", "[3, 32,", "[2, 32,")),
    ("w2", cut(1), ValueError, ("w2", "32", "31")),
    ("w13", on_meta, TypeError, ("w13", "meta", "cpu")),
    ("w13_bias", cut(1), ValueError, ("w13_bias", "[3, 32]", "[3, 31]")),
    ("w13_bias", to(torch.int32), TypeError, ("w13_bias", "int32")),
    ("w13_bias", on_meta, TypeError, ("w13_bias", "meta", "cpu")),
    ("w2_bias", cut(0), ValueError, ("w2_bias", "[3, 32]", "[2, 32]")),
    ("w2_bias", lambda t: t[0], ValueError, ("w2_bias", "[3, 32]", "[32]")),
    ("expert_map", value(torch.zeros(4)), TypeError, ("expert_map", "int32", "float32")),
    ("expert_map", value(torch.zeros(4, dtype=torch.int64)), TypeError, ("expert_map", "int32", "int64")),
    ("expert_map", value(torch.zeros(2, 2, dtype=torch.int32)), ValueError, ("expert_map", "[2, 2]")),
    ("global_num_experts", value(5), ValueError, ("global_num_experts", "3", "5")),
    ("global_num_experts", value(-2), ValueError, ("global_num_experts", "-2")),
    ("activation", value(9), ValueError, ("activation", "9", "silu", "swigluoai")),
    ("activation", value("swish"), ValueError, ("activation", "swish", "silu", "swigluoai")),
    ("w13_order", value(2), ValueError, ("w13_order", "2", "halves", "interleaved")),
    ("alpha", value(1.0), ValueError, ("alpha", "silu")),
    ("beta", value(1.0), ValueError, ("beta", "silu")),
    ("limit", value(0.0), ValueError, ("limit", "0")),
    ("limit", value(-7.0), ValueError, ("limit", "-7")),
    ("limit", value(float("nan")), ValueError, ("limit", "nan")),
    ("apply_router_weight_on_input", value(True), ValueError, ("apply_router_weight_on_input", "1", "2")),
]  # fmt: skip
DENSE_LIST: list[tuple[str, Change, type[Exception], tuple[str, ...]]] = [
    ("w13", cut(1, 30), ValueError, ("w2", "15", "16")),  # I comes from w13, which then contradicts w2
    ("w13", to(torch.float16), TypeError, ("w13", "bfloat16", "float16")),
    ("w2", to(torch.uint8), TypeError, ("w2", "bfloat16", "uint8")),
    ("w13", cut(2, 30), ValueError, ("w13", "32", "30")),
    ("w2", cut(2), ValueError, ("w2", "16", "15")),
    ("w13", lambda t: t.repeat(1, 1, 2)[:, :, ::2], ValueError, ("w13", "contiguous", "stride")),
]
PACKED_LIST: list[tuple[str, Change, type[Exception], tuple[str, ...]]] = [
    ("w13", cut(1, 30), ValueError, ("w13", "32", "30")),
    ("w13", to(torch.int32), TypeError, ("w13", "uint8", "int32")),
    ("w2", to(torch.int8), TypeError, ("w2", "uint8", "int8")),
    ("w13", cut(2, 15), ValueError, ("w13", "16", "15")),
    ("w2", cut(2, 7), ValueError, ("w2", "7")),
    ("w13_scales", to(torch.float64), TypeError, ("w13_scales", "float64")),
    ("w13_scales", cut(2), ValueError, ("w13_scales", "[3, 32, 2]", "[3, 32, 1]", "32", "16")),
    ("w13_scales", cut(1), ValueError, ("w13_scales", "[3, 32, 2]", "[3, 31, 2]")),
    ("w2_scales", cut(0), ValueError, ("w2_scales", "[3, 32, 2]", "[2, 32, 2]")),
    ("w2_scales", lambda t: t[0], ValueError, ("w2_scales", "[3, 32, 2]", "[32, 2]")),
    ("w2_scales", on_meta, TypeError, ("w2_scales", "meta", "cpu")),
    ("w13_qzeros", to(torch.int32), TypeError, ("w13_qzeros", "uint8", "int32")),
    ("w13_qzeros", cut(2), ValueError, ("w13_qzeros", "[3, 32, 2]", "[3, 32, 1]")),
    ("w2_qzeros", cut(1), ValueError, ("w2_qzeros", "[3, 32, 2]", "[3, 31, 2]")),
    ("w13_group_size", value(0), ValueError, ("w13_group_size", "0")),
    ("w13_group_size", value(-2), ValueError, ("w13_group_size", "-2")),
    ("w2_group_size", value(0), ValueError, ("w2_group_size", "0")),
    ("w13_group_size", value(33), ValueError, ("w13_group_size", "33", "32")),
    ("w13_group_size", value(8), ValueError, ("[3, 32, 4]", "[3, 32, 2]", "8")),
    ("w2_group_size", value(4), ValueError, ("[3, 32, 4]", "[3, 32, 2]", "4")),
    (
        "w13_perm",
        value(torch.zeros(3, 31, dtype=torch.int32)),
        ValueError,
        ("w13_perm", "[3, 32]", "[3, 31]"),
    ),
    ("w13_perm", value(torch.zeros(3, 32, dtype=torch.int64)), TypeError, ("w13_perm", "int32", "int64")),
    ("w13_perm", value(torch.full((3, 32), 32, dtype=torch.int32)), ValueError, ("w13_perm", "32")),
    ("w13_perm", value(torch.full((3, 32), -1, dtype=torch.int32)), ValueError, ("w13_perm", "-1")),
    ("w13_bits", value(3), ValueError, ("w13_bits", "4", "8", "3")),
    ("w2_bits", value(16), ValueError, ("w2_bits", "4", "8", "16")),
    ("w2_bits", value(8), ValueError, ("w2", "8")),
    ("layout", value(77), ValueError, ("layout", "77")),
    ("intermediate_size", value(17), ValueError, ("17", "16")),
]


def _label(v: Any) -> str | None:
    return (
        v
        if isinstance(v, str)
        else v.__name__
        if isinstance(v, type)
        else "+".join(v)
        if isinstance(v, tuple)
        else ""
    )


@pytest.mark.parametrize(("name", "change", "error", "fragments"), SHARED_LIST + PACKED_LIST, ids=_label)
def test_fused_moe_packed(
    compiled: ModuleType, name: str, change: Change, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    arguments = base(packed=True)
    arguments[name] = change(arguments.get(name))
    assert_refused(call, error, fragments, compiled.fused_moe_packed, arguments, PACKED_NAMES)
    out = torch.full((4, 32), float("nan"), dtype=torch.bfloat16)
    with pytest.raises(error):
        call(compiled.fused_moe_packed, arguments, PACKED_NAMES, out=out)
    assert out.isnan().all(), "a refused call wrote to out"


@pytest.mark.parametrize(("name", "change", "error", "fragments"), SHARED_LIST + DENSE_LIST, ids=_label)
def test_fused_moe(
    compiled: ModuleType, name: str, change: Change, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    arguments = base(packed=False)
    arguments[name] = change(arguments.get(name))
    assert_refused(call, error, fragments, compiled.fused_moe, arguments, MOE_NAMES)
    out = torch.full((4, 32), float("nan"), dtype=torch.bfloat16)
    with pytest.raises(error):
        call(compiled.fused_moe, arguments, MOE_NAMES, out=out)
    assert out.isnan().all(), "a refused call wrote to out"


@pytest.mark.parametrize(("name", "bad"), [("alpha", float("inf")), ("beta", float("nan"))])
def test_swigluoai_with_a_constant_that_is_no_number(compiled: ModuleType, name: str, bad: float) -> None:
    given = {"activation": "swigluoai", "limit": 7.0, "alpha": 1.702, "beta": 1.0} | {name: bad}
    arguments = base(packed=True) | given
    assert_refused(
        call, ValueError, (name, "finite", str(bad)), compiled.fused_moe_packed, arguments, PACKED_NAMES
    )


@pytest.mark.parametrize("activation", ["swigluoai"])
@pytest.mark.parametrize("missing", ["limit", "alpha", "beta"])
def test_missing_activation_parameter(compiled: ModuleType, activation: str, missing: str) -> None:
    given = {"limit": 7.0, "alpha": 1.702, "beta": 1.0} | {missing: None}
    arguments = base(packed=True) | given | {"activation": activation}
    assert_refused(
        call, ValueError, (missing, activation), compiled.fused_moe_packed, arguments, PACKED_NAMES
    )


@pytest.mark.parametrize("activation", ["gelu", "relu2", "silu_no_mul"])
def test_parameter_that_the_activation_does_not_take(compiled: ModuleType, activation: str) -> None:
    arguments = base(packed=True) | {"activation": activation, "limit": 7.0}
    if (
        activation == "silu_no_mul"
    ):  # w13 then holds 32 rows of one kind, so I = 32: keep the shapes consistent
        arguments |= make_no_gate()
    assert_refused(
        call, ValueError, ("limit", activation), compiled.fused_moe_packed, arguments, PACKED_NAMES
    )


def make_no_gate() -> dict[str, Any]:
    layer = make_layer(
        np.random.default_rng(3),
        experts=3,
        hidden=32,
        intermediate=16,
        tokens=4,
        group_sizes=(16, 8),
        activation="silu_no_mul",
        bias=True,
        dtype=torch.bfloat16,
    )
    return dict(zip(PACKED_NAMES, layer.packed_args(), strict=True)) | {
        k: v for k, v in layer.packed_options().items() if k != "activation"
    }


@pytest.mark.parametrize(("out", "error", "fragments"), [
    (torch.zeros(4, 31, dtype=torch.bfloat16), ValueError, ("out", "[4, 32]", "[4, 31]")),
    (torch.zeros(4, 32, dtype=torch.float16), TypeError, ("out", "bfloat16", "float32", "float16")),
    (torch.zeros(4, 32, dtype=torch.bfloat16, device="meta"), TypeError, ("out", "meta", "cpu")),
    (torch.zeros(32, 4, dtype=torch.bfloat16).t(), ValueError, ("out", "contiguous")),
    (torch.zeros(1, 1, dtype=torch.bfloat16).expand(4, 32), ValueError, ("out", "contiguous")),
], ids=["shape", "dtype", "device", "transposed", "expanded"])  # fmt: skip
def test_out_argument(
    compiled: ModuleType, out: torch.Tensor, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    assert_refused(call, error, fragments, compiled.fused_moe_packed, base(True), PACKED_NAMES, out=out)
    assert out.device.type == "meta" or (out == 0).all()


# Dequantize and friends.


def gptq() -> dict[str, Any]:
    """O=16, I=32, groups of 8."""
    return {
        "qweight": torch.zeros(4, 16, dtype=torch.int32), "scales": torch.ones(4, 16, dtype=torch.float16),
        "qzeros": torch.zeros(4, 2, dtype=torch.int32), "g_idx": torch.arange(32, dtype=torch.int32) // 8,
        "group_size": 8, "format": 2,
    }  # fmt: skip


DEQUANTIZE_LIST: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("qweight", torch.zeros(4, 16, dtype=torch.int64), TypeError, ("qweight", "int32", "int64")),
    ("qweight", torch.zeros(16, dtype=torch.int32), ValueError, ("qweight", "[16]")),
    ("qweight", torch.zeros(2, 3, 4, 16, dtype=torch.int32), ValueError, ("qweight", "[2, 3, 4, 16]")),
    (
        "scales",
        torch.ones(3, 16, dtype=torch.float16),
        ValueError,
        ("scales", "= 4", "[3, 16]", "32", "8"),
    ),
    ("scales", torch.ones(16, 4, dtype=torch.float16), ValueError, ("scales", "4", "[16, 4]")),
    ("scales", torch.ones(4, 16, dtype=torch.float64), TypeError, ("scales", "float64")),
    ("scales", torch.ones(4, 16, device="meta"), TypeError, ("scales", "meta", "cpu")),
    ("qzeros", torch.zeros(4, 16, dtype=torch.int32), ValueError, ("qzeros", "[4, 2]", "[4, 16]")),
    ("qzeros", torch.zeros(4, 2, dtype=torch.uint8), TypeError, ("qzeros", "int32", "uint8")),
    ("group_size", 0, ValueError, ("group_size", "0")),
    ("group_size", -2, ValueError, ("group_size", "-2")),
    ("group_size", 33, ValueError, ("group_size", "33", "32")),
    ("group_size", 16, ValueError, ("scales", "= 2", "[4, 16]", "16")),
    ("format", 99, ValueError, ("format", "99", "gptq_v1", "awq")),
    ("format", "marlin", ValueError, ("format", "marlin", "gptq_v1", "awq")),
    ("bits", 3, ValueError, ("bits", "4", "8", "3")),
    ("in_features", 40, ValueError, ("in_features", "40", "32")),
    ("dtype", torch.float64, TypeError, ("dtype", "float64")),
    ("g_idx", torch.zeros(31, dtype=torch.int32), ValueError, ("g_idx", "[32]", "[31]")),
    ("g_idx", torch.zeros(32, dtype=torch.int64), TypeError, ("g_idx", "int32", "int64")),
    ("g_idx", torch.full((32,), 4, dtype=torch.int32), ValueError, ("g_idx", "4")),
    ("g_idx", torch.full((32,), -1, dtype=torch.int32), ValueError, ("g_idx", "-1")),
]


@pytest.mark.parametrize(("name", "bad", "error", "fragments"), DEQUANTIZE_LIST, ids=_label)
def test_dequantize(
    compiled: ModuleType, name: str, bad: Any, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    arguments = gptq() | {name: bad}
    if name != "g_idx":  # with g_idx, more groups than I / group_size are allowed
        arguments["g_idx"] = None
    assert_refused(compiled.dequantize, error, fragments, **arguments)
    if name != "dtype":
        out = torch.full((16, 32), float("nan"), dtype=torch.float16)
        with pytest.raises(error):
            compiled.dequantize(**arguments, out=out)
        assert out.isnan().all()


def test_group_size_contradicts_the_scales_also_for_awq(compiled: ModuleType) -> None:
    qweight, scales = torch.zeros(64, 2, dtype=torch.int32), torch.ones(4, 16, dtype=torch.float16)
    assert_refused(
        compiled.dequantize,
        ValueError,
        ("scales", "= 2", "[4, 16]", "64", "32"),
        qweight,
        scales,
        group_size=32,
        format=4,
    )


REPACK_LIST: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("in_perm", torch.zeros(31, dtype=torch.int32), ValueError, ("in_perm", "[32]", "[31]")),
    ("in_perm", torch.full((32,), 32, dtype=torch.int32), ValueError, ("in_perm", "32")),
    ("in_perm", torch.zeros(32, dtype=torch.int64), TypeError, ("in_perm", "int32", "int64")),
    ("out_perm", torch.zeros(15, dtype=torch.int32), ValueError, ("out_perm", "[16]", "[15]")),
    ("out_perm", torch.full((16,), -1, dtype=torch.int32), ValueError, ("out_perm", "-1")),
    ("qzeros", torch.zeros(3, 2, dtype=torch.int32), ValueError, ("qzeros", "[4, 2]", "[3, 2]")),
    ("format", -1, ValueError, ("format", "-1")),
]


@pytest.mark.parametrize(("name", "bad", "error", "fragments"), REPACK_LIST, ids=_label)
def test_repack(
    compiled: ModuleType, name: str, bad: Any, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    arguments = {k: v for k, v in gptq().items() if k not in ("g_idx", "group_size")} | {name: bad}
    assert_refused(compiled.repack, error, fragments, **arguments)


def gemm() -> dict[str, Any]:
    """R=6, K=32, N=16, E=2, groups of 16."""
    return {
        "x": torch.zeros(6, 32),
        "weight": torch.zeros(2, 16, 16, dtype=torch.uint8),
        "expert_offsets": torch.tensor([0, 2, 6], dtype=torch.int32),
        "scales": torch.ones(2, 16, 2),
        "group_size": 16,
    }


GEMM_LIST: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("x", torch.zeros(6, 30), ValueError, ("weight", "30", "[2, 16, 15]")),
    ("x", torch.zeros(6), ValueError, ("x", "[6]")),
    ("x", torch.zeros(6, 32, dtype=torch.int32), TypeError, ("x", "int32")),
    ("weight", torch.zeros(2, 16, 16), TypeError, ("weight", "uint8", "float32")),
    ("weight", torch.zeros(16, 16, dtype=torch.uint8), ValueError, ("weight", "[16, 16]")),
    ("expert_offsets", torch.tensor([0, 6], dtype=torch.int32), ValueError, ("expert_offsets", "[3]", "[2]")),
    ("expert_offsets", torch.tensor([0.0, 2.0, 6.0]), TypeError, ("expert_offsets", "int32", "float32")),
    ("expert_offsets", torch.tensor([0, 2, 7], dtype=torch.int32), ValueError, ("expert_offsets", "7", "6")),
    ("expert_offsets", torch.tensor([0, 4, 2], dtype=torch.int32), ValueError, ("expert_offsets", "4", "2")),
    ("expert_offsets", torch.tensor([-1, 2, 6], dtype=torch.int32), ValueError, ("expert_offsets", "-1")),
    ("scales", torch.ones(2, 16, 3), ValueError, ("scales", "[2, 16, 2]", "[2, 16, 3]")),
    ("group_size", 0, ValueError, ("group_size", "0")),
    ("bits", 5, ValueError, ("bits", "4", "8", "5")),
    ("layout", 5, ValueError, ("layout", "5")),
    ("bias", torch.zeros(2, 15), ValueError, ("bias", "[2, 16]", "[2, 15]")),
    ("perm", torch.zeros(2, 31, dtype=torch.int32), ValueError, ("perm", "[2, 32]", "[2, 31]")),
    ("perm", torch.full((2, 32), 99, dtype=torch.int32), ValueError, ("perm", "99", "31")),
    ("qzeros", torch.zeros(2, 16, 1, dtype=torch.uint8), ValueError, ("qzeros", "[2, 16, 2]", "[2, 16, 1]")),
]


@pytest.mark.parametrize(("name", "bad", "error", "fragments"), GEMM_LIST, ids=_label)
def test_grouped_gemm(
    compiled: ModuleType, name: str, bad: Any, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    assert_refused(compiled.grouped_gemm, error, fragments, **(gemm() | {name: bad}))


@pytest.mark.parametrize(("args", "error", "fragments"), [
    ((torch.zeros(3, 2), 4), TypeError, ("topk_ids", "float32")),
    ((torch.zeros(3, dtype=torch.int32), 4), ValueError, ("topk_ids", "[3]")),
    ((torch.zeros(3, 2, dtype=torch.int32), -1), ValueError, ("num_experts", "-1")),
    ((torch.zeros(3, 2, dtype=torch.int32), 4, 0), ValueError, ("block_size", "0")),
], ids=["dtype", "dims", "experts", "block"])  # fmt: skip
def test_moe_align(
    compiled: ModuleType, args: tuple[Any, ...], error: type[Exception], fragments: tuple[str, ...]
) -> None:
    assert_refused(compiled.moe_align, error, fragments, *args)


def test_a_refusal_leaves_the_next_call_unharmed(compiled: ModuleType) -> None:
    arguments = base(packed=True)
    want = call(compiled.fused_moe_packed, arguments, PACKED_NAMES)
    with pytest.raises(ValueError, match="group_size"):
        call(compiled.fused_moe_packed, arguments | {"w13_group_size": 0}, PACKED_NAMES)
    assert torch.equal(call(compiled.fused_moe_packed, arguments, PACKED_NAMES), want)


def test_shape_checks_run_on_empty_input(compiled: ModuleType) -> None:
    arguments = base(packed=True)
    empty = {n: arguments[n][:0] for n in ("hidden_states", "topk_weights", "topk_ids")}
    assert call(compiled.fused_moe_packed, arguments | empty, PACKED_NAMES).shape == (0, 32)
    wrong = arguments | empty | {"w2": arguments["w2"][:2]}
    assert_refused(call, ValueError, ("w2",), compiled.fused_moe_packed, wrong, PACKED_NAMES)
