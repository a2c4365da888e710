"""How much memory there is, and how much this process holds: Linux counters, cgroup limits included."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def _fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes; empty where the file does not exist (not Linux)."""
    values: dict[str, int] = {}
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            parts = rest.split()
            if len(parts) == 2 and parts[1] == "kB":
                values[name] = int(parts[0]) * 1024
    except OSError:
        pass
    return values


def anonymous_bytes() -> int:
    """Anonymous and shared memory of this process; mapped file pages, which the kernel can drop, do not
    count.
    """
    status = _fields(_STATUS)
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def cgroup_available(v2: Path = _CGROUP_V2, v1: Path = _CGROUP_V1) -> int | None:
    """Bytes left below the container's memory limit, reclaimable file pages counted as free; None without a
    limit.
    """
    for limit_file, usage_file, stat_file in (
        (v2 / "memory.max", v2 / "memory.current", v2 / "memory.stat"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", v1 / "memory.stat"),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        # v1 writes "no limit" as a number near 2^63.
        if limit is None or usage is None or limit >= 1 << 60:
            continue
        try:
            stat = dict(line.split()[:2] for line in stat_file.read_text().splitlines() if line.strip())
        except OSError:
            stat = {}
        reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        return max(0, limit - usage + reclaimable)
    return None


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    host = _fields(_MEMINFO).get("MemAvailable")
    limit = cgroup_available()
    known = [n for n in (host, limit) if n is not None]
    return min(known) if known else None


_HUGE_PAGE = 2 << 20


@cache
def _madvise() -> Any:
    """The C library's madvise; None where there are no huge pages to be advised."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor for a layer's weights: in main memory, of huge pages where the system has some left.

    Most of the time that a copy to new memory takes goes into the pages, one interruption for each.
    """
    tensor = torch.empty(tuple(sizes), dtype=dtype, device=device)
    madvise = _madvise() if tensor.device.type == "cpu" else None
    if madvise is not None:
        # Whole pages alone: what lies beside the tensor is another's.
        begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE
        if end > begin:
            madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return tensor
