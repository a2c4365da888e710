"""Random projections as each checkpoint format stores them, beside what they must decode to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import oracle
from layers import NAMES, random_floats, to_torch

FORMAT_BITS_LIST = [(name, bits) for name, layout in oracle.LAYOUTS.items() for bits in layout.bits]


def stored(
    name: str,
    bits: int,
    rng: np.random.Generator,
    rows: int,
    columns: int,
    group_size: int,
    scales_dtype: torch.dtype,
    experts: int = 0,
    symmetric: bool = False,
    pad: int = 15,
) -> tuple[tuple[Any, ...], NDArray, NDArray, NDArray | None]:
    """Random weights written in format `name`: ((qweight, scales, qzeros), exact [.., O, I], codes, zeros)."""
    groups = 1 if group_size == -1 else -(-columns // group_size)
    many = max(experts, 1)
    codes = rng.integers(0, 1 << bits, (many, rows, columns))
    scales = random_floats(rng, (many, rows, groups), scales_dtype, 0.1)
    zeros = None if symmetric else rng.integers(0, 1 << bits, (many, rows, groups))
    parts = [
        oracle.store(name, codes[e], scales[e], None if zeros is None else zeros[e], bits, pad)
        for e in range(many)
    ]
    exact = oracle.exact_weight(codes, scales, zeros, group_size, bits)
    qweight, stored_scales = (np.stack([p[i] for p in parts]) for i in (0, 1))
    qzeros = None if zeros is None else torch.from_numpy(np.stack([p[2] for p in parts]))
    tensors: tuple[Any, ...] = (torch.from_numpy(qweight), to_torch(stored_scales, scales_dtype), qzeros)
    if not experts:
        tensors = tuple(None if t is None else t[0] for t in tensors)
        return tensors, exact[0], codes[0], None if zeros is None else zeros[0]
    return tensors, exact, codes, zeros


def expect(exact: NDArray, scales_dtype: torch.dtype, out: torch.dtype) -> torch.Tensor:
    return to_torch(oracle.rounded_weight(exact, NAMES[scales_dtype], NAMES[out]), out)
