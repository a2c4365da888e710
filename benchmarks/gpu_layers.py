"""Times whole MoE layers on a CUDA GPU as graph replays, packed and dequantised, beside torch._grouped_mm and humming-kernels.

    python benchmarks/gpu_layers.py [--shapes qwen3-30b-a3b,mixtral-8x7b] [--tokens 1,4,16] [--rounds 7] [--json FILE]

The router's output is given. Weights are random, larger than the caches, and met by another routing in each layer of a graph. Times are
medians over interleaved rounds, ratios medians of paired ratios; the error is that of four rows against float64 on the exact weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import int4_emu
from gpu_peers import Humming, grouped_mm
from gpu_problem import SHAPES, Problem, Shape
from gpu_timing import Limits, graph_of, interleaved, measure_limits, ratio
from int4_emu import ops
from int4_emu.cli._arguments import positive, positive_list
from int4_emu.cli._console import console, table
from int4_emu.cli._problems import formats, group_size_of, relative_error, stored

TOKENS = [1, 4, 16, 64, 256, 1024, 4096]
# Rows per expert -> what packed over humming and dequantised over grouped_mm may be: wgmma, which the peers use above, comes later.
FEW_ROWS, BOUNDS_FEW, BOUNDS_MANY = 64, (2.0, 1.3), (2.5, 1.7)
DEQUANTIZE_GOAL, DECODE_GOAL = 0.8, 0.5


def layers_in_graph(touched: float, tokens: int) -> int:
    """Enough that the weights between two uses of the same ones do not fit the L2 cache several times over."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2 if tokens > 256 else 4, min(24, math.ceil(4 * cache / touched)))


def measure_shape(
    shape: Shape, tokens: list[int], rounds: int, limits: Limits, humming: bool
) -> list[dict[str, Any]]:
    """A row per number of tokens."""
    problem = Problem(shape)
    print(
        f"{shape.name}: packed {problem.packed_experts.selection}; dequantised {problem.dense_experts.selection}"
    )
    candidates: dict[str, Callable[[Any], Any]] = {
        "packed": lambda b: problem.packed_experts(b.x, b.weights, b.ids),
        "dequantised": lambda b: problem.dense_experts(b.x, b.weights, b.ids),
        "grouped_mm": grouped_mm(problem),
    }
    if humming:
        try:
            candidates["humming"] = Humming(problem, tokens)
        except ImportError as error:
            print(f"humming-kernels is not installed, its column is missing: {error}")
        except Exception as error:
            print(f"humming-kernels failed, its column is missing: {type(error).__name__}: {error}")
    rows = []
    for count in tokens:
        first = problem.batch(count, 0)
        number = layers_in_graph(problem.bytes_touched(first, packed=True), count)
        batches = [first, *(problem.batch(count, seed) for seed in range(1, number))]
        sample = sorted({0, count // 3, 2 * count // 3, count - 1})
        want = problem.exact(first, sample).cpu()
        row: dict[str, Any] = {"shape": shape.name, "tokens": count, "layers": number, "rows_per_expert": 0.0}
        graphs, errors = {}, {}
        for name, run in candidates.items():
            try:
                errors[name] = relative_error(run(first)[sample], want)
                graphs[name] = graph_of(run, batches)
            except Exception as error:  # a peer's refusal must not cost the table
                print(f"{name} at M = {count}: {type(error).__name__}: {str(error)[:300]}")
        times = interleaved({n: g.replay for n, g in graphs.items()}, rounds)
        times = {n: [t / number for t in spent] for n, spent in times.items()}
        hit = sum(b.experts_hit for b in batches) / number
        row["rows_per_expert"] = count * shape.top_k / hit
        for name in graphs:
            moved = (
                sum(problem.bytes_touched(b, packed=name in ("packed", "humming")) for b in batches) / number
            )
            floor = max(moved / limits.copy, problem.operations(count) / limits.matmul)
            row[name] = {
                "us": median(times[name]) * 1e6, "min_us": min(times[name]) * 1e6, "floor_us": floor * 1e6,
                "of_copy": moved / limits.copy / median(times[name]), "error": errors[name],
            }  # fmt: skip
        for name, peer in (("packed", "humming"), ("dequantised", "grouped_mm")):
            if name in times and peer in times:
                row[f"{name}_over_{peer}"] = ratio(times, name, peer)
        rows.append(row)
        graphs.clear()
        torch.cuda.empty_cache()
    return rows


def verdict(row: dict[str, Any], name: str, peer: str, bound: float) -> str:
    found = row.get(f"{name}_over_{peer}")
    return "-" if found is None else f"{found:.2f} {'<=' if found <= bound else '>'} {bound}"


def layer_table(rows: list[dict[str, Any]]) -> Any:
    """Microseconds and errors, the share of the floor, and the ratios beside their bounds."""
    names = ["packed", "humming", "dequantised", "grouped_mm"]
    columns = ["shape", "M", "rows/expert"]
    columns += [c for n in names for c in (f"{n} us", "error")] + [
        "packed of floor", "dequantised of floor", "packed / humming", "dequantised / grouped_mm",
    ]  # fmt: skip
    lines = []
    for row in rows:
        line = [row["shape"], str(row["tokens"]), f"{row['rows_per_expert']:.1f}"]
        for n in names:
            line += [f"{row[n]['us']:.1f}", f"{row[n]['error']:.1e}"] if n in row else ["-", "-"]
        for n in ("packed", "dequantised"):
            line.append(f"{row[n]['floor_us'] / row[n]['us']:.0%}" if n in row else "-")
        bounds = BOUNDS_FEW if row["rows_per_expert"] <= FEW_ROWS else BOUNDS_MANY
        line.append(verdict(row, "packed", "humming", bounds[0]))
        line.append(verdict(row, "dequantised", "grouped_mm", bounds[1]))
        lines.append(tuple(line))
    return table(columns, lines, right=columns[1:])


def measure_dequantize(limits: Limits, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Every format, to bf16, into place; bytes read and written over the copy's bytes per second."""
    n, k, experts = (512, 1024, 8) if quick else (2048, 2048, 128)
    rng, rows = torch.Generator().manual_seed(0), []
    # Act-order: every column's group drawn by lot, in formats that have it.
    cases = [(fmt, bits, group, False) for fmt, bits in formats() for group in (32, 128)]
    ordered = [(fmt, bits) for fmt, bits in formats() if fmt.name in ("compressed_tensors", "gptq_v2")]
    cases += [(fmt, bits, group, True) for fmt, bits in ordered for group in (32, 128)]
    for fmt, bits, group, act_order in cases:
        size = group_size_of(fmt, group)
        if size == -1 and group == 128:
            continue
        one = stored(fmt, bits, 1, n, k, size, rng)[:3]
        q, s, z = (t.cuda().repeat(experts, *[1] * (t.dim() - 1)) for t in one)
        options: dict[str, Any] = {"group_size": size, "format": fmt, "bits": bits}
        if act_order:
            options["g_idx"] = (
                torch.randperm(k, generator=rng)
                .div(size, rounding_mode="floor")
                .int()
                .repeat(experts, 1)
                .cuda()
            )
        out = ops.dequantize(q, s, z, dtype=torch.bfloat16, **options)
        run = lambda q=q, s=s, z=z, o=out, g=options: ops.dequantize(q, s, z, out=o, **g)  # noqa: E731
        spent = median(interleaved({"dequantize": run}, rounds)["dequantize"])
        moved = sum(t.numel() * t.element_size() for t in (q, s, z, out))
        rows.append(
            {
                "format": fmt.name + (", act-order" if act_order else ""),
                "bits": bits,
                "group_size": size,
                "us": spent * 1e6,
                "of_copy": moved / spent / limits.copy,
            }
        )
    return rows


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", default="qwen3-30b-a3b,mixtral-8x7b,deepseek-v3", help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument("--tokens", type=positive_list, default=TOKENS)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--no-humming", action="store_true")
    parser.add_argument("--no-dequantize", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small machine limits and formats: a first look")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU: torch sees none")
    unknown = set(args.shapes.split(",")) - set(SHAPES)
    if unknown:
        raise SystemExit(f"--shapes must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    out = console()
    document: dict[str, Any] = {
        "version": int4_emu.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }

    def save() -> None:
        if args.json:
            Path(args.json).write_text(json.dumps(document, indent=1))

    with torch.inference_mode():
        limits = measure_limits(quick=args.quick)
        document["limits"] = {"copy": limits.copy, "read": limits.read, "matmul": limits.matmul}
        print(
            f"{document['gpu']}, torch {torch.__version__}: copy {limits.copy / 1e12:.2f} TB/s (read and written), "
            f"read {limits.read / 1e12:.2f} TB/s, bf16 product {limits.matmul / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        document["dequantize"] = []
        if not args.no_dequantize:
            found = document["dequantize"] = measure_dequantize(limits, args.rounds, quick=args.quick)
            lines = [
                (r["format"], str(r["bits"]), str(r["group_size"]), f"{r['us']:.0f}", f"{r['of_copy']:.0%}")
                for r in found
            ]
            out.print(
                table(("format", "bits", "group", "us", f"of copy (goal {DEQUANTIZE_GOAL:.0%})"), lines)
            )
        document["layers"] = []
        for name in args.shapes.split(","):
            rows = measure_shape(SHAPES[name], args.tokens, args.rounds, limits, not args.no_humming)
            document["layers"] += rows
            out.print(layer_table(rows))
            save()
            torch.cuda.empty_cache()
    decode = next((r for r in document["layers"] if r["shape"] == "mixtral-8x7b" and r["tokens"] == 1), None)
    if decode and "packed" in decode:
        print(
            f"Mixtral M = 1, packed: {decode['packed']['of_copy']:.0%} of the copy bandwidth (goal {DECODE_GOAL:.0%})"
        )
    save()


if __name__ == "__main__":
    main()
