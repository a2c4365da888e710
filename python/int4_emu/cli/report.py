"""No command: what this machine and this installation offer, and why not more."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__, _library
from .._memory import available_bytes
from ..backends import WeightsMode, all_backends
from ..errors import BackendError
from ..oracle import select_backend
from ..quant_config import MoEConfig, QuantConfig
from ._console import console, print_pairs, say, size, table

# Every variable that the package reads, and what it does.
ENVIRONMENT = {
    "INT4_EMU_BACKEND": "backend to insist on",
    "INT4_EMU_CPU_ISA": "CPU instruction set: portable, avx2, avx512 or amx",
    "INT4_EMU_LIBRARY": "path of another compiled library",
    "INT4_EMU_CHECK_IDS": "1: an expert id out of range raises instead of being unrouted",
    "INT4_EMU_GPU": "while building: GPU kernels, 0 without, 1, cuda or rocm insist on them",
    "INT4_EMU_NATIVE_TESTS": "1, while building: also build the module of the native tests",
    "INT4_EMU_AMD_ALLOW_SKIP": "1, for make amd-check: a part that cannot run here is no error",
}


def main(args: argparse.Namespace) -> int:
    """Prints the report."""
    out = console()
    print_pairs(out, f"int4_emu {__version__}", _versions())
    print_pairs(out, "\nCompiled library", _build())
    out.print()
    say(out, "Devices and backends", "bold")
    out.print(_backends())
    print_pairs(out, "\nEnvironment", _environment())
    say(out, "\nTry: int4-emu selftest, int4-emu run, int4-emu inspect DIR")
    return 0


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> list[tuple[str, str]]:
    free = available_bytes(torch.device("cpu"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", torch.__version__),
        ("transformers", f"{_installed('transformers')} (for run and from_pretrained: >= 5.17)"),
        ("safetensors", _installed("safetensors")),
        ("matplotlib", f"{_installed('matplotlib')} (for bench --plot)"),
        (
            "system",
            f"{platform.system()} {platform.release()} {platform.machine()}, libc {' '.join(platform.libc_ver())}",
        ),
        ("processor", f"{cpu_name()}, {usable} usable, torch uses {torch.get_num_threads()} threads"),
        ("memory", "unknown" if free is None else f"{size(free)} available"),
    ]


def _build() -> list[tuple[str, str]]:
    if not _library.is_compiled():
        return [
            ("status", "not in use: the PyTorch reference serves every op, slowly"),
            ("reason", str(_library.load_error())),
        ]
    isa, reasons = _library.cpu_isa()
    lines = [("built with", str(_library.build_info())), ("CPU kernels", isa or "none")]
    lines += [("", reason.strip()) for reason in reasons.split(";") if reason.strip()]
    rounding = {
        name: _library.packed_numerics(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")
    }
    lines.append(
        ("packed weights", ", ".join(f"{kind} with {name} activations" for name, kind in rounding.items()))
    )
    architectures, why = _library.gpu_architectures()
    lines.append(("GPU kernels", architectures or f"{why}; the reference backend runs on GPUs"))
    return lines


def devices() -> list[tuple[torch.device, str]]:
    """(device, its name) of everything torch can compute on here."""
    found = [(torch.device("cpu"), "")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            arch = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
            found.append((torch.device("cuda", index), f"{properties.name}, {arch}"))
    if torch.backends.mps.is_available():
        found.append((torch.device("mps"), "Apple GPU"))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append((torch.device("xpu"), torch.xpu.get_device_name(0)))
    return found


def _backends() -> object:
    """A row per device, weights and backend, asked with a typical layer (Qwen3-30B-A3B, int4 groups of 128)."""
    rows: list[tuple[str, str, str, str]] = []
    quant = QuantConfig.int4_w4a16(group_size=128)
    modes: tuple[tuple[WeightsMode, QuantConfig | None], ...] = (("packed", quant), ("dequantized", None))
    for device, name in devices():
        for mode, given in modes:
            config = MoEConfig(2048, 768, 128, 8, torch.bfloat16, device, given)
            chosen = None
            for backend in all_backends().values():
                reasons = backend.is_supported(config, mode)
                verdict = (
                    f"not used since {'; '.join(reasons)}"
                    if reasons
                    else f"yes ({backend.describe(config, mode)})"
                )
                rows.append((f"{device} {name}".strip(), mode, backend.name, verdict))
            try:
                chosen = select_backend(config, weights=mode)
                rows.append(("", "", "chosen", chosen.backend))
            except (BackendError, ValueError) as error:
                rows.append(("", "", "chosen", f"none: {error}"))
    return table(("device", "weights", "backend", "serves a typical layer"), rows)


def _environment() -> list[tuple[str, str]]:
    lines = [
        (name, f"{os.environ[name]!r} ({what})") for name, what in ENVIRONMENT.items() if name in os.environ
    ]
    lines += [
        (n, "set, but nothing reads it")
        for n in os.environ
        if n.startswith("INT4_EMU_") and n not in ENVIRONMENT
    ]
    others = (
        "OMP_NUM_THREADS",
        "MAX_JOBS",
        "PYTORCH_ROCM_ARCH",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
    )
    lines += [(name, repr(os.environ[name])) for name in others if name in os.environ]
    return lines or [("", f"none of {', '.join(ENVIRONMENT)} is set")]
