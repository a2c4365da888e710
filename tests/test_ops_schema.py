"""Schemas by hand, opcheck, aliasing, fake kernels and torch.compile, for every op that is registered."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from op_calls import OP_LIST, Call, call_of, small_layer

_MOE_TAIL = (
    "Tensor? w13_bias=None, Tensor? w2_bias=None, Tensor? expert_map=None, "
    "SymInt global_num_experts=-1, {sizes}"
    "int activation=0, float? limit=None, float? alpha=None, float? beta=None, int w13_order=0, "
    "bool apply_router_weight_on_input=False"
)
_MOE_HEAD = "Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
_DENSE = _MOE_HEAD + "*, " + _MOE_TAIL.format(sizes="")
_PACKED = (
    _MOE_HEAD + "Tensor w13_scales, Tensor w2_scales, SymInt w13_group_size, SymInt w2_group_size, *, "
    "Tensor? w13_qzeros=None, Tensor? w2_qzeros=None, Tensor? w13_perm=None, "
    + _MOE_TAIL.format(sizes="SymInt intermediate_size=-1, int w13_bits=4, int w2_bits=4, int layout=0, ")
)  # fmt: skip
_DEQUANTIZE = (
    "Tensor qweight, Tensor scales, Tensor? qzeros=None, Tensor? g_idx=None, *, SymInt group_size, "
    "int format=0, int bits=4, SymInt in_features=-1"
)
_REPACK = (
    "Tensor qweight, Tensor scales, Tensor? qzeros=None, *, int format, int bits=4, SymInt in_features=-1, "
    "Tensor? in_perm=None, Tensor? out_perm=None"
)
_GEMM = (
    "Tensor x, Tensor weight, Tensor expert_offsets, *, Tensor? scales=None, Tensor? qzeros=None, "
    "Tensor? perm=None, Tensor? bias=None, SymInt group_size=0, int bits=4, int layout=0"
)
# Registered for autograd only: the node that refuses to run backward.
INTERNAL = {"_no_backward": "(Tensor grad, SymInt[] shape, int op) -> Tensor"}
SCHEMAS = {
    "unpack": "(Tensor qweight, *, int format=0, int bits=4, SymInt in_features=-1) -> Tensor",
    "unpack_zeros": "(Tensor qzeros, *, int format=0, int bits=4, SymInt out_features=-1) -> Tensor",
    "dequantize": f"({_DEQUANTIZE}, ScalarType? dtype=None) -> Tensor",
    "dequantize_out": f"({_DEQUANTIZE}, Tensor(a!) out) -> ()",
    "repack": f"({_REPACK}) -> (Tensor, Tensor, Tensor)",
    "repack_out": f"({_REPACK}, Tensor(a!) out_qweight, Tensor(b!) out_scales, "
    "Tensor(c!)? out_qzeros=None) -> ()",
    "prepack": "(Tensor qweight, *, int layout, int bits=4) -> Tensor",
    "unprepack": "(Tensor qweight, *, int layout, int bits=4) -> Tensor",
    "moe_align": "(Tensor topk_ids, SymInt num_experts, SymInt block_size=1, *, Tensor? expert_map=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "grouped_gemm": f"({_GEMM}) -> Tensor",
    "grouped_gemm_out": f"({_GEMM}, Tensor(a!) out) -> ()",
    "fused_moe": f"({_DENSE}) -> Tensor",
    "fused_moe_out": f"({_DENSE}, Tensor(a!) out) -> ()",
    "fused_moe_packed": f"({_PACKED}) -> Tensor",
    "fused_moe_packed_out": f"({_PACKED}, Tensor(a!) out) -> ()",
}

pytestmark = pytest.mark.usefixtures("compiled")


def namespace() -> Any:
    return torch.ops.int4_emu


def registered() -> dict[str, Any]:
    """Every schema in the library, whether this file knows it or not."""
    return {
        s.name.removeprefix("int4_emu::"): s
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("int4_emu::")
    }


# Schemas.


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_the_published_one(name: str) -> None:
    assert str(getattr(namespace(), name).default._schema) == f"int4_emu::{name}{SCHEMAS[name]}"


def test_no_op_without_a_literal() -> None:
    assert set(registered()) == set(SCHEMAS) | set(INTERNAL)
    for name, literal in INTERNAL.items():
        assert str(registered()[name]) == f"int4_emu::{name}{literal}"


def test_only_out_variants_may_write_and_nothing_is_a_str_or_scalar() -> None:
    for name in SCHEMAS:
        schema = registered()[name]
        written = [a.name for a in schema.arguments if a.alias_info is not None]
        assert written == [a for a in written if a.startswith("out")] and bool(written) == name.endswith(
            "_out"
        ), name
        assert not any(r.alias_info for r in schema.returns), name
        kinds = {str(a.type).removeprefix("Optional[").rstrip("]") for a in schema.arguments}
        assert kinds <= {"Tensor", "int", "SymInt", "float", "bool"}, (name, kinds)


# One call of each op.


def test_every_op_has_a_call() -> None:
    assert set(OP_LIST) == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name: str) -> None:
    """Schema against behaviour, autograd registration, fake kernel, and tracing with static and dynamic
    shapes."""
    args, kwargs = call_of(name)
    torch.library.opcheck(getattr(namespace(), name).default, args, kwargs)


@pytest.mark.parametrize("name", [n for n in SCHEMAS if not n.endswith("_out")])
def test_outputs_alias_no_input_and_not_each_other(name: str) -> None:
    args, kwargs = call_of(name)
    results = getattr(namespace(), name)(*args, **kwargs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    inputs = [t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor)]
    pointers = [t.untyped_storage().data_ptr() for t in [*inputs, *results] if t.numel()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("name", [n for n in SCHEMAS if not n.endswith("_out")])
def test_fake_kernel_agrees_on_meta(name: str) -> None:
    args, kwargs = call_of(name)
    real = getattr(namespace(), name)(*args, **kwargs)

    def to_meta(v: Any) -> Any:
        return v.to("meta") if isinstance(v, torch.Tensor) else v

    fake = getattr(namespace(), name)(*map(to_meta, args), **{k: to_meta(v) for k, v in kwargs.items()})
    pairs = [(real, fake)] if isinstance(real, torch.Tensor) else list(zip(real, fake, strict=True))
    for r, f in pairs:
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


# Compile.


def test_compile_with_dynamic_tokens(compiled: ModuleType) -> None:
    """One fullgraph compilation serves several M; results equal eager bit for bit."""
    layer = small_layer()
    dense = layer.dense_weights()

    def both(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        args = layer.packed_args()
        packed = compiled.fused_moe_packed(x, *args[1:3], weights, ids, *args[5:], **layer.packed_options())
        return packed, compiled.fused_moe(x * 2, *dense, weights, ids, **layer.options) + 1

    torch._dynamo.reset()
    graph = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 8):
        other = small_layer(tokens)
        inputs = (other.x, other.topk_weights, other.topk_ids)
        assert all(torch.equal(a, b) for a, b in zip(graph(*inputs), both(*inputs), strict=True))


@pytest.mark.parametrize("name", ["unpack", "dequantize", "repack", "prepack", "moe_align", "grouped_gemm"])
def test_compile_of_the_single_ops(compiled: ModuleType, name: str) -> None:
    args, kwargs = call_of(name)
    torch._dynamo.reset()
    graph = torch.compile(getattr(compiled, name), fullgraph=True, dynamic=True, backend="aot_eager")
    got, want = graph(*args, **kwargs), getattr(compiled, name)(*args, **kwargs)
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_compile_with_inductor(compiled: ModuleType) -> None:
    """The default compiler, once: the fake strides must hold for generated code too."""
    layer = small_layer()

    def run(x: torch.Tensor) -> torch.Tensor:
        args = layer.packed_args()
        return compiled.fused_moe_packed(x.relu(), *args[1:], **layer.packed_options()) * 2

    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True)(layer.x), run(layer.x))


# Fake kernels refuse what eager refuses.


def _wrong_calls() -> list[tuple[str, str, Callable[[Call], Call], type[Exception]]]:
    def at(i: int, change: Callable[[Any], Any]) -> Callable[[Call], Call]:
        return lambda c: ((*c[0][:i], change(c[0][i]), *c[0][i + 1 :]), c[1])

    def option(**new: Any) -> Callable[[Call], Call]:
        return lambda c: (c[0], {**c[1], **new})

    return [
        ("dequantize", "group size 0", option(group_size=0), ValueError),
        ("dequantize", "unknown format", option(format=77), ValueError),
        ("dequantize", "scales cut", at(1, lambda t: t[:-1]), ValueError),
        ("dequantize", "qweight dtype", at(0, torch.Tensor.long), TypeError),
        ("unpack", "bits", option(bits=3), ValueError),
        ("repack", "zeros cut", at(2, lambda t: t[:-1]), ValueError),
        ("prepack", "layout", option(layout=9), ValueError),
        ("moe_align", "ids dtype", at(0, torch.Tensor.float), TypeError),
        ("moe_align", "block", at(2, lambda _: 0), ValueError),
        ("grouped_gemm", "offsets length", at(2, lambda t: t[:-1]), ValueError),
        ("grouped_gemm", "x width", at(0, lambda t: t[:, :-2]), ValueError),
        ("fused_moe", "weights dtype", at(3, torch.Tensor.double), TypeError),
        ("fused_moe", "topk shapes", at(4, lambda t: t[:, :1]), ValueError),
        ("fused_moe", "activation", option(activation=9), ValueError),
        ("fused_moe", "missing alpha", option(activation=4, limit=7.0, beta=1.0), ValueError),
        ("fused_moe_packed", "scales cut", at(5, lambda t: t[:, :, :1]), ValueError),
        ("fused_moe_packed", "group size -2", at(7, lambda _: -2), ValueError),
        ("fused_moe_packed", "x dtype", at(0, torch.Tensor.double), TypeError),
    ]


@pytest.mark.parametrize(
    ("name", "what", "change", "error"), _wrong_calls(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_fake_kernels_raise_the_same_errors(
    compiled: ModuleType, name: str, what: str, change: Callable[[Call], Call], error: type[Exception]
) -> None:
    args, kwargs = change(call_of(name))
    with pytest.raises(error) as eager:
        getattr(compiled, name)(*args, **kwargs)
    with FakeTensorMode() as mode:

        def convert(v: Any) -> Any:
            return mode.from_tensor(v) if isinstance(v, torch.Tensor) else v

        fake_args, fake_kwargs = [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}
        with pytest.raises(error) as traced:
            getattr(compiled, name)(*fake_args, **fake_kwargs)
    assert type(traced.value) is type(eager.value)
