"""Decisions of the build that deserve a test: how many compile jobs, which GPU kernels, with which compiler, for which architectures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GIB = 1024**3
JOB_BYTES = 2 * GIB  # peak of one compiler process on the largest file, with room
RESERVE_BYTES = 1 * GIB  # left to the rest of the machine
MAX_USEFUL_JOBS = 32

ROOT = Path(__file__).parent
ATOMS_FILE = ROOT / "csrc" / "gpu" / "atoms.txt"
# Ampere and Hopper, and PTX for what comes after.
CUDA_DEFAULT = "8.0+PTX;9.0a"
# What torch's builder understands beside numbers.
CUDA_FAMILIES = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
CUDA_NAME = r"(sm|compute)_[0-9]{2,3}[af]?"
HIP_NAME = r"gfx[0-9a-f]{3,5}"
# What torch 2.10 itself can be had for, with some room; HIP 5 lacks half of the matrix builtins.
OLDEST_COMPILER = {"cuda": (12, 4), "hip": (6, 0)}
COMPILER_NAME = {"cuda": "nvcc", "hip": "hipcc"}


class BuildError(ValueError):
    """What the build was asked for cannot be had; the message is for the person who asked."""


def visible_memory() -> int:
    """Bytes this process may use: physical memory or the cgroup limit, whichever is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def compile_jobs(cpus: int, memory: int, env: Mapping[str, str]) -> int:
    """Parallel compile jobs: MAX_JOBS as it stands, else what CPUs and memory allow, at least 1.

    Args:
        cpus: processors this process may run on.
        memory: bytes it may use.
        env: environment variables.

    Raises:
        ValueError: MAX_JOBS is not a positive integer.
    """
    asked = env.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"MAX_JOBS must be a positive integer, got {asked!r}")
        return int(asked)
    return max(1, min(cpus, (memory - RESERVE_BYTES) // JOB_BYTES, MAX_USEFUL_JOBS))


# Architectures.


def rocm_architectures(env: Mapping[str, str], torch_list: Sequence[str]) -> list[str]:
    """AMD architectures to compile for: PYTORCH_ROCM_ARCH, else the list torch was built for, else an error.

    The live GPU is never asked: an image is built where there is none.

    Raises:
        BuildError: neither source names an architecture, or a name is not one (`native` included).
    """
    text = env.get("PYTORCH_ROCM_ARCH", "")
    names = [n for n in re.split(r"[;,\s]+", text) if n] or list(torch_list)
    if not names:
        raise BuildError(
            "no AMD architecture to build for: set PYTORCH_ROCM_ARCH, for example to gfx942;gfx1100"
        )
    for name in names:
        if not re.fullmatch(HIP_NAME + r"(:(sramecc|xnack)[+-])*", name):
            raise BuildError(
                f"PYTORCH_ROCM_ARCH must list names like gfx942 or gfx1100, got {name!r} in {text or ';'.join(names)!r}"
            )
    return list(dict.fromkeys(names))


def cuda_architectures(env: Mapping[str, str]) -> list[str]:
    """NVIDIA architectures to compile for, in nvcc's names: sm_<n> is machine code, compute_<n> PTX.

    TORCH_CUDA_ARCH_LIST as torch's builder reads it (`8.0 9.0a+PTX`, `Hopper`), else sm_80, compute_80 and sm_90a. Like torch's own
    packages, never the live GPU.

    Raises:
        BuildError: a name is not one (`native` included).
    """
    text = env.get("TORCH_CUDA_ARCH_LIST", "").strip()
    found: dict[str, None] = {}
    for word in re.split(r"[;,\s]+", text or CUDA_DEFAULT):
        for name in CUDA_FAMILIES.get(word, word).split(";"):
            match = re.fullmatch(r"([0-9]{1,2})\.([0-9])([af]?)(\+PTX)?", name)
            if match is None:
                if not word:
                    continue
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST must list names like 8.0, 9.0a, 8.0+PTX or Hopper, got {word!r} in {text!r}"
                )
            number = match[1] + match[2] + match[3]
            found[f"sm_{number}"] = None
            if match[4]:
                found[f"compute_{number}"] = None
    if not found:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST must list names like 8.0, 9.0a or 8.0+PTX, got {text!r}")
    return sorted(found, key=lambda name: name.startswith("compute_"))


# Instruction families.


class Atom(NamedTuple):
    """A row of csrc/gpu/atoms.txt: an instruction family and the architectures that get its kernels."""

    name: str
    vendor: str  # cuda, hip or any
    architectures: tuple[str, ...]

    def serves(self, architecture: str) -> bool:
        """Whether this family's kernels are compiled for an architecture.

        Features (gfx90a:xnack-) and the a and f variants of a number (sm_120a) run what the plain one runs.
        """
        plain = architecture.partition(":")[0]
        names = {
            plain,
            re.sub(r"(?<=[0-9])[af]$", "", plain) if plain.startswith(("sm_", "compute_")) else plain,
        }
        return self.architectures == ("*",) or bool(names & set(self.architectures))


def gpu_atoms(path: Path = ATOMS_FILE) -> list[Atom]:
    """The table of instruction families, best first, checked.

    Raises:
        BuildError: a line is not one; names the file, the line and the rule.
    """
    atoms: list[Atom] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue

        def refuse(rule: str, number: int = number, line: str = line) -> BuildError:
            return BuildError(f"{path.name}, line {number}: {rule}, got {line.strip()!r}")

        if len(words) < 3:
            raise refuse("must be a name, a vendor and architectures")
        name, vendor, architectures = words[0], words[1], tuple(words[2:])
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or any(name == atom.name for atom in atoms):
            raise refuse("the name must be new, in lower case")
        pattern = {"cuda": CUDA_NAME, "hip": HIP_NAME, "any": r"\*"}.get(vendor)
        if pattern is None:
            raise refuse("the vendor must be cuda, hip or any")
        if not all(re.fullmatch(pattern, a) for a in architectures) or len(set(architectures)) < len(
            architectures
        ):
            raise refuse(f"architectures of vendor {vendor} must be different names of its kind")
        atoms.append(Atom(name, vendor, architectures))
    return atoms


def atom_of(source: Path, atoms: Sequence[Atom]) -> Atom | None:
    """The family whose name a file carries as whole words (`gemm_mma_sm80_bf16.cu`); None: for every architecture."""
    found = [a for a in atoms if re.search(rf"(^|_){a.name}(_|$)", source.stem)]
    if len(found) > 1:
        raise BuildError(
            f"{source.name} must carry the name of one atom, got {', '.join(a.name for a in found)}"
        )
    return found[0] if found else None


def gpu_groups(
    sources: Sequence[Path], atoms: Sequence[Atom], architectures: Sequence[str]
) -> list[tuple[list[str], list[Path]]]:
    """What to compile: (architectures, files), the files for every architecture first.

    Files of a family are compiled for its architectures alone, and left out where none of those is asked for. Families that get the
    same architectures share a group, so that their files are compiled side by side.
    """
    groups: dict[tuple[str, ...], list[Path]] = {tuple(architectures): []}
    for source in sources:
        atom = atom_of(source, atoms)
        wanted = tuple(a for a in architectures if atom is None or atom.serves(a))
        if wanted:
            groups.setdefault(wanted, []).append(source)
    return [(list(names), files) for names, files in groups.items() if files]


def gpu_defines(atoms: Sequence[Atom], architectures: Sequence[str]) -> list[str]:
    """Macros for every GPU file: which families are in the build, and what it is compiled for."""
    present = [a.name for a in atoms if any(a.serves(name) for name in architectures)]
    listed = ", ".join(architectures)
    return [*(f"-DINT4_EMU_ATOM_{name.upper()}" for name in present), f'-DINT4_EMU_GPU_ARCHS="{listed}"']


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    """The compiler's flags for a list of architectures of one vendor."""
    flags = []
    for name in architectures:
        if name.startswith("gfx"):
            flags.append(f"--offload-arch={name}")
        else:
            number = name.partition("_")[2]
            flags.append(f"-gencode=arch=compute_{number},code={name}")
    return flags


# The choice.


class Gpu(NamedTuple):
    """Which GPU kernels are built, and why."""

    vendor: str  # cuda, hip, or empty: none
    reason: str
    own_step: bool = False  # torch's builder serves a torch of that vendor alone
    compiler: str = ""
    architectures: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.vendor:
            return f"GPU kernels: none, {self.reason}"
        step = "an own compile step" if self.own_step else "torch's builder"
        return f"GPU kernels: for {', '.join(self.architectures)} with {self.compiler} through {step}, {self.reason}"


class TorchBuild(NamedTuple):
    """What the torch at hand was built for, read without asking a device."""

    cuda: str | None  # torch.version.cuda
    hip: str | None  # torch.version.hip
    hip_architectures: tuple[str, ...] = ()


def choose_gpu(
    env: Mapping[str, str],
    torch_build: TorchBuild,
    find: Callable[[str], str | None],
    ask: Callable[..., str],
) -> Gpu:
    """Chooses what INT4_EMU_GPU and the torch at hand call for.

    Without the variable: the kernels for torch's own GPUs where its compiler is there and fits, else the CPU alone.

    Args:
        env: environment variables.
        torch_build: the torch that the extension is built for.
        find: path of `nvcc` or `hipcc`, or None.
        ask: runs a compiler; returns what it printed, raises OSError or CalledProcessError.

    Raises:
        BuildError: the variable insists on what cannot be had, or a list of architectures is wrong.
    """
    asked = env.get("INT4_EMU_GPU", "").strip()
    if asked not in ("", "0", "1", "cuda", "rocm"):
        raise BuildError(f"INT4_EMU_GPU must be 0, 1, cuda or rocm, got {asked!r}")
    if asked == "0":
        return Gpu("", "since INT4_EMU_GPU=0")
    own = "cuda" if torch_build.cuda else "hip" if torch_build.hip else ""
    version = (
        f"torch is built for {'CUDA' if own == 'cuda' else 'ROCm'} {torch_build.cuda or torch_build.hip}"
    )
    if not own and not asked:
        return Gpu("", "since torch is built for CPUs (INT4_EMU_GPU=cuda or rocm compiles them all the same)")
    vendor = {"cuda": "cuda", "rocm": "hip"}.get(asked) or own or "cuda"
    if own and vendor != own:
        raise BuildError(f"INT4_EMU_GPU={asked} does not fit: {version}")
    name = COMPILER_NAME[vendor]
    compiler = find(name)
    if compiler is None:
        where = "PATH or in CUDA_HOME" if vendor == "cuda" else "PATH or in ROCM_HOME"
        problem = f"there is no {name} on {where}"
    else:
        problem = compiler_problem(vendor, compiler, torch_build, ask)
    names: list[str] = []
    if compiler and not problem:
        names = (
            cuda_architectures(env)
            if vendor == "cuda"
            else rocm_architectures(env, torch_build.hip_architectures)
        )
        check_architectures(compiler, names, ask)
        problem = trial_problem(compiler, names[0], ask)
    if problem or compiler is None:
        if asked:
            raise BuildError(f"INT4_EMU_GPU={asked} cannot be done: {problem}")
        return Gpu("", f"since {version} and {problem}")
    why = f"since INT4_EMU_GPU={asked}" if asked else f"since {version}"
    return Gpu(vendor, why, not own, compiler, tuple(names))


def compiler_problem(vendor: str, compiler: str, torch_build: TorchBuild, ask: Callable[..., str]) -> str:
    """Why this compiler does not serve: a clause, or an empty text."""
    try:
        said = ask(compiler, "--version")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{compiler} does not run ({error})"
    match = re.search(r"release (\d+)\.(\d+)" if vendor == "cuda" else r"HIP version: (\d+)\.(\d+)", said)
    if match is None:
        return f"{compiler} --version names no version: {said.strip()[:80]!r}"
    version, oldest = (int(match[1]), int(match[2])), OLDEST_COMPILER[vendor]
    if version < oldest:
        return f"{compiler} is version {version[0]}.{version[1]}, older than {oldest[0]}.{oldest[1]}"
    # Torch's headers and runtime of another major version do not go together; minor ones do.
    if vendor == "cuda" and torch_build.cuda and version[0] != int(torch_build.cuda.partition(".")[0]):
        return f"{compiler} is version {version[0]}.{version[1]}"
    return ""


def check_architectures(compiler: str, names: Sequence[str], ask: Callable[..., str]) -> None:
    """Asks the compiler for each name: what it refuses is unknown.

    Raises:
        BuildError: names the architecture, the variable it came from, and what the compiler said.
    """
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.write_text("")
        for name in names:
            flags = architecture_flags([name])
            if name.startswith("gfx"):
                flags += ["--cuda-device-only", "-nogpuinc", "-nogpulib", "-fsyntax-only"]
            try:
                ask(compiler, *flags, *(() if name.startswith("gfx") else ("--dryrun",)), str(empty))
            except subprocess.CalledProcessError as error:
                variable = "PYTORCH_ROCM_ARCH" if name.startswith("gfx") else "TORCH_CUDA_ARCH_LIST"
                raise BuildError(
                    f"{variable} names {name}, which {compiler} does not know: {first_error(error)}"
                ) from None


def trial_problem(compiler: str, architecture: str, ask: Callable[..., str]) -> str:
    """Why the compiler makes no library at all: headers, runtime or host compiler may be missing or not fit. As compiler_problem."""
    host = ["-fPIC"] if architecture.startswith("gfx") else ["-Xcompiler=-fPIC", "-cudart=shared"]
    header = "hip/hip_runtime.h" if architecture.startswith("gfx") else "cuda_runtime.h"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cu"
        source.write_text(
            f"#include <{header}>\n__global__ void trial_kernel() {{}}\nvoid trial() {{ trial_kernel<<<1, 1>>>(); }}\n"
        )
        try:
            ask(
                compiler,
                *architecture_flags([architecture]),
                *host,
                "-shared",
                str(source),
                "-o",
                f"{folder}/trial.so",
            )
        except subprocess.CalledProcessError as error:
            return f"{compiler} cannot compile a kernel: {first_error(error)}"
    return ""


def first_error(error: subprocess.CalledProcessError) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [
        line.strip() for line in f"{error.stderr or ''}\n{error.stdout or ''}".splitlines() if line.strip()
    ]
    return next(
        (line for line in lines if re.search("error|fatal", line, re.IGNORECASE)),
        lines[0] if lines else str(error),
    )


def run_compiler(compiler: str, *arguments: str) -> str:
    """Runs a compiler and returns what it printed."""
    # With nvcc on PATH hipcc would call that, without a word.
    env = {**os.environ, "HIP_PLATFORM": "amd"}
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=True, env=env)
    return done.stdout + done.stderr


def find_compiler(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Path of nvcc or hipcc: under CUDA_HOME or ROCM_HOME (CUDA_PATH, ROCM_PATH) where one is set, else on PATH, else the usual place."""
    home_list = ("CUDA_HOME", "CUDA_PATH") if name == "nvcc" else ("ROCM_HOME", "ROCM_PATH")
    home = next((env[key] for key in home_list if env.get(key)), None)
    if home:
        return shutil.which(name, path=f"{home}/bin")
    usual = "/usr/local/cuda/bin" if name == "nvcc" else "/opt/rocm/bin"
    return shutil.which(name, path=env.get("PATH", "")) or shutil.which(name, path=usual)


def toolkit_home(vendor: str, compiler: str) -> Path:
    """The installation that a compiler belongs to, as it sees it itself: it may be a wrapper script elsewhere."""
    if vendor == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
            top = re.search(r"TOP=(\S+)", run_compiler(compiler, "--dryrun", empty.name))
        if top:
            return Path(top[1]).resolve()
    home = Path(compiler).resolve().parents[1]
    return home.parent if home.name == "hip" else home


# Incremental builds of what ninja does not follow.


def included_files(source: Path) -> set[Path]:
    """A source and the files of this repository that it includes, directly or through others."""
    seen: set[Path] = set()
    todo = [source.resolve()]
    while todo:
        file = todo.pop()
        if file not in seen and file.is_file():
            seen.add(file)
            names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
            todo += [(file.parent / name).resolve() for name in names]
    return seen


def is_stale(target: Path, source: Path) -> bool:
    """Whether an object is missing, or older than anything it was made of."""
    if not target.exists():
        return True
    built = target.stat().st_mtime
    return any(file.stat().st_mtime > built for file in included_files(source))


def parallel_flags(vendor: str, jobs: int) -> list[str]:
    """Lets nvcc use processors that would idle: a few files, those of matrix instructions, take much longer than all others."""
    return [f"-split-compile={jobs // 4}"] if vendor == "cuda" and jobs >= 8 else []
