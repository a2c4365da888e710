"""No instruction of a wide instruction set may leave the file that is compiled for it.

A template or inline function that two objects share is one weak symbol in the library: the linker may keep
the AVX-512 copy, and an older CPU then faults in code that looks portable. So objects with instruction-set
flags define no weak symbol, and the others contain no wide instruction.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the instruction sets are x86-64's"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is needed to compile the objects"),
    pytest.mark.skipif(
        shutil.which("nm") is None or shutil.which("objdump") is None, reason="binutils are needed"
    ),
]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni"]
ISA_FLAGS = {
    "tile_avx2": AVX2,
    "tile_avx512": AVX512,
    "tile_amx": [*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
# ymm, zmm, mask and tile registers, and VEX or EVEX encodings of anything else.
WIDE = re.compile(r"%(?:ymm|zmm|tmm|k[0-7]\b)|\t(?:v[a-z]|ldtilecfg|tilerelease)")


def compile_object(source: Path, flags: list[str], level: str, folder: Path) -> Path:
    target = folder / f"{source.stem}{level}.o"
    command = ["g++", "-std=c++17", level, "-fPIC", "-w", *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every torch-free object at -O2, those of instruction sets also at -O0, keyed by (stem, level)."""
    folder = tmp_path_factory.mktemp("objects")
    source_list = sorted([*(ROOT / "csrc/core").glob("*.cpp"), *(ROOT / "csrc/cpu").glob("*.cpp")])
    jobs = [(source, "-O2") for source in source_list]
    jobs += [(source, "-O0") for source in source_list if source.stem in ISA_FLAGS]
    with ThreadPoolExecutor(2) as pool:
        paths = pool.map(
            lambda job: compile_object(job[0], ISA_FLAGS.get(job[0].stem, []), job[1], folder), jobs
        )
        return {(source.stem, level): path for (source, level), path in zip(jobs, paths, strict=True)}


def shared_symbols(path: Path) -> list[str]:
    """Weak and unique symbols that an object defines or asks for."""
    listing = subprocess.run(["nm", "-C", str(path)], check=True, capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if re.search(r" [WVu] ", line)]


def global_functions(path: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", "-g", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split(" T ")[1] for line in listing.splitlines() if " T " in line]


def wide_instructions(path: Path) -> list[str]:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return [line for line in text.splitlines() if WIDE.search(line)]


@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("stem", ISA_FLAGS)
def test_isa_objects_share_nothing(objects: dict[tuple[str, str], Path], stem: str, level: str) -> None:
    path = objects[stem, level]
    assert shared_symbols(path) == []
    arguments = "bool" if stem == "tile_avx512" else ""
    assert global_functions(path) == [f"int4_emu::cpu::{stem.removeprefix('tile_')}_table({arguments})"]


@pytest.mark.parametrize("stem", ISA_FLAGS)
def test_isa_objects_use_their_set(objects: dict[tuple[str, str], Path], stem: str) -> None:
    register = {"tile_avx2": "%ymm", "tile_avx512": "%zmm", "tile_amx": "%tmm"}[stem]
    lines = wide_instructions(objects[stem, "-O2"])
    assert any(register in line for line in lines)
    if stem == "tile_avx2":
        assert not any("%zmm" in line or "%tmm" in line for line in lines)


def test_other_objects_have_no_wide_instruction(objects: dict[tuple[str, str], Path]) -> None:
    found = {
        stem: wide_instructions(path)[:3] for (stem, _), path in objects.items() if stem not in ISA_FLAGS
    }
    assert len(found) > 5
    assert {stem: lines for stem, lines in found.items() if lines} == {}


def test_flags_are_those_of_the_build() -> None:
    setup = (ROOT / "setup.py").read_text()
    for stem, flags in ISA_FLAGS.items():
        entry = setup.split(f'"{stem}.cpp": [', 1)[1].split("]", 1)[0]
        assert sorted(re.findall(r'"([^"]+)"', entry)) == sorted(flags)


def test_isa_files_include_nothing_shared() -> None:
    allowed = {"cstddef", "cstdint", "immintrin.h"}
    name_list = [
        "tile_avx2.cpp",
        "tile_avx512.cpp",
        "tile_amx.cpp",
        "tile.h",
        "../core/problem.h",
        "../core/types.h",
    ]
    paths = [ROOT / "csrc/cpu" / name for name in name_list] + sorted((ROOT / "csrc/cpu").glob("simd_*.h"))
    for path in paths:
        for include in re.findall(r"#include <([^>]+)>", path.read_text()):
            assert include in allowed, f"{path.name} includes <{include}>"


def test_the_gate_sees_a_leak(tmp_path: Path) -> None:
    bait = tmp_path / "bait.cpp"
    bait.write_text(
        "#include <vector>\n"
        "float sum(std::vector<float> v) { float s = 0; for (float x : v) s += x; return s; }\n"
    )
    path = compile_object(bait, AVX512, "-O0", tmp_path)
    assert shared_symbols(path)
    assert wide_instructions(path)
