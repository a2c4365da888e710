"""Every CPU instruction set in a process of its own, chosen by environment; those the machine lacks refuse
clearly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = {
    "portable": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}


def cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return {f for line in lines if line.startswith("flags") for f in line.split(":")[1].split()}
    except OSError:
        return set()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status (negative: a signal) and output of each instruction set's process."""
    folder = tmp_path_factory.mktemp("isa")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    command = [sys.executable, str(HERE / "isa_program.py"), str(folder), *FLAGS, "sse9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {isa: (int(code), (folder / isa).read_text()) for isa, code in codes.items()}


Results = dict[str, tuple[int, str]]


@pytest.mark.parametrize("isa", FLAGS)
def test_every_instruction_set(compiled: ModuleType, results: Results, isa: str) -> None:
    code, output = results[isa]
    if FLAGS[isa] <= cpu_flags():
        assert code == 0 and output.endswith("judged\n"), output[-3000:]
    else:
        assert code > 0, f"neither a crash by signal nor a silent fallback, got {code}"
        last = output.strip().splitlines()[-1]
        assert isa in last and "INT4_EMU_CPU_ISA" in last, output[-2000:]


def test_unknown_instruction_set_lists_the_known(compiled: ModuleType, results: Results) -> None:
    code, output = results["sse9"]
    assert code > 0
    last = output.strip().splitlines()[-1]
    assert all(name in last for name in ("sse9", *FLAGS)), output[-2000:]
