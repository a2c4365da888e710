"""Builds int4_emu: the op library `int4_emu._C` (no Python ABI, torch's stable API) and, on request, the native test module.

Environment: MAX_JOBS, CXX, INT4_EMU_GPU=1 (also build `int4_emu._C_gpu` with nvcc), INT4_EMU_NATIVE_TESTS=1 (the pybind11 module
that binds the torch-free C++).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # a PEP 517 frontend does not
from build_tools import compile_jobs, visible_memory  # noqa: E402

# The oldest torch whose ABI the library needs: 2.10.
TORCH_TARGET = "0x020a000000000000"
CXX_FLAGS = [
    "-std=c++17",
    "-g0",
    "-O3",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffile-prefix-map=.=int4_emu",
    "-Wall",
    "-Wextra",
]
# gcc 12 reports false uninitialised variables inside its own AVX-512 headers.
ISA_FLAGS = {
    "tile_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "tile_avx512.cpp": [
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bf16",
    ],
    "tile_amx.cpp": [
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
    ],
}
ISA_WARNINGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# Ampere and Hopper, and PTX for what comes after.
GPU_ARCHITECTURES = "sm_80, sm_90a, compute_80"
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-DINT4_EMU_ATOM_MMA_SM80",
    f'-DINT4_EMU_GPU_ARCHS="{GPU_ARCHITECTURES}"',
]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def compiler_version() -> str:
    """First line of `$CXX --version`."""
    cxx = os.environ.get("CXX") or "c++"
    try:
        return subprocess.run(
            [*cxx.split(), "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown compiler"


def sources(*folders: str) -> list[str]:
    """C++ files of these folders, relative to the checkout."""
    return sorted(str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).glob("*.cpp"))


def kernel_groups() -> list[tuple[str, list[str], list[str]]]:
    """The torch-free sources as (object folder, files, flags): a wide instruction never leaves its own file."""
    base, groups = [], []
    for source in sources("csrc/core", "csrc/cpu"):
        flags = ISA_FLAGS.get(Path(source).name)
        if flags is None:
            base.append(source)
        else:
            groups.append((Path(source).stem, [source], CXX_FLAGS + ISA_WARNINGS + (flags if IS_X86 else [])))
    return [("kernels", base, CXX_FLAGS), *groups]


def nvcc_path() -> str | None:
    """The CUDA compiler, if there is one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def cuda_library_folders(nvcc: str) -> list[str]:
    """Where the runtime to link statically may be, as this nvcc sees its own installation (it may be a wrapper script)."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        said = subprocess.run(
            [nvcc, "--dryrun", empty.name], capture_output=True, text=True, check=True
        ).stderr
    top = re.search(r"TOP=(\S+)", said)
    home = Path(top[1]) if top else Path(nvcc).resolve().parents[1]
    found = [home / name for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")]
    return [str(f.resolve()) for f in found if (f / "libcudart_static.a").exists()]


def wants_gpu() -> bool:
    """Whether INT4_EMU_GPU=1 asks for `_C_gpu`."""
    asked = os.environ.get("INT4_EMU_GPU", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"INT4_EMU_GPU must be 0 or 1, got {asked!r}")
    if asked == "1" and nvcc_path() is None:
        raise SystemExit("INT4_EMU_GPU=1 needs nvcc on PATH or CUDA_HOME")
    return asked == "1"


def gpu_objects(folder: Path, jobs: int) -> list[str]:
    """Compiles csrc/gpu with nvcc; only what changed."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = nvcc_path()
    assert nvcc is not None
    newest = max(p.stat().st_mtime for d in ("csrc/gpu", "csrc/core") for p in (ROOT / d).glob("*.*h"))

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            subprocess.run([nvcc, "-c", str(source), "-o", str(target), *NVCC_FLAGS], check=True)
        return str(target)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, sorted((ROOT / "csrc/gpu").glob("*.cu"))))


class Build(BuildExtension):
    """Compiles groups of files once, shares their objects between extensions, and replaces a library in one rename."""

    def build_extension(self, ext: Extension) -> None:
        objects: list[str] = []
        for name, files, flags in ext.groups:
            objects += self.compiler.compile(
                files,
                output_dir=str(Path(self.build_temp) / name),
                include_dirs=list(ext.include_dirs),
                macros=list(ext.define_macros),
                extra_postargs=list(flags),
                depends=ext.depends,
            )
        if ext.name == "int4_emu._C_gpu":
            objects += gpu_objects(Path(self.build_temp) / "gpu", int(os.environ["MAX_JOBS"]))
        saved = list(ext.extra_objects or [])
        ext.extra_objects = saved + objects
        try:
            super().build_extension(ext)
        finally:
            ext.extra_objects = saved

    def copy_extensions_to_source(self) -> None:
        # setuptools would write over the file that a running process has mapped.
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(ext.name))
            target = (
                Path(self.get_ext_fullpath(ext.name))
                if not self.inplace
                else ROOT / "python" / self.get_ext_filename(ext.name)
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_suffix(".tmp")
            shutil.copy2(built, temporary)
            os.replace(temporary, target)


headers = [
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")),
    "python/int4_emu/schemas.inc",
    "csrc/torch/exports.map",
    "csrc/torch/ops.inc",
]
build_info = f"torch {torch.__version__}, {compiler_version()}, torch ABI 2.10"
link_args = (
    ["-Wl,--as-needed", "-Wl,-z,defs", "-Wl,--version-script=csrc/torch/exports.map"]
    if sys.platform == "linux"
    else []
)
# Checks and op implementations, the same objects in both libraries.
FRONT = ("front", ["csrc/torch/check.cpp", "csrc/torch/ops_formats.cpp", "csrc/torch/ops_moe.cpp"], CXX_FLAGS)


def op_library(
    name: str, files: list[str], groups: list[tuple[str, list[str], list[str]]], link: list[str]
) -> Extension:
    """One library of op kernels on torch's stable ABI."""
    ext = CppExtension(
        name,
        files,
        depends=headers,
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET), ("INT4_EMU_BUILD_INFO", f'"{build_info}"')],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=link_args + link,
        py_limited_api=True,
    )
    ext.groups = groups
    return ext


extensions: list[Extension] = [
    op_library(
        "int4_emu._C", ["csrc/torch/library.cpp", "csrc/torch/device_cpu.cpp"], [FRONT, *kernel_groups()], []
    )
]
if wants_gpu():
    cudart = [
        *(f"-L{folder}" for folder in cuda_library_folders(nvcc_path() or "")),
        "-Wl,-Bstatic",
        "-lcudart_static",
        "-Wl,-Bdynamic",
        "-ldl",
        "-lrt",
        "-lpthread",
    ]
    core = ("kernels", sources("csrc/core"), CXX_FLAGS)
    files = ["csrc/torch/library_gpu.cpp", "csrc/torch/device_gpu.cpp"]
    extensions.append(op_library("int4_emu._C_gpu", files, [FRONT, core], cudart))
wheel_options: dict[str, dict[str, str]] = {"bdist_wheel": {"py_limited_api": "cp310"}}
if os.environ.get("INT4_EMU_NATIVE_TESTS") == "1" and (ROOT / "tests/native/bind.cpp").exists():
    import pybind11

    # Binds the torch-free C++ for tests; it has a Python ABI and does not belong into a wheel for everyone.
    native = Extension(
        "int4_emu_native",
        ["tests/native/bind.cpp"],
        include_dirs=[pybind11.get_include()],
        depends=headers,
        extra_compile_args=CXX_FLAGS,
        language="c++",
    )
    native.groups = kernel_groups()
    extensions.append(native)
    wheel_options = {}

if not is_ninja_available():
    print("note: ninja is not installed, compiling one file after another", file=sys.stderr)
os.environ["MAX_JOBS"] = str(compile_jobs(len(os.sched_getaffinity(0)), visible_memory(), os.environ))

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": Build.with_options(use_ninja=is_ninja_available())},
    options=wheel_options,
)
