"""Random MoE layers for the tests: torch tensors for the ops beside the float64 values that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import oracle

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def to_torch(values: NDArray, dtype: torch.dtype) -> torch.Tensor:
    """float64 values -> a tensor of `dtype`; they must be representable, so that nothing is rounded here."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    assert np.array_equal(tensor.double().numpy(), values, equal_nan=True), "values are not representable"
    return tensor


def to_numpy(tensor: torch.Tensor) -> NDArray:
    return tensor.detach().double().numpy()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def random_floats(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0
) -> NDArray:
    return oracle.round_to(rng.standard_normal(shape) * scale, NAMES[dtype])


@dataclass(frozen=True)
class Quantised:
    """One stacked projection: canonical tensors for the ops, codes and float64 values for the oracle."""

    codes: NDArray  # [E, O, I]
    scale_values: NDArray  # [E, O, C]
    zero_values: NDArray | None
    qweight: torch.Tensor
    scales: torch.Tensor
    qzeros: torch.Tensor | None
    group_size: int
    bits: int
    exact: NDArray  # [E, O, I], (q - z) * s


def quantise(
    rng: np.random.Generator, experts: int, rows: int, columns: int, group_size: int, *, bits: int = 4,
    symmetric: bool = False, scales_dtype: torch.dtype = torch.bfloat16,
) -> Quantised:  # fmt: skip
    """Uniform codes and zero points with all values present; scales keep x @ w of order one."""
    groups = 1 if group_size == -1 else -(-columns // group_size)
    codes = rng.integers(0, 1 << bits, (experts, rows, columns))
    zeros = None if symmetric else rng.integers(0, 1 << bits, (experts, rows, groups))
    spread = (1 << bits) * 0.4 * columns**0.5
    scales = oracle.round_to(rng.uniform(0.3, 1.7, (experts, rows, groups)) / spread, NAMES[scales_dtype])
    qzeros = None if zeros is None else torch.from_numpy(zeros.astype(np.uint8))
    exact = oracle.exact_weight(codes, scales, zeros, group_size, bits)
    qweight = torch.from_numpy(oracle.pack_bytes(codes, bits))
    return Quantised(
        codes, scales, zeros, qweight, to_torch(scales, scales_dtype), qzeros, group_size, bits, exact
    )


@dataclass(frozen=True)
class Layer:
    """A routed layer with its input. `options` go to ops and, by `oracle_options`, to the oracle."""

    x: torch.Tensor
    w13: Quantised
    w2: Quantised
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def with_(self, **changes: Any) -> Layer:
        return replace(self, **changes)

    def dense_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact weights rounded once to x's dtype."""
        return tuple(
            to_torch(oracle.round_to(w.exact, NAMES[self.dtype]), self.dtype) for w in (self.w13, self.w2)
        )  # type: ignore[return-value]

    def run_dense(self, ops: Any, **extra: Any) -> torch.Tensor:
        w13, w2 = self.dense_weights()
        return ops.fused_moe(self.x, w13, w2, self.topk_weights, self.topk_ids, **self.options, **extra)

    def packed_args(self) -> tuple[Any, ...]:
        a, b = self.w13, self.w2
        return (
            self.x, a.qweight, b.qweight, self.topk_weights, self.topk_ids, a.scales, b.scales,
            _resolved(a), _resolved(b),
        )  # fmt: skip

    def packed_options(self) -> dict[str, Any]:
        a, b = self.w13, self.w2
        return dict(w13_qzeros=a.qzeros, w2_qzeros=b.qzeros, w13_bits=a.bits, w2_bits=b.bits, **self.options)

    def run_packed(self, ops: Any, **extra: Any) -> torch.Tensor:
        return ops.fused_moe_packed(*self.packed_args(), **self.packed_options(), **extra)

    def oracle_options(self) -> dict[str, Any]:
        o = dict(self.options)
        names = {number: name for name, number in oracle.ACTIVATION_IDS.items()}
        o["activation"] = names[int(o.get("activation", 0))]
        o["interleaved"] = bool(o.pop("w13_order", 0))
        o.pop("global_num_experts", None)
        for key in ("w13_bias", "w2_bias", "expert_map"):
            if o.get(key) is not None:
                o[key] = to_numpy(o[key]).astype(np.int64 if key == "expert_map" else np.float64)
        return o

    def want(self, *, packed: bool) -> oracle.Judged:
        """Float64 truth: exact weights for the packed op, weights rounded to x's dtype for the dense one."""
        name = NAMES[self.dtype]
        w13, w2 = self.w13.exact, self.w2.exact
        if not packed:
            w13, w2 = oracle.round_to(w13, name), oracle.round_to(w2, name)
        return oracle.moe(
            to_numpy(self.x), w13, w2, to_numpy(self.topk_weights), self.topk_ids.numpy(), dtype=name,
            weight_rounding=oracle.UNIT_ROUNDOFF[name] if packed else 0.0, **self.oracle_options(),
        )  # fmt: skip


def _resolved(w: Quantised) -> int:
    return w.codes.shape[-1] if w.group_size == -1 else w.group_size


def make_layer(
    rng: np.random.Generator,
    *,
    experts: int = 5,
    hidden: int = 64,
    intermediate: int = 32,
    tokens: int = 7,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    scales_dtype: torch.dtype = torch.bfloat16,
    group_sizes: tuple[int, int] = (32, 16),
    bits: tuple[int, int] = (4, 4),
    symmetric: bool = False,
    ids_dtype: torch.dtype = torch.int32,
    activation: str = "silu",
    bias: bool = False,
    **options: Any,
) -> Layer:
    """A layer with distinct experts a token where E allows, positive router weights, and the options of the
    ops."""
    rows13 = intermediate if activation.endswith("_no_mul") else 2 * intermediate
    w13 = quantise(
        rng,
        experts,
        rows13,
        hidden,
        group_sizes[0],
        bits=bits[0],
        symmetric=symmetric,
        scales_dtype=scales_dtype,
    )
    w2 = quantise(
        rng,
        experts,
        hidden,
        intermediate,
        group_sizes[1],
        bits=bits[1],
        symmetric=symmetric,
        scales_dtype=scales_dtype,
    )
    distinct = experts >= top_k
    ids = np.array([rng.choice(experts, top_k, replace=not distinct) for _ in range(tokens)]).reshape(
        tokens, top_k
    )
    weights = rng.uniform(0.1, 1.0, (tokens, top_k)).astype(np.float32)
    options = {"activation": oracle.ACTIVATION_IDS[activation], **options}
    if bias:
        options["w13_bias"] = to_torch(random_floats(rng, (experts, rows13), dtype), dtype)
        options["w2_bias"] = to_torch(random_floats(rng, (experts, hidden), dtype), dtype)
    x = to_torch(random_floats(rng, (tokens, hidden), dtype), dtype)
    return Layer(x, w13, w2, torch.from_numpy(weights), torch.from_numpy(ids).to(ids_dtype), options)
