"""The torch-free library elsewhere: through CMake here, for 64-bit Arm (run under qemu), and by clang."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def need(*program_list: str) -> None:
    """Skips, saying which program is not installed."""
    missing = [name for name in program_list if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def build(folder: Path, *options: str) -> Path:
    """Configures and builds cmake/ with warnings as errors; returns the self-check program."""
    configure = ["cmake", "-S", str(ROOT / "cmake"), "-B", str(folder), "-DINT4_EMU_WERROR=ON", *options]
    for command in (configure, ["cmake", "--build", str(folder), "-j2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "selfcheck"


def assert_all_right(command: list[str], table_list: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    for table in table_list:
        assert f"{table:8} product fp32" in done.stdout


@pytest.mark.slow
def test_cmake_build_checks_itself(tmp_path: Path) -> None:
    need("cmake", "c++")
    assert_all_right([str(build(tmp_path)), "--quick"], ["portable"])


@pytest.mark.slow
def test_clang_build_checks_itself(tmp_path: Path) -> None:
    need("cmake", "clang++")
    assert_all_right([str(build(tmp_path, "-DCMAKE_CXX_COMPILER=clang++")), "--quick"], ["portable"])


@pytest.mark.slow
def test_arm_build_runs_under_qemu(tmp_path: Path) -> None:
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    program = build(tmp_path, f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/toolchain-aarch64.cmake'}")
    assert_all_right(["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(program), "--quick"], ["portable"])


def test_sources_compile_for_arm(tmp_path: Path) -> None:
    need("aarch64-linux-gnu-g++")
    for source in [
        *sorted((ROOT / "csrc/cpu").glob("tile_*.cpp")),
        ROOT / "csrc/cpu/features.cpp",
        ROOT / "csrc/cpu/select.cpp",
    ]:
        command = [
            "aarch64-linux-gnu-g++",
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-c",
            str(source),
        ]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "a.o")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
