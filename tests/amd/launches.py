"""Part d: every launcher of csrc/gpu/api.h against a recording runtime.

The program in tests/amd/recorder is built for the host by clang, with part a's code objects inside as the compiler driver would put them
there. It compares every launch with what was worked out by hand from the shapes; here, launches meet the limits of the chip and what the
code objects say of the kernels.
"""

from __future__ import annotations

import os
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amd import debian, gates, parse
from amd.common import (
    GPU,
    HIP_ATOMS,
    ROOT,
    TARGETS,
    WORK,
    Compiler,
    Failure,
    Skip,
    atom_of,
    definitions,
    each,
    jobs,
    must,
    run,
    sources_for,
)

HERE = ROOT / "tests" / "amd" / "recorder"
BUILT = WORK / "launches"
LLVM = Path("/usr/lib/llvm-19/bin")
PLAIN = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-D__HIP_PLATFORM_AMD__", "-fPIC"]
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


@dataclass(frozen=True)
class Launch:
    """One line of the program's output."""

    arch: str
    symbol: str
    grid: int
    block: int
    shared: int


def read_launches(text: str) -> list[Launch]:
    """The program's `launch` lines."""
    found = re.findall(r"^launch (\S+) (\S+) (\d+) (\d+) (\d+)$", text, flags=re.MULTILINE)
    return [Launch(arch, symbol, *map(int, numbers)) for arch, symbol, *numbers in found]


def complaints(launch: Launch, kernels: dict[str, parse.Metadata]) -> list[str]:
    """What a launch asks for that its kernel or chip has not."""
    kernel, target = kernels.get(launch.symbol), TARGETS[launch.arch]
    where = f"{launch.arch}: {launch.symbol}"
    if kernel is None:
        return [f"{where}: not in the code objects of {launch.arch}"]
    bad = []
    if launch.block > kernel.most_threads:
        bad.append(f"{where}: {launch.block} threads, compiled for {kernel.most_threads}")
    if kernel.lds + launch.shared > target.lds:
        bad.append(f"{where}: {kernel.lds} + {launch.shared} bytes of local memory, {target.lds} are there")
    if launch.block % kernel.wave or kernel.wave != target.wave:
        bad.append(f"{where}: {launch.block} threads in waves of {kernel.wave}")
    if launch.grid * launch.block >= 2**32:
        bad.append(f"{where}: a grid of 2^32 threads or more")
    return bad


def objects_of(arch: str) -> list[Path]:
    """Code objects of part a, which this part needs anyway, or of part b for what part a's compiler does not know."""
    for folder in (debian.OBJECTS / arch, gates.OBJECTS / arch):
        paths = [folder / f"{source.stem}.o" for source in sources_for(arch)]
        if all(p.exists() for p in paths):
            return paths
    return []


def kernels_of(arch: str) -> dict[str, parse.Metadata]:
    """Every kernel in the code objects for `arch`."""
    return {
        name: kernel
        for path in objects_of(arch)
        for name, kernel in parse.metadata(must([LLVM / "llvm-readelf", "--notes", path], path.name)).items()
    }


def bundle(source: Path) -> Path:
    """The code objects of a file for all targets that part a compiled it for, in one, as a host object carries them.

    The format: a magic, the number of entries, each with offset, size and name; the objects on whole pages.
    """
    archs = [
        a for a in TARGETS if (debian.OBJECTS / a / f"{source.stem}.o").exists() and source in sources_for(a)
    ]
    names: list[str] = ["host-x86_64-unknown-linux-gnu-", *(f"hipv4-amdgcn-amd-amdhsa--{a}" for a in archs)]
    contents = [b"", *((debian.OBJECTS / a / f"{source.stem}.o").read_bytes() for a in archs)]
    page = 4096
    header, body = [MAGIC, struct.pack("<Q", len(names))], b""
    for name, content in zip(names, contents, strict=True):
        header += [struct.pack("<QQQ", page + len(body), len(content), len(name)), name.encode()]
        body += content + b"\0" * (-len(content) % page)
    out = BUILT / f"{source.stem}.hipfb"
    out.write_bytes(b"".join(header).ljust(page, b"\0") + body)
    return out


def compile_all(names: Sequence[str]) -> list[Path]:
    """Host objects of csrc/core, of csrc/gpu with AMD's families, and of these files of the recorder."""
    BUILT.mkdir(parents=True, exist_ok=True)
    hip = ["-x", "hip", "--offload-arch=gfx942", "--cuda-host-only", "-nogpulib", *PLAIN]
    compiler = Compiler(["clang++-19"], must(["clang++-19", "--version"], "clang++-19").splitlines()[0])
    kernels = [p for p in sorted(GPU.glob("*.cu")) if atom_of(p.name) in (None, "fma", *HIP_ATOMS)]

    def flags_for(source: Path) -> list[str]:
        if source.parent.name == "core":
            return PLAIN
        unit = ["-Xclang", f"-cuid={source.stem}"]  # else every object defines the same symbol
        own = source in kernels
        embedded = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(bundle(source))] if own else []
        return [*hip, *unit, *definitions(", ".join(TARGETS)), *embedded]

    def made(source: Path) -> Path:
        out = BUILT / f"{source.stem}.o"
        compiler.compile(source, out, flags_for(source))
        return out

    return each(
        made,
        [*kernels, *sorted((ROOT / "csrc/core").glob("*.cpp")), *(HERE / name for name in names)],
        jobs(),
    )


def build() -> Path:
    """The program, with the recording runtime beside it."""
    objects = compile_all(["main.cpp", "formats.cpp", "layers.cpp"])
    library, out = BUILT / "libamdhip64.so.5", BUILT / "launches"
    named = ["-shared", "-Wl,-soname,libamdhip64.so.5"]
    must(["clang++-19", *PLAIN, *named, HERE / "runtime.cpp", "-o", library], "the recording runtime")
    must(["clang++-19", *objects, library, "-o", out], "linking with the recording runtime")
    return out


def build_library() -> Path:
    """Launchers and recording runtime in one library, for emulate.py."""
    out = BUILT / "liblaunchers.so"
    objects = compile_all(["plain.cpp"])
    must(
        ["clang++-19", *PLAIN, "-shared", *objects, HERE / "runtime.cpp", "-o", out],
        "the library of launchers",
    )
    return out


def check() -> None:
    """Part d.

    Raises:
        Skip: part a made no code objects.
        Failure: a launch is not as it was worked out, or not within limits.
    """
    if not objects_of("gfx942"):
        raise Skip("no code objects: part a or b comes first")
    done = run([build()], env={**os.environ, "LD_LIBRARY_PATH": str(BUILT)})
    launched = read_launches(done.stdout)
    bad = [line for line in done.stdout.splitlines() if not line.startswith("launch ")]
    print("\n".join(f"d: {line}" for line in bad))
    if done.returncode != 0:
        raise Failure(f"the program of launches ended with {done.returncode}")
    by_arch = defaultdict(list)
    for launch in launched:
        by_arch[launch.arch].append(launch)
    wrong: list[str] = []
    for arch, launches in by_arch.items():
        kernels = kernels_of(arch)
        if not kernels:
            print(f"d: {arch}: {len(launches)} launches; no code objects to hold them against")
            continue
        complaints_here = [text for launch in launches for text in complaints(launch, kernels)]
        never = sorted(set(kernels) - {launch.symbol for launch in launches})
        most = max(
            kernels[launch.symbol].lds + launch.shared for launch in launches if launch.symbol in kernels
        )
        print(
            f"d: {arch}: {len(launches)} launches of {len(kernels)} kernels, at most {most} bytes of local memory"
        )
        wrong += [
            *dict.fromkeys(complaints_here),
            *(f"{arch}: {name}: no launcher reached it" for name in never),
        ]
    if wrong:
        raise Failure("\n".join(wrong))
