"""Kernels with one thing broken: the host engine must notice each."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from simt.build import GPU, Builder

SEEDS = range(1, 5)

pytestmark = pytest.mark.skipif(not GPU.is_dir(), reason="runs in a source checkout")


@dataclass(frozen=True)
class Mutant:
    """One substitution in one file; `check` are the options under which it must be noticed."""

    file: str
    old: str
    new: str
    check: str = "layers"
    arch: str = "gfx942"


BARRIER = "__syncthreads();"
MUTANTS = {
    "scan reads before its neighbours wrote": Mutant(
        "align.cu",
        f"partial[threadIdx.x] = sum;\n  {BARRIER}",
        "partial[threadIdx.x] = sum;",
        check="align",
    ),
    "trailing barrier of a scan step": Mutant(
        "align.cu",
        f"partial[threadIdx.x] += add;\n    {BARRIER}",
        "partial[threadIdx.x] += add;",
        check="align",
    ),
    "turns of the scatter": Mutant(
        "align.cu", f"      {BARRIER}\n    }}\n  }}\n}}", "    }\n  }\n}", check="align"
    ),
    "a barrier that some threads skip": Mutant(
        "align.cu",
        f"partial[threadIdx.x] = sum;\n  {BARRIER}",
        f"partial[threadIdx.x] = sum;\n  if (threadIdx.x != 5) {BARRIER}",
        check="align",
    ),
    "barrier of the fma main loop": Mutant(
        "gemm.cuh",
        f"{BARRIER}  // step's tiles are there, and nobody reads the stage that is filled next",
        "",
    ),
    "fma accumulator map": Mutant("atom_fma.cuh", "f(ty + 16 * i, ", "f(ty ^ (16 * i + 1), "),
    "fma padding rows": Mutant(
        "gemm.cuh", "rows[i] = row >= 0 && row < a.blocks.row_count ? row : -1;", "rows[i] = row;"
    ),
    "weight rows past the last column": Mutant("activation.cuh", "if (column >= a.columns) return -1;", ""),
    "results past the last column": Mutant(
        "activation.cuh", "if (column + 1 < a.columns) store_float(", "store_float("
    ),
    "stage written while others read it": Mutant(
        "stream.cuh", f"{BARRIER}  // nobody reads the stage before any more", ""
    ),
    "stage read before it is written": Mutant(
        "stream.cuh",
        f"fill.load(a, stage, expert, k0 + Shape::kDepth);\n    {BARRIER}",
        "fill.load(a, stage, expert, k0 + Shape::kDepth);",
    ),
    "barrier before the results": Mutant(
        "stream.cuh", f"{BARRIER}  // x, or the results of the tile before, are no longer read", ""
    ),
    "mfma accumulator map": Mutant(
        "stream.cuh",
        "first_column + r * 16 + lane / 16 * Shape::kSums])",
        "first_column + r * 16 + (3 - lane / 16) * Shape::kSums])",
    ),
    "mfma padding rows": Mutant(
        "stream.cuh",
        "const bool there = row >= 0 && row < a.blocks.row_count;",
        "const bool there = row >= 0;",
    ),
    "octets past the end of a row": Mutant(
        "stream.cuh", "const bool inside = octet * 8 < k_count;", "const bool inside = true;"
    ),
    "order of k of one operand": Mutant(
        "stream_fill.cuh", "if constexpr (kKind != WeightKind::int4) return v;", "return v;"
    ),
    "halves of k of one operand": Mutant(
        "mma_amd.cuh",
        "c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<Short4>(a), bits_as<Short4>(b), c, 0, 0, 0);",
        "c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<Short4>(a), bits_as<Short4>(b_rest), c, 0, 0, 0);",
    ),
    "repeated operands that differ": Mutant(
        "stream.cuh", "part = Atom::kParts == 1 ? 0 : lane / 16;", "part = lane / 16;", arch="gfx1100"
    ),
}

# Only kernels of bf16 x and int4 weights, which the checks below ask for: a mutant then compiles in a second or two.
SLIM = [
    ("gemm_fma.cu", r"if \(a\.x_dtype == DType::f32\)[^;]*;", ""),
    ("gemm_fma.cu", r"return launch_gemm_kind<Atom, Fp16>[^;]*;", ""),
    ("gemm_fma.cu", r"launch_gemm_kind<Atom, Bf16>\(", "launch_gemm<Atom, Bf16, WeightKind::int4>("),
    ("gemm_fma.cu", r"if \(a\.x_dtype == DType::bf16\) ", ""),
    ("gemm_mfma_gfx9_fp16.cu", r"return launch_stream<[^;]*;", "return {};"),
    ("gemm_wmma_gfx11_fp16.cu", r"return launch_stream<[^;]*;", "return {};"),
    ("gemm_mfma_gfx9_bf16.cu", r"launch_stream<(.*)>\(", r"launch_stream_packed<\1, WeightKind::int4>("),
    ("gemm_wmma_gfx11_bf16.cu", r"launch_stream<(.*)>\(", r"launch_stream_packed<\1, WeightKind::int4>("),
]


@pytest.fixture(scope="module")
def builder() -> Builder:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Builder("g++")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the kernel files, with few kernels."""
    for folder in ("core", "gpu"):
        shutil.copytree(GPU.parent / folder, tmp_path / folder)
    for file, pattern, replacement in SLIM:
        path = tmp_path / "gpu" / file
        text, count = re.subn(pattern, replacement, path.read_text())
        assert count == 1, f"{file}: {pattern}"
        path.write_text(text)
    return tmp_path / "gpu"


def run(program: Path, arch: str, check: str, seed: int) -> subprocess.CompletedProcess[str]:
    options = [
        f"--arch={arch}",
        f"--seed={seed}",
        "--quick",
        f"--only={check}",
        "--only-for=bf16 4",
        "--stop",
    ]
    return subprocess.run([program, *options], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_without_a_change_all_is_right(builder: Builder, sources: Path, arch: str) -> None:
    program = builder.program(arch, sources)
    for seed in SEEDS[:2]:
        done = run(program, arch, "layers", seed)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(builder: Builder, sources: Path, name: str) -> None:
    mutant = MUTANTS[name]
    path = sources / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, "the substitution must apply once"
    path.write_text(text.replace(mutant.old, mutant.new))
    program = builder.program(mutant.arch, sources)
    results = (run(program, mutant.arch, mutant.check, seed) for seed in SEEDS)
    noticed = next((done for done in results if done.returncode != 0), None)
    assert noticed is not None, "no seed notices it"
    assert noticed.returncode in (1, 3), noticed.stderr  # a wrong number, or the engine's own sentence
