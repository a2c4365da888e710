"""Times and floors: interleaved rounds, and what this machine can read and multiply at best, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from .. import ops
from ._bench_layers import CPU, Batch, Problem, Shape


@dataclass(frozen=True)
class Machine:
    """Limits measured just now: bytes per second of reading, floating-point operations per second of products."""

    read: float
    gemm: float
    gemm_dtype: str


@dataclass(frozen=True)
class Times:
    """Seconds of one candidate."""

    median: float
    min: float
    rounds: int


def _finish(device: torch.device) -> None:
    """A GPU's calls return before their work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best(run: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """The shortest of many calls, after one that does not count."""
    run()
    _finish(device)
    best, begin = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - begin < seconds:
        run()
        _finish(device)
        best = min(best, time.perf_counter() - start)
    return best


def measure_machine(dtype: torch.dtype, *, quick: bool, device: torch.device) -> Machine:
    """Reads with a sum over memory that no cache holds, multiplies with torch's own products.

    Weights may be held in a type in which the machine multiplies slowly, and multiplied in another: the better of the
    compute dtype and fp32 is the limit.
    """
    seconds = 0.2 if quick else 1.0
    data = torch.ones((64 if quick else 128) << 20, dtype=torch.float32, device=device)
    read = data.numel() * 4 / _best(data.sum, seconds, device)
    n = (512 if quick else 1024) if device.type == "cpu" else 8192
    speeds = {}
    for kind in {dtype, torch.float32}:
        a = torch.randn(n, n, device=device).to(kind)
        speeds[kind] = 2 * n**3 / _best(partial(torch.mm, a, a), seconds, device)
    fastest = max(speeds, key=lambda k: speeds[k])
    return Machine(read, speeds[fastest], str(fastest).removeprefix("torch."))


def floor_seconds(shape: Shape, batch: Batch, mode: str, dtype: torch.dtype, machine: Machine) -> float:
    """The larger of reading what the batch touches and multiplying it: no implementation is faster on this machine.

    Packed weights: half a byte each, and a 16-bit scale per group. Dense ones: the dtype.
    """
    tokens, top_k = batch.topk_ids.shape
    weights = batch.experts_hit * shape.weights_per_expert
    size = 0.5 + 2 / shape.group_size if mode == "packed" else dtype.itemsize
    moved = weights * size + 2 * tokens * shape.hidden_size * dtype.itemsize
    products = 2.0 * tokens * top_k * shape.weights_per_expert
    return max(moved / machine.read, products / machine.gemm)


def time_interleaved(
    candidates: Mapping[str, Callable[[Batch], Any]],
    batches: list[Batch],
    seconds: float,
    device: torch.device = CPU,
) -> tuple[dict[str, Times], dict[str, Any]]:
    """Times candidates in turn, so that what disturbs the machine disturbs all of them.

    Args:
        candidates: name to function; each is called once with the first batch before the clock starts.
        batches: used round robin.
        device: whose work a call must have finished.
        seconds: about how long to measure. At least three rounds, or one where three would take four times as long. A
            candidate whose first call takes twice as long is not called again: that call is its time.

    Returns:
        Times, and the results of the first calls.
    """
    spent: dict[str, list[float]] = {}
    results: dict[str, Any] = {}
    slow: dict[str, float] = {}
    for name, run in candidates.items():
        start = time.perf_counter()
        results[name] = run(batches[0])
        _finish(device)
        passed = time.perf_counter() - start
        spent[name] = []
        if passed > 2 * seconds and len(candidates) > 1:
            slow[name] = passed
    names, begin = [n for n in candidates if n not in slow], time.perf_counter()
    for number in range(200 if names else 0):
        passed = time.perf_counter() - begin
        if number and passed > (4 * seconds if number < 3 else seconds):
            break
        batch = batches[(number + 1) % len(batches)]
        # Another one begins each round: the caches that the last leaves are nobody's in particular.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            candidates[name](batch)
            _finish(device)
            spent[name].append(time.perf_counter() - start)
    spent |= {name: [value] for name, value in slow.items()}
    return {name: Times(median(values), min(values), len(values)) for name, values in spent.items()}, results


@dataclass(frozen=True)
class DequantizeTimes:
    """Dequantising w13 of some experts beside copying the result, in seconds."""

    dequantize: Times
    copy: Times
    nbytes: int

    @property
    def ratio(self) -> float:
        """Median over median."""
        return self.dequantize.median / self.copy.median


def time_dequantize(problem: Problem, seconds: float) -> DequantizeTimes:
    """`ops.dequantize` into place, beside `copy_` of its result to other memory."""
    codes, scales = problem.codes[0], problem.scales[0]
    count = max(
        1, min(codes.shape[0], (128 << 20) // (codes.shape[1] * codes.shape[2] * 2 * problem.dtype.itemsize))
    )
    codes, scales = codes[:count], scales[:count]
    out = ops.dequantize(codes, scales, group_size=problem.shape.group_size, dtype=problem.dtype)
    other = torch.empty_like(out)
    candidates: dict[str, Callable[[Any], Any]] = {
        "dequantize": lambda _: ops.dequantize(codes, scales, group_size=problem.shape.group_size, out=out),
        "copy": lambda _: other.copy_(out),
    }
    nothing: list[Any] = [None]
    times, _ = time_interleaved(candidates, nothing, seconds, codes.device)
    return DequantizeTimes(times["dequantize"], times["copy"], out.numel() * out.element_size())
