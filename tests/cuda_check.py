"""The CUDA build without a GPU: `make cuda-check`.

nvcc compiles the kernels beside a CPU torch for sm_80, sm_90a and PTX, the library links and loads, it uses and shows only what it may,
and every kernel is there for each architecture. Exit status: 0 all held; 1 something did not; 3 there is no nvcc, or no cuobjdump to look
into the code with.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
import build_tools  # noqa: E402

from amd.common import Failure, Skip  # noqa: E402
from amd.rocm_build import check_library, dynamic, stable_names  # noqa: E402

WORK = ROOT / "build" / "cuda-check"
# A static runtime: the same file serves whatever CUDA torch it is loaded beside.
MAY_NEED = {
    "libc10",
    "libtorch_cpu",
    "libstdc++",
    "libgcc_s",
    "libm",
    "libc",
    "libdl",
    "librt",
    "libpthread",
    "ld-linux-x86-64",
}
LOAD = """
import ctypes, sys, torch
for name in ("_C", "_C_gpu"):
    torch.ops.load_library(f"{sys.argv[1]}/{name}.abi3.so")
library = ctypes.CDLL(f"{sys.argv[1]}/_C_gpu.abi3.so")
library.int4_emu_gpu_architectures.restype = ctypes.c_char_p
print("architectures", library.int4_emu_gpu_architectures().decode())
ops = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("int4_emu::")}
for op in sorted(ops):
    print("op", op, torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA"))
"""


def build() -> Path:
    """The folder with both libraries, compiled with full optimisation; only what changed."""
    # A caller's settings must not decide what is checked.
    env = {k: v for k, v in os.environ.items() if k not in ("TORCH_CUDA_ARCH_LIST", "INT4_EMU_NATIVE_TESTS")}
    WORK.mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build" / "cuda-check.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(WORK / "lib")],
            cwd=ROOT,
            env={**env, "INT4_EMU_GPU": "cuda"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    (WORK / "build.log").write_text(done.stdout)
    if done.returncode != 0:
        raise Failure(f"the build ended with status {done.returncode}\n{done.stdout[-4000:]}")
    print(
        next(
            (line for line in done.stdout.splitlines() if "GPU kernels" in line), "no word on the GPU kernels"
        )
    )
    return WORK / "lib" / "int4_emu"


def check_loads(folder: Path) -> list[str]:
    """Loads both libraries in this torch; returns the architectures that the second names."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failure(f"the libraries do not load: {done.stderr[-2000:]}")
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    without = [text for kind, text in lines if kind == "op" and text.endswith("False")]
    count = sum(kind == "op" for kind, _ in lines)
    if without or not count:
        raise Failure(f"of {count} ops these have no CUDA kernel: {', '.join(without)}")
    (architectures,) = (text for kind, text in lines if kind == "architectures")
    print(f"loaded: {count} ops have CUDA kernels, for {architectures}")
    return architectures.split(", ")


def check_needs(library: Path) -> None:
    """That nothing but the C library and torch's CPU half is needed to load it."""
    strange = [name for name in dynamic(library) if name.partition(".so")[0] not in MAY_NEED]
    if strange:
        raise Failure(f"{library.name} needs {', '.join(strange)}")


def find_cuobjdump(nvcc: str) -> str:
    """cuobjdump on PATH, beside nvcc, or of the package nvidia-cuda-cuobjdump.

    Raises:
        Skip: there is none.
    """
    beside = build_tools.toolkit_home("cuda", nvcc) / "bin"
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [
        os.environ.get("PATH", ""),
        str(beside),
        *(str(p.parent) for p in packaged.glob("*/bin/cuobjdump")),
    ]
    for folder in folders:
        if found := shutil.which("cuobjdump", path=folder):
            return found
        # Packages lose the mode of their files on some installers.
        plain = Path(folder) / "cuobjdump"
        if os.pathsep not in folder and plain.is_file():
            plain.chmod(0o755)
            return str(plain)
    raise Skip("there is no cuobjdump (pip install nvidia-cuda-cuobjdump)")


def machine_code(listing: str) -> dict[str, set[str]]:
    """Entry points by architecture, from `cuobjdump --dump-elf-symbols`."""
    found: dict[str, set[str]] = {}
    architecture = ""
    for line in listing.splitlines():
        if match := re.match(r"arch = (sm_\w+)", line):
            architecture = match[1]
            found.setdefault(architecture, set())
        elif match := re.match(r"FUNC\s+\w+\s+\w+\s+ENTRY\s+(\S+)$", line):
            found[architecture].add(match[1])
    return found


def ptx_entries(text: str) -> dict[str, set[str]]:
    """Entry points by `.target`, from `cuobjdump --dump-ptx`."""
    found: dict[str, set[str]] = {}
    target = ""
    for line in text.splitlines():
        if match := re.match(r"\.target (sm_\w+)", line):
            target = match[1].replace("sm_", "compute_")
            found.setdefault(target, set())
        elif match := re.match(r"(?:\.weak |\.visible )?\.entry (\w+)\(?", line):
            found[target].add(match[1])
    return found


def check_kernels(found: dict[str, set[str]], architectures: Iterable[str]) -> int:
    """That each architecture has every kernel; their number."""
    wanted = set(architectures)
    if set(found) != wanted:
        raise Failure(
            f"the library has code for {', '.join(sorted(found))}, and says {', '.join(sorted(wanted))}"
        )
    every = set().union(*found.values())
    if not every or (strange := sorted(name for name in every if "_kernel" not in name)):
        raise Failure(f"entry points that are no kernels of ours: {strange[:5] if every else 'none at all'}")
    for architecture, names in sorted(found.items()):
        if missing := every - names:
            raise Failure(
                f"{architecture} lacks {len(missing)} of {len(every)} kernels, such as {min(missing)}"
            )
    return len(every)


def run() -> None:
    """Everything; prints what held."""
    nvcc = build_tools.find_compiler("nvcc")
    if nvcc is None:
        raise Skip("there is no nvcc on PATH or in CUDA_HOME")
    import torch

    if torch.version.cuda or torch.version.hip:
        raise Skip(f"it compiles beside a CPU torch, and torch {torch.__version__} is not one")
    folder = build()
    library = folder / "_C_gpu.abi3.so"
    check_library(library, stable_names(Path(torch.__file__).parent), ("torch_cpu",))
    check_needs(library)
    architectures = check_loads(folder)
    if architectures != ["sm_80", "sm_90a", "compute_80"]:
        raise Failure(f"the default architectures must be sm_80, sm_90a and compute_80, got {architectures}")
    cuobjdump = find_cuobjdump(nvcc)

    def listing(option: str) -> str:
        return subprocess.run(
            [cuobjdump, option, str(library)], capture_output=True, text=True, check=True
        ).stdout

    found = machine_code(listing("--dump-elf-symbols")) | ptx_entries(listing("--dump-ptx"))
    print(f"{check_kernels(found, architectures)} kernels, each for {', '.join(architectures)}")


def main() -> int:
    try:
        run()
    except Failure as failure:
        print(f"cuda-check: failed: {failure}")
        return 1
    except Skip as skip:
        print(f"cuda-check: skipped: {skip}")
        return 3
    print("cuda-check: all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
