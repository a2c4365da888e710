"""Times `ops.dequantize` of every checkpoint format beside `copy_` of its result.

    python benchmarks/dequantize_formats.py [--rows 1536] [--columns 2048] [--experts 16] [--dtype bf16] [--threads N]

The layer benchmark is `int4-emu bench`; this one answers what loading a checkpoint of each format costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from int4_emu import Format, ops
from int4_emu.cli._arguments import dtype_of, positive
from int4_emu.cli._bench_timing import time_interleaved
from int4_emu.cli._console import console, table
from int4_emu.cli._problems import formats, group_size_of, stored


def main() -> None:
    """Prints a row per format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=1536)
    parser.add_argument("--columns", type=positive, default=2048)
    parser.add_argument("--experts", type=positive, default=16)
    parser.add_argument("--group-size", type=positive, default=128)
    parser.add_argument("--dtype", type=dtype_of, default=torch.bfloat16)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--seconds", type=float, default=1.0, help="per format")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rng = torch.Generator().manual_seed(0)
    rows = []
    # act-order comes from GPTQ, and from compressed-tensors, whose rows are those of the canonical layout.
    ordered = [(f, b, True) for f in (Format.gptq_v2, Format.compressed_tensors) for b in (4, 8)]
    for fmt, bits, act_order in [(f, b, False) for f, b in formats()] + ordered:
        group = group_size_of(fmt, args.group_size)
        q, s, z, g_idx = stored(
            fmt, bits, args.experts, args.rows, args.columns, group, rng, act_order=act_order
        )
        options: dict[str, Any] = {"group_size": group, "format": fmt, "bits": bits, "g_idx": g_idx}
        out = ops.dequantize(q, s, z, dtype=args.dtype, **options)
        other = torch.empty_like(out)
        candidates: dict[str, Callable[[Any], Any]] = {
            "dequantize": lambda _, q=q, s=s, z=z, o=out, k=options: ops.dequantize(q, s, z, out=o, **k),
            "copy": lambda _, o=out, t=other: t.copy_(o),
        }
        nothing: list[Any] = [None]
        times, _ = time_interleaved(candidates, nothing, args.seconds)
        mine, copy = times["dequantize"].median, times["copy"].median
        least = times["dequantize"].min / times["copy"].min
        speed = f"{out.numel() * out.element_size() / mine / 1e9:.1f}"
        rows.append(
            (
                f"{fmt.name} int{bits}" + act_order * " act-order",
                f"{mine * 1e3:.1f}",
                speed,
                f"{copy * 1e3:.1f}",
                f"{mine / copy:.2f}",
                f"{least:.2f}",
            )
        )
    columns = ("format", "median ms", "GB/s written", "copy_ ms", "ratio", "of minima")
    console().print(table(columns, rows, right=columns[1:]))


if __name__ == "__main__":
    main()
