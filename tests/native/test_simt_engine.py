"""The host engine itself: small kernels that it must run, and wrong ones that it must stop."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from simt.build import GPU, Builder, find_clang

pytestmark = pytest.mark.skipif(not GPU.is_dir(), reason="runs in a source checkout")

RIGHT = ["sum", "lanes", "unwritten", "dynamic inside", "too much shared memory"]
# What the last line of the standard error must say.
WRONG = {
    "divergent": "divergent barrier: thread 0 waits at engine_check.cpp:",
    "early return": "thread 100 returned while thread 0 waits at the barrier in engine_check.cpp:",
    "two operations": "lanes 0 and 1 of wave",
    "past": "thread 127: touched byte 512 of a buffer of 512 bytes",
    "before": "wrote beside a buffer of 512 bytes",
    "read past": "thread 127: touched byte 512 of a buffer of 512 bytes",
    "misaligned": "an access that is not aligned to its type",
    "dynamic past": "touched memory outside every buffer",
    "dynamic before": "wrote 8 bytes before its dynamic shared memory",
}


@pytest.fixture(scope="module", params=["g++", "clang++"])
def program(request: pytest.FixtureRequest) -> Path:
    compiler = find_clang() if request.param == "clang++" else shutil.which("g++")
    if compiler is None:
        pytest.skip(f"needs {request.param}")
    return Builder(compiler).engine_check()


def run(program: Path, arch: str, case: str, seed: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, arch, case, str(seed)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_right_kernels_run(program: Path, arch: str) -> None:
    for case in [*RIGHT, "mfma" if arch == "gfx942" else "wmma"]:
        for seed in range(1, 4):
            done = run(program, arch, case, seed)
            assert (done.returncode, done.stdout) == (0, "ok\n"), f"{case}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_kernels_are_stopped(program: Path, arch: str, case: str) -> None:
    done = run(program, arch, case)
    assert done.returncode == 3
    assert WRONG[case] in done.stderr.splitlines()[-1]


def test_a_race_shows(program: Path) -> None:
    assert [run(program, "gfx942", "race", seed).returncode for seed in range(1, 5)] == [1, 1, 1, 1]


def test_matrix_instructions_take_whole_waves_of_their_size(program: Path) -> None:
    assert (
        "lane 9 of wave 0 is missing at mfma_f32_16x16x16bf16_1k"
        in run(program, "gfx942", "lane missing").stderr
    )
    assert "operands of lane 20 differ from lane 4's" in run(program, "gfx1100", "halves differ").stderr
    assert "for waves of 64 lanes ran in a wave of 32" in run(program, "gfx1100", "mfma").stderr
