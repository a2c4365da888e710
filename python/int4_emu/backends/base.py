"""What a backend is. One file each; other packages add theirs through the entry point group `int4_emu.backends`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .._enums import Layout
from ..quant_config import MoEConfig

WeightsMode = Literal["packed", "dequantized"]


@dataclass(frozen=True)
class MoEWeights:
    """The tensors of one layer: dense w13 [E, 2I, H] and w2 [E, H, I], or codes with the quantisation fields set."""

    w13: Tensor
    w2: Tensor
    w13_scales: Tensor | None = None
    w2_scales: Tensor | None = None
    w13_qzeros: Tensor | None = None
    w2_qzeros: Tensor | None = None
    w13_perm: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_group_size: int = 0
    w2_group_size: int = 0
    w13_bits: int = 4
    w2_bits: int = 4
    layout: Layout = Layout.canonical


class Backend(ABC):
    """Runs MoE layers of the kinds it supports."""

    name: str
    # Compiled backends are what `weights="auto"` stays packed for.
    is_compiled: bool = True

    @abstractmethod
    def is_supported(self, config: MoEConfig, weights: WeightsMode) -> list[str]:
        """Every reason against serving this layer, each completing "not used since ..."; empty = it can."""

    def broken_choice(self, config: MoEConfig) -> str | None:
        """Why a choice that the user made for this backend cannot be honoured; such a layer is served by none."""
        return None

    def layout(self, config: MoEConfig) -> Layout:
        """The order in which this backend wants the codes of a packed layer (`ops.prepack`)."""
        return Layout.canonical

    def describe(self, config: MoEConfig, weights: WeightsMode) -> str:
        """A few words on how the layer runs: the instruction set, the rounding."""
        return ""

    @abstractmethod
    def run(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """The layer: hidden_states [M, H], topk_weights float32 [M, k], topk_ids [M, k] to [M, H].

        `options` are the keyword arguments that `ops.fused_moe` and `ops.fused_moe_packed` share.
        """

    def run_float32(
        self,
        weights: MoEWeights,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """`run` without its last rounding: float32 [M, H]. A backend that cannot leave it out rounds all the same."""
        return self.run(weights, hidden_states, topk_weights, topk_ids, options).float()


def op_arguments(
    weights: MoEWeights,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Every argument of `fused_moe`, or of `fused_moe_packed` where the weights are packed, by name."""
    arguments = options | {
        "hidden_states": hidden_states,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        **{n: getattr(weights, n) for n in ("w13", "w2", "w13_bias", "w2_bias")},
    }
    if weights.w13_scales is None:
        return arguments
    quantization = ("scales", "qzeros", "group_size", "bits")
    names = [f"{p}_{q}" for p in ("w13", "w2") for q in quantization] + ["w13_perm"]
    return arguments | {n: getattr(weights, n) for n in names} | {"layout": int(weights.layout)}
