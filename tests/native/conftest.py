"""The native module (built with INT4_EMU_NATIVE_TESTS=1) and the tile tables that this machine can run."""

from __future__ import annotations

from types import ModuleType

import pytest

TABLES = ["portable", "avx2", "avx512", "avx512-other", "amx"]


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """int4_emu_native, or a skip when it was not built."""
    return pytest.importorskip("int4_emu_native", reason="build with INT4_EMU_NATIVE_TESTS=1")


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, native: ModuleType) -> str:
    """The name of a tile table; skips with the reason those that this machine or build lacks."""
    reason = native.why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    name: str = request.param
    return name
