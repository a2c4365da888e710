"""Runs the built code objects instruction by instruction, once in a while, as evidence: `emulate.py --emulator PATH`.

PATH is a checkout of tinygrad's git repository, whose test/mockgpu/amd/emu.py emulates AMD instructions; none of it is kept here. The
launchers of csrc/gpu run on the host against the recording runtime (part d of amd-check), which hands every launch over: its kernel runs
from part b's code object, on the launch's own arguments, in this process's memory. Results are compared with NumPy in float64.
Needs: root, parts a, b and d of amd-check, NumPy, and what tinygrad needs (Python 3.11 or newer, clang).
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from amd import gates, launches, parse
from amd.code_object import CodeObject
from amd.common import TARGETS, WORK, Failure, must, sources_for
from amd.emulated_cases import CASES, Ops
from amd.emulator import load_emulator
from amd.tree import SUITE, in_tree

MODES = {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
LDS_GRANULE, LDS_SHIFT, LDS_MASK = 512, 15, 0x1FF << 15
WORKGROUP_X = 1 << 7


class Launch(ctypes.Structure):
    """RecordedLaunch of tests/amd/recorder/runtime.h."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Machine:
    """One architecture: its code objects, and the emulator to run them."""

    def __init__(self, arch: str, run_asm: Callable[..., int]) -> None:
        self.arch, self.run_asm = arch, run_asm
        self.launched: dict[str, int] = {}
        self.error: Exception | None = None
        self.paths: dict[str, Path] = {}  # of each kernel's code object
        self.loaded: dict[Path, CodeObject] = {}
        self.notes: dict[Path, str] = {}
        for source in sources_for(arch):
            path = gates.OBJECTS / arch / f"{source.stem}.o"
            self.notes[path] = must([launches.LLVM / "llvm-readelf", "--notes", path], path.name)
            self.paths |= dict.fromkeys(parse.metadata(self.notes[path]), path)

    def object_of(self, kernel: str) -> CodeObject:
        """The loaded code object that holds a kernel."""
        path = self.paths[kernel]
        if path not in self.loaded:
            listing = must([*in_tree(WORK / SUITE), f"{gates.LLVM}/llvm-objdump", "-d", path], path.name)
            self.loaded[path] = CodeObject(path, listing, self.notes[path])
        return self.loaded[path]

    def launch(self, launch: Launch) -> None:
        """Runs a recorded launch to its end."""
        name = launch.kernel.decode()
        loaded = self.object_of(name)
        kernel, described = loaded.metadata[name], loaded.descriptor(name)
        kernarg = (ctypes.c_char * (described.kernarg + 256))()
        for i, (offset, size) in enumerate(kernel.arguments):
            ctypes.memmove(ctypes.addressof(kernarg) + offset, launch.arguments[i], size)
        hidden = {"hidden_block_count_x": (launch.grid[0], 4), "hidden_group_size_x": (launch.block[0], 2)}
        for kind, offset in kernel.hidden:
            value, size = hidden.get(
                kind, (1, 4) if "block_count" in kind else (1, 2) if "group_size" in kind else (0, 0)
            )
            kernarg[offset : offset + size] = value.to_bytes(size, "little")
        granules = -(-(kernel.lds + launch.shared) // LDS_GRANULE)
        rsrc2 = described.rsrc2 & ~LDS_MASK | granules << LDS_SHIFT
        address = ctypes.addressof(kernarg)
        self.launched[name] = self.launched.get(name, 0) + 1
        self.run_asm(
            described.entry,
            loaded.size,
            *(launch.grid[0], 1, 1),
            *(launch.block[0], 1, 1),
            address,
            rsrc2,
            described.scratch,
            MODES[self.arch],
            described.user_registers(address),
        )


def main() -> int:
    """Runs every case on every architecture asked for and prints a table row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--emulator", type=Path, required=True, help="checkout of tinygrad's git repository")
    parser.add_argument("--archs", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--cases", default="", help="only cases whose name holds this")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run_asm = load_emulator(options.emulator)
    commit = subprocess.run(
        ["git", "-C", options.emulator, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"emulator {commit.stdout.strip()}, Python {platform.python_version()}, NumPy {np.__version__}")
    library = ctypes.CDLL(str(launches.build_library()))
    current: list[Machine] = []

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(Launch))
    def on_launch(launch: Any) -> None:
        try:
            current[0].launch(launch.contents)
        except Exception as error:
            current[0].error = current[0].error or error

    library.recorder_on_launch(on_launch)
    failed = 0
    for arch in options.archs:
        device = library.recorder_add_device(arch.encode(), TARGETS[arch].wave)
        current[:] = [Machine(arch, run_asm)]
        ops = Ops(library, device)
        for name, case, bound in CASES:
            if options.cases not in name:
                continue
            began, current[0].error = time.monotonic(), None
            try:
                error = case(ops, arch)
                if current[0].error:
                    raise current[0].error
            except Exception as problem:
                failed += 1
                print(f"{arch:8} {name:44} FAILED {type(problem).__name__}: {str(problem)[:300]}")
                continue
            if error is None:
                continue
            right = error <= bound
            failed += not right
            print(
                f"{arch:8} {name:44} {error:9.2e} <= {bound:7.1e} {'ok' if right else 'FAILED'} {time.monotonic() - began:5.1f} s"
            )
        print(f"{arch}: ran {len(current[0].launched)} of {len(current[0].paths)} kernels")
        for kernel in sorted(set(current[0].paths) - set(current[0].launched)):
            print(f"{arch}: not run: {kernel}")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(str(failure))
