"""Options that several commands share."""

from __future__ import annotations

import argparse

import torch

from ..checkpoint import Checkpoint

_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


def dtype_of(text: str) -> torch.dtype:
    """An argparse type: bf16, fp16 or fp32, short or long."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_DTYPES)}, got {text!r}")
    return _DTYPES[text]


def dtype_name(dtype: torch.dtype) -> str:
    """bf16, fp16 or fp32."""
    return next(name for name, value in _DTYPES.items() if value == dtype)


def positive(text: str) -> int:
    """An argparse type: a whole number above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return value


def positive_list(text: str) -> list[int]:
    """An argparse type: whole numbers above zero, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """How strictly, and by which conventions, a checkpoint is read."""
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--lenient", action="store_true", help="ignore unknown tensors and non-finite scales with a warning"
    )
    group.add_argument("--zero-points", choices=("gptq_v1", "gptq_v2", "gptq_v1_nibble"),
                       help="read GPTQ zero points by this convention instead of the declared one")  # fmt: skip
    group.add_argument("--contradicting-zeros", choices=("raise", "use_label", "use_values"), default="raise",
                       help="for a weight declared symmetric with other zero points on disk")  # fmt: skip


def open_checkpoint(args: argparse.Namespace) -> Checkpoint:
    """The checkpoint that `dir` and the reading options name."""
    return Checkpoint(args.dir, strict=not args.lenient, zero_point_format=args.zero_points,
                      contradicting_zeros=args.contradicting_zeros)  # fmt: skip
