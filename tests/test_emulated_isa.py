"""AVX-512 and AMX tile functions on a CPU that has neither: their intrinsics as loops over lanes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "tests/native"
FLAGS = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c"]


def has_avx2() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and {"avx2", "fma", "f16c"} <= set(info.read_text().split())


def compile_object(source: Path, target: Path, *flags: str) -> str:
    command = ["g++", *FLAGS, *flags, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return str(target)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is needed to compile the emulation")
@pytest.mark.skipif(not has_avx2(), reason="the emulation runs on AVX2, FMA and F16C")
def test_avx512_and_amx_agree_with_double_precision(tmp_path: Path) -> None:
    header = str(NATIVE / "emulated_avx512.h")
    objects = [
        compile_object(ROOT / "csrc/cpu" / f"{stem}.cpp", tmp_path / f"{stem}.o", "-include", header)
        for stem in ("tile_avx512", "tile_amx")
    ]
    objects += [
        compile_object(NATIVE / name, tmp_path / f"{name}.o")
        for name in ("selfcheck.cpp", "emulated_tables.cpp")
    ]
    program = tmp_path / "selfcheck"
    subprocess.run(["g++", *objects, "-o", str(program)], check=True)
    done = subprocess.run(
        [str(program), "--quick", "avx512", "avx512-other", "amx"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for table in ("avx512", "amx"):
        for what in (
            "product fp32",
            "product bf16",
            "cuts bf16",
            "whole products",
            "activations",
            "combine",
            "dequantize, bits",
        ):
            assert any(
                line.startswith(f"{table:8} {what}") and " ok " in line for line in done.stdout.splitlines()
            )
