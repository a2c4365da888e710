"""bf16 and fp16 as uint16 arrays, for tests that talk to the torch-free C++."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]

# Relative rounding error of one conversion, by DType name.
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def encode(values: npt.ArrayLike, dtype: str) -> Array:
    """fp32 values rounded to nearest even, as float32 (f32) or as the bits of f16 or bf16."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "f32":
        return single
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def decode(stored: Array, dtype: str) -> Floats:
    """The float64 values of what `encode` returns."""
    if dtype == "f32":
        return stored.astype(np.float64)
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
