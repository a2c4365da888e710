"""Part b: the ROCm compiler of the tree, warnings as errors, and what every kernel of every target must hold."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from amd import parse
from amd.common import (
    ATOMS,
    TARGETS,
    WORK,
    Compiler,
    Failure,
    atom_of,
    definitions,
    each,
    jobs,
    must,
    sources_for,
)
from amd.tree import in_tree

ARCHS = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
OBJECTS = WORK / "hipcc"
LLVM = "/usr/lib/llvm-21/bin"
FLAGS = [
    *("-std=c++17", "-O3", "--cuda-device-only", "--no-gpu-bundle-output"),
    *("-Wall", "-Wextra", "-Werror", "-Rpass-analysis=kernel-resource-usage"),
]

# Waves that must fit a SIMD, by how a kernel's name begins; the first that fits. Eight (gfx9) or sixteen (gfx11, gfx12) are the most.
LEAST_OCCUPANCY = [
    *(("stream_kernel<Wmma", 6), ("stream_kernel", 2), ("gemm_kernel", 2)),
    # 17 KB of local memory a block, for 256 columns of 64 rows of bytes.
    *((f"{name}<(CodeReader::Words)1, 8", 3) for name in ("dequantize_squares_kernel", "act_order_kernel")),
    ("dequantize_squares_kernel<(CodeReader::Words)2, 8", 3),
    ("", 4),
]
# Vector-ALU instructions per weight in the main loop: gfx942, int4, one tile of 16 tokens, by the form of the scales.
MOST_VALU = {"whole": 1.0, "pieces": 1.2}
FORMS = ["whole", "pieces"]  # in the order of the kernels' enumeration
WIDE_LOAD = re.compile(r"(global|buffer)_load_(dwordx4|b128)$")
WIDE_STORE = re.compile(r"(global|buffer)_store_(dwordx4|b128)$")
STORES_WIDE = ("dequantize_squares_kernel", "act_order_kernel")


@dataclass(frozen=True)
class Kernel:
    """A kernel as it was built for one target."""

    arch: str
    source: str
    name: str  # readable
    symbol: str
    resources: parse.Resources
    valu_per_weight: float | None = None  # of kernels with a packed main loop


def short(name: str) -> str:
    """A demangled kernel without its namespaces and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|int4_emu::(gpu::)?", "", name).removeprefix("void ")
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def token_tiles(name: str) -> int | None:
    """Tiles of 16 tokens that a tile of packed weights is multiplied by, from a kernel's template arguments; None: no such kernel."""
    found = re.match(r"stream_kernel<.*\(WeightKind\)[12], \(Form\)\d, (\d+)", name)
    return int(found[1]) if found else None


def form_of(name: str) -> str:
    """Whether a group's scale holds for a whole chunk of columns, or for pieces of it."""
    found = re.search(r"\(Form\)(\d)", name)
    return FORMS[int(found[1])] if found else ""


def complaints(kernel: Kernel, code: list[parse.Instruction], most_threads: int) -> list[str]:
    """What is wrong with a kernel, in words."""
    target, r, bad = TARGETS[kernel.arch], kernel.resources, []
    if r.scratch:
        bad.append(f"{r.scratch} bytes of scratch memory a lane")
    if r.sgpr_spills or r.vgpr_spills:
        bad.append(f"{r.sgpr_spills} scalar and {r.vgpr_spills} vector registers spilled")
    if r.lds > target.lds:
        bad.append(f"{r.lds} bytes of local memory, {target.lds} are there")
    least = next(waves for start, waves in LEAST_OCCUPANCY if kernel.name.startswith(start))
    least = max(least, -(-most_threads // (target.wave * 4)))
    if r.occupancy < least:
        bad.append(f"{r.occupancy} waves fit a SIMD, {least} must")
    names = {i.name for i in code}
    atom = atom_of(kernel.source)
    if atom is not None and ATOMS[atom][1] != ["*"]:
        wanted = "bf16" if "Bf16" in kernel.name else "f16"
        matrix = {
            n for n in names if (m := parse.MATRIX.match(n)) and m[2] == wanted
        }  # 16x16x16_f16, or gfx90a's 16x16x16f16
        if not matrix:
            bad.append(f"no matrix instruction on {wanted}")
        if kernel.arch == "gfx950" and not any("16x16x32" in n for n in matrix):
            bad.append("not gfx950's 16x16x32 matrix instruction")
        if not any(WIDE_LOAD.match(n) for n in names):
            bad.append("no 16-byte load from memory")
    if kernel.name.startswith(STORES_WIDE) and not any(WIDE_STORE.match(n) for n in names):
        bad.append("no 16-byte store to memory")
    valu = kernel.valu_per_weight
    gated = kernel.arch == "gfx942" and token_tiles(kernel.name) == 1 and "(WeightKind)1" in kernel.name
    if valu is not None and gated and valu > MOST_VALU[form_of(kernel.name)]:
        bad.append(f"{valu:.2f} vector-ALU instructions a weight, at most {MOST_VALU[form_of(kernel.name)]}")
    return bad


def examine(tree: Path, compiler: Compiler, source: Path, arch: str) -> tuple[list[Kernel], list[str]]:
    """Compiles one file for one target; its kernels, and complaints about them."""
    out = OBJECTS / arch / f"{source.stem}.o"
    remarks = compiler.compile(source, out, [*FLAGS, f"--offload-arch={arch}", *definitions(arch)])
    usage = parse.resource_usage(remarks)

    def tool(name: str, *words: str | Path) -> str:
        return must([*in_tree(tree), f"{LLVM}/{name}", *words], f"{name} on {out.name}")

    notes = parse.metadata(tool("llvm-readelf", "--notes", out))
    functions = parse.disassembly(tool("llvm-objdump", "-d", out))
    readable = dict(zip(usage, tool("llvm-cxxfilt", *usage).splitlines(), strict=True)) if usage else {}
    bad = [f"{source.name} {arch}: {name} was not inlined" for name in sorted(set(functions) - set(notes))]
    if set(notes) != set(usage):
        bad.append(
            f"{source.name} {arch}: remarks and object disagree about {sorted(set(notes) ^ set(usage))}"
        )
    kernels = []
    for symbol, resources in usage.items():
        code, name = functions.get(symbol, []), short(readable[symbol])
        loop, tiles = parse.main_loop(code), token_tiles(name)
        valu = (
            parse.vector_alu(loop) / parse.weights_per_lane(loop, TARGETS[arch].wave, tiles)
            if tiles and loop
            else None
        )
        kernel = Kernel(arch, source.name, name, symbol, resources, valu)
        kernels.append(kernel)
        bad += [
            f"{source.name} {arch}: {name}: {b}" for b in complaints(kernel, code, notes[symbol].most_threads)
        ]
        if tiles and not loop:
            bad.append(f"{source.name} {arch}: {name}: no loop with matrix instructions")
    return kernels, bad


def row(kernel: Kernel) -> str:
    """One line of the printed table."""
    r, valu = kernel.resources, kernel.valu_per_weight
    cells = f"{r.vgprs:>4} {r.agprs:>4} {r.sgprs:>4} {r.lds:>6} {r.occupancy:>3} {'' if valu is None else f'{valu:.2f}':>5}"
    return f"b: {kernel.arch:8} {cells}  {kernel.name}"


def check_all(tree: Path, archs: Sequence[str] = ARCHS) -> list[Kernel]:
    """Part b.

    Raises:
        Failure: a file does not compile, or a kernel does not hold what is stated.
    """
    version = must([*in_tree(tree), "hipcc", "--version"], "hipcc --version")
    print("\n".join(f"b: {line}" for line in version.splitlines()[:2]))
    compiler = Compiler([*in_tree(tree), "hipcc"], version)
    began = time.monotonic()
    work = [(source, arch) for arch in archs for source in sources_for(arch)]
    results = each(lambda w: examine(tree, compiler, *w), work, jobs())
    kernels = [kernel for found, _ in results for kernel in found]
    bad = [text for _, texts in results for text in texts]
    print(
        "b: vector-ALU instructions a weight = (v_* instructions of the main loop that are no v_mfma or v_wmma) / (weights a lane"
    )
    print(
        "b: handles there = 16 K / lanes of a wave for each 16x16xK matrix instruction, / tiles of 16 tokens)"
    )
    print("b: target   VGPR AGPR SGPR    LDS occ VALU/weight")
    for kernel in kernels:
        print(row(kernel))
    (WORK / "kernels.json").write_text(json.dumps([asdict(k) for k in kernels], indent=1), encoding="utf-8")
    print(
        f"b: {len(kernels)} kernels, {compiler.compiled} of {len(work)} files compiled anew, {time.monotonic() - began:.0f} s"
    )
    if bad:
        raise Failure("\n".join(bad))
    return kernels
