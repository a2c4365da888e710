"""The choice of an instruction set, each override in a process of its own: it is read once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ORDER = ["amx", "avx512", "avx2", "portable"]
PROGRAM = """
import int4_emu_native as native
name, rejections = native.select_isa()
numerics = [native.packed_numerics(t) for t in (native.DType.bf16, native.DType.f16)]
print(name, native.active_table(), *numerics, rejections, sep="|")
try:
    native.check_isa()
except RuntimeError as error:
    print(error)
"""


def choose(native: ModuleType, override: str | None) -> list[str]:
    """Lines printed by a process with INT4_EMU_CPU_ISA set to `override`."""
    environment = {k: v for k, v in os.environ.items() if k != "INT4_EMU_CPU_ISA"}
    if override is not None:
        environment["INT4_EMU_CPU_ISA"] = override
    environment["PYTHONPATH"] = str(Path(str(native.__file__)).parent)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_best_usable_set_is_chosen(native: ModuleType) -> None:
    (line,) = choose(native, None)
    name, active, bf16, f16, rejections = line.split("|")
    usable = [isa for isa in ORDER if native.why_not(isa) is None]
    assert name == active == usable[0]
    assert bf16 == ("rounded" if name in ("amx", "avx512") else "exact")
    assert f16 == "exact"
    assert rejections == "; ".join(f"{isa}: {native.why_not(isa)}" for isa in ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("override", ORDER)
def test_override(native: ModuleType, override: str) -> None:
    lines = choose(native, override)
    name, active, _, _, rejections = lines[0].split("|")
    reason = native.why_not(override)
    if reason is None:
        assert (name, active, len(lines)) == (override, override, 1)
        assert all(isa in rejections for isa in ORDER[: ORDER.index(override)])
    else:
        assert (name, active) == ("None", "portable")
        assert rejections == f"INT4_EMU_CPU_ISA={override} cannot be used: {reason}"
        assert lines[1] == rejections


def test_unknown_override_is_an_error(native: ModuleType) -> None:
    lines = choose(native, "sse9")
    assert lines[0].startswith("None|portable|")
    assert lines[1] == 'INT4_EMU_CPU_ISA must be portable, avx2, avx512 or amx, got "sse9"'


def test_empty_override_is_no_override(native: ModuleType) -> None:
    assert choose(native, "") == choose(native, None)


def test_unusable_set_is_refused_with_its_reason(native: ModuleType) -> None:
    unusable = [isa for isa in ORDER if native.why_not(isa) is not None]
    for isa in unusable:
        with pytest.raises(ValueError, match="cannot be used"):
            native.has_bf16(isa)
    assert native.why_not("portable") is None
    assert native.why_not("sse9") == "unknown instruction set"


def test_features_agree_with_the_kernel_s_view(native: ModuleType) -> None:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("/proc/cpuinfo is needed")
    flags = set(
        next((line for line in info.read_text().splitlines() if line.startswith("flags")), "").split()
    )
    features = native.features()
    avx2 = {"avx2", "fma", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"} <= flags
    assert (features["avx2"] is None) == avx2
    assert (features["avx512"] is None) == avx512
    if features["amx"] is None:
        assert avx512
        assert {"amx_tile", "amx_bf16", "amx_int8"} <= flags
