"""CUDA graphs, streams, threads and hidden synchronisation: every op on a GPU, nothing here without one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from on_gpu import BOTH, captured, gpu_layer, needs_gpu, poison_allocator, routings, to_gpu
from op_calls import OP_LIST, call_of

pytestmark = [needs_gpu, pytest.mark.gpu]

# Rows per expert from one to many: the decode kernels, one token tile, several.
TOKENS_LIST = [1, 5, 40, 300]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


def run_op(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the op returns or writes."""
    result = getattr(torch.ops.int4_emu, name)(*args, **kwargs)
    written = [v for k, v in kwargs.items() if k.startswith("out")]
    return written if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("tokens", TOKENS_LIST)
@DTYPES
@BOTH
def test_replay_follows_what_changed_in_place(packed: bool, dtype: torch.dtype, tokens: int) -> None:
    """Captured once; ids, router weights and x change in place: each replay equals a fresh eager call bit for bit."""
    layer = gpu_layer(tokens=tokens, dtype=dtype, packed=packed, experts=16, top_k=4, ids_dtype=torch.int64)
    graph, out = captured(layer.run)
    graph.replay()
    layer.check(out)
    first = out.clone()
    for seed, (name, ids) in enumerate(routings(layer.ids, 16).items()):
        rng = torch.Generator("cuda").manual_seed(seed)
        layer.ids.copy_(ids)
        layer.weights.copy_(torch.rand(layer.weights.shape, device="cuda", generator=rng))
        layer.x.copy_(torch.randn(layer.x.shape, device="cuda", generator=rng))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer.run()), name
        layer.check(replayed, list(range(min(tokens, 40))))
        assert not torch.equal(replayed, first), "the replay did not see the change"
    assert (replayed == 0).all(), "the last routing leaves every token without an expert"


@pytest.mark.parametrize("name", OP_LIST)
def test_every_op_can_be_captured(name: str) -> None:
    args, kwargs = to_gpu(call_of(name)[0]), to_gpu(call_of(name)[1])
    want = [t.clone() for t in run_op(name, args, kwargs)]
    graph, got = captured(lambda: run_op(name, args, kwargs))
    for t in got:
        t.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", OP_LIST)
def test_no_op_synchronises(name: str) -> None:
    args, kwargs = to_gpu(call_of(name)[0]), to_gpu(call_of(name)[1])
    want = [t.clone() for t in run_op(name, args, kwargs)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            want[0].sum().item()  # the mode works
        got = run_op(name, args, kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [1, 300])
@BOTH
def test_work_goes_to_the_current_stream(packed: bool, tokens: int) -> None:
    """A slow producer on a side stream: a kernel on any other stream would read x before it is there."""
    layer = gpu_layer(tokens=tokens, packed=packed)
    want = layer.run()
    right, late = layer.x.clone(), layer.with_(x=torch.full_like(layer.x, float("nan")))
    late.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.x.copy_(right)
        got = late.run()
    stream.synchronize()
    assert torch.equal(got, want)


def test_two_threads_on_two_streams() -> None:
    """Each thread has its layer and stream; nothing may be shared between calls in flight."""
    layers = [
        gpu_layer(tokens=t, packed=p, seed=s) for t, p, s in ((3, True, 1), (70, True, 2), (70, False, 3))
    ]
    wants = [layer.run() for layer in layers]
    torch.cuda.synchronize()
    barrier, wrong = threading.Barrier(len(layers)), []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            barrier.wait()
            results = [layers[number].run() for _ in range(30)]
        stream.synchronize()
        wrong.extend(number for r in results if not torch.equal(r, wants[number]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(layers))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("tokens", TOKENS_LIST)
@DTYPES
@BOTH
def test_bits_are_the_same_every_time(packed: bool, dtype: torch.dtype, tokens: int) -> None:
    """Over repeats, whatever the scratch memory held before."""
    layer = gpu_layer(
        tokens=tokens, dtype=dtype, packed=packed, experts=16, top_k=4, hidden=256, intermediate=192
    )
    want = layer.run()
    layer.check(want, list(range(min(tokens, 20))))
    for _ in range(10):
        poison_allocator()
        assert torch.equal(layer.run(), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    layer = gpu_layer(tokens=9)
    want = layer.run().cpu()
    with torch.cuda.device(0):
        moved = layer.with_(
            **{n: getattr(layer, n).to("cuda:1") for n in ("x", "ids", "weights")},
            **{
                n: type(w)(w.codes.to("cuda:1"), w.scales.to("cuda:1"), w.zeros.to("cuda:1"), w.group_size)
                for n, w in (("w13", layer.w13), ("w2", layer.w2))
            },
        )
        got = moved.run()
        assert got.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        with pytest.raises(TypeError, match=r"(?s)(?=.*cuda:0)(?=.*cuda:1)"):
            layer.with_(x=moved.x).run()
    assert torch.equal(got.cpu(), want)
