"""The build's own decisions: compile jobs, AMD architectures, and an extension that is missing or broken."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GIB = 1024**3


def load_build_tools():
    spec = importlib.util.spec_from_file_location("build_tools", ROOT / "build_tools.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_tools = load_build_tools()


@pytest.mark.parametrize(
    ("cpus", "memory", "env", "want"),
    [
        (96, 880 * GIB, {}, 32),  # the cap: more jobs than files are of no use
        (64, 32 * GIB, {}, 15),  # (32 - 1) / 2
        (2, 2 * GIB, {}, 1),  # never none
        (2, 24 * GIB, {}, 2),
        (8, GIB // 2, {}, 1),
        (96, 880 * GIB, {"MAX_JOBS": "3"}, 3),
        (2, 2 * GIB, {"MAX_JOBS": "7"}, 7),  # kept as it stands
        (4, 64 * GIB, {"MAX_JOBS": " "}, 4),
    ],
)
def test_case_23_jobs_follow_cpus_memory_and_max_jobs(cpus, memory, env, want):
    assert build_tools.compile_jobs(cpus, memory, env) == want


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5"])
def test_case_23_a_bad_max_jobs_is_refused(value):
    with pytest.raises(ValueError, match=f"MAX_JOBS must be a positive integer, got '{value}'"):
        build_tools.compile_jobs(2, 8 * GIB, {"MAX_JOBS": value})


def test_case_23_a_cgroup_limit_below_the_machine_counts(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "3221225472\n")
    assert build_tools.visible_memory() == 3 * GIB
    monkeypatch.setattr(Path, "read_text", lambda self: "max\n")
    assert build_tools.visible_memory() > 0


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("gfx1151", ["gfx1151"]),
        ("gfx942;gfx1100", ["gfx942", "gfx1100"]),
        ("gfx942, gfx1100 gfx90a", ["gfx942", "gfx1100", "gfx90a"]),
        ("gfx90a:xnack-", ["gfx90a:xnack-"]),
    ],
)
def test_case_22_the_variable_is_the_only_source(text, want):
    assert build_tools.rocm_architectures({"PYTORCH_ROCM_ARCH": text}, ["gfx908"]) == want


def test_case_22_without_the_variable_torch_says_and_nothing_else():
    assert build_tools.rocm_architectures({}, ["gfx90a", "gfx942"]) == ["gfx90a", "gfx942"]
    with pytest.raises(ValueError, match="set PYTORCH_ROCM_ARCH"):
        build_tools.rocm_architectures({}, [])
    with pytest.raises(ValueError, match="native"):
        build_tools.rocm_architectures({"PYTORCH_ROCM_ARCH": "native"}, ["gfx942"])


PROBE = """
import torch, int4_emu
assert not int4_emu.is_compiled()
print(int4_emu.load_error())
w = int4_emu.ops.dequantize(torch.full((2, 4), 0x98, dtype=torch.uint8), torch.ones(2, 1), group_size=8)
assert w.tolist() == [[0.0, 1.0] * 4] * 2, w
config = int4_emu.MoEConfig(64, 32, 4, 2, torch.bfloat16, "cpu", int4_emu.QuantConfig.int4_w4a16(32))
print(int4_emu.select_backend(config))
try:
    int4_emu.select_backend(config, backend="cpu")
except int4_emu.BackendError as error:
    print(error)
"""


@pytest.fixture
def stub_library(tmp_path):
    """A shared library with an unresolved symbol that carries a build line of another torch."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the stub")
    source = tmp_path / "stub.c"
    source.write_text(
        'extern void symbol_of_another_torch(void);\nconst char info[] = "torch 9.9.9+cpu, stub, torch ABI 9.9";\n'
        "__attribute__((constructor)) static void start(void) { symbol_of_another_torch(); }\n"
    )
    library = tmp_path / "_C.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def run_probe(library):
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        env={"INT4_EMU_LIBRARY": str(library), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_case_24_a_broken_library_says_why_and_the_reference_serves(stub_library):
    import torch

    text = run_probe(stub_library)
    assert "symbol_of_another_torch" in text and "torch 9.9.9" in text and torch.__version__ in text
    assert "reference with packed weights" in text
    assert "backend cpu cannot serve" in text


def test_case_24_a_missing_library_says_so(tmp_path):
    text = run_probe(tmp_path / "nothing.so")
    assert "nothing.so" in text and "reference with packed weights" in text


def test_schemas_have_one_source():
    from int4_emu import _library

    schemas = _library.schemas()
    lines = [x for x in (ROOT / "python/int4_emu/schemas.inc").read_text().splitlines() if x.strip()]
    assert len(schemas) == len(lines) == 15
