"""Independent float64 oracle: what every op must return, in NumPy, sharing no code with the package.

Three layers: rounding and bit packing (integers and single roundings are exact, so tests compare them bit
for bit), the MoE layer in float64, and an error model that turns norms and unit roundoffs into its bound.
Shapes: O output rows, I input columns, C groups along I, E experts, M tokens, k = top-k, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

# dtype name -> (significand bits with the hidden one, smallest normal exponent, largest finite value)
_FLOATS = {
    "bfloat16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, (2 - 2.0**-23) * 2.0**127),
}

# Root-mean-square error of one rounding relative to the value; the worst case is twice as large.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}
WORST_ROUNDOFF = {name: 2 * u for name, u in UNIT_ROUNDOFF.items()}


def round_to(x: NDArray, dtype: str) -> Array:
    """Rounds float64 values once to `dtype`, ties to even, denormals kept, overflow to inf; returns float64."""
    bits, min_exponent, largest = _FLOATS[dtype]
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(x)  # |x| in [2^(e-1), 2^e)
    step = np.maximum(exponent - bits, min_exponent - bits + 1)
    with np.errstate(invalid="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x, -step)), step)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded)


# Bit packing.

PLAIN8 = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ8 = (0, 2, 4, 6, 1, 3, 5, 7)  # physical slot p of a word holds column AWQ8[p] of its eight


def pack_words(
    codes: NDArray, axis: int, bits: int = 4, slots: Sequence[int] = PLAIN8, pad: int = 0
) -> NDArray[np.int32]:
    """Packs 32/bits codes along `axis` into one int32, lowest slot first; a short last word is filled with
    `pad`."""
    per_word = 32 // bits
    moved = np.moveaxis(np.asarray(codes, np.int64), axis, -1)
    missing = -moved.shape[-1] % per_word
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, missing)], constant_values=pad)
    lanes = moved.reshape(*moved.shape[:-1], moved.shape[-1] // per_word, per_word)
    words = np.zeros(lanes.shape[:-1], np.int64)
    for slot in range(per_word):
        column = slots[slot] if per_word == 8 else slot
        words |= (lanes[..., column] & (2**bits - 1)) << (bits * slot)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32).view(np.int32)


def pack_bytes(codes: NDArray, bits: int = 4) -> NDArray[np.uint8]:
    """Canonical packing along the last axis: low nibble = even index (bits=8: the codes themselves).

    The nibble that an odd length leaves over holds 15: it must never be read.
    """
    codes = np.asarray(codes, np.uint8)
    if bits == 4 and codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.full_like(codes[..., :1], 15)], -1)
    return codes.copy() if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


@dataclass(frozen=True)
class Layout:
    """How one checkpoint format stores a projection; `matrix` builds its tensors from codes."""

    name: str
    output_first: bool  # packed tensor is [O, I..] (else [I.., O])
    packed_along_input: bool
    zeros_along: str  # "groups_last": [O/8, C]; "groups_first": [C, O/8]; "channel": [O/8]; "bytes": [O, C]
    slots: tuple[int, ...] = PLAIN8
    signed: bool = False  # codes and zeros are stored in two's complement
    zero_offset: int = 0  # subtracted from stored zero words (v1) or nibbles (v1_nibble)
    bits: tuple[int, ...] = (4, 8)
    channel_only: bool = False


def _quark(signed: bool, channel: bool, reorder: bool) -> Layout:
    order = "reorder" if reorder else "order"
    name = f"quark_{'int' if signed else 'uint'}{'_channel' if channel else ''}_{order}"
    zeros = "channel" if channel else "groups_first"
    return Layout(name, channel, channel, zeros, AWQ8 if reorder else PLAIN8, signed, channel_only=channel)


LAYOUTS = {
    layout.name: layout
    for layout in [
        Layout("canonical", True, True, "bytes"),
        Layout("compressed_tensors", True, True, "groups_last"),
        Layout("gptq_v1", False, True, "groups_first", zero_offset=1),
        Layout("gptq_v2", False, True, "groups_first"),
        Layout("gptq_v1_nibble", False, True, "groups_first", zero_offset=1),
        Layout("awq", False, False, "groups_first", AWQ8, bits=(4,)),
        *(_quark(s, c, r) for s in (True, False) for c in (False, True) for r in (False, True)),
    ]
}
FORMAT_IDS = {
    "canonical": 0, "compressed_tensors": 1, "gptq_v1": 2, "gptq_v2": 3, "awq": 4, "quark_int_order": 5,
    "quark_int_reorder": 6, "quark_uint_order": 7, "quark_uint_reorder": 8, "quark_int_channel_order": 9,
    "quark_int_channel_reorder": 10, "quark_uint_channel_order": 11, "quark_uint_channel_reorder": 12,
    "gptq_v1_nibble": 13,
}  # fmt: skip


def _store_zeros(layout: Layout, zeros: NDArray, bits: int) -> NDArray:
    """zeros [O, C] true zero points -> the format's tensor."""
    z = np.asarray(zeros, np.int64)
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    if layout.zeros_along == "bytes":
        return z.astype(np.uint8)
    if layout.signed:
        z = z - half
    if layout.name == "gptq_v1_nibble":
        z = (z - 1) & mask
    if layout.name.startswith("quark") and bits == 8:
        stored = z.astype(np.int8 if layout.signed else np.uint8)
        return stored[:, 0].copy() if layout.channel_only else np.ascontiguousarray(stored.T)
    if layout.zeros_along == "groups_last":
        return pack_words(z, 0, bits, layout.slots)
    if layout.zeros_along == "channel":
        return pack_words(z[:, 0], 0, bits, layout.slots)
    words = pack_words(z.T, 1, bits, layout.slots)
    if layout.name == "gptq_v1":  # the writer subtracts one in every lane of the whole word, with borrow
        ones = 0x11111111 if bits == 4 else 0x01010101
        words = (
            ((words.view(np.uint32).astype(np.int64) - ones) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        )
    return words


def store(
    name: str, codes: NDArray, scales: NDArray, zeros: NDArray | None, bits: int = 4, pad: int = 0
) -> tuple[NDArray, NDArray, NDArray | None]:
    """Writes one projection as format `name`: codes [O, I], scales [O, C], zeros [O, C] -> (qweight, scales,
    qzeros)."""
    layout = LAYOUTS[name]
    q = np.asarray(codes, np.int64)
    if layout.signed:
        q = q - (1 << (bits - 1))
    if name == "canonical":
        packed: NDArray = pack_bytes(codes, bits)
    elif name.startswith("quark") and bits == 8:
        packed = (q if layout.output_first else q.T).astype(np.int8 if layout.signed else np.uint8)
        packed = np.ascontiguousarray(packed)
    elif layout.output_first:
        packed = pack_words(q, 1, bits, layout.slots, pad)
    elif layout.packed_along_input:
        packed = pack_words(q.T, 0, bits, layout.slots)
    else:
        packed = pack_words(q.T, 1, bits, layout.slots)
    if layout.channel_only:
        stored_scales = np.ascontiguousarray(scales[:, 0])
    else:
        stored_scales = np.ascontiguousarray(
            scales if layout.zeros_along in ("bytes", "groups_last") else scales.T
        )
    return packed, stored_scales, None if zeros is None else _store_zeros(layout, zeros, bits)


def unpack_canonical(packed: NDArray, bits: int = 4) -> Ints:
    """Canonical bytes [..., I*bits/8] -> codes [..., I]."""
    p = np.asarray(packed, np.int64)
    return p if bits == 8 else np.stack([p & 15, p >> 4], -1).reshape(*p.shape[:-1], -1)


# Dequantisation.


def exact_weight(
    codes: NDArray,
    scales: NDArray,
    zeros: NDArray | None,
    group_size: int,
    bits: int = 4,
    g_idx: NDArray | None = None,
) -> Array:
    """(q - z) * s in float64: codes [..., O, I], scales and zeros [..., O, C], g_idx [..., I] -> [..., O,
    I]."""
    q = np.asarray(codes, np.float64)
    if g_idx is None:
        g_idx = np.arange(q.shape[-1]) // (q.shape[-1] if group_size == -1 else group_size)
    index = np.broadcast_to(np.asarray(g_idx)[..., None, :], q.shape)
    s = np.take_along_axis(np.asarray(scales, np.float64), index, -1)
    z = (
        float(1 << (bits - 1))
        if zeros is None
        else np.take_along_axis(np.asarray(zeros, np.float64), index, -1)
    )
    return (q - z) * s


def rounded_weight(exact: Array, scales_dtype: str, out_dtype: str) -> Array:
    """The emulation's weight: the fp32 product (itself rounded only for fp32 scales), rounded once to
    `out_dtype`."""
    return round_to(round_to(exact, "float32") if scales_dtype == "float32" else exact, out_dtype)


# Routing.


def local_experts(topk_ids: NDArray, num_experts: int, expert_map: NDArray | None = None) -> Ints:
    """Global ids [M, k] -> local expert or -1, by the one rule: outside [0, global E) is unrouted."""
    ids = np.asarray(topk_ids, np.int64)
    bound = num_experts if expert_map is None else len(expert_map)
    inside = (ids >= 0) & (ids < bound)
    local = np.where(inside, ids, 0)
    if expert_map is not None:
        local = np.asarray(expert_map, np.int64)[local] if bound else local
        inside &= (local >= 0) & (local < num_experts)
    return np.where(inside, local, -1)


def align(
    topk_ids: NDArray, num_experts: int, block: int = 1, expert_map: NDArray | None = None
) -> tuple[Ints, Ints, Ints, int]:
    """(sorted_slots [cap], block_experts [cap/block], expert_offsets [E+1], rows used), padding slot = M*k."""
    local = local_experts(topk_ids, num_experts, expert_map).reshape(-1)
    n = local.size
    cap = -(-(n + num_experts * (block - 1)) // block) * block
    slots: list[int] = []
    owners: list[int] = []
    offsets = [0]
    for expert in range(num_experts):
        mine = np.flatnonzero(local == expert).tolist()
        mine += [n] * (-len(mine) % block)
        slots += mine
        owners += [expert] * (len(mine) // block)
        offsets.append(len(slots))
    used = len(slots)
    slots += [n] * (cap - used)
    owners += [-1] * (cap // block - len(owners))
    return np.array(slots, np.int64), np.array(owners, np.int64), np.array(offsets, np.int64), used


# Activations.

GATED = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")
PLAIN = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
ACTIVATION_IDS = {name: i for i, name in enumerate(GATED)} | {name: 16 + i for i, name in enumerate(PLAIN)}

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


_SHAPES: dict[str, Callable[[Array], Array]] = {
    "silu": lambda g: g * _sigmoid(g),
    "gelu": lambda g: 0.5 * g * (1.0 + _erf(g / math.sqrt(2.0))) if g.size else g,
    "gelu_tanh": lambda g: 0.5 * g * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3))),
    "relu2": lambda g: np.maximum(g, 0.0) ** 2,
}


def activate(
    name: str, gate: Array, up: Array, limit: float | None, alpha: float | None, beta: float | None
) -> Array:
    """One activation in float64; for the gate-less ones `up` is ignored."""
    if name.endswith("_no_mul"):
        return _SHAPES[name.removesuffix("_no_mul")](gate)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if name == "swigluoai":
        assert alpha is not None and beta is not None
        return gate * _sigmoid(alpha * gate) * (up + beta)
    return _SHAPES[name](gate) * up


def split_gate_up(h: Array, name: str, interleaved: bool) -> tuple[Array, Array]:
    """Rows of w13's output [.., 2I] -> gate and up [.., I]."""
    if name.endswith("_no_mul"):
        return h, np.zeros_like(h)
    if interleaved:
        return h[..., 0::2], h[..., 1::2]
    half = h.shape[-1] // 2
    return h[..., :half], h[..., half:]


# The MoE layer and its error.


@dataclass(frozen=True)
class Judged:
    """A float64 result and the root-mean-square error that correct arithmetic may show, element by element."""

    value: Array
    error: Array


def moe(
    x: Array,
    w13: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: NDArray,
    *,
    dtype: str,
    weight_rounding: float = 0.0,
    w13_bias: Array | None = None,
    w2_bias: Array | None = None,
    expert_map: NDArray | None = None,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    interleaved: bool = False,
    apply_router_weight_on_input: bool = False,
) -> Judged:
    """The layer in float64, with the error model of type `dtype`: x [M, H], w13 [E, N1, H], w2 [E, H, I].

    The model adds variances: a rounding of relative size u in one factor of a sum of products contributes
    u * ||x|| * ||w||, fp32 accumulation 2^-24 * sqrt(K) * ||x|| * ||w||. `weight_rounding` is u of
    the compute dtype where a packed kernel may round its weights, else 0.
    """
    u, eps = UNIT_ROUNDOFF[dtype], 2.0**-24
    tokens, hidden = x.shape
    local = local_experts(topk_ids, len(w13), expert_map)
    value, variance = np.zeros((tokens, hidden)), np.zeros((tokens, hidden))
    for t in range(tokens):
        for j in range(local.shape[1]):
            e, weight = int(local[t, j]), float(topk_weights[t, j])
            if e < 0:
                continue
            row = x[t] * weight if apply_router_weight_on_input else x[t]
            pre = w13[e] @ row
            pre_var = (weight_rounding**2 + eps**2 * hidden) * (w13[e] ** 2 @ row**2)
            if apply_router_weight_on_input:
                # One error in x meets gate and up alike, so it is not averaged out: its worst case counts.
                pre_var, weight = pre_var + 4 * u**2 * (w13[e] ** 2 @ row**2), 1.0
            if w13_bias is not None:
                pre = pre + w13_bias[e]
            pre_var = pre_var + (eps * pre) ** 2
            (g, up), (g_var, up_var) = (split_gate_up(v, activation, interleaved) for v in (pre, pre_var))

            def act(a: Array, b: Array) -> Array:
                return activate(activation, a, b, limit, alpha, beta)

            h = act(g, up)
            step = 1e-6
            slope_g = (act(g + step, up) - act(g - step, up)) / (2 * step)
            slope_u = (act(g, up + step) - act(g, up - step)) / (2 * step)
            scale = np.abs(h) + np.abs(g) * (
                1.0 if activation.endswith("_no_mul") else np.abs(up) + abs(beta or 0.0)
            )
            h_var = slope_g**2 * g_var + slope_u**2 * up_var + (u * h) ** 2 + (4 * eps * scale) ** 2
            y = w2[e] @ h
            y_var = w2[e] ** 2 @ h_var + (weight_rounding**2 + eps**2 * h.size) * (w2[e] ** 2 @ h**2)
            if w2_bias is not None:
                y = y + w2_bias[e]
            value[t] += weight * y
            variance[t] += weight**2 * (y_var + (2 * eps * y) ** 2)
    tiny = (
        2.0**-24 if dtype == "float16" else 0.0
    )  # fp16's denormals: an absolute step instead of a relative one
    return Judged(value, np.sqrt(variance + (u * value) ** 2 + tiny**2 * (value != 0)))


def gemm(
    x: Array, w: Array, *, dtype: str, weight_rounding: float = 0.0, bias: Array | None = None
) -> Judged:
    """One x [R, K] by weight [N, K] transposed, with the same error model."""
    magnitude = x**2 @ (w**2).T
    value = x @ w.T + (0.0 if bias is None else bias)
    variance = (weight_rounding**2 + 2.0**-48 * x.shape[1]) * magnitude + (UNIT_ROUNDOFF[dtype] * value) ** 2
    return Judged(value, np.sqrt(variance))


def check(got: NDArray, want: Judged, slack: float = 1.5) -> None:
    """Fails unless ||got - want|| is within the model, over all elements and in every row; zeros must be
    exact zeros."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.value.shape, f"shape {got.shape}, want {want.value.shape}"
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    error = got - want.value
    norm, bound = np.linalg.norm(error), np.linalg.norm(want.error)
    size = np.linalg.norm(want.value)
    assert norm <= slack * bound, (
        f"relative error {norm / max(size, 1e-300):.3g} > {slack * bound / max(size, 1e-300):.3g}"
    )
    rows, row_bounds = np.linalg.norm(error, axis=-1), np.linalg.norm(want.error, axis=-1)
    worst = int(np.argmax(rows - 2 * slack * row_bounds)) if rows.size else 0
    assert (rows <= 2 * slack * row_bounds).all(), (
        f"row {worst}: error {rows[worst]:.3g} > {row_bounds[worst]:.3g} * {2 * slack}"
    )
