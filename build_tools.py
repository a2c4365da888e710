"""Decisions of the build that deserve a test: how many compile jobs, and which GPU architectures."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 1024**3
JOB_BYTES = 2 * GIB  # peak of one compiler process on the largest file, with room
RESERVE_BYTES = 1 * GIB  # left to the rest of the machine
MAX_USEFUL_JOBS = 32


def visible_memory() -> int:
    """Bytes this process may use: physical memory or the cgroup limit, whichever is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def compile_jobs(cpus: int, memory: int, env: Mapping[str, str]) -> int:
    """Parallel compile jobs: MAX_JOBS as it stands, else what CPUs and memory allow, at least 1.

    Args:
        cpus: processors this process may run on.
        memory: bytes it may use.
        env: environment variables.

    Raises:
        ValueError: MAX_JOBS is not a positive integer.
    """
    asked = env.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"MAX_JOBS must be a positive integer, got {asked!r}")
        return int(asked)
    return max(1, min(cpus, (memory - RESERVE_BYTES) // JOB_BYTES, MAX_USEFUL_JOBS))


def rocm_architectures(env: Mapping[str, str], torch_list: Sequence[str]) -> list[str]:
    """AMD architectures to compile for: PYTORCH_ROCM_ARCH, else the list torch was built for, else an error.

    The live GPU is never asked: an image is built where there is none.

    Raises:
        ValueError: neither source names an architecture, or a name is not one (`native` included).
    """
    text = env.get("PYTORCH_ROCM_ARCH", "")
    names = [n for n in re.split(r"[;,\s]+", text) if n] or list(torch_list)
    if not names:
        raise ValueError(
            "no AMD architecture to build for: set PYTORCH_ROCM_ARCH, for example to gfx942;gfx1100"
        )
    for name in names:
        if not re.fullmatch(r"gfx[0-9a-f]{3,5}(:(sramecc|xnack)[+-])*", name):
            raise ValueError(
                f"PYTORCH_ROCM_ARCH must list names like gfx942 or gfx1100, got {name!r} in {text or ';'.join(names)!r}"
            )
    return names
