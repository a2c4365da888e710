"""The backends that are present, in the order in which selection asks them."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points

from .base import Backend, MoEWeights, WeightsMode
from .cpu import CpuBackend
from .gpu import GpuBackend
from .reference import ReferenceBackend

__all__ = [
    "Backend",
    "CpuBackend",
    "GpuBackend",
    "MoEWeights",
    "ReferenceBackend",
    "WeightsMode",
    "all_backends",
]

log = logging.getLogger(__name__)


@cache
def all_backends() -> dict[str, Backend]:
    """Name to backend: this package's compiled ones, other packages', and the reference last."""
    found: dict[str, Backend] = {"cpu": CpuBackend(), "gpu": GpuBackend()}
    for point in entry_points(group="int4_emu.backends"):
        try:
            backend = point.load()()
        except Exception as error:
            log.warning("the backend %r of %s did not load: %s", point.name, point.value, error)
            continue
        if backend.name in found or backend.name == "reference":
            log.warning(
                "the backend %r of %s is not used since that name is taken", backend.name, point.value
            )
            continue
        found[backend.name] = backend
    found["reference"] = ReferenceBackend()
    return found
