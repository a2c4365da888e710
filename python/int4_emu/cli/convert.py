"""`int4-emu convert DIR OUT`: a floating-point checkpoint that transformers loads by itself."""

from __future__ import annotations

import argparse
import re
import sys
import time

import torch
from tqdm import tqdm

from ..convert import convert_checkpoint
from ._arguments import add_reading_options, dtype_name, dtype_of, open_checkpoint
from ._console import console, say, size

HELP = "write a checkpoint as a plain floating-point one that transformers loads by itself"

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def bytes_of(text: str) -> int:
    """An argparse type: 4GB, 500MB, 2GiB or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    value = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a size like 4GB, 500MB or 2GiB, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    parser.add_argument("dir", metavar="DIR", help="quantised model folder")
    parser.add_argument(
        "out", metavar="OUT", help="folder to make; it appears when it is whole, and not before"
    )
    parser.add_argument(
        "--dtype",
        type=dtype_of,
        default=torch.bfloat16,
        help="of the dequantised weights: bf16 (default), fp16, fp32",
    )
    parser.add_argument(
        "--max-shard-size", type=bytes_of, default=bytes_of("4GB"), help="largest file (default: 4GB)"
    )
    parser.add_argument("--force", action="store_true", help="replace a model folder that is already there")
    parser.add_argument("--no-progress", action="store_true", help="show no bar")
    add_reading_options(parser)


def main(args: argparse.Namespace) -> int:
    """Converts, with a bar on stderr."""
    checkpoint = open_checkpoint(args)
    start = time.perf_counter()
    hidden = args.no_progress or not sys.stderr.isatty()
    with tqdm(desc="converting", unit="B", unit_scale=True, disable=hidden) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        done = convert_checkpoint(
            checkpoint,
            args.out,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size,
            force=args.force,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    files = f"{len(done.files)} file{'s' if len(done.files) > 1 else ''}"
    out = console()
    say(
        out,
        f"{args.out}: {done.tensors} tensors ({done.dequantized} dequantised to {dtype_name(args.dtype)}), "
        f"{size(done.nbytes)} in {files}, {seconds:.1f} s, {done.nbytes / seconds / 1e9:.2f} GB/s",
    )
    say(out, f"Load it with transformers.AutoModelForCausalLM.from_pretrained({args.out!r})")
    return 0
