"""The choice of a backend: asked with a configuration, answered with the choice and every refusal's reason."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .backends import Backend, WeightsMode, all_backends
from .errors import BackendError
from .quant_config import MoEConfig

ENVIRONMENT = "INT4_EMU_BACKEND"


@dataclass(frozen=True)
class Selection:
    """The answer of `select_backend`.

    Attributes:
        backend: its name.
        weights: `packed` or `dequantized`.
        rejections: (candidate, reason) of each backend asked before it.
        detail: how it runs, for example the CPU instruction set.
        implementation: the backend itself.
    """

    backend: str
    weights: WeightsMode
    rejections: list[tuple[str, str]]
    detail: str
    implementation: Backend = field(repr=False, compare=False)

    def __str__(self) -> str:
        text = f"{self.backend} with {self.weights} weights" + (f" ({self.detail})" if self.detail else "")
        for name, reason in self.rejections:
            text += f"; {name} not used since {reason}"
        return text


def select_backend(
    config: MoEConfig, *, weights: WeightsMode | None = None, backend: str | None = None
) -> Selection:
    """The first backend that can serve the layer.

    Args:
        weights: `packed` or `dequantized`; None = packed where `config.quant` is given.
        backend: a name to insist on; None = the environment variable INT4_EMU_BACKEND, else any.

    Raises:
        ValueError: an unknown backend or weights mode; the message lists the known.
        BackendError: the backend asked for, or every one, refuses; the message holds all reasons.
    """
    if weights is None:
        weights = "dequantized" if config.quant is None else "packed"
    if weights not in ("packed", "dequantized"):
        raise ValueError(f"weights must be packed or dequantized, got {weights!r}")
    if weights == "packed" and config.quant is None:
        raise ValueError("weights must be dequantized where quant is None, got packed")
    known = all_backends()
    asked = backend or os.environ.get(ENVIRONMENT) or None
    if asked is not None and asked not in known:
        source = "backend" if backend else ENVIRONMENT
        raise ValueError(f"{source} must be one of {', '.join(known)}, got {asked!r}")
    if asked is None:
        for known_backend in known.values():
            if broken := known_backend.broken_choice(config):
                raise BackendError(broken)
    rejections: list[tuple[str, str]] = []
    for name in [asked] if asked else known:
        reasons = known[name].is_supported(config, weights)
        if not reasons:
            return Selection(name, weights, rejections, known[name].describe(config, weights), known[name])
        rejections.append((name, "; ".join(reasons)))
    layer = (
        f"H={config.hidden_size}, I={config.intermediate_size}, E={config.num_experts}, {config.quant or 'dense'}, "
        f"{str(config.dtype).removeprefix('torch.')} on {config.device}"
    )
    told = "; ".join(f"{name} not used since {reason}" for name, reason in rejections)
    who = f"backend {asked} cannot serve" if asked else "no backend can serve"
    raise BackendError(f"{who} this layer with {weights} weights ({layer}): {told}")
