"""Two GPUs: the device guard of every op, and expert parallelism over NCCL. Skipped where there are fewer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import oracle
from distributed_worker import CASES, MODES, case_layer
from int4_emu import ops
from layers import to_numpy
from on_gpu import BOTH, GpuLayer, captured, gpu_layer, needs_gpu, to_gpu
from op_calls import OP_LIST, call_of
from test_distributed import run_ranks

pytestmark = [
    needs_gpu,
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"two GPUs: torch sees {torch.cuda.device_count()}"
    ),
]


def call(name: str, device: str) -> tuple[Tensor, ...]:
    """The tensors that the op's small call returns or writes."""
    args, kwargs = to_gpu(call_of(name), device)
    result = getattr(torch.ops.int4_emu, name)(*args, **kwargs)
    if result is None:
        return tuple(v for k, v in kwargs.items() if k in ("out", "out_qweight", "out_scales", "out_qzeros"))
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", OP_LIST)
def test_case_25_tensors_of_the_other_device(name: str) -> None:
    """Current device 0, tensors on device 1: the numbers of device 0, memory on device 1 alone, and the current device stays."""
    torch.cuda.set_device(0)
    want = call(name, "cuda:0")
    call(name, "cuda:1")
    torch.cuda.synchronize(0)
    used = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    got = call(name, "cuda:1")
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == used, "workspace on the current device"
    for a, b in zip(got, want, strict=True):
        assert a.device.index == 1
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    "name", [n for n in OP_LIST if sum(isinstance(a, Tensor) for a in call_of(n)[0]) > 1]
)
def test_tensors_on_two_devices_are_refused(name: str) -> None:
    """Every tensor in turn is left on device 0; the error names both devices."""
    args, kwargs = to_gpu(call_of(name), "cuda:1")
    for i in [i for i, a in enumerate(args) if isinstance(a, Tensor)][1:]:
        mixed = (*args[:i], args[i].to("cuda:0"), *args[i + 1 :])
        with pytest.raises((TypeError, ValueError), match=r"cuda:1.*cuda:0"):
            getattr(torch.ops.int4_emu, name)(*mixed, **kwargs)
    assert torch.cuda.current_device() == 0


def run_on(layer: GpuLayer, device: str) -> Callable[[], Tensor]:
    """The layer's call with every tensor on `device`."""
    a, b = layer.w13, layer.w2
    if layer.dense is not None:
        dense = to_gpu((layer.x, *layer.dense, layer.weights, layer.ids), device)
        return lambda: ops.fused_moe(*dense)
    args = to_gpu((layer.x, a.codes, b.codes, layer.weights, layer.ids, a.scales, b.scales), device)
    zeros = to_gpu({"w13_qzeros": a.zeros, "w2_qzeros": b.zeros}, device)
    return lambda: ops.fused_moe_packed(*args, a.group_size, b.group_size, **zeros)


@BOTH
def test_two_threads_on_two_devices(packed: bool) -> None:
    runs = [run_on(gpu_layer(tokens=40, packed=packed, dtype=torch.bfloat16), f"cuda:{i}") for i in range(2)]
    want = [run().cpu() for run in runs]
    wrong: list[str] = []

    def work(index: int) -> None:
        wrong.extend(
            f"device {index}, turn {turn}"
            for turn in range(50)
            if not torch.equal(runs[index]().cpu(), want[index])
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@BOTH
def test_capture_on_the_second_device(packed: bool) -> None:
    run = run_on(gpu_layer(tokens=5, packed=packed, dtype=torch.bfloat16), "cuda:1")
    want = run()
    with torch.cuda.device(1):
        graph, out = captured(run)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert torch.cuda.current_device() == 0


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """name/mode -> outputs in rank order, for one rank and for two."""
    folder = tmp_path_factory.mktemp("nccl")
    found = {}
    for world in (1, 2):
        ranks = run_ranks("cases", world, folder / str(world), DEVICE="cuda")
        found[world] = {key: torch.cat([rank[key] for rank in ranks]) for key in ranks[0]}
    return found


@pytest.mark.parametrize("name", CASES)
def test_expert_parallel_over_nccl(nccl: dict[int, dict[str, Tensor]], name: str) -> None:
    """Against float64 in every mode; the ways that sum in slot order have the bits of one rank."""
    layer = case_layer(name)
    if name == "weight_on_input":
        layer = layer.with_(options=layer.options | {"apply_router_weight_on_input": True})
    want = layer.with_(topk_weights=layer.topk_weights.nan_to_num()).want(packed=CASES[name][3])
    for world in (1, 2):
        for mode in MODES:
            oracle.check(to_numpy(nccl[world][f"{name}/{mode}"]), want)
    for mode in ("all_to_all", "padded"):
        assert torch.equal(nccl[2][f"{name}/{mode}"], nccl[1][f"{name}/{mode}"]), mode


def test_padded_mode_in_a_cuda_graph(tmp_path: Path) -> None:
    for rank in run_ranks("graph", 2, tmp_path / "ranks", DEVICE="cuda"):
        assert len(rank) == 6
        for replayed, eager in rank:
            assert torch.equal(replayed, eager)
        assert not torch.equal(rank[0][0], rank[1][0])


def test_the_sizes_are_the_only_wait(tmp_path: Path) -> None:
    for waits in run_ranks("syncs", 2, tmp_path / "ranks", DEVICE="cuda"):
        assert {mode: len(said) for mode, said in waits.items()} == {
            "all_to_all": 1, "padded": 0, "all_gather": 1, "auto": 1,
        }, waits  # fmt: skip
