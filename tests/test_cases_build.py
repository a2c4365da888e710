"""requirements cases 22-24: architectures without a live GPU, the job count, and a library that does not
load."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "int4_emu"
GB = 2**30

pytestmark = pytest.mark.skipif(not (ROOT / "build_tools.py").is_file(), reason="runs in a source checkout")


@pytest.fixture(scope="module")
def build_tools() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tools_under_test", ROOT / "build_tools.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gfx1151", ["gfx1151"]),
        ("gfx942;gfx1100", ["gfx942", "gfx1100"]),
        ("gfx942 gfx1100", ["gfx942", "gfx1100"]),
        ("gfx942,gfx1100", ["gfx942", "gfx1100"]),
        (" gfx90a ; ", ["gfx90a"]),
        ("gfx90a:xnack-", ["gfx90a:xnack-"]),
    ],
)
def test_case_22_the_variable_is_the_only_source(
    build_tools: ModuleType, text: str, names: list[str]
) -> None:
    assert build_tools.rocm_architectures({"PYTORCH_ROCM_ARCH": text}, ["gfx906"]) == names


def test_case_22_else_torch_and_else_stop(build_tools: ModuleType) -> None:
    assert build_tools.rocm_architectures({}, ["gfx942", "gfx1100"]) == ["gfx942", "gfx1100"]
    for env in ({}, {"PYTORCH_ROCM_ARCH": ""}, {"PYTORCH_ROCM_ARCH": " ; "}):
        with pytest.raises(ValueError, match="PYTORCH_ROCM_ARCH"):
            build_tools.rocm_architectures(env, [])


@pytest.mark.parametrize("name", ["native", "sm_90", "gfx", "gfx942;native", "gfx942; rm -rf"])
def test_case_22_native_and_nonsense_are_refused(build_tools: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="PYTORCH_ROCM_ARCH"):
        build_tools.rocm_architectures({"PYTORCH_ROCM_ARCH": name}, ["gfx942"])


def test_case_23_a_given_job_count_stands(build_tools: ModuleType) -> None:
    for cpus, memory in ((96, 880 * GB), (2, 2 * GB), (1, GB // 2)):
        assert build_tools.compile_jobs(cpus, memory, {"MAX_JOBS": "3"}) == 3
    for bad in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match="MAX_JOBS"):
            build_tools.compile_jobs(4, 8 * GB, {"MAX_JOBS": bad})


def test_case_23_else_cpus_and_memory_bound_it(build_tools: ModuleType) -> None:
    """At least one, at most one a CPU, monotonic in memory, with a reserve left on a small host."""

    def jobs(cpus: int, gigabytes: float) -> int:
        return build_tools.compile_jobs(cpus, int(gigabytes * GB), {})

    assert jobs(2, 2) == 1, "half of the memory would be gone with two"
    assert jobs(1, 0.25) == 1
    assert 1 <= jobs(64, 32) < 32, "a gigabyte a job leaves no reserve"
    assert 1 <= jobs(96, 880) <= 96
    counts = [jobs(96, g) for g in (1, 2, 4, 8, 16, 32, 64, 128, 880)]
    assert counts == sorted(counts)
    assert jobs(4, 880) == 4


def test_case_23_memory_is_what_the_cgroup_allows(
    build_tools: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_text

    def limited(path: Path, *args: object, **kwargs: object) -> str:
        return "1073741824\n" if str(path) == "/sys/fs/cgroup/memory.max" else real(path)

    monkeypatch.setattr(Path, "read_text", limited)
    assert build_tools.visible_memory() == 2**30
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: "max\n" if "memory.max" in str(path) else real(path)
    )
    assert build_tools.visible_memory() > 2**30


# 24: a copy of the package with a library that does not load.

PROBE = """
import sys, torch
import int4_emu
assert int4_emu.__file__.startswith(sys.argv[1]), int4_emu.__file__
assert not int4_emu.is_compiled()
print("REASON", " ".join(int4_emu.load_error().split()))
config = int4_emu.MoEConfig(64, 32, 4, 2, torch.float32, "cpu", int4_emu.QuantConfig.int4_w4a16(32))
selection = int4_emu.select_backend(config)
assert selection.backend == "reference", selection
print("SELECTION", " ".join(str(selection).split()))
try:
    int4_emu.select_backend(config, backend="cpu")
except int4_emu.BackendError as error:
    print("REFUSAL", " ".join(str(error).split()))
q = torch.full((1, 4), 0x99, dtype=torch.uint8)
assert int4_emu.reference.dequantize(q, torch.ones(1, 1), group_size=8).eq(1).all()
assert int4_emu.ops.dequantize(q, torch.ones(1, 1), group_size=8).eq(1).all()  # the reference stands in
"""


def probe(folder: Path) -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("data", "__pycache__", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "int4_emu", ignore=ignore)
    return tmp_path


@pytest.mark.parametrize("stub", ["absent", "unresolved symbol", "another library"])
def test_case_24_import_works_and_says_why(copied_package: Path, stub: str) -> None:
    import torch

    library = copied_package / "int4_emu" / "_C.abi3.so"
    if stub != "absent":
        compiler = shutil.which("cc") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no compiler")
        source = copied_package / "stub.c"
        unresolved = (
            "extern int torch_symbol_of_another_version; int *p = &torch_symbol_of_another_version;\n"
        )
        source.write_text(unresolved if stub == "unresolved symbol" else "int loads_and_defines_no_op;\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    said = probe(copied_package)
    assert torch.__version__ in said["REASON"], "the running version"
    cause = {
        "absent": "_C",
        "unresolved symbol": "torch_symbol_of_another_version",
        "another library": "has no op unpack",
    }
    assert cause[stub] in said["REASON"]
    key = said["REASON"][:60]
    assert key in said["REFUSAL"] and "cpu" in said["REFUSAL"], said["REFUSAL"]
    assert "not used since" in said["SELECTION"]
