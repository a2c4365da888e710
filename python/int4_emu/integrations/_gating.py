"""Finds out what a transformers experts module computes, by asking its own function."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._enums import Activation
from ..errors import CheckpointError

# Values on both sides of zero and of every limit in use (7 and 10).
_PROBE = (-30.0, -9.0, -6.5, -3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 6.5, 8.0, 12.0, 30.0)


@dataclass(frozen=True)
class Gating:
    """An activation with its parameters, in the names of `int4_emu.Experts`."""

    activation: Activation
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None

    def __str__(self) -> str:
        given = [f"{n}={v}" for n in ("limit", "alpha", "beta") if (v := getattr(self, n)) is not None]
        return f"{self.activation.name}({', '.join(given)})" if given else self.activation.name


def _host_values(module: Any) -> tuple[Tensor, Tensor]:
    """The probe [n, 2] (gate, up) or [n, 1], and what the host's own function makes of it [n, 1], in
    float32.
    """
    # The functions hold no weights, so they run on the CPU even while the module lies on the meta device.
    values = list(_PROBE)
    if (limit := _limit(module)) is not None:
        values += [-2 * limit, -0.5 * limit, 0.5 * limit, 2 * limit]
    # In a host that is being built, the default dtype is the model's.
    probe = torch.tensor(values, dtype=torch.float32, device="cpu")
    with torch.device("cpu"), torch.no_grad():
        if not getattr(module, "has_gate", True):
            h = probe.unsqueeze(1)
            return h, module.act_fn(h).float()
        # One gate and one up column: halves and interleaved rows are then the same order.
        h = torch.cartesian_prod(probe, probe)
        if hasattr(module, "_apply_gate"):
            return h, module._apply_gate(h).float()
        return h, (module.act_fn(h[:, :1]) * h[:, 1:]).float()


def _limit(module: Any) -> float | None:
    """The clamp of a host module's activation, by the names in use."""
    found = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    return None if found is None else float(found)


def _agrees(gating: Gating, h: Tensor, y: Tensor) -> bool:
    if gating.activation.is_gated != (h.shape[1] == 2):
        return False
    mine = reference.activate(
        h, activation=gating.activation, limit=gating.limit, alpha=gating.alpha, beta=gating.beta
    )
    return torch.allclose(mine, y, rtol=1e-4, atol=1e-5)


def check_gating(module: Any, gating: Gating, name: str) -> None:
    """Compares `gating` with the host module's own activation function on a few numbers.

    Raises:
        CheckpointError: they differ, so the model would compute something else.
    """
    h, y = _host_values(module)
    if not _agrees(gating, h, y):
        raise CheckpointError(
            f"{name}: the configuration says activation {gating}, "
            f"but the activation of {type(module).__name__} gives other values"
        )


def find_gating(module: Any, name: str) -> Gating:
    """The activation and parameters that reproduce the host module's own function.

    Raises:
        ValueError: none of the known activations does.
    """
    h, y = _host_values(module)
    gated = h.shape[1] == 2
    candidates = [Gating(a) for a in Activation if a is not Activation.swigluoai and a.is_gated == gated]
    limit = _limit(module)
    if gated and limit is not None:
        alpha = float(getattr(module, "alpha", getattr(module, "swiglu_alpha", 1.702)))
        candidates += [
            Gating(Activation.silu, limit=limit),
            Gating(Activation.swigluoai, limit=limit, alpha=alpha, beta=1.0),
        ]
    for candidate in candidates:
        if _agrees(candidate, h, y):
            return candidate
    known = ", ".join(str(c) for c in candidates)
    raise ValueError(
        f"{name}: no known activation gives the values of {type(module).__name__}; tried {known}"
    )


def gating_of(module: Any) -> Gating:
    """What a host's experts module computes, asked at its first call.

    Raises:
        ValueError: it norms each expert's output, or its activation is not one of int4_emu's.
    """
    found: Gating | None = getattr(module, "_int4_emu_gating", None)
    if found is None:
        found = module._int4_emu_gating = _ask(id(module))
    return found


# The first call may be one that torch.compile traces, which must not look into this. What it takes for constant must get constants alone
# before torch 2.12: hence a number for the module, which the caller keeps alive.
@torch.compiler.assume_constant_result
def _ask(address: int) -> Gating:
    module = ctypes.cast(address, ctypes.py_object).value
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} norms each expert's output, which int4_emu does not do: "
            "choose another experts_implementation"
        )
    return find_gating(module, name)
