"""Fixtures that the whole suite shares: the implementations to judge, dtypes, seeds, poisoned memory."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # must precede torch: the suite runs on small shared machines

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

import int4_emu
from implementations import IMPLEMENTATIONS
from int4_emu import ops as compiled_ops

FLOAT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out unless a marker expression asks for them."""
    if not config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def ops(request: pytest.FixtureRequest) -> ModuleType:
    """The module whose functions a numeric test calls: the compiled ops, or the PyTorch reference."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def compiled() -> ModuleType:
    """The compiled ops, for tests of what only they have (schemas, checks, workspace)."""
    if "cpu" not in IMPLEMENTATIONS:
        pytest.skip(f"the compiled extension did not load: {int4_emu.load_error()}")
    return compiled_ops


@pytest.fixture(params=FLOAT_DTYPES, ids=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: stable from run to run, different from test to test."""
    return np.random.default_rng(list(request.node.name.encode()))


def poison_freed_memory() -> None:
    """Leaves NaN bit patterns in the allocator's free lists, for buffers that bypass torch's own filling."""
    blocks = [
        torch.full((size,), float("nan"))
        for size in (16, 64, 256, 1024, 4096, 16384, 65536)
        for _ in range(8)
    ]
    del blocks


@pytest.fixture
def poison() -> Iterator[None]:
    """Makes torch.empty return NaN (largest int), so that reading a value that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    poison_freed_memory()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables keep their words whole, wherever the suite runs."""
    monkeypatch.setenv("COLUMNS", "160")
