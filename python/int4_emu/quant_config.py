"""What a caller says of a quantised MoE layer before any tensor exists: the questions that backend selection answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ._enums import Activation
from .activations import check_activation

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantConfig:
    """How the weights of a MoE layer are quantised, and the parameters of its activation.

    Attributes:
        w13_bits, w2_bits: 4 or 8.
        w13_group_size, w2_group_size: input columns per group; -1 = per-channel.
        symmetric: zero point at the midpoint (8 or 128).
        act_order: w13 gathers its input columns (`w13_perm`).
        gemm1_clamp_limit, gemm1_alpha, gemm1_beta: SwiGLU parameters; None = the activation takes none.
    """

    w13_bits: int
    w2_bits: int
    w13_group_size: int
    w2_group_size: int
    symmetric: bool
    act_order: bool = False
    gemm1_clamp_limit: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None

    def __post_init__(self) -> None:
        for name in ("w13_bits", "w2_bits"):
            if getattr(self, name) not in (4, 8):
                raise ValueError(f"{name} must be 4 or 8, got {getattr(self, name)}")
        for name in ("w13_group_size", "w2_group_size"):
            size = getattr(self, name)
            if size != -1 and size < 1:
                raise ValueError(f"{name} must be -1 (per-channel) or >= 1, got {size}")

    @classmethod
    def int4_w4a16(
        cls,
        group_size: int = 128,
        symmetric: bool = True,
        *,
        act_order: bool = False,
        gemm1_clamp_limit: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
    ) -> QuantConfig:
        """int4 weights, 16-bit (or fp32) activations, the same group size in both projections."""
        return cls(
            4, 4, group_size, group_size, symmetric, act_order, gemm1_clamp_limit, gemm1_alpha, gemm1_beta
        )

    @classmethod
    def int8_w8a16(
        cls,
        group_size: int = -1,
        symmetric: bool = True,
        *,
        act_order: bool = False,
        gemm1_clamp_limit: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
    ) -> QuantConfig:
        """int8 weights, 16-bit (or fp32) activations, the same group size in both projections."""
        return cls(
            8, 8, group_size, group_size, symmetric, act_order, gemm1_clamp_limit, gemm1_alpha, gemm1_beta
        )

    def __str__(self) -> str:
        def one(bits: int, group: int) -> str:
            return f"int{bits} {'per-channel' if group == -1 else f'g{group}'}"

        w13, w2 = one(self.w13_bits, self.w13_group_size), one(self.w2_bits, self.w2_group_size)
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{w13 if w13 == w2 else f'{w13} / {w2}'} {kind}{' act-order' if self.act_order else ''}"


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer as backend selection sees it.

    Attributes:
        hidden_size, intermediate_size: H and I of this rank's slice.
        num_experts: E, local experts (may be 0).
        top_k: k.
        dtype: of the activations (x and the result).
        device: where the layer runs.
        quant: None = dense floating-point weights.
        activation: enum member, name or number; its parameters come from `quant`, or from limit, alpha, beta for dense weights.
        has_bias: w13 or w2 has a bias.
        expert_parallel: an expert_map is used.
        capturing: calls happen while a CUDA/HIP stream is being captured.

    Raises:
        ValueError: a size below its minimum, or an activation parameter missing or not taken.
        TypeError: a dtype other than bfloat16, float16, float32.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device | str
    quant: QuantConfig | None
    activation: Activation | str | int = Activation.silu
    has_bias: bool = False
    expert_parallel: bool = False
    capturing: bool = False
    limit: float | None = field(default=None, kw_only=True)
    alpha: float | None = field(default=None, kw_only=True)
    beta: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("hidden_size", 1), ("intermediate_size", 1), ("num_experts", 0), ("top_k", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.dtype not in COMPUTE_DTYPES:
            raise TypeError(
                f"dtype must be bfloat16, float16 or float32, got {str(self.dtype).removeprefix('torch.')}"
            )
        q = self.quant
        if q is not None:
            for name, mine, theirs in (
                ("limit", self.limit, q.gemm1_clamp_limit),
                ("alpha", self.alpha, q.gemm1_alpha),
                ("beta", self.beta, q.gemm1_beta),
            ):
                if mine is not None and mine != theirs:
                    raise ValueError(
                        f"{name} = {mine} contradicts the QuantConfig's {theirs}: give it in one place"
                    )
                object.__setattr__(self, name, theirs)
            for name, group, columns in (
                ("w13_group_size", q.w13_group_size, self.hidden_size),
                ("w2_group_size", q.w2_group_size, self.intermediate_size),
            ):
                if group > columns:
                    raise ValueError(
                        f"{name} must be -1 or 1..{columns}, got {group} (H={self.hidden_size}, I={self.intermediate_size})"
                    )
        object.__setattr__(
            self, "activation", check_activation(self.activation, self.limit, self.alpha, self.beta)
        )
        object.__setattr__(self, "device", torch.device(self.device))
