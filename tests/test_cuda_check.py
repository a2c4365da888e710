"""What `make cuda-check` reads from cuobjdump, and how it judges; expected values are written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="runs in a source checkout")

import cuda_check  # noqa: E402
from amd.common import Failure  # noqa: E402

SYMBOLS = """
Fatbin elf code:
================
arch = sm_80
host = linux

symbols:
FUNC          GLOBAL  DEFAULT    ENTRY                                _Z8a_kernelILi3EEvPi
FUNC          WEAK    DEFAULT    -                                    $__internal_0_$__cuda_sm20_div_s64
NOTYPE        WEAK    DEFAULT    RESERVED_SHARED                      __nv_reservedSMEM_offset_0_alias

Fatbin elf code:
================
arch = sm_90a

symbols:
FUNC          GLOBAL  DEFAULT    ENTRY                                _Z8a_kernelILi3EEvPi
FUNC          LOCAL   DEFAULT    ENTRY                                _ZN1nE8b_kernelEv
Fatbin elf code:
arch = sm_80
FUNC          LOCAL   DEFAULT    ENTRY                                _ZN1nE8b_kernelEv
"""
PTX = """Fatbin ptx code:
arch = sm_80
.version 9.0
.target sm_80
.address_size 64
.visible .entry _Z8a_kernelILi3EEvPi(
	.param .u64 p
)
.entry _ZN1nE8b_kernelEv()
.weak .entry _Z8c_kernelv(
.func (.param .b32 out) helper(
"""


def test_listings_are_read():
    assert cuda_check.machine_code(SYMBOLS) == {
        "sm_80": {"_Z8a_kernelILi3EEvPi", "_ZN1nE8b_kernelEv"},
        "sm_90a": {"_Z8a_kernelILi3EEvPi", "_ZN1nE8b_kernelEv"},
    }
    assert cuda_check.ptx_entries(PTX) == {
        "compute_80": {"_Z8a_kernelILi3EEvPi", "_ZN1nE8b_kernelEv", "_Z8c_kernelv"}
    }


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ({"sm_80": {"a_kernel"}}, "has code for sm_80, and says compute_80, sm_80"),
        ({"sm_80": set(), "compute_80": set()}, "none at all"),
        (
            {"sm_80": {"a_kernel"}, "compute_80": {"a_kernel", "b_kernel"}},
            "sm_80 lacks 1 of 2 kernels, such as b_kernel",
        ),
        ({"sm_80": {"main"}, "compute_80": {"main"}}, "no kernels of ours: .'main'"),
    ],
)
def test_a_missing_architecture_or_kernel_fails(found, match):
    with pytest.raises(Failure, match=match):
        cuda_check.check_kernels(found, ["sm_80", "compute_80"])


def test_all_kernels_for_all_architectures_hold():
    found = {"sm_80": {"a_kernel", "b_kernel"}, "compute_80": {"a_kernel", "b_kernel"}}
    assert cuda_check.check_kernels(found, ["sm_80", "compute_80"]) == 2


def test_without_nvcc_the_check_is_skipped_by_name(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/cuda_check.py")],
        env={**os.environ, "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        3,
        "cuda-check: skipped: there is no nvcc on PATH or in CUDA_HOME\n",
    )
