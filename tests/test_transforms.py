"""Autocast, functional transforms and DTensor over the ops and modules: right, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import oracle
from int4_emu import Experts, Int4Linear, ops
from layers import make_layer, to_numpy
from on_gpu import needs_gpu
from op_calls import OP_LIST, call_of

Function = Callable[[Tensor], Tensor]
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])]
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


def experts_of(layer: Any, packed: bool, dtype: torch.dtype, **options: Any) -> Experts:
    a, b = layer.w13, layer.w2
    if not packed:
        return Experts(*(w.to(dtype) for w in layer.dense_weights()), dtype=dtype, **options)
    return Experts(
        a.qweight, b.qweight, w13_scales=a.scales, w2_scales=b.scales, w13_qzeros=a.qzeros, w2_qzeros=b.qzeros,
        w13_group_size=a.group_size, w2_group_size=b.group_size, dtype=dtype, **options,
    )  # fmt: skip


# Autocast.


@BOTH
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_casts_the_input_and_keeps_fp32_inside(
    packed: bool, backend: str, rng: np.random.Generator
) -> None:
    """fp32 x under bf16 autocast: what the layer gives for x in bf16, or with fp32 weights for x in fp32, rounded once."""
    layer = make_layer(rng, dtype=torch.float32)
    experts = experts_of(layer, packed, torch.float32, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(layer.x, layer.topk_weights, layer.topk_ids)
        again = experts(layer.x.bfloat16(), layer.topk_weights, layer.topk_ids)
    assert got.dtype == again.dtype == torch.bfloat16
    if packed:
        want = experts(layer.x.bfloat16(), layer.topk_weights, layer.topk_ids)
        assert torch.equal(got, want) and torch.equal(again, want)
    else:
        assert torch.equal(got, experts(layer.x, layer.topk_weights, layer.topk_ids).bfloat16())
    # Sums in bf16 would be off by far more than the rounding of x and of the result.
    exact = layer.with_(x=layer.x.bfloat16().float() if packed else layer.x).want(packed=packed).value
    assert np.linalg.norm(to_numpy(got) - exact) <= (6e-3 if packed else 2.5e-3) * np.linalg.norm(exact)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_of_a_linear(device: str, rng: np.random.Generator) -> None:
    w = make_layer(rng).w13
    assert w.qzeros is not None
    linear = Int4Linear(w.qweight[0], w.scales[0], w.qzeros[0], group_size=w.group_size).to(device)
    x = torch.randn(4, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        got = linear(x)
    assert torch.equal(got, linear(x.bfloat16())) and got.dtype == torch.bfloat16


@BOTH
def test_autocast_in_a_compiled_graph(packed: bool, rng: np.random.Generator) -> None:
    """The casts are part of the graph, whether the region is around it or in it."""
    layer = make_layer(rng, dtype=torch.float32)
    experts = experts_of(layer, packed, torch.float32)
    args = (layer.x, layer.topk_weights, layer.topk_ids)

    def inside(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return experts(*args)

    torch._dynamo.reset()
    around = torch.compile(experts, fullgraph=True, backend="aot_eager")
    within = torch.compile(inside, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = inside(*args)
        assert torch.equal(within(*args), want) and want.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(around(*args), want)
        assert around(*args).dtype == torch.float32  # compiled anew


def test_autocast_leaves_float64_to_the_checks(rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="hidden_states must be"):
        layer.with_(x=layer.x.double()).run_packed(ops)


# Functional transforms.


def floating_ops(rng: np.random.Generator) -> dict[str, tuple[Function, Tensor]]:
    """Each op with a floating result as a function of one tensor."""
    layer = make_layer(rng)
    a, b = layer.w13, layer.w2
    dense, offsets = layer.dense_weights(), torch.tensor([0, 1, 3, 4, 5, 7], dtype=torch.int32)
    routed = (layer.topk_weights, layer.topk_ids)
    return {
        "dequantize": (lambda s: ops.dequantize(a.qweight, s, a.qzeros, group_size=a.group_size), a.scales.float()),
        "grouped_gemm": (
            lambda x: ops.grouped_gemm(
                x, a.qweight, offsets, scales=a.scales, qzeros=a.qzeros, group_size=a.group_size
            ),
            layer.x,
        ),
        "fused_moe": (lambda x: ops.fused_moe(x, *dense, *routed), layer.x),
        "fused_moe_packed": (
            lambda x: ops.fused_moe_packed(
                x, a.qweight, b.qweight, *routed, a.scales, b.scales, a.group_size, b.group_size,
                w13_qzeros=a.qzeros, w2_qzeros=b.qzeros,
            ),
            layer.x,
        ),
    }  # fmt: skip


NAMES = ["dequantize", "grouped_gemm", "fused_moe", "fused_moe_packed"]


@pytest.mark.parametrize("name", OP_LIST)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_one_call_after_the_other(name: str) -> None:
    """Over the first argument, codes and ids too; torch itself refuses it for ops that write into their arguments."""
    (first, *rest), options = call_of(name)
    op = getattr(torch.ops.int4_emu, name)

    def function(t: Tensor) -> Any:
        return op(t, *rest, **options)

    batch = torch.stack([first, first.flip(0), first.flip(-1)])
    if name.endswith("_out"):
        with pytest.raises(RuntimeError, match=f"Batching rule not implemented for int4_emu::{name}"):
            torch.vmap(function)(batch)
        return
    got, want = torch.vmap(function)(batch), [function(t) for t in batch]
    if isinstance(got, Tensor):
        got, want = (got,), [(t,) for t in want]
    for i, results in enumerate(got):
        assert torch.equal(results, torch.stack([w[i] for w in want]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
def test_reverse_transforms_are_refused(name: str, transform: str, rng: np.random.Generator) -> None:
    function, x = floating_ops(rng)[name]
    run = {
        "grad": lambda: torch.func.grad(lambda t: function(t).sum())(x),
        "vjp": lambda: torch.func.vjp(function, x),
        "jacrev": lambda: torch.func.jacrev(function)(x),
    }
    with pytest.raises(NotImplementedError, match=f"int4_emu::{name} is inference only and has no backward"):
        run[transform]()


@pytest.mark.parametrize("name", NAMES)
def test_forward_derivatives_are_refused_and_not_dropped(name: str, rng: np.random.Generator) -> None:
    function, x = floating_ops(rng)[name]
    with pytest.raises(
        NotImplementedError, match=f"int4_emu::{name} is inference only and has no forward-mode"
    ):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        assert torch.equal(function(x), function(x.clone()))  # nothing to derive
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(forward_ad.make_dual(x, torch.ones_like(x)))


def test_what_does_not_depend_on_the_variable_may_be_called(rng: np.random.Generator) -> None:
    function, x = floating_ops(rng)["fused_moe_packed"]
    gradient = torch.func.grad(lambda t: (t * function(x)).sum())(x)
    assert torch.equal(gradient, function(x))


# DTensor and tensor-parallel plans.


@pytest.fixture
def mesh() -> Any:
    """One process as a device mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@BOTH
def test_dtensors_are_refused_with_the_way_out(mesh: Any, packed: bool, rng: np.random.Generator) -> None:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = make_layer(rng)
    experts = experts_of(layer, packed, torch.float32)
    x = distribute_tensor(layer.x, mesh, [Replicate()])
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"hidden_states .* got a DTensor.*tp_rank="),
    ):
        experts(x, layer.topk_weights, layer.topk_ids)
    with pytest.raises(NotImplementedError, match="ColwiseParallel currently only support"):
        parallelize_module(experts, mesh, ColwiseParallel())
    want = experts(layer.x, layer.topk_weights, layer.topk_ids)
    assert torch.equal(experts(x.to_local(), layer.topk_weights, layer.topk_ids), want)
    distribute_module(experts, mesh)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"w13 must be a plain tensor, got a DTensor"),
    ):
        experts(layer.x, layer.topk_weights, layer.topk_ids)


def test_oracle_is_independent_of_autocast(rng: np.random.Generator) -> None:
    """The packed op inside a region that is switched off again."""
    layer = make_layer(rng)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        got = layer.run_packed(ops)
    assert got.dtype == torch.float32
    oracle.check(to_numpy(got), layer.want(packed=True))
