"""Which GPU kernels a build makes: the choice, its reasons, architecture names, and which file is compiled for what."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "build_tools.py").is_file(), reason="runs in a source checkout")


def load_build_tools():
    name = "build_tools_of_gpu_tests"
    spec = importlib.util.spec_from_file_location(name, ROOT / "build_tools.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tools = load_build_tools() if (ROOT / "build_tools.py").is_file() else None

CPU = (None, None)
CUDA = ("13.0", None)
ROCM = (None, "7.0.51831")
NVCC_13 = "Cuda compilation tools, release 13.0, V13.0.88"
HIPCC_6 = "HIP version: 6.4.43484-9999\nDebian clang version 21.1.8 (13)"


class Compiler:
    """Stands in for nvcc or hipcc: a version, the architectures it refuses, and whether it can link."""

    def __init__(self, version: str, unknown: tuple[str, ...] = (), broken: str = "") -> None:
        self.version, self.unknown, self.broken = version, unknown, broken
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, compiler: str, *arguments: str) -> str:
        self.calls.append((compiler, *arguments))
        if arguments == ("--version",):
            return self.version
        for name in self.unknown:
            if any(argument.endswith(f"={name}") for argument in arguments):
                said = f"nvcc warning : old\nnvcc fatal   : Unsupported gpu architecture '{name}'\n"
                raise subprocess.CalledProcessError(1, compiler, "", said)
        if self.broken and "-shared" in arguments:
            raise subprocess.CalledProcessError(1, compiler, "", f"trial.cu:1: {self.broken}\n")
        return ""


def choose(torch_versions, env, compiler=None, torch_list=(), found=("nvcc", "hipcc")):
    build = tools.TorchBuild(*torch_versions, torch_list)
    if compiler is None:
        compiler = Compiler(HIPCC_6 if torch_versions[1] or env.get("INT4_EMU_GPU") == "rocm" else NVCC_13)
    return tools.choose_gpu(env, build, lambda name: f"/x/bin/{name}" if name in found else None, compiler)


# The choice.

DEFAULT_CUDA = ("sm_80", "sm_90a", "compute_80")


@pytest.mark.parametrize(
    ("torch_versions", "env", "vendor", "own_step", "architectures", "reason"),
    [
        (CPU, {}, "", False, (), "since torch is built for CPUs"),
        (CPU, {"INT4_EMU_GPU": "0"}, "", False, (), "since INT4_EMU_GPU=0"),
        (CPU, {"INT4_EMU_GPU": "1"}, "cuda", True, DEFAULT_CUDA, "since INT4_EMU_GPU=1"),
        (CPU, {"INT4_EMU_GPU": "cuda"}, "cuda", True, DEFAULT_CUDA, "since INT4_EMU_GPU=cuda"),
        (
            CPU,
            {"INT4_EMU_GPU": "rocm", "PYTORCH_ROCM_ARCH": "gfx942"},
            "hip",
            True,
            ("gfx942",),
            "INT4_EMU_GPU=rocm",
        ),
        (CUDA, {}, "cuda", False, DEFAULT_CUDA, "since torch is built for CUDA 13.0"),
        (CUDA, {"INT4_EMU_GPU": "0"}, "", False, (), "since INT4_EMU_GPU=0"),
        (CUDA, {"INT4_EMU_GPU": "1"}, "cuda", False, DEFAULT_CUDA, "since INT4_EMU_GPU=1"),
        (
            CUDA,
            {"TORCH_CUDA_ARCH_LIST": "9.0a+PTX"},
            "cuda",
            False,
            ("sm_90a", "compute_90a"),
            "built for CUDA 13.0",
        ),
        (
            ROCM,
            {"PYTORCH_ROCM_ARCH": "gfx90a;gfx1100"},
            "hip",
            False,
            ("gfx90a", "gfx1100"),
            "built for ROCm 7.0.51831",
        ),
        (
            ROCM,
            {"INT4_EMU_GPU": "rocm", "PYTORCH_ROCM_ARCH": "gfx1201"},
            "hip",
            False,
            ("gfx1201",),
            "GPU=rocm",
        ),
    ],
)
def test_the_torch_at_hand_and_the_variable_choose(
    torch_versions, env, vendor, own_step, architectures, reason
):
    gpu = choose(torch_versions, env)
    assert (gpu.vendor, gpu.own_step, gpu.architectures) == (vendor, own_step, architectures)
    assert reason in gpu.reason and reason in str(gpu)


def test_the_rocm_torch_lends_its_list_and_without_one_the_build_stops():
    assert choose(ROCM, {}, torch_list=("gfx942", "gfx1100")).architectures == ("gfx942", "gfx1100")
    with pytest.raises(tools.BuildError, match="no AMD architecture to build for: set PYTORCH_ROCM_ARCH"):
        choose(ROCM, {})


@pytest.mark.parametrize(
    ("torch_versions", "compiler", "found", "reason"),
    [
        (CUDA, None, (), "there is no nvcc on PATH or in CUDA_HOME"),
        (ROCM, None, (), "there is no hipcc on PATH or in ROCM_HOME"),
        (
            CUDA,
            Compiler("Cuda compilation tools, release 11.8, V11.8.89"),
            ("nvcc",),
            "nvcc is version 11.8, older than 12.4",
        ),
        (CUDA, Compiler("Cuda compilation tools, release 12.8, V1"), ("nvcc",), "nvcc is version 12.8"),
        (ROCM, Compiler("HIP version: 5.7.31921-0"), ("hipcc",), "hipcc is version 5.7, older than 6.0"),
        (
            CUDA,
            Compiler("a wrapper"),
            ("nvcc",),
            "nvcc --version names no version: 'a wrapper'",
        ),
        (
            CUDA,
            Compiler(NVCC_13, broken="fatal error: cuda_runtime.h: No such file or directory"),
            ("nvcc",),
            "nvcc cannot compile a kernel: trial.cu:1: fatal error: cuda_runtime.h: No such file",
        ),
    ],
)
def test_without_a_fitting_compiler_the_cpu_alone_is_built_and_insisting_stops(
    torch_versions, compiler, found, reason
):
    env = {"PYTORCH_ROCM_ARCH": "gfx942"}
    gpu = choose(torch_versions, env, compiler, found=found)
    assert (
        gpu.vendor == "" and reason in str(gpu) and "GPU kernels: none, since torch is built for" in str(gpu)
    )
    with pytest.raises(tools.BuildError, match="INT4_EMU_GPU=1 cannot be done") as error:
        choose(torch_versions, {**env, "INT4_EMU_GPU": "1"}, compiler, found=found)
    assert reason in str(error.value)


def test_a_minor_version_apart_serves_and_beside_a_cpu_torch_any_major():
    other = Compiler("Cuda compilation tools, release 13.2, V13.2.1")
    assert choose(CUDA, {}, other).vendor == "cuda"
    assert (
        choose(CPU, {"INT4_EMU_GPU": "1"}, Compiler("Cuda compilation tools, release 12.8, V1")).vendor
        == "cuda"
    )


@pytest.mark.parametrize(
    ("torch_versions", "value", "match"),
    [
        (CPU, "yes", "INT4_EMU_GPU must be 0, 1, cuda or rocm, got 'yes'"),
        (CPU, "hip", "INT4_EMU_GPU must be 0, 1, cuda or rocm, got 'hip'"),
        (CUDA, "rocm", "INT4_EMU_GPU=rocm does not fit: torch is built for CUDA 13.0"),
        (ROCM, "cuda", "INT4_EMU_GPU=cuda does not fit: torch is built for ROCm 7.0.51831"),
    ],
)
def test_a_wrong_wish_is_named(torch_versions, value, match):
    with pytest.raises(tools.BuildError, match=match):
        choose(torch_versions, {"INT4_EMU_GPU": value, "PYTORCH_ROCM_ARCH": "gfx942"})


# Architecture names.


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", ["sm_80", "sm_90a", "compute_80"]),
        ("8.0", ["sm_80"]),
        ("8.0;9.0a", ["sm_80", "sm_90a"]),
        ("8.0 8.6, 12.0+PTX", ["sm_80", "sm_86", "sm_120", "compute_120"]),
        ("8.0+PTX;9.0", ["sm_80", "sm_90", "compute_80"]),
        ("Hopper", ["sm_90", "compute_90"]),
        ("Ampere Ada", ["sm_80", "sm_86", "sm_89", "compute_86", "compute_89"]),
        ("8.0;8.0", ["sm_80"]),
        ("10.3f", ["sm_103f"]),
    ],
)
def test_cuda_names_are_those_of_torch(text, want):
    assert tools.cuda_architectures({"TORCH_CUDA_ARCH_LIST": text}) == want


@pytest.mark.parametrize("name", ["native", "sm_80", "8", "8.0+ptx", "90a", "Kepler", "all"])
def test_other_cuda_names_are_refused(name):
    text = f"8.0;{name}"
    with pytest.raises(tools.BuildError, match="TORCH_CUDA_ARCH_LIST must list names") as error:
        tools.cuda_architectures({"TORCH_CUDA_ARCH_LIST": text})
    assert f"got {name!r} in {text!r}" in str(error.value)


def test_a_name_that_the_compiler_refuses_is_unknown():
    with pytest.raises(tools.BuildError) as error:
        choose(CUDA, {"TORCH_CUDA_ARCH_LIST": "8.0;9.9"}, Compiler(NVCC_13, unknown=("sm_99",)))
    assert str(error.value) == (
        "TORCH_CUDA_ARCH_LIST names sm_99, which /x/bin/nvcc does not know: nvcc fatal   : Unsupported gpu architecture 'sm_99'"
    )
    with pytest.raises(tools.BuildError, match="PYTORCH_ROCM_ARCH names gfx999, which /x/bin/hipcc does not"):
        choose(ROCM, {"PYTORCH_ROCM_ARCH": "gfx942;gfx999"}, Compiler(HIPCC_6, unknown=("gfx999",)))


def test_the_real_nvcc_refuses_a_made_up_name_and_takes_the_default():
    nvcc = tools.find_compiler("nvcc")
    if nvcc is None:
        pytest.skip("not installed: nvcc")
    tools.check_architectures(nvcc, DEFAULT_CUDA, tools.run_compiler)
    with pytest.raises(tools.BuildError, match=r"names sm_99, .* Unsupported gpu architecture"):
        tools.check_architectures(nvcc, ["sm_80", "sm_99"], tools.run_compiler)
    assert tools.trial_problem(nvcc, "sm_80", tools.run_compiler) == ""


def test_flags_name_each_architecture():
    assert tools.architecture_flags(["sm_80", "sm_90a", "compute_80"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert tools.architecture_flags(["gfx90a:xnack-", "gfx1100"]) == [
        "--offload-arch=gfx90a:xnack-",
        "--offload-arch=gfx1100",
    ]


# The table of instruction families.

TABLE = """# a comment
new_cuda cuda sm_100a sm_120
mma_sm80 cuda sm_80 sm_90 compute_80  # Ampere
mfma_gfx9 hip gfx90a gfx942
wmma_gfx11 hip gfx1100
fma any *
"""
FILES = [
    "align.cu",
    "gemm_fma.cu",
    "gemm_mma_sm80_bf16.cu",
    "packed_mma_sm80_g32.cu",
    "gemm_mfma_gfx9_bf16.cu",
    "decode_wmma_gfx11_fp16.cu",
]


@pytest.fixture
def atoms(tmp_path):
    (tmp_path / "atoms.txt").write_text(TABLE)
    return tools.gpu_atoms(tmp_path / "atoms.txt")


def test_the_table_is_read(atoms):
    assert [(a.name, a.vendor, a.architectures) for a in atoms] == [
        ("new_cuda", "cuda", ("sm_100a", "sm_120")),
        ("mma_sm80", "cuda", ("sm_80", "sm_90", "compute_80")),
        ("mfma_gfx9", "hip", ("gfx90a", "gfx942")),
        ("wmma_gfx11", "hip", ("gfx1100",)),
        ("fma", "any", ("*",)),
    ]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("mma cuda", "line 2: must be a name, a vendor and architectures, got 'mma cuda'"),
        ("Mma cuda sm_80", "line 2: the name must be new, in lower case"),
        ("fma any *", "line 2: the name must be new"),
        ("mma amd gfx942", "line 2: the vendor must be cuda, hip or any"),
        ("mma cuda gfx942", "line 2: architectures of vendor cuda must be different names of its kind"),
        ("mma hip gfx942 gfx942", "line 2: architectures of vendor hip must be different"),
        ("mma hip *", "line 2: architectures of vendor hip"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, match):
    path = tmp_path / "atoms.txt"
    path.write_text(f"fma any *\n{line}\n")
    with pytest.raises(tools.BuildError, match=match):
        tools.gpu_atoms(path)


@pytest.mark.parametrize(
    ("architectures", "want", "present"),
    [
        (
            ["sm_80", "sm_90", "compute_80"],
            [(["sm_80", "sm_90", "compute_80"], FILES[:4])],
            {"MMA_SM80", "FMA"},
        ),
        (
            ["sm_75", "sm_80"],
            [(["sm_75", "sm_80"], FILES[:2]), (["sm_80"], FILES[2:4])],
            {"MMA_SM80", "FMA"},
        ),
        (["sm_75"], [(["sm_75"], FILES[:2])], {"FMA"}),
        (["sm_120a"], [(["sm_120a"], FILES[:2])], {"NEW_CUDA", "FMA"}),
        (
            ["gfx90a:xnack-", "gfx1100", "gfx1030"],
            [
                (["gfx90a:xnack-", "gfx1100", "gfx1030"], FILES[:2]),
                (["gfx90a:xnack-"], [FILES[4]]),
                (["gfx1100"], [FILES[5]]),
            ],
            {"MFMA_GFX9", "WMMA_GFX11", "FMA"},
        ),
    ],
)
def test_each_file_is_compiled_for_its_architectures(atoms, architectures, want, present):
    groups = tools.gpu_groups([Path(name) for name in FILES], atoms, architectures)
    assert [(names, [file.name for file in files]) for names, files in groups] == want
    defines = tools.gpu_defines(atoms, architectures)
    assert {d.removeprefix("-DINT4_EMU_ATOM_") for d in defines[:-1]} == present
    assert defines[-1] == '-DINT4_EMU_GPU_ARCHS="' + ", ".join(architectures) + '"'


def test_a_file_of_two_families_is_refused(atoms):
    with pytest.raises(
        tools.BuildError, match=r"x_mma_sm80_fma.cu must carry the name of one atom, got mma_sm80, fma"
    ):
        tools.atom_of(Path("x_mma_sm80_fma.cu"), atoms)


def test_the_table_of_the_tree_fits_its_files():
    atoms = tools.gpu_atoms()
    names = [a.name for a in atoms]
    assert {"mma_sm80", "mfma_gfx9", "wmma_gfx11", "wmma_gfx12", "fma"} <= set(names) and names[-1] == "fma"
    by_name = {a.name: a for a in atoms}
    assert all(by_name["mma_sm80"].serves(a) for a in DEFAULT_CUDA) and not by_name["mma_sm80"].serves(
        "sm_75"
    )
    assert by_name["mfma_gfx9"].serves("gfx950") and not by_name["mfma_gfx9"].serves("gfx908")
    for source in (ROOT / "csrc/gpu").glob("*.cu"):
        atom = tools.atom_of(source, atoms)
        if "sm80" in source.stem or "gfx" in source.stem:
            assert atom is not None and atom.vendor != "any", source.name


# Compilers on this machine, and what is rebuilt.


def test_a_home_that_is_set_is_the_only_place(tmp_path):
    for name in ("home/bin/nvcc", "path/nvcc"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    path = {"PATH": str(tmp_path / "path")}
    assert tools.find_compiler("nvcc", path) == str(tmp_path / "path/nvcc")
    home = {**path, "CUDA_HOME": str(tmp_path / "home")}
    assert tools.find_compiler("nvcc", home) == str(tmp_path / "home/bin/nvcc")
    assert tools.find_compiler("nvcc", {**path, "CUDA_HOME": str(tmp_path / "empty")}) is None


def test_an_object_is_stale_when_a_header_of_its_source_changed(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "a.cu").write_text('#include "b.cuh"\n#include <vector>\n')
    (folder / "b.cuh").write_text('#  include "../c.h"\n')
    (tmp_path / "c.h").write_text("")
    (folder / "other.cuh").write_text("")
    target = tmp_path / "a.o"
    assert tools.is_stale(target, folder / "a.cu")
    target.write_text("")
    old, new = target.stat().st_mtime - 10, target.stat().st_mtime + 10
    for file in (folder / "a.cu", folder / "b.cuh", tmp_path / "c.h"):
        os.utime(file, (old, old))
    os.utime(folder / "other.cuh", (new, new))
    assert not tools.is_stale(target, folder / "a.cu")
    os.utime(tmp_path / "c.h", (new, new))
    assert tools.is_stale(target, folder / "a.cu")


def test_idle_processors_help_nvcc():
    assert tools.parallel_flags("cuda", 16) == ["-split-compile=4"]
    assert tools.parallel_flags("cuda", 2) == tools.parallel_flags("hip", 16) == []


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ({"INT4_EMU_GPU": "maybe"}, "int4_emu: INT4_EMU_GPU must be 0, 1, cuda or rocm, got 'maybe'"),
        ({"INT4_EMU_GPU": "cuda", "CUDA_HOME": "/nowhere"}, "there is no nvcc on PATH or in CUDA_HOME"),
        ({"INT4_EMU_GPU": "rocm", "ROCM_HOME": "/nowhere"}, "there is no hipcc on PATH or in ROCM_HOME"),
    ],
)
def test_setup_ends_with_one_sentence(env, match):
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("for a CPU torch")
    if shutil.which("c++") is None:
        pytest.skip("not installed: c++")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert match in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
