"""What the machine can read, copy and multiply at best, measured just now by as many threads as the layers get."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BYTES = 256 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes per second read from memory of huge pages and copied (read and written), operations per second, and of what."""

    read: float
    copy: float
    multiply: float
    unit: str


def _compile() -> Any:
    source = Path(__file__).with_name("cpu_limits.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(library))


def _best_rate(run: Callable[[int], Any], threads: int, amount: float, seconds: float) -> float:
    """The highest rate of several rounds in which `threads` threads call `run` with their number at once."""
    with ThreadPoolExecutor(threads) as pool:
        best, begin = 0.0, time.perf_counter()
        list(pool.map(run, range(threads)))
        while (start := time.perf_counter()) - begin < seconds:
            list(pool.map(run, range(threads)))
            best = max(best, amount * threads / (time.perf_counter() - start))
    return best


def measure_limits(threads: int, seconds: float = 0.7) -> Limits:
    """Needs a C compiler, Linux and AVX2."""
    library = _compile()
    library.fma_operations.restype = library.amx_operations.restype = ctypes.c_double
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    memory = mmap.mmap(-1, _BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    data.fill_(1)
    share = _BYTES // threads // 256 * 256
    read = _best_rate(
        lambda i: library.read_all(data.data_ptr() + i * share, share - 8192), threads, share - 8192, seconds
    )
    half = share // 2
    pieces = [data[i * share : (i + 1) * share] for i in range(threads)]
    ctypes.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    copy = _best_rate(
        lambda i: ctypes.memmove(pieces[i].data_ptr(), pieces[i].data_ptr() + half, half),
        threads,
        2 * half,
        seconds,
    )
    # torch asks the kernel for AMX where there is any; without, a tile instruction would be fatal.
    amx = hasattr(torch.cpu, "_init_amx") and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    function, operations = (
        (library.amx_operations, 4 * 2 * 16 * 16 * 32) if amx else (library.fma_operations, 192)
    )
    steps = 200_000 if amx else 2_000_000
    multiply = _best_rate(
        lambda _: function(ctypes.c_int64(steps)), threads, float(operations * steps), seconds
    )
    return Limits(read, copy, multiply, "AMX bf16" if amx else "fp32 FMA, 256 bits")
