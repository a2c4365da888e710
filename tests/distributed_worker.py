"""One rank of the expert-parallel tests: runs every case in every mode and leaves its results in a folder."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from int4_emu import Checkpoint, Experts, make_expert_map
from int4_emu._shards import TensorFiles
from int4_emu.integrations.distributed import ExpertParallel, local_expert_ids
from layers import Layer, make_layer

CAPACITY = 30
DEVICE = os.environ.get("DEVICE", "cpu")
MODES: dict[str, dict[str, Any]] = {
    "all_to_all": {"mode": "all_to_all"},
    "padded": {"mode": "padded", "capacity": CAPACITY},
    "all_gather": {"mode": "all_gather"},
    "auto": {},
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def even(tokens: int, world: int) -> list[int]:
    return [tokens // world + (r < tokens % world) for r in range(world)]


def last_only(tokens: int, world: int) -> list[int]:
    """Every rank but the last is without tokens."""
    return [0] * (world - 1) + [tokens]


def ragged(tokens: int, world: int) -> list[int]:
    return [tokens] if world == 1 else [tokens - 3, *[0] * (world - 2), 3]


def skewed(layer: Layer) -> Layer:
    ids = layer.topk_ids.clone()
    ids[:, 0] = 0
    ids[5:, 1:] = 1
    return layer.with_(topk_ids=ids)


def duplicates(layer: Layer) -> Layer:
    return layer.with_(topk_ids=layer.topk_ids[:, :1].expand_as(layer.topk_ids).contiguous())


def unrouted(layer: Layer) -> Layer:
    ids = layer.topk_ids.clone()
    ids[0], ids[1, 1], ids[2, 0], ids[3] = -1, 10, 2**31 - 1, -7
    weights = layer.topk_weights.clone()
    weights[0, 0] = float("nan")  # of a slot that counts for nothing
    return layer.with_(topk_ids=ids, topk_weights=weights)


# name: layer options, change of the layer, tokens per rank, packed, placement
CASES: dict[str, tuple[dict[str, Any], Callable[[Layer], Layer], Callable[[int, int], list[int]], bool, str]] = {
    "packed": ({"dtype": BF16}, lambda x: x, even, True, "linear"),
    "dense": ({"dtype": FP32}, lambda x: x, even, False, "linear"),
    "fp16": ({"dtype": FP16, "bits": (8, 4), "ids_dtype": torch.int64}, lambda x: x, ragged, True, "round_robin"),
    "skewed": ({"dtype": BF16}, skewed, even, True, "linear"),
    "duplicates": ({"dtype": BF16}, duplicates, ragged, True, "linear"),
    "unrouted": ({"dtype": FP32}, unrouted, even, True, "linear"),
    "few_experts": ({"dtype": BF16, "experts": 3}, lambda x: x, even, True, "round_robin"),
    "one_owner_of_tokens": ({"dtype": BF16}, lambda x: x, last_only, False, "linear"),
    "weight_on_input": ({"dtype": BF16, "top_k": 1}, lambda x: x, even, True, "linear"),
    "bias": ({"dtype": FP32, "bias": True, "activation": "gelu_tanh"}, lambda x: x, even, False, "linear"),
}  # fmt: skip


def case_layer(name: str) -> Layer:
    """The same on every rank and in the test."""
    options, change, *_ = CASES[name]
    shape = {
        "experts": 10,
        "hidden": 64,
        "intermediate": 48,
        "tokens": 24,
        "top_k": 3,
        "group_sizes": (32, 16),
    }
    rng = np.random.default_rng(sorted(CASES).index(name))
    return change(make_layer(rng, **(shape | options)))


def local_experts(layer: Layer, packed: bool, expert_map: torch.Tensor) -> Experts:
    mine = (expert_map >= 0).nonzero().flatten()
    mine = mine[expert_map[mine].argsort()]
    options = {k: v[mine] if k.endswith("bias") else v for k, v in layer.options.items()} | {
        "dtype": layer.dtype
    }
    if not packed:
        w13, w2 = layer.dense_weights()
        return Experts(w13[mine], w2[mine], **options)
    a, b = layer.w13, layer.w2
    assert a.qzeros is not None
    assert b.qzeros is not None
    return Experts(
        a.qweight[mine], b.qweight[mine], w13_scales=a.scales[mine], w2_scales=b.scales[mine],
        w13_qzeros=a.qzeros[mine], w2_qzeros=b.qzeros[mine], w13_group_size=a.group_size,
        w2_group_size=b.group_size, w13_bits=a.bits, w2_bits=b.bits, **options,
    )  # fmt: skip


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def run_cases(rank: int, world: int) -> dict[str, Any]:
    results: dict[str, Any] = costs(rank, world) if DEVICE == "cpu" else {}
    for name, (_, _, split, packed, placement) in CASES.items():
        layer = case_layer(name)
        counts = split(layer.x.shape[0], world)
        rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        expert_map = make_expert_map(layer.w13.codes.shape[0], world, rank, placement)
        experts = local_experts(layer, packed, expert_map).to(DEVICE)
        for mode, options in MODES.items():
            parallel = ExpertParallel(experts, expert_map=expert_map, **options)
            extra = {"apply_router_weight_on_input": True} if name == "weight_on_input" else {}
            given = on_device(layer.x[rows], layer.topk_weights[rows], layer.topk_ids[rows])
            results[f"{name}/{mode}"] = parallel(*given, **extra).cpu()
    return results


class Operators(TorchDispatchMode):
    """Counts the operators that do work; views and new tensors are free."""

    FREE = (
        "view",
        "_unsafe_view",
        "expand",
        "unsqueeze",
        "reshape",
        "slice",
        "select",
        "split",
        "unbind",
        "flatten",
        "chunk",
    )
    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        name = op.__name__.partition(".")[0]
        given = [a for a in args if isinstance(a, Tensor)]
        same = isinstance(result, Tensor) and any(
            result is t for t in given
        )  # .to() and .contiguous() of what is so already
        self.count += not (name.startswith(self.FREE) or "empty" in name or same)
        return result


def costs(rank: int, world: int) -> dict[str, Tensor]:
    """costs/mode to [operators, bytes sent] of one call."""
    from wire import Counting

    layer = case_layer("packed")
    counts = even(layer.x.shape[0], world)
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    experts = local_experts(layer, True, make_expert_map(10, world, rank))
    found = {}
    for mode, options in MODES.items():
        parallel = Counting(experts, **options)
        with Operators() as operators:
            parallel(layer.x[rows], layer.topk_weights[rows], layer.topk_ids[rows])
        found[f"costs/{mode}"] = torch.tensor([operators.count, parallel.sent])
    return found


def run_graph(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """The padded mode captured once, and what it replays for three batches, beside eager calls."""
    results = []
    for packed in (True, False):
        layer = case_layer("packed")
        experts = local_experts(layer, packed, make_expert_map(10, world, rank)).to(DEVICE)
        parallel = ExpertParallel(experts, mode="padded", capacity=24)
        x, weights, ids = on_device(layer.x, layer.topk_weights, layer.topk_ids)
        parallel(x, weights, ids)  # makes the communicator
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = parallel(x, weights, ids)
        for change in (0, 3, -4):  # other experts; then many slots unrouted
            ids.add_(change)
            x.mul_(0.5)
            graph.replay()
            results.append((y.cpu(), parallel(x, weights, ids).cpu()))
    return results


def run_syncs(rank: int, world: int) -> dict[str, list[str]]:
    """Mode to what torch says of each wait for the device during one call."""
    layer = case_layer("packed")
    experts = local_experts(layer, True, make_expert_map(10, world, rank)).to(DEVICE)
    given = on_device(layer.x, layer.topk_weights, layer.topk_ids)
    waits = {}
    for mode, options in MODES.items():
        parallel = ExpertParallel(experts, **options)
        parallel(*given)  # makes the communicator
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            parallel(*given)
            torch.cuda.set_sync_debug_mode("default")
        # Not torch's own remark that the mode is a prototype.
        waits[mode] = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    return waits


def run_checkpoint(rank: int, world: int) -> tuple[Tensor, dict[str, int]]:
    """Loads this rank's experts from the folder in $CHECKPOINT and runs the layer on every world-th token; and the bytes read by name."""
    read: dict[str, int] = {}
    original = TensorFiles._read

    def counting(self: TensorFiles, name: str, cuts: Any) -> Tensor:
        tensor = original(self, name, cuts)
        read[name] = read.get(name, 0) + tensor.nbytes
        return tensor

    TensorFiles._read = counting  # type: ignore[method-assign]
    checkpoint = Checkpoint(os.environ["CHECKPOINT"])
    ids = local_expert_ids(checkpoint.plan(0).num_experts)
    experts = checkpoint.load_experts(0, weights="packed", dtype=FP32, expert_ids=ids)
    x, weights, topk_ids = torch.load(os.environ["INPUT"])
    return ExpertParallel(experts)(x[rank::world], weights[rank::world], topk_ids[rank::world]), read


def run_refusals(rank: int, world: int) -> dict[str, str]:
    """Mistakes of one rank that every rank must hear of, with what each was told."""
    layer = case_layer("packed")
    told = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    def experts(r: int = rank, dtype: torch.dtype = BF16) -> Experts:
        return local_experts(layer.with_(x=layer.x.to(dtype)), True, make_expert_map(10, world, r))

    attempt("mode", lambda: ExpertParallel(experts(), mode="all_to_all" if rank else "all_gather"))
    attempt("dtype", lambda: ExpertParallel(experts(dtype=FP16 if rank else BF16)))
    loaded = experts()
    loaded.source = f"layer {rank} of checkpoint 0123456789ab"
    attempt("layer", lambda: ExpertParallel(loaded))
    told["source"] = "0123456789ab', 'layer 1 of checkpoint 0123456789ab'] in rank order"
    gelu = layer.with_(options={"activation": "gelu" if rank else "silu"})
    attempt("activation", lambda: ExpertParallel(local_experts(gelu, True, make_expert_map(10, world, rank))))
    small = make_layer(np.random.default_rng(0), experts=10, intermediate=32 if rank else 48)
    attempt(
        "intermediate", lambda: ExpertParallel(local_experts(small, False, make_expert_map(10, world, rank)))
    )
    attempt(
        "map", lambda: ExpertParallel(experts(), expert_map=make_expert_map(12 if rank else 10, world, rank))
    )
    attempt("no mode", lambda: ExpertParallel(experts(), mode="ring" if rank else "auto"))
    attempt("no capacity", lambda: ExpertParallel(experts(), mode="padded", capacity=None if rank else 4))
    flat = make_expert_map(10, world, rank)
    attempt("flat", lambda: ExpertParallel(experts(), expert_map=flat.view(2, 5) if rank else flat))
    twice = make_expert_map(10, world, 0)
    attempt("twice", lambda: ExpertParallel(experts(0), expert_map=twice))
    good = ExpertParallel(experts(), mode="all_to_all")
    x = layer.x if rank else layer.x[:, :40]
    attempt("shape", lambda: good(x, layer.topk_weights, layer.topk_ids))
    k = 3 if rank else 2
    attempt("k", lambda: good(layer.x, layer.topk_weights[:, :k], layer.topk_ids[:, :k]))
    attempt("x dtype", lambda: good(layer.x.half(), layer.topk_weights, layer.topk_ids))
    with torch.inference_mode(False), torch.enable_grad():
        x = layer.x.clone().requires_grad_()
        attempt("grad", lambda: good(x, layer.topk_weights, layer.topk_ids))
    y = good(layer.x, layer.topk_weights, layer.topk_ids)  # nothing is left out of step
    told["after"] = str(bool(y.isfinite().all()))
    padded = ExpertParallel(experts(), mode="padded", capacity=10)
    attempt("capacity", lambda: padded(layer.x, layer.topk_weights, layer.topk_ids))
    return told


def run_death(rank: int, world: int) -> str:
    """The last rank dies or sleeps in place of its call, or dies in its experts."""
    layer, how = case_layer("packed"), os.environ["HOW"]
    experts = local_experts(layer, True, make_expert_map(10, world, rank))
    parallel = ExpertParallel(experts, **MODES["padded" if how == "sleep" else "all_to_all"])
    if rank == world - 1:
        if how == "sleep":
            time.sleep(20)
        if how != "in its experts":
            os._exit(0)
        experts.partial_sums = lambda *args, **options: os._exit(0)  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        parallel(layer.x, layer.topk_weights, layer.topk_ids)
    except RuntimeError as error:
        return f"{time.monotonic() - start:.1f} s: {error}"
    return "no error"


def main() -> None:
    job, (rank, world) = sys.argv[1], map(int, sys.argv[2:4])
    folder, timeout = Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=float(timeout)),
    )
    jobs: dict[str, Callable[[int, int], Any]] = {
        "cases": run_cases,
        "graph": run_graph,
        "syncs": run_syncs,
        "checkpoint": run_checkpoint,
        "refusals": run_refusals,
        "death": run_death,
    }
    with torch.inference_mode():
        torch.save(jobs[job](rank, world), folder / f"{rank}.pt")
    if job == "death":
        os._exit(0)  # gloo's threads still wait for the dead peer and can abort an orderly end
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
