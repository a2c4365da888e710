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


@dataclass
class _Rate:
    """What one kind of work reached: in the quickest round, and over all of them."""

    best: float
    mean: float


def _rate(
    pool: ThreadPoolExecutor, run: Callable[[int], Any], threads: int, amount: float, seconds: float
) -> _Rate:
    """Rounds in which `threads` threads call `run` with their number at once, each for `amount` of work."""
    best, rounds, begin = 0.0, 0, time.perf_counter()
    end = begin
    while rounds == 0 or end - begin < seconds:
        start = end
        list(pool.map(run, range(threads)))
        end = time.perf_counter()
        best, rounds = max(best, amount * threads / (end - start)), rounds + 1
    return _Rate(best, rounds * amount * threads / (end - begin))


class Probe:
    """Measures the machine's limits with so many threads. Needs a C compiler, Linux and AVX2."""

    def __init__(self, threads: int) -> None:
        self.threads, self.pool = threads, ThreadPoolExecutor(threads)
        self.library = _compile()
        self.library.fma_operations.restype = self.library.amx_operations.restype = ctypes.c_double
        self.library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        memory = mmap.mmap(-1, _BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(memory, dtype=torch.uint8)
        self.data.fill_(1)
        # torch asks the kernel for AMX where there is any; without, a tile instruction would be fatal.
        self.amx = bool(hasattr(torch.cpu, "_init_amx") and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
        self.measure(0.0)  # threads begin, and pages are touched

    def measure(self, seconds: float) -> tuple[Limits, Limits]:
        """The limits of the quickest rounds, and those over `seconds` for each kind of work: what a long call could reach now."""
        share = _BYTES // self.threads // 256 * 256
        half = share // 2
        first = [self.data.data_ptr() + i * share for i in range(self.threads)]
        function, operations = (
            (self.library.amx_operations, 4 * 2 * 16 * 16 * 32) if self.amx else (self.library.fma_operations, 192)
        )
        steps = 200_000 if self.amx else 2_000_000
        works: list[tuple[Callable[[int], Any], float]] = [
            (lambda i: self.library.read_all(first[i], share - 8192), share - 8192),
            (lambda i: ctypes.memmove(first[i], first[i] + half, half), 2 * half),
            (lambda _: function(ctypes.c_int64(steps)), float(operations * steps)),
        ]
        rates = [_rate(self.pool, run, self.threads, amount, seconds) for run, amount in works]
        unit = "AMX bf16" if self.amx else "fp32 FMA, 256 bits"
        return Limits(*(r.best for r in rates), unit), Limits(*(r.mean for r in rates), unit)
