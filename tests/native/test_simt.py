"""The GPU kernels on the host: unmodified sources, one fiber a GPU thread, waves of 64 and of 32 lanes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from simt.build import ARCHITECTURES, GPU, Builder, find_clang
from simt.kernels import difference, of_program

PHASES = 3  # of the cases of layers and groups, each a third, each in an order of its own

pytestmark = pytest.mark.skipif(not GPU.is_dir(), reason="runs in a source checkout")


@pytest.fixture(scope="session")
def builder() -> Builder:
    """The build of the machine's own compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Builder("g++")


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *options], capture_output=True, text=True, check=False, timeout=300)


def kernels_run(output: str) -> set[str]:
    return {line.removeprefix("kernel ") for line in output.splitlines() if line.startswith("kernel ")}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_runs_and_is_right(builder: Builder, arch: str) -> None:
    program = builder.program(arch)
    ran: set[str] = set()
    for phase in range(PHASES):
        seed = 1 + phase + PHASES * ARCHITECTURES.index(arch)
        options = [f"--arch={arch}", f"--seed={seed}", "--quick", f"--every={PHASES}", f"--phase={phase}"]
        done = run(program, *options, "--list-kernels-run")
        wrong = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
        assert done.returncode == 0, "\n".join([*wrong[:20], done.stderr])
        ran |= kernels_run(done.stdout)
    assert not difference(ran, of_program(program), "in the program")


@pytest.mark.slow
def test_clang_s_program_is_right_too() -> None:
    compiler = find_clang()
    if compiler is None:
        pytest.skip("needs clang++")
    program = Builder(compiler).program("gfx942")
    done = run(program, "--arch=gfx942", "--quick", "--list-kernels-run")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert not difference(kernels_run(done.stdout), of_program(program), "in the program")
