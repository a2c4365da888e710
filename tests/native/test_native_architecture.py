"""Which devices compiled GPU code serves, and the instruction family of an architecture, by name alone."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("compiled", "device"),
    [
        ("sm_80, sm_90a", "sm_80"),
        ("sm_80, sm_90a", "sm_86"),
        ("sm_80, sm_90a", "sm_90"),
        ("sm_80;compute_80", "sm_120"),
        ("sm_100f", "sm_103"),
        ("compute_100f", "sm_103"),
        ("gfx90a gfx942", "gfx942:sramecc+:xnack-"),
        ("gfx942:xnack-", "gfx942"),
        ("unknown", "sm_75"),
    ],
)
def test_served(native: ModuleType, compiled: str, device: str) -> None:
    assert native.arch_is_served(compiled, device)


@pytest.mark.parametrize(
    ("compiled", "device"),
    [
        ("sm_86", "sm_80"),
        ("sm_80, sm_90a", "sm_100"),
        ("sm_90a", "sm_91"),
        ("compute_90a", "sm_100"),
        ("compute_100f", "sm_120"),
        ("compute_90", "sm_80"),
        ("gfx90a, gfx942", "gfx950"),
        ("gfx94", "gfx942"),
        ("sm_80", "gfx942"),
        ("gfx942", "sm_80"),
        ("sm_", "sm_80"),
        ("", "gfx1100"),
    ],
)
def test_not_served(native: ModuleType, compiled: str, device: str) -> None:
    assert not native.arch_is_served(compiled, device)


@pytest.mark.parametrize(
    ("device", "family"),
    [
        ("sm_75", None),
        ("sm_80", "mma_sm80"),
        ("sm_120", "mma_sm80"),
        ("gfx906", None),
        ("gfx90a:sramecc+:xnack-", "mfma_gfx9"),
        ("gfx942", "mfma_gfx9"),
        ("gfx950", "mfma_gfx9"),
        ("gfx1030", None),
        ("gfx1151", "wmma_gfx11"),
        ("gfx1201", "wmma_gfx12"),
        ("gfx1250", None),
    ],
)
def test_family(native: ModuleType, device: str, family: str | None) -> None:
    assert native.family_for(device) == family
