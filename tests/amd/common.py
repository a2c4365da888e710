"""What the parts of amd-check share: targets, files per architecture, compiling with a cache, results."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "csrc" / "gpu"
WORK = ROOT / "build" / "amd"
KIB = 1024

Item = TypeVar("Item")
Made = TypeVar("Made")


class Skip(Exception):
    """Something that this machine cannot do; the text names it."""


class Failure(Exception):
    """A check that did not hold; the text says which."""


@dataclass(frozen=True)
class Target:
    """An architecture: lanes of a wave, local memory of a compute unit, vector registers of a lane's SIMD share."""

    name: str
    wave: int
    lds: int = 64 * KIB
    bitcode: str | None = None  # Debian 12's oclc_isa_version_*, where its compiler knows the architecture


TARGETS = {
    t.name: t
    for t in (
        Target("gfx90a", 64, bitcode="90a"),
        Target("gfx942", 64, bitcode="940"),
        Target("gfx950", 64, lds=160 * KIB),
        Target("gfx1100", 32, bitcode="1036"),
        Target("gfx1201", 32, bitcode="1036"),
        Target("gfx1030", 32, bitcode="1030"),
        Target("gfx1151", 32, bitcode="1036"),
    )
}


def read_atoms(text: str) -> dict[str, tuple[str, list[str]]]:
    """atoms.txt: family -> (vendor, architectures), in its order."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return {words[0]: (words[1], words[2:]) for words in lines if words}


ATOMS = read_atoms((GPU / "atoms.txt").read_text(encoding="utf-8"))


def atom_of(name: str, atoms: Iterable[str] = ATOMS) -> str | None:
    """The family that a source file belongs to by its name."""
    return next((a for a in atoms if f"_{a}_" in name or f"_{a}." in name), None)


# AMD's families, of which there are kernels.
HIP_ATOMS = [
    a
    for a, (vendor, _) in ATOMS.items()
    if vendor == "hip" and any(atom_of(p.name) == a for p in GPU.glob("*.cu"))
]


def sources_for(arch: str) -> list[Path]:
    """The GPU files that a build for `arch` compiles."""

    def wanted(path: Path) -> bool:
        atom = atom_of(path.name)
        return atom is None or arch in ATOMS[atom][1] or "*" in ATOMS[atom][1]

    return [p for p in sorted(GPU.glob("*.cu")) if wanted(p)]


def definitions(archs: str) -> list[str]:
    """What a build that asks for every AMD family defines."""
    return [*(f"-DINT4_EMU_ATOM_{a.upper()}" for a in HIP_ATOMS), f'-DINT4_EMU_GPU_ARCHS="{archs}"']


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command and captures what it says, both streams in stdout unless told otherwise."""
    settings: dict[str, object] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "cwd": ROOT,
    }
    return subprocess.run([str(c) for c in command], check=False, **(settings | options))  # type: ignore[call-overload]


def must(command: Sequence[str | Path], what: str) -> str:
    """Output of a command that has to succeed."""
    done = run(command)
    if done.returncode != 0:
        raise Failure(f"{what}:\n{done.stdout[-6000:]}")
    return done.stdout


def each(work: Callable[[Item], Made], items: Sequence[Item], jobs: int) -> list[Made]:
    """`work` on every item, `jobs` at a time; the first failure ends it."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(work, items))


def jobs() -> int:
    """MAX_JOBS, else one for every processor of this process."""
    asked = os.environ.get("MAX_JOBS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))


@dataclass
class Compiler:
    """A compiler by its command line, with its version for the cache."""

    command: list[str | Path]
    version: str
    compiled: int = field(default=0)

    def _digest(self, flags: Sequence[str | Path], depends: Path) -> str | None:
        """Of everything the object came from, or None where that is not known."""
        if not depends.exists():
            return None
        names = depends.read_text(encoding="utf-8").replace("\\\n", " ").split()[1:]
        hashed = hashlib.sha256("\0".join([self.version, *map(str, [*self.command, *flags])]).encode())
        for name in sorted(names):
            path = ROOT / name
            if path.is_relative_to(ROOT) and WORK not in path.parents:
                if not path.exists():
                    return None
                hashed.update(path.read_bytes())
        return hashed.hexdigest()

    def compile(self, source: Path, out: Path, flags: Sequence[str | Path]) -> str:
        """Compiles unless `out` is of these very sources and flags; returns what the compiler said then.

        Raises:
            Failure: the compiler refused.
        """
        depends, said, key = (out.with_suffix(s) for s in (".d", ".txt", ".key"))
        if out.exists() and key.exists() and key.read_text() == self._digest(flags, depends):
            return said.read_text(encoding="utf-8")
        out.parent.mkdir(parents=True, exist_ok=True)
        key.unlink(missing_ok=True)
        # -MD is ignored by clang 21 where it compiles for the device alone.
        listed = [word for w in ("-dependency-file", depends, "-MT", out.name) for word in ("-Xclang", w)]
        done = run([*self.command, *flags, *listed, "-c", source.relative_to(ROOT), "-o", out])
        if done.returncode != 0:
            raise Failure(f"{source.name} for {out.parent.name}:\n{done.stdout[-6000:]}")
        self.compiled += 1
        said.write_text(done.stdout, encoding="utf-8")
        key.write_text(self._digest(flags, depends) or "")
        return done.stdout
