"""Builds the check program of an architecture from the unmodified GPU sources, with any C++17 compiler.

    python tests/native/simt/build.py gfx942      builds (or finds) the program and prints its path

Objects are kept under build/simt by what they were made from: flags and preprocessed text, so that architectures share what is the same
for both. Which text a file has is remembered by the contents of all files that it includes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
GPU = ROOT / "csrc" / "gpu"

# What the vendor's compiler defines for device code.
MACROS = {
    "gfx90a": ["__gfx90a__", "__GFX9__"],
    "gfx942": ["__gfx942__", "__GFX9__"],
    "gfx950": ["__gfx950__", "__GFX9__"],
    "gfx1100": ["__gfx1100__", "__GFX11__"],
    "gfx1201": ["__gfx1201__", "__GFX12__"],
}
ARCHITECTURES = list(MACROS)

COMMON = ["-std=c++17", "-Wno-psabi", f"-I{HERE / 'include'}"]
SIMT = ["-DINT4_EMU_SIMT", "-D__HIPCC__"]
# Locals that nobody wrote hold a pattern; an access that is not aligned to its type traps.
PATTERN = ["-ftrivial-auto-var-init=pattern"]
ALIGNMENT = {
    "gcc": ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-fno-ipa-icf"],
    "clang": ["-fsanitize=alignment", "-fsanitize-trap=alignment"],
}
UNUSED_SECONDS = 7 * 24 * 3600  # what nobody asked for in a week goes


class BuildError(Exception):
    """The compiler refused; the text is what it said."""


@dataclass(frozen=True)
class Unit:
    source: Path
    flags: tuple[str, ...]


def atoms(gpu: Path = GPU) -> dict[str, list[str]]:
    """Instruction families of atoms.txt and their architectures."""
    lines = [
        line.split("#")[0].split() for line in (gpu / "atoms.txt").read_text(encoding="utf-8").splitlines()
    ]
    return {words[0]: words[2:] for words in lines if words}


def family_of(path: Path) -> str | None:
    """The instruction family that a file belongs to by its name."""
    return next((a for a in atoms(path.parent) if f"_{a}_" in path.name or f"_{a}." in path.name), None)


def gpu_sources(arch: str, gpu: Path = GPU) -> list[Path]:
    """The kernel files that a build for `arch` compiles."""

    def wanted(path: Path) -> bool:
        family = family_of(path)
        return family is None or arch in atoms(gpu)[family] or "*" in atoms(gpu)[family]

    return [path for path in sorted(gpu.glob("*.cu")) if wanted(path)]


def find_clang() -> str | None:
    """The newest clang++ on PATH."""
    names = [f"clang++-{n}" for n in range(25, 13, -1)] + ["clang++"]
    return next((name for name in names if shutil.which(name)), None)


class Builder:
    """Compiles for one compiler into one folder; several processes may share the folder."""

    def __init__(self, compiler: str | None = None, folder: Path = ROOT / "build" / "simt") -> None:
        self.compiler = compiler or os.environ.get("CXX") or "g++"
        self.folder = folder
        version = subprocess.run(
            [self.compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout
        self.version = version.splitlines()[0]
        self.kind = "clang" if "clang" in version else "gcc"
        self._texts: dict[Path, str] = {}

    def units(self, arch: str, gpu: Path = GPU) -> list[Unit]:
        """Everything the program of `arch` is made of."""
        families = sorted({family for path in gpu_sources(arch, gpu) if (family := family_of(path))})
        device = [*COMMON, *SIMT, *(f"-D{m}" for m in MACROS[arch])]
        device += [
            *(f"-DINT4_EMU_ATOM_{name.upper()}" for name in families),
            f'-DINT4_EMU_GPU_ARCHS="{arch}"',
        ]
        device += ["-x", "c++", *PATTERN, *ALIGNMENT[self.kind]]
        host = (*COMMON, *SIMT, "-x", "c++", "-O1")

        def level(path: Path) -> str:
            # The unrolled loops of matrix families compile twice as fast so, and hardly run slower.
            return "-O1" if family_of(path) in (None, "fma") else "-Og"

        cpu = [ROOT / "csrc/cpu" / f"{name}.cpp" for name in ("canonical", "repack", "prepack", "align")]
        host_list = [
            *sorted((ROOT / "csrc/core").glob("*.cpp")),
            *cpu,
            *sorted((ROOT / "tests/gpu").glob("check_*.cu")),
            HERE / "main.cpp",
        ]
        return [
            *(Unit(path, (*device, level(path))) for path in gpu_sources(arch, gpu)),
            *(Unit(path, host) for path in host_list),
            *self.engine,
        ]

    @property
    def engine(self) -> list[Unit]:
        return [
            Unit(HERE / f"{name}.cpp", (*COMMON, *SIMT, "-O2"))
            for name in ("engine", "matrix", "runtime", "symbols")
        ]

    def program(self, arch: str, gpu: Path = GPU) -> Path:
        """Path of the program of `arch`, built where it is not there yet.

        Raises:
            BuildError: the compiler refused a file.
        """
        return self._link(arch, self.units(arch, gpu))

    def engine_check(self) -> Path:
        """Path of the program that checks the engine itself."""
        flags = (*COMMON, *SIMT, "-O1", *PATTERN, *ALIGNMENT[self.kind])
        return self._link("engine-check", [Unit(HERE / "engine_check.cpp", flags), *self.engine])

    def _link(self, prefix: str, units: list[Unit]) -> Path:
        with self._lock():
            self._remove_unused()
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = list(pool.map(self._object, units))
            program = self.folder / f"{prefix}-{self._digest(str(path) for path in objects)}"
            if not program.exists():
                self._run([*map(str, objects), "-o", f"{program}.tmp"])
                Path(f"{program}.tmp").replace(program)
            os.utime(program)
            return program

    def _object(self, unit: Unit) -> Path:
        known = (
            self.folder
            / "known"
            / self._digest([unit.source.name, *unit.flags, *self._contents(unit.source)])
        )
        if known.exists():
            path = self.folder / "objects" / known.read_text()
            if path.exists():
                os.utime(known), os.utime(path)
                return path
        text = self._run([*unit.flags, "-E", "-P", str(unit.source)])
        plain = [
            flag for flag in unit.flags if not flag.startswith(("-D", "-I"))
        ]  # the text says what these do
        path = self.folder / "objects" / f"{unit.source.stem}-{self._digest([*plain, text])}.o"
        for folder in (path.parent, known.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._run([*unit.flags, "-c", str(unit.source), "-o", f"{path}.tmp"])
            Path(f"{path}.tmp").replace(path)
        os.utime(path)
        known.write_text(path.name)
        return path

    def _contents(self, source: Path) -> Iterator[str]:
        """The text of a file and of everything of this project that it includes."""
        seen, todo = {source.resolve()}, [source.resolve()]
        while todo:
            current = todo.pop()
            if current not in self._texts:
                self._texts[current] = current.read_text(encoding="utf-8")
            yield self._texts[current]
            for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', self._texts[current], re.MULTILINE):
                for base in (current.parent, HERE / "include"):
                    header = (base / name).resolve()
                    if header.is_file() and header not in seen:
                        seen.add(header)
                        todo.append(header)

    def _digest(self, parts: Iterable[str]) -> str:
        return hashlib.sha256("\0".join([self.version, *parts]).encode()).hexdigest()[:20]

    def _run(self, arguments: list[str]) -> str:
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{self.compiler} {' '.join(arguments)}\n{done.stderr[-6000:]}")
        return done.stdout

    def _remove_unused(self) -> None:
        for path in [*self.folder.glob("objects/*"), *self.folder.glob("known/*"), *self.folder.glob("*-*")]:
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


if __name__ == "__main__":
    for name in sys.argv[1:] or ARCHITECTURES:
        print(Builder().program(name))
