"""The source distribution holds what a build of the wheel and of the C++ package needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["csrc", "cmake", "python", "setup.py", "build_tools.py", "pyproject.toml", "README.md", "LICENSE"]
# What cmake/tests compiles.
NEEDED += [
    "tests/native/selfcheck.cpp",
    "tests/native/reference.h",
    "tests/native/whole_products.h",
    "tests/gpu/*.cu",
    "tests/gpu/*.h",
]


def test_the_source_distribution_is_complete(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *NEEDED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = {n for n in listed.stdout.split() if "/data/" not in n}
    if listed.returncode != 0 or "csrc/gpu/atoms.txt" not in names:
        pytest.skip("not a git checkout with these files")
    # A GPU that is asked for, or a torch that would need PYTORCH_ROCM_ARCH, is nothing to a source distribution.
    env = {**os.environ, "INT4_EMU_GPU": "1", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("int4_emu-*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert names <= held, sorted(names - held)[:10]
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]
