"""Small random problems: stored tensors of any format, and what a layer makes of them in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._enums import Activation, Format
from ..formats.base import TensorAxes, tensor_axes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Relative L2 error that rounding may cause: a few units in the last place of the dtype.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}
SWIGLU = {"limit": 1.5, "alpha": 1.702, "beta": 1.0}


def formats() -> list[tuple[Format, int]]:
    """Every (format, bits) that exists. AWQ is 4 bits only; int8 Quark files do not depend on the pack method."""
    return [
        (fmt, bits)
        for bits in (4, 8)
        for fmt in Format
        if bits == 4 or (fmt is not Format.awq and not fmt.name.endswith("reorder"))
    ]


def parameters(activation: Activation) -> dict[str, float]:
    """The parameters that the activation needs."""
    return dict(SWIGLU) if activation is Activation.swigluoai else {}


def _axes(fmt: Format, bits: int) -> TensorAxes:
    if fmt is Format.canonical:
        return TensorAxes(("O", "I8"), ("O", "C"), ("O", "C"))
    return tensor_axes(fmt, bits)


def group_size_of(fmt: Format, group_size: int) -> int:
    """The group size that the format can store: per-channel formats have no other."""
    return -1 if "channel" in fmt.name else group_size


# qweight, scales, qzeros and g_idx (None without act-order), each with the expert axis first.
Stored = tuple[Tensor, Tensor, Tensor, Tensor | None]


def stored(
    fmt: Format,
    bits: int,
    experts: int,
    rows: int,
    columns: int,
    group_size: int,
    rng: torch.Generator,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False,
) -> Stored:
    """Random tensors as a file of this format would hold them, stacked over experts.

    Any word is a legal code, so no packer is needed. Scales make weights of about 1 / sqrt(columns).
    """
    groups = 1 if group_size == -1 else -(-columns // group_size)
    per_word = 32 // bits
    sizes = {"O": rows, "I": columns, "C": groups, "O*": rows // per_word, "I*": columns // per_word}
    sizes["I8"] = columns * bits // 8
    axes = _axes(fmt, bits)

    def words(dims: tuple[str, ...], values: int = 256) -> Tensor:
        shape = (experts, *(sizes[d] for d in dims))
        if any(d.endswith("*") for d in dims):
            return torch.randint(-(2**31), 2**31, shape, generator=rng, dtype=torch.int64).to(torch.int32)
        signed = fmt.name.startswith("quark_int")
        codes = torch.randint(0, values, shape, generator=rng, dtype=torch.int64).to(torch.uint8)
        return codes.view(torch.int8) if signed else codes

    unit = 1 / (2 ** (bits - 1) * columns**0.5)
    spread = torch.rand((experts, *(sizes[d] for d in axes.scales)), generator=rng) + 0.5
    scales = (spread * (2 * unit)).to(scale_dtype)
    g_idx = None
    if act_order:
        plain = torch.arange(columns, dtype=torch.int32) // group_size
        g_idx = torch.stack([plain[torch.randperm(columns, generator=rng)] for _ in range(experts)])
    # Canonical zero points are one byte each whatever the width.
    zero_values = 1 << bits if fmt is Format.canonical else 256
    return words(axes.qweight), scales, words(axes.qzeros, zero_values), g_idx


@dataclass
class Layer:
    """Stored projections of one MoE layer and their exact weights.

    Attributes:
        gate, up, down: stacked tensors; gate is None without a gate.
        w13, w2: exact fp32 weights [E, 2I, H] ([E, I, H] without a gate) and [E, H, I].
    """

    format: Format
    bits: int
    group_size: int
    gate: Stored | None
    up: Stored
    down: Stored
    w13: Tensor
    w2: Tensor
    biases: dict[str, Tensor] = field(default_factory=dict)


def exact(tensors: Stored, fmt: Format, bits: int, group_size: int) -> Tensor:
    """(q - z) * s in fp32 [E, O, I], by the reference."""
    columns = reference.unpack(tensors[0][0], format=fmt, bits=bits).shape[-1]
    size = columns if group_size == -1 else group_size
    return reference.dequantize(*tensors, group_size=size, format=fmt, bits=bits, dtype=torch.float32)


def random_layer(
    fmt: Format,
    bits: int,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool,
    rng: torch.Generator,
    group_size: int = 32,
    act_order: bool = False,
) -> Layer:
    """A layer in the given format; act-order permutes gate and up alike, as writers do."""
    group = group_size_of(fmt, group_size)
    up = stored(fmt, bits, experts, intermediate, hidden, group, rng, act_order=act_order)
    gate = None
    if gated:
        gate = (*stored(fmt, bits, experts, intermediate, hidden, group, rng)[:3], up[3])
    down = stored(fmt, bits, experts, hidden, intermediate, group, rng, act_order=act_order)
    upper = [exact(p, fmt, bits, group) for p in (gate, up) if p is not None]
    return Layer(fmt, bits, group, gate, up, down, torch.cat(upper, dim=1), exact(down, fmt, bits, group))


@dataclass
class Batch:
    """Tokens and their routing: x [M, H], topk_weights fp32 [M, k], topk_ids [M, k]."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def random_batch(
    tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype, rng: torch.Generator
) -> Batch:
    """A batch whose first token is unrouted in its last slot (id -1)."""
    x = torch.randn(tokens, hidden, generator=rng).to(dtype)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(tokens)]).to(torch.int32)
    if top_k > 1:
        ids[0, -1] = -1
    return Batch(x, torch.rand(tokens, top_k, generator=rng), ids)


def expected(
    layer: Layer, batch: Batch, activation: Activation, *, order: int = 0, on_input: bool = False
) -> Tensor:
    """The layer in double precision, without any rounding on the way: [M, H] float64."""
    x, w = batch.x.double(), batch.topk_weights.double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(layer.w13.shape[0]):
        token, slot = (batch.topk_ids == e).nonzero(as_tuple=True)
        factor = w[token, slot].unsqueeze(1)
        h = (x[token] * factor if on_input else x[token]) @ layer.w13[e].double().t()
        if "w13_bias" in layer.biases:
            h = h + layer.biases["w13_bias"][e].double()
        h = reference.activate(h, activation=activation, w13_order=order, **parameters(activation))
        y = h @ layer.w2[e].double().t()
        if "w2_bias" in layer.biases:
            y = y + layer.biases["w2_bias"][e].double()
        out.index_add_(0, token, y if on_input else y * factor)
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in double precision; infinite where a value is not finite."""
    difference = (got.detach().cpu().double() - want).norm()
    error = float(difference / want.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def experts_options(layer: Layer, activation: Activation) -> dict[str, Any]:
    """Arguments of `Experts.from_format` for a layer."""

    def named(tensors: Stored | None) -> dict[str, Tensor | None] | None:
        if tensors is None:
            return None
        return dict(zip(("qweight", "scales", "qzeros", "g_idx"), tensors, strict=True))

    return {
        "format": layer.format,
        "gate": named(layer.gate),
        "up": named(layer.up),
        "down": named(layer.down),
        "group_size": layer.group_size,
        "bits": layer.bits,
        "activation": activation,
        **parameters(activation),
    }
