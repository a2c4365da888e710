"""Times a packed MoE layer for every kind of weights and activations beside int4 in groups of 128 with bf16 activations.

    python benchmarks/cpu_kinds.py [--shape qwen3-30b-a3b] [--tokens 1,16,64,1024] [--threads 1] [--rounds 5]

All kinds are in one process, where they take turns; routing is random, another one for each call. Times are medians over rounds, ratios
medians of paired ratios. Weights are random bytes: their values cost nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from int4_emu.cli._arguments import positive, positive_list
from int4_emu.cli._bench_layers import Shape, shape_of
from int4_emu.cli._console import console, table

HEADLINE = "int4 g128"
BF16, FP16 = torch.bfloat16, torch.float16
# name: bits, group size (-1 per channel), zero points, permuted columns (act-order), activations
KINDS: dict[str, tuple[int, int, bool, bool, torch.dtype]] = {
    HEADLINE: (4, 128, False, False, BF16),
    "int4 g128, zero points": (4, 128, True, False, BF16),
    "int4 g64": (4, 64, False, False, BF16),
    "int4 g32": (4, 32, False, False, BF16),
    "int4 g32, zero points": (4, 32, True, False, BF16),
    "int4 per channel": (4, -1, False, False, BF16),
    "int4 g128 act-order": (4, 128, False, True, BF16),
    "int8 g128": (8, 128, False, False, BF16),
    "int4 g128, fp16 x": (4, 128, False, False, FP16),
}


def make_layer(shape: Shape, kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    bits, group, zeros, act_order, dtype = KINDS[kind]
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def group_of(columns: int) -> int:
        return columns if group == -1 else group

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        groups = columns // group_of(columns)
        codes = torch.randint(0, 256, (e, rows, columns * bits // 8), dtype=torch.uint8)
        scales = (torch.rand(e, rows, groups) / (1 << bits) / columns**0.5).to(dtype)
        return codes, scales, torch.randint(0, 16, (e, rows, groups), dtype=torch.uint8) if zeros else None

    w13, s13, z13 = matrix(2 * i, h)
    w2, s2, z2 = matrix(h, i)
    permutation = torch.stack([torch.randperm(h) for _ in range(e)]).int() if act_order else None
    return lambda x, weights, ids: torch.ops.int4_emu.fused_moe_packed(
        x, w13, w2, weights, ids, s13, s2, group_of(h), group_of(i), w13_qzeros=z13, w2_qzeros=z2, w13_perm=permutation,
        w13_bits=bits, w2_bits=bits,
    )  # fmt: skip


def measure(shape: Shape, tokens: int, rounds: int) -> list[tuple[str, float, float]]:
    """For each kind milliseconds and the ratio to the headline."""
    layers = {kind: make_layer(shape, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):  # the first is not counted
        for kind, layer in layers.items():
            calls = []
            for _ in range(max(2, 16 // tokens)):
                x = torch.randn(tokens, shape.hidden_size).to(KINDS[kind][4])
                weights, ids = torch.rand(tokens, shape.num_experts).topk(shape.top_k)
                start = time.perf_counter()
                layer(x, weights, ids.int())
                calls.append(time.perf_counter() - start)
            seconds[kind].append(median(calls))
    base = seconds[HEADLINE][1:]
    return [
        (kind, 1e3 * median(t[1:]), median(a / b for a, b in zip(t[1:], base, strict=True)))
        for kind, t in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=positive_list, default=[1, 16, 64, 1024])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--experts", type=positive, help="fewer, for a machine with little memory")
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = shape_of(args.shape, args.experts, 128)
    with torch.inference_mode():
        rows = {m: measure(shape, m, args.rounds) for m in args.tokens}
    times = [f"M = {m}" for m in args.tokens]
    cells = (
        [kind, *(f"{rows[m][n][1]:.3g} {rows[m][n][2]:.2f}" for m in args.tokens)]
        for n, kind in enumerate(KINDS)
    )
    title = f"{args.shape}, threads: {args.threads}, milliseconds and ratio to {HEADLINE}"
    console().print(table(["weights", *times], cells, title=title, right=times))


if __name__ == "__main__":
    main()
