"""Sizes at the edges on a GPU: nothing to do, offsets past 2^31, many experts, no tile multiple, no memory, wrong devices, PTX."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import int4_emu
from int4_emu import _library, ops
from on_gpu import (
    BOTH,
    GpuLayer,
    Packed,
    captured,
    gpu_layer,
    needs_gpu,
    poison_allocator,
    random_packed,
    to_gpu,
)
from op_calls import OP_LIST, call_of

pytestmark = [needs_gpu, pytest.mark.gpu]


@pytest.fixture
def much_memory() -> Iterator[None]:
    """30 GiB of the GPU: one such test at a time, whichever process of a parallel run it is in."""
    with (Path(tempfile.gettempdir()) / "int4_emu_gpu_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        free = torch.cuda.mem_get_info()[0] / (1 << 30)
        if free < 30:
            pytest.skip(f"needs 30 GiB of GPU memory, {free:.1f} are free")
        yield
        gc.collect()
        torch.cuda.empty_cache()


# Nothing to do.


@BOTH
def test_no_tokens(packed: bool) -> None:
    """[0, H] of x's dtype, captured as well; the next call is unharmed."""
    layer = gpu_layer(tokens=6, packed=packed)
    want = layer.run()
    empty = layer.with_(x=layer.x[:0], ids=layer.ids[:0], weights=layer.weights[:0])
    got = empty.run()
    assert got.shape == (0, 128) and got.dtype == layer.x.dtype and got.device == layer.x.device
    graph, _ = captured(lambda: (empty.run(), layer.run()))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(layer.run(), want)
    with pytest.raises(ValueError, match="topk_ids"):
        empty.with_(ids=layer.ids).run()
    slots, owners, offsets, total = ops.moe_align(layer.ids[:0], 8, 4)
    assert (slots == 0).all() and (owners == -1).all() and not offsets.any() and not total.any()


@BOTH
def test_no_local_experts(packed: bool) -> None:
    layer = gpu_layer(tokens=6, packed=packed)

    def none(w: Packed) -> Packed:
        return Packed(w.codes[:0], w.scales[:0], w.zeros[:0], w.group_size)

    dense = None if layer.dense is None else (layer.dense[0][:0], layer.dense[1][:0])
    poison_allocator()
    got = layer.with_(w13=none(layer.w13), w2=none(layer.w2), dense=dense).run()
    assert got.shape == layer.x.shape and not got.any()


# Shapes.


@pytest.mark.parametrize(("hidden", "intermediate", "group_size"), [
    (2880, 2880, 32), (2880, 720, 48), (1344, 672, 32), (200, 136, 8), (70, 42, 14), (34, 22, 2), (2, 2, 2),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 7, 150])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@BOTH
def test_sizes_that_are_no_multiple_of_a_tile(
    packed: bool, dtype: torch.dtype, tokens: int, hidden: int, intermediate: int, group_size: int
) -> None:
    layer = gpu_layer(
        tokens=tokens, hidden=hidden, intermediate=intermediate, group_size=group_size, dtype=dtype,
        packed=packed, experts=5, top_k=3,
    )  # fmt: skip
    poison_allocator()
    layer.check(layer.run(), list(range(min(tokens, 12))))


@pytest.mark.parametrize("experts", [1025, 3000])
@pytest.mark.parametrize("tokens", [4, 900])
@BOTH
def test_more_than_1024_experts(packed: bool, tokens: int, experts: int) -> None:
    layer = gpu_layer(tokens=tokens, experts=experts, hidden=64, intermediate=32, top_k=8, packed=packed)
    layer.ids[0, 0] = experts - 1
    poison_allocator()
    layer.check(layer.run(), list(range(4)))
    aligned = ops.moe_align(layer.ids, experts, 16)
    want = ops.moe_align(layer.ids.cpu(), experts, 16)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(aligned, want, strict=True))


# Offsets past 2^31 elements. What is compared lies at both ends and in the middle.


def ends(tokens: int) -> list[int]:
    return [0, 1, tokens // 2, tokens - 2, tokens - 1]


def check_rows_alone(layer: GpuLayer, got: torch.Tensor) -> None:
    """Against float64, and against a call with these rows only."""
    rows = ends(len(got))
    layer.check(got, rows)
    alone = layer.with_(x=layer.x[rows], ids=layer.ids[rows], weights=layer.weights[rows])
    alone.check(alone.run())


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(("tokens", "top_k", "hidden", "intermediate"), [
    (65_537, 4, 64, 4096),  # rows * 2I
    (65_537, 8, 4096, 64),  # rows * H, between the down projection and the sum
    (524_289, 1, 4096, 64),  # M * H: x and the result themselves
])  # fmt: skip
@BOTH
def test_row_offsets_past_2_31(packed: bool, tokens: int, top_k: int, hidden: int, intermediate: int) -> None:
    assert tokens * top_k * max(hidden, 2 * intermediate) > 2**31
    layer = gpu_layer(
        tokens=tokens,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        experts=max(2, top_k),
        packed=packed,
    )
    check_rows_alone(layer, layer.run())


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("tokens", [1, 64])
@BOTH
def test_expert_offsets_past_2_31(packed: bool, tokens: int) -> None:
    """E * N * K: bytes of packed weights, elements of dense ones."""
    experts = 320 if packed else 160
    layer = gpu_layer(
        tokens=tokens, experts=experts, hidden=4096, intermediate=2048 if packed else 2080, packed=packed
    )
    size = layer.w13.codes.numel() if layer.dense is None else layer.dense[0].numel()
    assert size > 2**31
    layer.ids[:, 0] = experts - 1
    layer.ids[:, 1] = torch.arange(tokens, device="cuda") % 2 * (experts - 2)
    layer.check(layer.run(), list(range(min(tokens, 3))))


@pytest.mark.usefixtures("much_memory")
def test_dequantize_past_2_31_elements() -> None:
    w = random_packed(160, 4096, 4096, 32, torch.Generator("cuda").manual_seed(0))
    out = ops.dequantize(w.codes, w.scales, w.zeros, group_size=32)
    assert out.numel() > 2**31
    for e in (0, 127, 128, 159):
        assert torch.equal(out[e], w.exact(e).bfloat16())


@pytest.mark.usefixtures("much_memory")
def test_grouped_gemm_past_2_31_elements() -> None:
    rows, k = 524_289, 4096
    w = random_packed(2, 64, k, 32, torch.Generator("cuda").manual_seed(0))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    offsets = torch.tensor([0, 5, rows - 1], device="cuda")
    got = ops.grouped_gemm(x, w.codes, offsets, scales=w.scales, qzeros=w.zeros, group_size=32)
    for row, expert in ((0, 0), (4, 0), (5, 1), (rows - 2, 1)):
        want = w.exact(expert) @ x[row].double()
        assert ((got[row].double() - want).norm() / want.norm()).item() < 1e-2, row
    assert not got[rows - 1].any()


# Errors that name what is wrong; the next call works.


def test_no_memory_for_the_workspace_or_the_output() -> None:
    # What is kept must not be cut from a large block that a test before, or the first run, has left in the cache.
    gc.collect()
    torch.cuda.empty_cache()
    # 32 MiB of result, gigabytes between the projections.
    layer = gpu_layer(tokens=65_536, top_k=8, hidden=256, intermediate=4096)
    # One token a million times: nothing but the result is large.
    many = layer.with_(
        x=layer.x[:1].expand(1 << 20, -1),
        ids=layer.ids[:1].repeat(1 << 20, 1),
        weights=layer.weights[:1].repeat(1 << 20, 1),
    )
    torch.cuda.empty_cache()
    want = layer.run()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        for run, what in ((many.run, "output"), (layer.run, "workspace")):
            sentence = rf"^out of memory: no [0-9.e+]+ MiB of {what} on cuda:0$"
            with pytest.raises(torch.OutOfMemoryError, match=sentence):
                run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(layer.run(), want)


@pytest.mark.parametrize("name", OP_LIST)
def test_tensors_on_two_devices_are_named(name: str) -> None:
    """Each tensor in turn left on the CPU, the first one too."""
    args, kwargs = call_of(name)
    every: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    tensors = [key for key, value in every.items() if isinstance(value, torch.Tensor)]
    if len(tensors) == 1:
        pytest.skip("takes one tensor")
    names = [a.name for a in getattr(torch.ops.int4_emu, name).default._schema.arguments]
    for key in tensors:
        moved = {k: v if k == key else to_gpu(v) for k, v in every.items()}
        positional = [moved.pop(i) for i in range(len(args))]
        with pytest.raises((TypeError, ValueError), match=r"(?s)(?=.*cuda:0)(?=.*cpu)") as error:
            getattr(torch.ops.int4_emu, name)(*positional, **moved)
        wrong = names[key] if isinstance(key, int) else key
        assert key == 0 or wrong in str(error.value)
    getattr(torch.ops.int4_emu, name)(*to_gpu(args), **to_gpu(kwargs))
    if name == "fused_moe":
        with pytest.raises(TypeError, match=r"(?s)(?=.*cuda:0)(?=.*cpu)"):
            ops.fused_moe(*to_gpu(args[:1]), *args[1:], **kwargs)


def test_a_layer_on_the_gpu_is_served_by_its_kernels() -> None:
    """Selection names the backend and the family, also while a stream captures."""
    for dtype in (torch.bfloat16, torch.float32):
        layer = gpu_layer(tokens=3, dtype=dtype, packed=False)
        assert layer.dense is not None
        experts = int4_emu.Experts(*layer.dense, dtype=dtype, top_k=2)
        assert "gpu" in str(experts.selection)
        layer.check(experts(layer.x, layer.weights, layer.ids))


_JIT_PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import torch
from int4_emu import ops, reference
from layers import make_layer
import numpy as np

# Copies only: under CUDA_FORCE_PTX_JIT torch's own kernels, which carry no PTX for this GPU, do not run.
for dtype, tokens in ((torch.bfloat16, 2), (torch.bfloat16, 90), (torch.float16, 5)):
    layer = make_layer(np.random.default_rng(0), tokens=tokens, dtype=dtype, hidden=128, intermediate=96)
    for dense in (False, True):
        if dense:
            args, options = (layer.x, *layer.dense_weights(), layer.topk_weights, layer.topk_ids), layer.options
        else:
            args, options = layer.packed_args(), layer.packed_options()
        move = lambda v: v.cuda() if isinstance(v, torch.Tensor) else v
        name = "fused_moe" if dense else "fused_moe_packed"
        got = getattr(ops, name)(*map(move, args), **{{k: move(v) for k, v in options.items()}}).cpu().double()
        want = getattr(reference, name)(*args, **options).double()
        error = ((got - want).norm() / want.norm()).item()
        assert error < 1e-2, (dtype, tokens, dense, error)
print("right")
"""


def test_compiled_from_ptx(tmp_path: Path) -> None:
    """The kernels of cards to come: their PTX, compiled by the driver, in place of this card's machine code."""
    if "compute_" not in str(_library.gpu_architectures()[0]):
        pytest.skip(f"this build has no PTX: {_library.gpu_architectures()[0]}")
    env = os.environ | {
        "CUDA_FORCE_PTX_JIT": "1",
        "CUDA_CACHE_PATH": str(tmp_path),
        "CUDA_MODULE_LOADING": "LAZY",
    }
    program = _JIT_PROGRAM.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr[-2000:]
