"""A Python whose CPU torch says that it is a ROCm build, to take into a Debian tree or an image that has hipcc.

No registry has a torch for ROCm. What the build asks of one is `torch.version.hip`, and headers and libraries of the stable ABI, which
are the same in every build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from amd.common import ROOT, Failure, Skip, run

# Where it runs, whatever the path was that it was copied to.
PREFIX = "/opt/python"
HIP_VERSION = "7.0.51831"  # what a torch for ROCm 7.0 says
# Distributions that a build needs; what they need comes with them.
_WANTED = ("torch", "pip", "setuptools", "ninja")


def _link(source: Path, target: Path) -> None:
    """A hard link where the file system allows it: torch alone has 750 MB. Nothing writes into these files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _distributions(wanted: tuple[str, ...]) -> list[metadata.Distribution]:
    """The wanted ones of this interpreter, and what they require."""
    found: dict[str, metadata.Distribution] = {}
    todo = list(wanted)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in wanted:
                raise
            continue  # for another platform or Python
        todo += [
            re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            for requirement in found[name].requires or ()
            if "extra ==" not in requirement
        ]
    return list(found.values())


def _libraries(files: list[Path], tree: Path) -> set[Path]:
    """Shared libraries outside the prefix that these need and the tree lacks; its own are newer, and its compiler needs those."""
    said = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    paths = {Path(p) for p in re.findall(r"=> (/\S+)", said)}
    folders = [tree / "usr/lib", *(tree / "usr/lib").glob("*-linux-gnu")]
    return {
        p
        for p in paths
        if not p.is_relative_to(sys.base_prefix) and not any((f / p.name).exists() for f in folders)
    }


def unusable() -> str | None:
    """Why this interpreter cannot be taken along, or None."""
    if Path(sys.base_prefix) == Path("/usr"):
        return "the system's own Python cannot be moved; use one with a prefix of its own"
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}); make run sets up .venv"
    if torch.version.cuda or torch.version.hip:
        return f"torch {torch.__version__} is no CPU build"
    return None


def obtain(target: Path, tree: Path, extra: tuple[str, ...] = ()) -> Path:
    """`make` in the project's environment, whose torch is a CPU build; without one, in this interpreter.

    Raises:
        Skip: that interpreter cannot be taken along.
    """
    own = ROOT / ".venv/bin/python"
    done = run([own if own.exists() else sys.executable, __file__, target, tree, *extra])
    if done.returncode == 3:
        raise Skip(done.stdout.strip().splitlines()[-1])
    if done.returncode != 0:
        raise Failure(f"a Python for the tree:\n{done.stdout[-3000:]}")
    return target


def make(target: Path, tree: Path, extra: tuple[str, ...] = ()) -> Path:
    """Lays the Python of this interpreter with a torch dressed as a ROCm build under `target`, which will be PREFIX in `tree`.

    Args:
        extra: distributions beside those that a build needs.
    """
    shutil.rmtree(target, ignore_errors=True)
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / version
    left_out = {"site-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__"}
    for path in library.rglob("*"):
        if path.is_file() and not left_out.intersection(path.relative_to(library).parts):
            _link(path, target / "lib" / version / path.relative_to(library))
    for path in (base / "lib").glob("libpython*.so*"):
        _link(path, target / "lib" / path.name)
    _link(base / "bin" / version, target / "bin" / version)
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(version)
    modules = [p for p in (library / "lib-dynload").glob("*.so") if "tkinter" not in p.name]
    for path in _libraries([base / "bin" / version, *modules], tree):
        _link(path, target / "lib" / path.name)
    site = target / "lib" / version / "site-packages"
    for distribution in _distributions((*_WANTED, *extra)):
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if source.is_file() and source.suffix != ".pyc":
                _link(source, Path(os.path.normpath(site / file)))
    _dress(site / "torch")
    # A base image has a C++ compiler under its usual names; the tree may have its clang alone.
    clang = max((tree / "usr/bin").glob("clang++-[0-9][0-9]"), default=None)
    for name in ("cc", "gcc", "c++", "g++"):
        if clang and not (tree / "usr/bin" / name).exists():
            plain = clang.name.replace("++", "" if "+" not in name else "++")
            (target / "bin" / name).symlink_to(f"/usr/bin/{plain}")
    return target


def _dress(torch: Path) -> None:
    """Makes the copy of torch say that it is a ROCm build; only its builder listens, so that it still runs on the CPU."""
    _replace(torch / "version.py", r"^(hip\b[^=\n]*=).*$", rf"\1 {HIP_VERSION!r}")
    # Without compiled GPU support torch looks for no ROCm.
    _replace(
        torch / "utils/cpp_extension.py",
        r"torch\.cuda\._is_compiled\(\) and torch\.version\.hip",
        "torch.version.hip",
    )


def _replace(path: Path, pattern: str, text: str) -> None:
    """Changes one place of a file that is a hard link to somebody's installation."""
    changed, count = re.subn(pattern, text, path.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise RuntimeError(f"{path.name} of this torch has {count} places like {pattern}, not 1")
    path.unlink()
    path.write_text(changed)


if __name__ == "__main__":
    if reason := unusable():
        print(reason)
        sys.exit(3)
    make(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:]))
