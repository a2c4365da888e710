"""Builds int4_emu: the op library `int4_emu._C` (no Python ABI, torch's stable API), the GPU kernels `int4_emu._C_gpu` where torch
and a compiler are there for them, and, on request, the native test module. build_tools.py has the decisions.

Environment: MAX_JOBS, CXX, INT4_EMU_GPU (0, 1, cuda, rocm), TORCH_CUDA_ARCH_LIST, PYTORCH_ROCM_ARCH, CUDA_HOME, ROCM_HOME,
INT4_EMU_NATIVE_TESTS=1 (the pybind11 module that binds the torch-free C++).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import Extension, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # a PEP 517 frontend does not
import build_tools  # noqa: E402
from build_tools import Gpu  # noqa: E402


def chosen_gpu() -> Gpu:
    """The GPU kernels of this build, said aloud; none where only metadata are asked for."""
    if {"sdist", "egg_info", "dist_info"} & set(sys.argv):
        return Gpu("", "since nothing is compiled")
    # torch.cuda.get_arch_list() has no answer without a GPU; this has.
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else ""
    torch_build = build_tools.TorchBuild(
        torch.version.cuda, torch.version.hip, tuple((flags or "").split()) if torch.version.hip else ()
    )

    def find(name: str) -> str | None:
        if not torch.version.hip:
            return build_tools.find_compiler(name)
        # The one that torch's builder will call: it knows a ROCm that is installed as Python packages, too.
        from torch.utils.cpp_extension import ROCM_HOME

        return shutil.which(name, path=f"{ROCM_HOME}/bin") if ROCM_HOME else None

    try:
        gpu = build_tools.choose_gpu(os.environ, torch_build, find, build_tools.run_compiler)
    except build_tools.BuildError as error:
        raise SystemExit(f"int4_emu: {error}") from None
    print(f"int4_emu: {gpu}", file=sys.stderr)
    return gpu


GPU = chosen_gpu()
GPU_HOME = build_tools.toolkit_home(GPU.vendor, GPU.compiler) if GPU.vendor else Path()
if GPU.vendor == "cuda":
    # What torch's builder would guess from PATH may be a wrapper's folder; it reads this once, when it is imported.
    os.environ.setdefault("CUDA_HOME", str(GPU_HOME))
elif GPU.vendor == "hip":
    os.environ["HIP_PLATFORM"] = "amd"  # else hipcc calls nvcc where there is one
from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    CUDAExtension,
    include_paths,
    is_ninja_available,
)

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
        "-mavx512vnni",
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
        "-mavx512vnni",
        "-mamx-tile",
        "-mamx-bf16",
        "-mamx-int8",
    ],
}
ISA_WARNINGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
GPU_FLAGS = {
    "cuda": ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"],
    "hip": ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"],
}
JOBS = build_tools.compile_jobs(len(os.sched_getaffinity(0)), build_tools.visible_memory(), os.environ)
os.environ["MAX_JOBS"] = str(JOBS)  # torch's builder reads it
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


def gpu_groups() -> list[tuple[str, list[str], list[str]]]:
    """The GPU sources as (object folder, files, flags): an instruction family only for the architectures that have it."""
    atoms = build_tools.gpu_atoms()
    files = sorted(p.relative_to(ROOT) for p in (ROOT / "csrc/gpu").glob("*.cu"))
    common = GPU_FLAGS[GPU.vendor] + build_tools.gpu_defines(atoms, GPU.architectures)
    return [
        (
            f"gpu{number}",
            [str(file) for file in group],
            common + build_tools.architecture_flags(names) + build_tools.parallel_flags(GPU.vendor, JOBS),
        )
        for number, (names, group) in enumerate(build_tools.gpu_groups(files, atoms, GPU.architectures))
    ]


def compile_directly(groups: list[tuple[str, list[str], list[str]]], folder: Path) -> list[str]:
    """Compiles GPU files beside a torch that has no builder for them; only what changed."""

    def compile_one(source: str, target: Path, flags: list[str]) -> str:
        command = [GPU.compiler, "-c", source, "-o", str(target), *flags]
        said = target.with_suffix(".command")
        if (
            build_tools.is_stale(target, ROOT / source)
            or not said.exists()
            or said.read_text() != str(command)
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(command, check=True)
            said.write_text(str(command))
        return str(target)

    with ThreadPoolExecutor(JOBS) as pool:
        running = [
            pool.submit(compile_one, source, folder / name / f"{Path(source).stem}.o", flags)
            for name, files, flags in groups
            for source in files
        ]
        return [future.result() for future in running]


class Build(BuildExtension):
    """Compiles groups of files once, shares their objects between extensions, and replaces a library in one rename."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.compiled: dict[tuple[str, str], str] = {}  # group and source file -> object

    def build_extension(self, ext: Extension) -> None:
        objects: list[str] = []
        for name, files, flags in ext.groups:
            # Another extension's macros and include folders mean nothing to these files, and would make ninja compile them again each time.
            new = [source for source in files if (name, source) not in self.compiled]
            if new:
                compiled = self.compiler.compile(
                    new,
                    output_dir=str(Path(self.build_temp) / name),
                    include_dirs=list(ext.include_dirs),
                    macros=list(ext.define_macros),
                    extra_postargs=list(flags),
                    depends=ext.depends,
                )
                self.compiled.update(zip([(name, source) for source in new], compiled, strict=True))
            objects += [self.compiled[name, source] for source in files]
        if ext.name == "int4_emu._C_gpu":
            objects += self.gpu_objects()
        saved = list(ext.extra_objects or [])
        ext.extra_objects = saved + objects
        try:
            super().build_extension(ext)
        finally:
            ext.extra_objects = saved

    def gpu_objects(self) -> list[str]:
        """The GPU kernels, with torch's own compile rules where this torch has them."""
        folder = Path(self.build_temp)
        if GPU.own_step:
            return compile_directly(gpu_groups(), folder)
        objects: list[str] = []
        for name, files, flags in gpu_groups():
            output = str((folder / name).resolve())
            for source, target in zip(
                files, self.compiler.object_filenames(files, output_dir=output), strict=True
            ):
                # torch's rule for hipcc follows no headers.
                if build_tools.is_stale(Path(target), ROOT / source):
                    Path(target).unlink(missing_ok=True)
            objects += self.compiler.compile(
                files, output_dir=output, extra_postargs={"cxx": [], "nvcc": flags}
            )
        return objects

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
    name: str,
    files: list[str],
    groups: list[tuple[str, list[str], list[str]]],
    link: list[str],
    kind: Callable[..., Extension] = CppExtension,
) -> Extension:
    """One library of op kernels on torch's stable ABI."""
    ext = kind(
        name,
        [],
        depends=headers,
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET), ("INT4_EMU_BUILD_INFO", f'"{build_info}"')],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=link_args + link,
        py_limited_api=True,
    )
    # Named afterwards: on a ROCm torch CUDAExtension would rewrite these files, which need no rewriting, and leave copies in the tree.
    ext.sources = files
    ext.groups = groups
    # All that the stable ABI needs is in these; torch's GPU libraries would tie the result to this torch, and their header folders
    # would make other commands, and new objects, of the files that both libraries share.
    ext.libraries = [name for name in ext.libraries if name in ("c10", "torch_cpu", "cudart", "amdhip64")]
    ext.include_dirs = include_paths()
    return ext


def gpu_link_args() -> list[str]:
    """The vendor's runtime for a build beside a CPU torch; torch's builder names its own."""
    if not GPU.own_step:
        return []
    names = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    if GPU.vendor == "hip":
        return [*(f"-L{GPU_HOME / name}" for name in names[:2]), "-lamdhip64"]
    folders = [GPU_HOME / name for name in names if (GPU_HOME / name / "libcudart_static.a").exists()]
    runtime = ["-Wl,-Bstatic", "-lcudart_static", "-Wl,-Bdynamic", "-ldl", "-lrt", "-lpthread"]
    return [*(f"-L{folder}" for folder in folders), *runtime]


extensions: list[Extension] = [
    op_library(
        "int4_emu._C", ["csrc/torch/library.cpp", "csrc/torch/device_cpu.cpp"], [FRONT, *kernel_groups()], []
    )
]
if GPU.vendor:
    core = ("kernels", sources("csrc/core"), CXX_FLAGS)
    files = ["csrc/torch/library_gpu.cpp", "csrc/torch/device_gpu.cpp"]
    kind = CppExtension if GPU.own_step else CUDAExtension
    extensions.append(op_library("int4_emu._C_gpu", files, [FRONT, core], gpu_link_args(), kind))
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

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": Build.with_options(use_ninja=is_ninja_available())},
    options=wheel_options,
)
