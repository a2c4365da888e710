"""int4_emu: int4 and int8 weight-quantised Mixture-of-Experts models on hardware without a native kernel for them.

Importing the package never fails for want of the compiled library and asks no device; `int4_emu.load_error()` says what is missing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import ops, reference
from ._enums import Activation, Format, Layout, W13Order
from ._library import build_info, is_compiled, load_error
from .errors import BackendError, CheckpointError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .expert_map import make_expert_map
    from .experts import Experts
    from .integrations.transformers import from_pretrained
    from .linear import Int4Linear
    from .oracle import Selection, select_backend
    from .quant_config import MoEConfig, QuantConfig

try:
    __version__ = version("int4_emu")
except PackageNotFoundError:  # a source tree on the path without an installation
    __version__ = "0+unknown"

# Public names and the module that defines each: loaded at first use, so that `import int4_emu` stays quick.
_LAZY = {
    "Checkpoint": "checkpoint",
    "Experts": "experts",
    "Int4Linear": "linear",
    "MoEConfig": "quant_config",
    "QuantConfig": "quant_config",
    "Selection": "oracle",
    "from_pretrained": "integrations.transformers",
    "make_expert_map": "expert_map",
    "select_backend": "oracle",
}

__all__ = [
    "Activation",
    "BackendError",
    "Checkpoint",
    "CheckpointError",
    "Experts",
    "Format",
    "Int4Linear",
    "Layout",
    "MoEConfig",
    "QuantConfig",
    "Selection",
    "W13Order",
    "build_info",
    "from_pretrained",
    "is_compiled",
    "load_error",
    "make_expert_map",
    "ops",
    "reference",
    "select_backend",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
