"""The installed C++ package: found by another project, linked, and one layer right; and the architectures CMake reads from the table."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "cmake").is_dir(), reason="runs in a source checkout"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="not installed: cmake"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="not installed: c++"),
]


def run(*command: object, status: int = 0) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of the CPU library, compiled without optimisation: this is about the package."""
    folder = tmp_path_factory.mktemp("cmake")
    options = ["-DINT4_EMU_TESTS=OFF", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    run(
        "cmake",
        "-S",
        ROOT / "cmake",
        "-B",
        folder / "build",
        f"-DCMAKE_INSTALL_PREFIX={folder / 'prefix'}",
        *options,
    )
    run("cmake", "--build", folder / "build", "-j2", "--target", "install")
    shutil.rmtree(folder / "build")  # what was installed must not need it
    return folder / "prefix"


def test_the_example_finds_links_and_runs_the_package(prefix: Path, tmp_path: Path) -> None:
    run("cmake", "-S", ROOT / "cmake/example", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    said = run(tmp_path / "moe_layer").splitlines()
    assert said[-1] == "right" and "relative error" in said[0]


def test_the_package_knows_its_version(prefix: Path, tmp_path: Path) -> None:
    for wanted, status in (("0.1", 0), ("0.2", 1), ("9", 1)):
        project = tmp_path / wanted
        project.mkdir()
        text = f"cmake_minimum_required(VERSION 3.18)\nproject(p CXX)\nfind_package(int4_emu {wanted} REQUIRED)\n"
        text += 'message(STATUS "found ${int4_emu_VERSION} ${int4_emu_WITH_CUDA} ${int4_emu_WITH_HIP}")\n'
        (project / "CMakeLists.txt").write_text(text)
        said = run(
            "cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix}", status=status
        )
        assert ("found 0.1.0 OFF OFF" in said) == (status == 0)


TABLE = "# comment\nmma_sm80 cuda sm_80 sm_90a compute_80\nmfma_gfx9 hip gfx90a gfx942  # CDNA\nfma any *\n"


@pytest.mark.parametrize(
    ("architectures", "want"),
    [
        ("80;90a-real", ["mma_sm80=80;90a-real", "mfma_gfx9=", "fma=80;90a-real"]),
        ("75;80-virtual", ["mma_sm80=80-virtual", "mfma_gfx9=", "fma=75;80-virtual"]),
        ("80a-real", ["mma_sm80=80a-real", "mfma_gfx9=", "fma=80a-real"]),
        ("gfx90a:xnack-;gfx1100", ["mma_sm80=", "mfma_gfx9=gfx90a:xnack-", "fma=gfx90a:xnack-;gfx1100"]),
    ],
)
def test_cmake_reads_the_table_as_setup_does(tmp_path: Path, architectures: str, want: list[str]) -> None:
    (tmp_path / "atoms.txt").write_text(TABLE)
    script = tmp_path / "probe.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.18)\ninclude({ROOT}/cmake/gpu.cmake)\n"
        f"int4_emu_read_atoms({tmp_path}/atoms.txt)\n"
        "foreach(atom IN LISTS INT4_EMU_ATOMS)\n"
        f'  int4_emu_entries_of(entries ${{atom}} "{architectures}")\n'
        '  message("${atom}=${entries}")\n'
        "endforeach()\n"
    )
    assert run("cmake", "-P", script).splitlines() == want


@pytest.mark.parametrize("entry", ["native", "sm_80", "all-major"])
def test_another_name_is_refused(tmp_path: Path, entry: str) -> None:
    script = tmp_path / "probe.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.18)\ninclude({ROOT}/cmake/gpu.cmake)\nint4_emu_names(names {entry})\n"
    )
    assert f"got {entry}" in " ".join(run("cmake", "-P", script, status=1).split())


def test_hip_without_architectures_ends_with_the_variable(tmp_path: Path) -> None:
    said = run("cmake", "-S", ROOT / "cmake", "-B", tmp_path, "-DINT4_EMU_HIP=ON", status=1)
    assert "set CMAKE_HIP_ARCHITECTURES" in " ".join(said.split())


def test_both_vendors_at_once_are_refused(tmp_path: Path) -> None:
    said = run(
        "cmake", "-S", ROOT / "cmake", "-B", tmp_path, "-DINT4_EMU_HIP=ON", "-DINT4_EMU_CUDA=ON", status=1
    )
    assert "exclude each other" in " ".join(said.split())
