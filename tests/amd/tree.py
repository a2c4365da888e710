"""The Debian tree with a ROCm compiler: made once under build/amd, then used through in_tree.sh."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from amd.common import ROOT, WORK, Failure, Skip, must, run

SUITE = "forky"
INCLUDE = ["hipcc", "libstdc++-14-dev", "libc6-dev"]
# The suite moves: other versions may compile, but the figures in docs/amd.md are of these.
VERSIONS = {
    "hipcc": "7.0.2",
    "clang-21": "1:21.1.8",
    "rocm-device-libs-21": "7.0.2",
    "libamdhip64-dev": "6.4.3",
}
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def mirror() -> str:
    """The Debian mirror that this machine's own apt uses.

    Raises:
        Skip: there is none.
    """
    folder = Path("/etc/apt/sources.list.d")
    for path in [Path("/etc/apt/sources.list"), *sorted(folder.glob("*"))]:
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                found = re.match(r"\s*(?:URIs:|deb\s+(?:\[[^\]]*\]\s+)?)\s*(\S+/debian)/?(?:\s|$)", line)
                if found:
                    return found[1]
    raise Skip("this machine's apt knows no Debian mirror")


def in_tree(tree: Path) -> list[str | Path]:
    """The words in front of a command that is to run in the tree."""
    return [ROOT / "tests/amd/in_tree.sh", tree]


def obtain(install: bool) -> Path:
    """The tree, made when it is not there yet, with its versions asserted.

    Raises:
        Skip: it cannot be had here.
        Failure: it holds other versions.
    """
    if os.geteuid() != 0:
        raise Skip("making and entering the tree takes root")
    tree = WORK / SUITE
    if not (tree / "usr/bin/hipcc").exists():
        make(tree, install)
    query = run([*in_tree(tree), "dpkg-query", "-W", "-f", "${Package} ${Version}\\n", *VERSIONS])
    if query.returncode != 0:
        raise Skip(f"the tree cannot be entered or lacks a package: {query.stdout.strip()[-300:]}")
    found = dict(line.split() for line in query.stdout.splitlines())
    for name, wanted in VERSIONS.items():
        print(f"b: {name} {found.get(name)}")
        if not found.get(name, "").startswith(wanted):
            raise Failure(
                f"{name} in {tree} must be {wanted}*, found {found.get(name)} (remove the tree to have it made anew)"
            )
    return tree


def make(tree: Path, install: bool) -> None:
    """Fetches the tree: minutes, about a gigabyte.

    Raises:
        Skip: no mmdebstrap, or the mirror does not answer, or it has no such packages.
    """
    if shutil.which("mmdebstrap") is None:
        if not install:
            raise Skip("not installed; as root: apt-get install -y --no-install-recommends mmdebstrap")
        must(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", "mmdebstrap"],
            "apt-get install mmdebstrap",
        )
    source, began = mirror(), time.monotonic()
    partial = tree.with_name(tree.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    done = run(
        [
            *("mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(INCLUDE)}"),
            *('--aptopt=Acquire::Check-Valid-Until "false"', '--aptopt=APT::Install-Recommends "false"'),
            *([f"--keyring={KEYS}"] if Path(KEYS).exists() else []),
            *(SUITE, partial, source),
        ]
    )
    if done.returncode != 0:
        said = [
            line for line in done.stdout.splitlines() if line.startswith(("E:", "Err:"))
        ] or done.stdout.splitlines()
        raise Skip(f"{SUITE} cannot be had from this machine's mirror: {' '.join(said[-2:])[-300:]}")
    partial.rename(tree)
    print(f"b: made {tree.relative_to(ROOT)} in {time.monotonic() - began:.0f} s")
