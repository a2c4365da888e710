"""opcheck and torch.compile on CUDA tensors, for every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from int4_emu import ops
from on_gpu import BOTH, gpu_layer, needs_gpu, to_gpu
from op_calls import OP_LIST, call_of

pytestmark = [needs_gpu, pytest.mark.gpu]

FUNCTIONAL = [name for name in OP_LIST if not name.endswith("_out")]


@pytest.mark.parametrize("name", OP_LIST)
def test_opcheck(name: str) -> None:
    args, kwargs = call_of(name)
    torch.library.opcheck(getattr(torch.ops.int4_emu, name).default, to_gpu(args), to_gpu(kwargs))


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else []


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_each_op_in_one_graph_of_any_shape(name: str) -> None:
    args, kwargs = to_gpu(call_of(name)[0]), to_gpu(call_of(name)[1])
    function = getattr(ops, name)
    torch._dynamo.reset()
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert same(graph(*args, **kwargs), function(*args, **kwargs))


@pytest.mark.parametrize("name", ["dequantize", "repack", "grouped_gemm", "fused_moe", "fused_moe_packed"])
def test_out_variants_write_into_given_memory(name: str) -> None:
    """Compiled and eager; nothing beside `out` is touched, also where it lies at an odd element."""
    args, kwargs = to_gpu(call_of(name)[0]), to_gpu(call_of(name)[1])
    want = flat(getattr(torch.ops.int4_emu, name)(*args, **kwargs))
    kwargs.pop("dtype", None)

    def guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.full((like.numel() + 64,), 255, dtype=torch.uint8, device="cuda").to(like.dtype)
        return memory, memory[33 : 33 + like.numel()].view(like.shape)

    pairs = [guarded(t) for t in want]
    names = ["out"] if len(pairs) == 1 else ["out_qweight", "out_scales", "out_qzeros"]
    outs = {n: view for n, (_, view) in zip(names, pairs, strict=True)}
    torch._dynamo.reset()
    op = getattr(torch.ops.int4_emu, f"{name}_out")
    compiled = torch.compile(lambda: op(*args, **kwargs, **outs), fullgraph=True, backend="aot_eager")
    for run in (lambda: op(*args, **kwargs, **outs), compiled):
        for view in outs.values():
            view.fill_(7)
        run()
        for (memory, view), t in zip(pairs, want, strict=True):
            assert torch.equal(view, t)
            edge = torch.cat((memory[:33], memory[33 + t.numel() :]))
            assert (edge == torch.tensor(255, dtype=torch.uint8, device="cuda").to(t.dtype)).all()


@BOTH
def test_one_compilation_serves_any_number_of_tokens(packed: bool) -> None:
    """The default compiler with a dynamic M, from the decode path to many tiles; bits equal to eager."""
    layers = [gpu_layer(tokens=t, packed=packed) for t in (3, 17, 300, 1)]
    a, b, dense = layers[0].w13, layers[0].w2, layers[0].dense

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if dense is not None:
            return ops.fused_moe(x, *dense, weights, ids) * 2
        packed_args = (x, a.codes, b.codes, weights, ids, a.scales, b.scales, 32, 32)
        return ops.fused_moe_packed(*packed_args, w13_qzeros=a.zeros, w2_qzeros=b.zeros) * 2

    torch._dynamo.reset()
    count = torch._dynamo.utils.counters["stats"]
    before = count["unique_graphs"]
    graph = torch.compile(run, fullgraph=True, dynamic=True)
    for layer in layers[:3]:
        assert torch.equal(graph(layer.x, layer.ids, layer.weights), layer.run() * 2)
    assert count["unique_graphs"] == before + 1
    last = layers[3]  # a size of one is always specialised
    assert torch.equal(graph(last.x, last.ids, last.weights), last.run() * 2)


def test_reduce_overhead_replays_every_op() -> None:
    """mode="reduce-overhead": all ops in one recorded CUDA graph, replayed over new values."""
    calls = {name: tuple(map(to_gpu, call_of(name))) for name in FUNCTIONAL}

    def run(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name, (args, kwargs) in calls.items():
            if name == "moe_align":
                args = (ids, *args[1:])
            if name.startswith("fused_moe"):
                args = (x, *args[1:4], ids, *args[5:])
            results += flat(getattr(ops, name)(*args, **kwargs))
        return results

    args = calls["fused_moe"][0]
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    skips = counters["cudagraph_skips"]
    graph = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        x = args[0] * (step + 1)
        ids = (args[4] + step) % 4 - 1  # -1 among them
        torch.compiler.cudagraph_mark_step_begin()
        assert same([t.clone() for t in graph(x, ids)], run(x, ids)), f"step {step}"
    assert counters["cudagraph_skips"] == skips, "inductor recorded no CUDA graph"
