"""CUDA graphs timed in interleaved rounds, and the machine's own limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


def elapsed(run: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds per call of what `run` puts on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def graph_of(run: Callable[[Any], Any], batches: Sequence[Any]) -> torch.cuda.CUDAGraph:
    """One graph that runs all batches, after a warm-up of each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in batches:
            run(batch)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            run(batch)
    return graph


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, seconds_each: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds per call of each candidate in each round; another one begins each round, and a first round does not count."""
    names = list(candidates)
    repeats = {n: max(1, min(50, int(seconds_each / max(elapsed(candidates[n]), 1e-7)))) for n in names}
    times: dict[str, list[float]] = {n: [] for n in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent = elapsed(candidates[name], repeats[name])
            if number:
                times[name].append(spent)
    return times


def ratio(times: Mapping[str, list[float]], name: str, other: str) -> float:
    """Median of the paired ratios."""
    return median(a / b for a, b in zip(times[name], times[other], strict=True))


@dataclass(frozen=True)
class Limits:
    """Bytes per second of a copy (read and written) and of reading, operations per second of a bf16 product."""

    copy: float
    read: float
    matmul: float


def measure_limits(*, quick: bool) -> Limits:
    """Over memory that no cache holds."""
    count = (256 if quick else 1024) << 20
    source = torch.zeros(count // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    size = 2048 if quick else 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    runs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "read": lambda: source.view(8192, -1).sum(1),
        "read in another shape": lambda: source.sum(),
        "matmul": lambda: a @ a,
    }
    times = {name: median(spent) for name, spent in interleaved(runs, 7, 4e-3).items()}
    read = min(times["read"], times["read in another shape"])
    return Limits(2 * count / times["copy"], count / read, 2 * size**3 / times["matmul"])
