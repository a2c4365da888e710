"""Part c: setup.py builds the wheel with a torch that says it is for ROCm, in the tree that has hipcc; the libraries are looked into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from amd import rocm_python
from amd.common import ROOT, Failure, Skip, jobs, sources_for
from amd.offload import code_objects, kernels

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# What a build needs of a checkout, as Dockerfile.rocm copies it.
SOURCES = ("pyproject.toml", "setup.py", "build_tools.py", "MANIFEST.in", "README.md", "LICENSE", "csrc", "python")
# Undefined on purpose where torch is older: the library asks whether they are there.
_OF_TORCH = re.compile(r"^(aoti_)?torch_")
_CPP_OF_TORCH = re.compile(r"^_Z(T[ISV])?NK?(2at|3c10|5torch|6caffe2)")
_RUN = r"""
set -eu
tree=$1 python=$2 work=$3
shift 3
mkdir -p "$work/upper" "$work/layer" "$work/root"
mount -t overlay overlay -o "lowerdir=$tree,upperdir=$work/upper,workdir=$work/layer" "$work/root"
mkdir -p "$work/root/opt/python" "$work/root$work"
mount --bind "$python" "$work/root/opt/python"
mount --bind "$work" "$work/root$work"
mount -t proc proc "$work/root/proc"
mount --rbind /dev "$work/root/dev"
exec chroot "$work/root" "$@"
"""


def in_tree(tree: Path, python: Path, work: Path, script: str, **environment: str) -> str:
    """Output of a shell script in a tree with that Python; what it writes outside `work` is thrown away.

    Raises:
        Failure: the script failed.
    """
    settings = {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PATH": f"{rocm_python.PREFIX}/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": f"{rocm_python.PREFIX}/lib",
        **environment,
    }
    words = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), "sh", "-euc", script]
    scratch = [work / name for name in ("upper", "layer", "root")]
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _RUN, "sh", str(tree), str(python), str(work), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    finally:
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
    if done.returncode != 0:
        raise Failure(f"{script.strip().splitlines()[-1]}: exit status {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


def copy_sources(target: Path) -> None:
    """The sources with their times, so that a second build compiles what changed alone; what is gone here goes there."""
    ignored = shutil.ignore_patterns("*.so", "*.pyc", "__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.rmtree(target / name, ignore_errors=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def dynamic(library: Path) -> list[str]:
    """Names of the libraries that it needs."""
    said = subprocess.run(["readelf", "-dW", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[([^]]+)\]", said)


def symbols(library: Path) -> dict[str, set[str]]:
    """Dynamic symbols by nm's letter, without versions."""
    said = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    for letter, name in re.findall(r"^(?:[0-9a-f]+)?\s+(\w) (\S+)$", said, flags=re.MULTILINE):
        found.setdefault(letter, set()).add(name.partition("@")[0])
    return found


def stable_names(torch: Path) -> set[str]:
    """Functions that the C interface of torch's stable ABI had in 2.10, by its own headers."""
    headers = ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")
    said = subprocess.run(
        ["c++", "-std=c++17", "-E", "-P", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{torch / 'include'}", "-x", "c++", "-"],
        input="".join(f"#include <{name}>\n" for name in headers),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", said))


def check_library(library: Path, stable: set[str], needed: tuple[str, ...]) -> None:
    """What a library needs, exports and leaves to torch."""
    needs, found = dynamic(library), symbols(library)
    print(f"c: {library.name}: {library.stat().st_size >> 10} KiB, needs {', '.join(needs)}")
    for name in needed:
        if not any(n.startswith(f"lib{name}.so") for n in needs):
            raise Failure(f"{library.name} does not need lib{name}")
    for name in ("c10_hip", "torch_hip", "torch_python", "c10_cuda", "torch_cuda"):
        if f"lib{name}.so" in needs:
            raise Failure(f"{library.name} needs lib{name}, which a torch for CPUs or another vendor lacks")
    exported = set().union(*(names for letter, names in found.items() if letter not in "Uwv"))
    if foreign := sorted(n for n in exported if not n.startswith("int4_emu_")):
        raise Failure(f"{library.name} exports {', '.join(foreign[:5])}")
    undefined = found.get("U", set())
    if unstable := sorted(n for n in undefined if _CPP_OF_TORCH.match(n)):
        raise Failure(f"{library.name} uses C++ of torch: {', '.join(unstable[:5])}")
    if newer := sorted(n for n in undefined if _OF_TORCH.match(n) and n not in stable):
        raise Failure(f"{library.name} uses what torch 2.10 lacks: {', '.join(newer[:5])}")


def check_kernels(library: Path, architectures: tuple[str, ...]) -> dict[str, set[str]]:
    """The kernels of each architecture; every file's code object is there for each architecture that the file is compiled for."""
    found: dict[str, set[str]] = {}
    objects: dict[str, int] = {}
    try:
        for architecture, code in code_objects(library.read_bytes()):
            found.setdefault(architecture, set()).update(kernels(code))
            objects[architecture] = objects.get(architecture, 0) + 1
    except ValueError as error:
        raise Failure(f"{library.name}: {error}") from None
    if set(found) != set(architectures):
        raise Failure(f"{library.name} has code for {', '.join(found)}, asked for {', '.join(architectures)}")
    for architecture in architectures:
        if not found[architecture] or any("_kernel" not in name for name in found[architecture]):
            raise Failure(f"{library.name}: kernels for {architecture}: {sorted(found[architecture])[:5]}")
        with_kernels = [s for s in sources_for(architecture) if "__global__" in _with_headers(s)]
        if objects[architecture] < len(with_kernels):
            raise Failure(f"{objects[architecture]} code objects for {architecture}, {len(with_kernels)} files have kernels")
        print(f"c: {architecture}: {len(found[architecture])} kernels in {objects[architecture]} code objects")
    return found


def _with_headers(source: Path) -> str:
    text = source.read_text()
    return text + "".join(
        header.read_text()
        for name in re.findall(r'#include "([^"]+)"', text)
        if (header := source.parent / name).is_file()
    )


def run(tree: Path, work: Path) -> str | None:
    """Part c of amd-check."""
    if os.geteuid() != 0:
        raise Skip("part c mounts and needs root")
    work = (work / "rocm").resolve()
    python = rocm_python.obtain(work / "python", tree, extra=("numpy", "safetensors", "tqdm", "rich"))
    torch = next(python.glob("lib/python3*/site-packages/torch"))
    source, wheels = work / "source", work / "wheels"
    copy_sources(source)
    shutil.rmtree(wheels, ignore_errors=True)
    build = f"cd {source} && python3 -m pip wheel -q --no-index --no-build-isolation --no-deps -w {wheels} ."
    said = in_tree(
        tree, python, work, build, PYTORCH_ROCM_ARCH=";".join(ARCHITECTURES), MAX_JOBS=str(jobs()), PIP_VERBOSE="1"
    )
    (work / "build.log").write_text(said)
    (wheel,) = wheels.glob("*.whl")
    installed = work / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    libraries = {path.name.partition(".")[0]: path for path in installed.rglob("*.so")}
    if set(libraries) != {"_C", "_C_gpu"}:
        raise Failure(f"the wheel holds {', '.join(sorted(libraries))}, wanted _C and _C_gpu")
    stable = stable_names(torch)
    check_library(libraries["_C"], stable, ("torch_cpu",))
    check_library(libraries["_C_gpu"], stable, ("torch_cpu", "amdhip64"))
    check_kernels(libraries["_C_gpu"], ARCHITECTURES)
    # The CPU half of that torch is real: both libraries load, and the CPU's ops are right.
    script = """cd /tmp
python3 -c "import int4_emu; from int4_emu import _library; assert int4_emu.is_compiled(), int4_emu.load_error()
print('loaded, GPU kernels for', *_library.gpu_architectures())"
python3 -m int4_emu selftest --quick --backend cpu"""
    said = in_tree(tree, python, work, script, PYTHONPATH=str(installed), PYTHONWARNINGS="ignore")
    loaded = re.search(r"^loaded, GPU kernels for (.*) None$", said, flags=re.MULTILINE)
    if loaded is None or set(re.findall(r"gfx\w+", loaded[1])) != set(ARCHITECTURES):
        raise Failure(f"loaded in a CPU torch, the library says: {said[-2000:]}")
    print(f"c: {wheel.name}: loads, with kernels for {loaded[1]}; {said.strip().splitlines()[-1]}")
    return None
