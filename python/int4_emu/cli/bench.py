"""`int4-emu bench`: layers of real models: time, share of the floor, error, and the ratio to torch."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import __version__, _library
from .._memory import available_bytes
from ._arguments import dtype_name, dtype_of, positive, positive_list
from ._bench_layers import (
    MODELS,
    Batch,
    Problem,
    Shape,
    exact_rows,
    layout_name,
    linear_loop,
    make_batch,
    make_problem,
    shape_of,
)
from ._bench_plot import check_plot, plot
from ._bench_timing import Machine, Times, floor_seconds, measure_machine, time_dequantize, time_interleaved
from ._console import console, say, size, table, whole_file
from ._problems import relative_error
from .report import cpu_name

HELP = "time layers of real models: share of the machine's floor, error, ratio to torch"

PEER = "F.linear loop"
# Rows whose error is computed in double precision.
_CHECKED_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.add_argument(
        "--model",
        default="qwen3-30b-a3b",
        metavar="NAME",
        help=f"one of {', '.join(MODELS)} (default: qwen3-30b-a3b)",
    )
    parser.add_argument(
        "--tokens", type=positive_list, default=None, metavar="M,M,...", help="default: 1,4,16,64,256,1024"
    )
    parser.add_argument(
        "--weights", choices=("both", "packed", "dequantized"), default="both", help="default: both"
    )
    parser.add_argument("--dtype", type=dtype_of, default=torch.bfloat16, help="bf16 (default), fp16 or fp32")
    parser.add_argument("--group-size", type=positive, metavar="G", help="default: the model's")
    parser.add_argument(
        "--experts", type=positive, metavar="E", help="fewer experts, for a machine with little memory"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), or a GPU such as cuda")
    parser.add_argument("--threads", type=positive, metavar="N", help="default: all")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="how long to measure each number of tokens (default: 2)"
    )
    parser.add_argument("--no-peer", action="store_true", help=f"leave out the {PEER}")
    parser.add_argument(
        "--quick", action="store_true", help="few experts, tokens and rounds: a first look, not a measurement"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the results; without FILE (or with -) to stdout, the table then goes to stderr",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw time over tokens (needs matplotlib)")


def main(args: argparse.Namespace) -> int:
    """Measures and prints."""
    out = console(stderr=args.json == "-")
    shape = shape_of(args.model, args.experts, args.group_size)
    if args.quick and args.experts is None:
        shape = shape_of(args.model, min(shape.num_experts, max(16, shape.top_k)), args.group_size)
    if args.seconds is not None and not 0 < args.seconds < 3600:
        raise ValueError(f"--seconds must be above 0 and below 3600, got {args.seconds}")
    if args.json and args.json != "-" and not Path(args.json).absolute().parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(Path(args.json).absolute().parent))
    if args.plot:
        check_plot(args.plot)
    before = torch.get_num_threads()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        document = _measure(args, shape, out)
    finally:
        torch.set_num_threads(before)
    if args.json == "-":
        print(json.dumps(document, indent=1))
    elif args.json:
        with whole_file(args.json) as file:
            json.dump(document, file, indent=1)
    if args.plot:
        plot(args.plot, document)
    return 0


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {text!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {text}: torch {torch.__version__} sees no GPU")
    return device


def _check_memory(shape: Shape, dtype: torch.dtype, device: torch.device, *, dense: bool) -> None:
    weights = shape.num_experts * shape.weights_per_expert
    # Canonical codes, prepacked codes, and the dense weights where a dense candidate is measured.
    need = int(weights * (1 + (dtype.itemsize if dense else 0)) * 1.05)
    free = available_bytes(device)
    if free is not None and need > free:
        raise MemoryError(
            f"the layer needs {size(need)}, {size(free)} are available: --experts N takes fewer"
        )


def _measure(args: argparse.Namespace, shape: Shape, out: Console) -> dict[str, Any]:
    dtype: torch.dtype = args.dtype
    device = _device(args.device)
    modes = ["packed", "dequantized"] if args.weights == "both" else [args.weights]
    peer = not args.no_peer
    _check_memory(shape, dtype, device, dense=peer or "dequantized" in modes)
    tokens = args.tokens or ([1, 16, 256] if args.quick else [1, 4, 16, 64, 256, 1024])
    seconds = args.seconds or (0.2 if args.quick else 2.0)
    start = time.perf_counter()
    problem = make_problem(shape, dtype, modes, peer=peer, device=device)
    machine = measure_machine(dtype, quick=args.quick, device=device)
    threads = torch.get_num_threads()
    processor = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    say(
        out,
        f"{args.model}: {shape}, {dtype_name(dtype)}, {threads} thread{'s' if threads > 1 else ''}, {processor}",
        "bold",
    )
    say(
        out,
        f"machine, just now: reads {machine.read / 1e9:.1f} GB/s, multiplies {machine.gemm / 1e9:.0f} GFLOP/s ({machine.gemm_dtype})",
    )
    candidates: dict[str, Callable[[Batch], Tensor]] = {}
    kinds: dict[str, str] = {}
    for mode, experts in (("packed", problem.packed), ("dequantized", problem.dense)):
        if experts is not None:
            candidates[mode] = lambda b, e=experts: e(b.x, b.topk_weights, b.topk_ids)  # type: ignore[misc]
            kinds[mode] = (
                f"{experts.selection.backend} ({experts.selection.detail}, {layout_name(experts)} layout)"
            )
            say(out, f"{mode}: {experts.selection}")
    if peer:
        candidates[PEER], kinds[PEER] = linear_loop(problem), f"torch {torch.__version__}"
    results = []
    with torch.inference_mode():
        for count in tokens:
            results += _measure_tokens(problem, machine, candidates, count, seconds, out)
        dequantize = time_dequantize(problem, seconds / 2)
    out.print(_table(results, peer))
    if any(r["rounds"] == 1 for r in results):
        say(
            out,
            "One round is a single call, perhaps a cold one: its ratio is a rough figure (--seconds S measures longer).",
        )
    if any(r["share_of_floor"] > 1.05 for r in results):
        say(
            out, "More than 100 % of a floor: something else used the machine while its limits were measured."
        )
    copied = dequantize.nbytes / dequantize.copy.median / 1e9
    say(
        out,
        f"dequantize to {dtype_name(dtype)}: {dequantize.dequantize.median * 1e3:.1f} ms for {size(dequantize.nbytes)}, "
        f"copy_ of its result {dequantize.copy.median * 1e3:.1f} ms ({copied:.1f} GB/s): {dequantize.ratio:.2f}x",
    )
    say(out, f"{time.perf_counter() - start:.0f} s in all")
    return {
        "version": __version__,
        "build": _library.build_info(),
        "isa": _library.cpu_isa()[0],
        "torch": torch.__version__,
        "processor": processor,
        "device": str(device),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "threads": threads,
        "model": args.model,
        "shape": str(shape),
        "dtype": dtype_name(dtype),
        "read_bytes_per_s": machine.read,
        "gemm_flop_per_s": machine.gemm,
        "gemm_dtype": machine.gemm_dtype,
        "candidates": kinds,
        "results": results,
        "dequantize": {
            "bytes": dequantize.nbytes,
            "median_s": dequantize.dequantize.median,
            "copy_median_s": dequantize.copy.median,
            "ratio": dequantize.ratio,
        },
    }


def _measure_tokens(
    problem: Problem,
    machine: Machine,
    candidates: dict[str, Callable[[Batch], Tensor]],
    count: int,
    seconds: float,
    out: Console,
) -> list[dict[str, Any]]:
    rng, device = torch.Generator().manual_seed(count), problem.codes[0].device
    batches = [make_batch(problem.shape, count, problem.dtype, rng, device) for _ in range(4)]
    with console(stderr=True).status(f"{count} tokens"):
        times, outputs = time_interleaved(candidates, batches, seconds, device)
        rows = torch.randperm(count, generator=rng)[:_CHECKED_ROWS]
        want = exact_rows(problem, batches[0], rows).cpu()
        errors = {name: relative_error(y[rows], want) for name, y in outputs.items()}
    results = []
    for name, t in times.items():
        mode = "packed" if name == "packed" else "dequantized"
        # Batches differ in the experts they hit; the floor is of the average batch.
        floor = sum(floor_seconds(problem.shape, b, mode, problem.dtype, machine) for b in batches) / len(
            batches
        )
        results.append(_row(count, name, t, floor, errors[name], times.get(PEER)))
    return results


def _row(count: int, name: str, t: Times, floor: float, error: float, peer: Times | None) -> dict[str, Any]:
    return {
        "tokens": count,
        "candidate": name,
        "median_s": t.median,
        "min_s": t.min,
        "rounds": t.rounds,
        "floor_s": floor,
        "share_of_floor": floor / t.median,
        "error": error,
        "speedup_over_linear": None if peer is None else peer.median / t.median,
    }


def _table(results: list[dict[str, Any]], peer: bool) -> Any:
    columns = [
        "tokens",
        "weights",
        "median ms",
        "min ms",
        "floor ms",
        "of floor",
        "error",
        f"x {PEER}",
        "rounds",
    ]
    rows = []
    last = None
    for r in results:
        rows.append(
            (
                str(r["tokens"]) if r["tokens"] != last else "",
                r["candidate"],
                f"{r['median_s'] * 1e3:.2f}",
                f"{r['min_s'] * 1e3:.2f}",
                f"{r['floor_s'] * 1e3:.2f}",
                f"{r['share_of_floor']:.0%}",
                f"{r['error']:.1e}",
                f"{r['speedup_over_linear']:.2f}" if peer else "-",
                str(r["rounds"]),
            )
        )
        last = r["tokens"]
    return table(columns, rows, right=[c for c in columns if c != "weights"])
