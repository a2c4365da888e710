"""setup.py's branches for CUDA, ROCm and CPU torch, run through torch's own builder with compilers that only write down their calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="runs in a source checkout"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: cc"),
    pytest.mark.skipif(sys.platform != "linux", reason="for Linux"),
]

# Says a version, refuses nothing, and makes an empty object of every source.
COMPILER = """#!{python}
import json, os, subprocess, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("{version}")
elif "--dryrun" in arguments:
    print("#$ TOP={home}", file=sys.stderr)
elif "-c" in arguments:
    with open("{log}", "a") as log:
        print(json.dumps(arguments), file=log)
    target = arguments[arguments.index("-o") + 1]
    subprocess.run(["cc", "-c", "-x", "c", "-o", target, "/dev/null"], check=True)
    if "-MF" in arguments:
        open(arguments[arguments.index("-MF") + 1], "w").write(target + ":\\n")
"""
# setup.py with a torch that says it is for another GPU; of its extensions only the GPU objects are compiled.
RUNNER = """
import runpy, sys
import torch, setuptools
vendor, work = sys.argv[1], sys.argv[2]
sys.argv = ["setup.py", "build_ext"]
if vendor != "cpu":
    torch.version.cuda = "13.0" if vendor == "cuda" else None
    torch.version.hip = "7.0.51831" if vendor == "rocm" else None
    torch.cuda._is_compiled = lambda: True
    torch.cuda.is_available = lambda: False
real = setuptools.setup
setuptools.setup = lambda **options: None
names = runpy.run_path("setup.py", run_name="__main__")
(extension,) = [e for e in names["extensions"] if e.name == "int4_emu._C_gpu"]
print("SOURCES", *extension.sources)
print("LIBRARIES", *extension.libraries)
extension.sources, extension.groups, extension.depends = [work + "/empty.cpp"], [], []
extension.extra_link_args = [a for a in extension.extra_link_args if "version-script" not in a]
distribution = setuptools.Distribution({"ext_modules": [extension]})
command = names["Build"].with_options(use_ninja=names["is_ninja_available"]())(distribution)
command.build_temp, command.build_lib = work + "/temp", work + "/lib"
command.ensure_finalized()
command.run()
"""


def run_setup(tmp_path: Path, vendor: str, **environment: str) -> tuple[str, dict[str, list[str]]]:
    """What setup.py printed, and each GPU file's compile command."""
    home, log = tmp_path / "toolkit", tmp_path / "log"
    if not home.exists():
        (home / "bin").mkdir(parents=True)
        (home / "lib").mkdir()
        (home / "lib64").mkdir()
        for name, version in (("nvcc", "release 13.0, V13.0.88"), ("hipcc", "HIP version: 7.0.51831-0")):
            path = home / "bin" / name
            path.write_text(COMPILER.format(python=sys.executable, version=version, home=home, log=log))
            path.chmod(0o755)
        for library in ("amdhip64", "cudart"):
            stub = home / "lib" / f"lib{library}.so"
            subprocess.run(["cc", "-shared", "-x", "c", "-o", str(stub), "/dev/null"], check=True)
            shutil.copy(stub, home / "lib64")
        subprocess.run(["ar", "rc", str(home / "lib64/libcudart_static.a")], check=True)
        (tmp_path / "empty.cpp").write_text("")
    log.write_text("")
    drop = ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "INT4_EMU_GPU", "INT4_EMU_NATIVE_TESTS", "CUDA_PATH")
    kept = {k: v for k, v in os.environ.items() if k not in drop}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, vendor, str(tmp_path)],
        cwd=ROOT,
        env={**kept, "CUDA_HOME": str(home), "ROCM_HOME": str(home), "MAX_JOBS": "2", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    by_file = {Path(a).name: call for call in calls for a in call if a.endswith(".cu")}
    assert len(by_file) == len(calls), "each file is compiled once"
    return done.stdout + done.stderr, by_file


def ninja_is_there() -> bool:
    from torch.utils.cpp_extension import is_ninja_available

    return is_ninja_available()


def architectures(command: list[str]) -> list[str]:
    return [a.rpartition("=")[2] for a in command if a.startswith(("-gencode", "--offload-arch"))]


def files(*atoms: str) -> set[str]:
    """The GPU files of these families, and of none."""
    other = ("mma_sm80", "mfma_gfx9", "wmma_gfx11", "wmma_gfx12")
    return {
        p.name
        for p in (CSRC / "gpu").glob("*.cu")
        if not any(f"_{a}" in p.stem for a in other if a not in atoms)
    }


def test_a_cuda_torch_compiles_through_its_own_builder(tmp_path):
    said, calls = run_setup(tmp_path, "cuda")
    assert "through torch's builder, since torch is built for CUDA 13.0" in said
    assert "LIBRARIES c10 torch_cpu cudart\n" in said
    assert set(calls) == files("mma_sm80")
    for name, command in calls.items():
        assert architectures(command) == ["sm_80", "sm_90a", "compute_80"], name
        assert "--expt-relaxed-constexpr" in command, "a flag of torch's builder"
        assert "-DINT4_EMU_ATOM_MMA_SM80" in command
        assert '-DINT4_EMU_GPU_ARCHS="sm_80, sm_90a, compute_80"' in command


def test_an_old_card_gets_no_file_of_matrix_instructions(tmp_path):
    _, calls = run_setup(tmp_path, "cuda", TORCH_CUDA_ARCH_LIST="7.5;8.6+PTX")
    assert set(calls) == files("mma_sm80")
    for name, command in calls.items():
        want = ["sm_86"] if "mma_sm80" in name else ["sm_75", "sm_86", "compute_86"]
        assert architectures(command) == want, name


def test_a_rocm_torch_compiles_the_same_files_as_they_are(tmp_path):
    before = {p for p in CSRC.rglob("*") if p.is_file()}
    said, calls = run_setup(tmp_path, "rocm", PYTORCH_ROCM_ARCH="gfx90a:xnack-;gfx1100 gfx1030")
    assert "through torch's builder, since torch is built for ROCm 7.0.51831" in said
    assert "SOURCES csrc/torch/library_gpu.cpp csrc/torch/device_gpu.cpp\n" in said
    assert "LIBRARIES c10 torch_cpu amdhip64\n" in said
    assert {p for p in CSRC.rglob("*") if p.is_file()} == before, "torch's translator must leave no copies"
    assert set(calls) == files("mfma_gfx9", "wmma_gfx11")
    for name, command in calls.items():
        want = ["gfx90a:xnack-", "gfx1100", "gfx1030"]
        want = want[:1] if "mfma_gfx9" in name else want[1:2] if "wmma_gfx11" in name else want
        assert architectures(command) == want, name
        assert "-D__HIP_PLATFORM_AMD__=1" in command, "a flag of torch's builder"
        assert any(a.endswith(f"csrc/gpu/{name}") for a in command)

    # What did not change is not compiled again, and torch's rule for hipcc follows no headers by itself.
    if not ninja_is_there():
        return
    next((tmp_path / "temp").rglob("align.o")).touch()
    stale = next((tmp_path / "temp").rglob("gather.o"))
    os.utime(stale, (1, 1))  # older than its headers
    _, again = run_setup(tmp_path, "rocm", PYTORCH_ROCM_ARCH="gfx90a:xnack-;gfx1100 gfx1030")
    assert set(again) == {"gather.cu"}


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_beside_a_cpu_torch_an_own_step_compiles_on_request(tmp_path, vendor):
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("for a CPU torch")
    env = {"INT4_EMU_GPU": vendor, "PYTORCH_ROCM_ARCH": "gfx942;gfx1201"}
    said, calls = run_setup(tmp_path, "cpu", **env)
    assert f"through an own compile step, since INT4_EMU_GPU={vendor}" in said
    assert "LIBRARIES c10 torch_cpu\n" in said
    if vendor == "cuda":
        assert set(calls) == files("mma_sm80")
    else:
        assert set(calls) == files("mfma_gfx9", "wmma_gfx12")
        wanted = {"mfma_gfx9": ["gfx942"], "wmma_gfx12": ["gfx1201"]}
        for name, command in calls.items():
            want = next((w for atom, w in wanted.items() if atom in name), ["gfx942", "gfx1201"])
            assert architectures(command) == want, name
        return
    next((tmp_path / "temp").rglob("align.o")).unlink()
    _, again = run_setup(tmp_path, "cpu", **env)
    assert set(again) == {"align.cu"}
