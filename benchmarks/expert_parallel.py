"""Expert parallelism over NCCL beside one rank: one layer of Qwen3-30B-A3B's shape, tokens per second and bytes on the wire.

python benchmarks/expert_parallel.py [--ranks 2] [--json FILE]; needs as many GPUs as ranks and says so where there are fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from int4_emu import Experts, make_expert_map
from wire import Counting

EXPERTS, HIDDEN, INTER, TOP_K, GROUP = 128, 2048, 768, 8, 32
TOKENS = (1, 16, 64, 4096)
ROUNDS = 5


def local_experts(world: int, rank: int, packed: bool) -> Experts:
    rng = torch.Generator("cuda").manual_seed(rank)
    mine = int((make_expert_map(EXPERTS, world, rank) >= 0).sum())

    def codes(n: int, k: int) -> Tensor:
        return torch.randint(0, 256, (mine, n, k // 2), dtype=torch.uint8, device="cuda", generator=rng)

    def scales(n: int, k: int) -> Tensor:
        return (
            (torch.rand(mine, n, k // GROUP, device="cuda", generator=rng) + 0.5) / (6 * k**0.5)
        ).bfloat16()

    if packed:
        return Experts(
            codes(2 * INTER, HIDDEN), codes(HIDDEN, INTER), w13_scales=scales(2 * INTER, HIDDEN),
            w2_scales=scales(HIDDEN, INTER), w13_group_size=GROUP, w2_group_size=GROUP,
        )  # fmt: skip
    dense = [
        torch.randn(mine, n, k, device="cuda", generator=rng, dtype=torch.bfloat16) / k**0.5
        for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    ]
    return Experts(*dense)


def seconds(call: Any) -> float:
    """Median over rounds of the slowest rank's time per call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        spent = torch.tensor([(time.perf_counter() - start) / 10], device="cuda")
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.item())
    return statistics.median(times)


def graphed(call: Any) -> Any:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(world: int, rank: int) -> list[dict[str, Any]]:
    found = []
    for packed in (True, False):
        experts = local_experts(world, rank, packed)
        for tokens in TOKENS:
            count = tokens // world + (rank < tokens % world)
            rng = torch.Generator("cuda").manual_seed(tokens + rank)
            x = torch.randn(count, HIDDEN, device="cuda", generator=rng).bfloat16()
            ids = torch.rand(count, EXPERTS, device="cuda", generator=rng).topk(TOP_K)[1]
            weights = torch.full((count, TOP_K), 1 / TOP_K, device="cuda")
            capacity = -(-tokens // world)
            ways: dict[str, Any] = {m: Counting(experts, mode=m) for m in ("all_to_all", "all_gather")}  # type: ignore[arg-type]
            if tokens <= 64:
                ways["padded, graph"] = Counting(experts, mode="padded", capacity=capacity)
            if world == 1:
                ways["Experts alone"] = experts
                ways["Experts alone, graph"] = experts
            for way, layer in ways.items():
                call = partial(layer, x, weights, ids)
                call()
                if isinstance(layer, Counting):
                    layer.sent = 0
                    call()
                sent = torch.tensor([getattr(layer, "sent", 0)], device="cuda")
                dist.all_reduce(sent)
                spent = seconds(graphed(call) if "graph" in way else call)
                found.append(
                    {
                        "weights": "packed" if packed else "dequantized", "tokens": tokens, "ranks": world, "way": way,
                        "microseconds": spent * 1e6, "tokens_per_second": tokens / spent, "bytes_sent": int(sent),
                    }
                )  # fmt: skip
        del experts
        torch.cuda.empty_cache()
    return found


def work(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    with torch.inference_mode():
        found = measure(world, rank)
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"skipped: needs {options.ranks} GPUs, torch sees {torch.cuda.device_count()}")
        return 3
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted({1, options.ranks}):
            mp.spawn(work, (world, folder), nprocs=world)
            found += json.loads(Path(folder, f"{world}.json").read_text())
    print(
        f"{'weights':12} {'tokens':>6} {'ranks':>5} {'way':22} {'us':>9} {'tokens/s':>11} {'bytes sent':>11}"
    )
    for r in sorted(found, key=lambda r: (r["weights"], r["tokens"], r["ranks"])):
        print(
            f"{r['weights']:12} {r['tokens']:6} {r['ranks']:5} {r['way']:22} {r['microseconds']:9.1f} "
            f"{r['tokens_per_second']:11.0f} {r['bytes_sent']:11}"
        )
    if options.json:
        temporary = options.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(found, indent=1))
        os.replace(temporary, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
