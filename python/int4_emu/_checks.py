"""The argument rules of every op in Python: fake kernels and the reference use them, and so gets a failed call its precise error type.
This file has the rules that all ops share; `_checks_formats.py` and `_checks_moe.py` those of their ops.

The compiled ops check the same rules in `csrc/torch/check.cpp`, with the same sentences; raw `torch.ops` calls there can only raise
ValueError, whereas these raise TypeError for a wrong dtype or device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._enums import Layout, parse_enum

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_bytes(k: int, bits: int) -> int:
    """Bytes of one canonical row of k codes."""
    return (k * bits + 7) // 8


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(t: Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(dtype_name, allowed))}, got {dtype_name(t.dtype)}")


def check_device(like: Tensor, like_name: str, **tensors: Tensor | None) -> None:
    """All tensors of a call live on one device."""
    for name, t in tensors.items():
        if t is not None and t.device != like.device:
            raise TypeError(f"{name} must be on {like.device} like {like_name}, got {t.device}")


def check_dim(t: Tensor, name: str, allowed: Sequence[int], meaning: str) -> None:
    if t.dim() not in allowed:
        raise ValueError(f"{name} must be {meaning}, got {t.dim()} dimensions {list(t.shape)}")


def check_shape(t: Tensor, name: str, want: Sequence[int], formula: str, context: str = "") -> None:
    if t.dim() != len(want) or any(a != b for a, b in zip(t.shape, want, strict=True)):
        tail = f" ({context})" if context else ""
        raise ValueError(f"{name} must be {formula} = {list(want)}, got {list(t.shape)}{tail}")


def check_out(out: Tensor, want: Sequence[int], formula: str, context: str, name: str = "out") -> None:
    check_shape(out, name, want, formula, context)
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(out.shape)} with other strides")


def check_bits(bits: int, name: str = "bits") -> None:
    if bits not in (4, 8):
        raise ValueError(f"{name} must be 4 or 8, got {bits}")


def check_group_size(group_size: int, k: int, name: str, k_name: str) -> None:
    if group_size < 1 or (group_size > k and k > 0):
        raise ValueError(
            f"{name} must be 1..{k_name} = 1..{k} (per-channel is {k_name} itself), got {group_size}"
        )


def check_index_range(t: Tensor, name: str, end: int, end_name: str) -> None:
    """Values of a real tensor lie in [0, end); a fake one has none to look at."""
    if (
        t.is_meta
        or torch.compiler.is_compiling()
        or isinstance(t, torch._subclasses.FakeTensor)
        or t.numel() == 0
    ):
        return
    low, high = t.aminmax()
    if int(low) < 0 or int(high) >= end:
        bad = int(low) if int(low) < 0 else int(high)
        raise ValueError(f"{name} values must be 0..{end_name}-1 = 0..{end - 1}, got {bad}")


def check_layout(layout: int, n: int, k: int, bits: int, name: str) -> None:
    kind = parse_enum(Layout, layout, "layout")
    if kind is Layout.cpu_n16 and (n % 16 or k % (32 // bits)):
        raise ValueError(
            f"layout cpu_n16 needs N % 16 == 0 and K % {32 // bits} == 0, got N={n}, K={k} ({name}, {bits} bits)"
        )
