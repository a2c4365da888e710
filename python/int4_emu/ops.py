"""The public functions over `torch.ops.int4_emu.*`: typed, documented, and usable inside torch.compile.

Letters in shapes: E local experts, H hidden size, I intermediate size, M tokens, k = top-k, O output rows and I input columns of one
matrix, C groups along the input axis = ceil(I / group_size), G group_size. `...` is nothing or one leading axis of experts.
Formats, activations, layouts and row orders are enum members, their names, or their numbers.

Every function raises ValueError for a wrong value or shape and TypeError for a wrong dtype or device, before any work is done. They are
inference only: inputs may require grad, but backward through a result raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from . import _checks_formats, _fake
from ._enums import Activation, Format, Layout, W13Order, parse_enum
from .errors import BackendError

_fake.register()

_ops = torch.ops.int4_emu

EnumLike = IntEnum | int | str

# How the dispatcher words an argument that no schema takes (None for a tensor, 16.0 for a size), before its page of schema.
_MISMATCH = re.compile(
    r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'"
)


def _number(kind: type[IntEnum], value: EnumLike, name: str) -> int:
    return value if type(value) is int else int(parse_enum(kind, value, name))


def _group(group_size: int, in_features: int) -> int:
    """-1 is per-channel: one group over the whole row. No kernel sees a value below 1."""
    return in_features if group_size == -1 else group_size


def _call(op: Any, check: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs the op; a failure is checked again in Python, whose rules tell a wrong dtype or device (TypeError) from a wrong value."""
    if torch.compiler.is_compiling():
        return op(*args, **options)
    _fake.refuse_tangents(op.__name__, (*args, *options.values()))
    try:
        return op(*args, **options)
    except (ValueError, RuntimeError, AttributeError) as error:
        if mismatch := _MISMATCH.search(str(error)):
            kind, name, came = mismatch.groups()
            raise TypeError(f"{name} must be of type {kind}, got {came}") from None
        # The dispatcher takes None for any tensor, as an undefined one.
        for argument, given in zip(op.default._schema.arguments, args, strict=False):
            if given is None and str(argument.type) == "Tensor":
                raise TypeError(f"{argument.name} must be of type Tensor, got NoneType") from None
        if str(error).startswith("out of memory"):
            raise torch.OutOfMemoryError(str(error)) from None
        if not isinstance(error, NotImplementedError):
            check(*args, **options)
        _refuse_distributed(op, args, options)
        if "INT4_EMU_CPU_ISA" in str(error):
            raise BackendError(str(error)) from None
        raise


def _refuse_distributed(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """DTensor knows no sharding of these ops, and says so of the op alone."""
    named = dict(zip((a.name for a in op.default._schema.arguments), args, strict=False)) | options
    for name, value in named.items():
        if type(value).__name__ == "DTensor":
            raise NotImplementedError(
                f"{name} must be a plain tensor, got a DTensor: give its to_local(), or load each rank's slice with "
                "Checkpoint.load_experts(tp_rank=, tp_size=) and sum the ranks' outputs"
            ) from None


def unpack(
    qweight: Tensor, *, format: EnumLike = Format.canonical, bits: int = 4, in_features: int = -1
) -> Tensor:
    """Integer codes of a packed weight, in unsigned form (two's complement formats become +8 or +128).

    Args:
        qweight: packed codes [..., ...] in `format` (see the format table of docs/api.md).
        format: how the codes are stored.
        bits: 4 or 8.
        in_features: I, where the last packed element of a row is padded; -1 = every packed code.

    Returns:
        uint8 [..., O, I].
    """
    options = {"format": _number(Format, format, "format"), "bits": bits, "in_features": in_features}
    return _call(_ops.unpack, _fake._unpack, (qweight,), options)


def unpack_zeros(
    qzeros: Tensor, *, format: EnumLike = Format.canonical, bits: int = 4, out_features: int = -1
) -> Tensor:
    """True zero points of a checkpoint's packed zeros: GPTQ v1's minus one undone, two's complement made unsigned.

    Returns:
        uint8 [..., O, C].
    """
    options = {"format": _number(Format, format, "format"), "bits": bits, "out_features": out_features}
    return _call(_ops.unpack_zeros, _fake._unpack_zeros, (qzeros,), options)


def _in_features(qweight: Tensor, fmt: int, bits: int, in_features: int) -> int:
    return (
        in_features if in_features != -1 else _checks_formats.check_codes(qweight, fmt, bits, -1).in_features
    )


def dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    format: EnumLike = Format.canonical,
    bits: int = 4,
    in_features: int = -1,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Dense weights (q - z) * s: the product in fp32, rounded once to the output dtype.

    Args:
        qweight: packed codes in `format`.
        scales: bfloat16, float16 or float32, in the format's shape ([..., O, C] when canonical).
        qzeros: packed zero points in `format`; None = the midpoint, 8 or 128.
        g_idx: int32 [..., I], the group of each input column (act-order); None = column // group_size.
        group_size: input columns per group; -1 = per-channel. The last group may be short.
        in_features: I, where the last packed element of a row is padded.
        dtype: output dtype; None = the scales'.
        out: contiguous [..., O, I] to write instead; its dtype is the output dtype.

    Returns:
        [..., O, I], or `out`.
    """
    fmt = _number(Format, format, "format")
    group_size = _group(group_size, _in_features(qweight, fmt, bits, in_features) if group_size == -1 else 0)
    options: dict[str, Any] = {
        "group_size": group_size,
        "format": fmt,
        "bits": bits,
        "in_features": in_features,
    }
    args = (qweight, scales, qzeros, g_idx)
    if out is None:
        return _call(_ops.dequantize, _fake._dequantize, args, options | {"dtype": dtype})
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"dtype must be None or out's {out.dtype}, got {dtype}")
    _call(_ops.dequantize_out, _fake._dequantize_out, args, options | {"out": out})
    return _written(out)


def _written(out: Tensor, *others: Tensor | None) -> Tensor:
    if not torch.compiler.is_compiling():
        outs = [t for t in (out, *others) if t is not None and not t.is_inference()]
        torch.autograd.graph.increment_version(outs)
    return out


def repack(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    format: EnumLike,
    bits: int = 4,
    in_features: int = -1,
    in_perm: Tensor | None = None,
    out_perm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checkpoint tensors of any format as canonical ones.

    Args:
        in_perm: int32 [I]; canonical column j is source column in_perm[j] (act-order: columns sorted by group). Scales stay as they are.
        out_perm: int32 [O]; canonical row i is source row out_perm[i], for codes, scales and zeros alike.

    Returns:
        (qweight uint8 [..., O, ceil(I * bits / 8)], scales [..., O, C], qzeros uint8 [..., O, C] or None).
    """
    options = {
        "format": _number(Format, format, "format"),
        "bits": bits,
        "in_features": in_features,
        "in_perm": in_perm,
        "out_perm": out_perm,
    }
    codes, s, z = _call(_ops.repack, _fake._repack, (qweight, scales, qzeros), options)
    return codes, s, None if qzeros is None else z


def repack_out(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    format: EnumLike,
    bits: int = 4,
    in_features: int = -1,
    in_perm: Tensor | None = None,
    out_perm: Tensor | None = None,
    out_qweight: Tensor,
    out_scales: Tensor,
    out_qzeros: Tensor | None = None,
) -> None:
    """`repack` straight into place: the outs are contiguous, for example row slices of one expert of an [E, N, ...] stack."""
    options = {
        "format": _number(Format, format, "format"),
        "bits": bits,
        "in_features": in_features,
        "in_perm": in_perm,
        "out_perm": out_perm,
        "out_qweight": out_qweight,
        "out_scales": out_scales,
        "out_qzeros": out_qzeros,
    }
    _call(_ops.repack_out, _fake._repack_out, (qweight, scales, qzeros), options)
    _written(out_qweight, out_scales, out_qzeros)


def prepack(qweight: Tensor, *, layout: EnumLike, bits: int = 4) -> Tensor:
    """Canonical codes [..., N, K * bits / 8] uint8 in the order of `layout`: the same bytes and shape, a bijection."""
    return _call(
        _ops.prepack, _fake._prepack, (qweight,), {"layout": _number(Layout, layout, "layout"), "bits": bits}
    )


def unprepack(qweight: Tensor, *, layout: EnumLike, bits: int = 4) -> Tensor:
    """The inverse of `prepack`, bit for bit."""
    return _call(
        _ops.unprepack,
        _fake._prepack,
        (qweight,),
        {"layout": _number(Layout, layout, "layout"), "bits": bits},
    )


def moe_align(
    topk_ids: Tensor, num_experts: int, block_size: int = 1, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts routed slots (token * k + j) by local expert, stable, each expert's run padded to `block_size`.

    Args:
        topk_ids: int32 or int64 [M, k], global expert ids; outside [0, global E) = unrouted.
        num_experts: E, local experts.
        expert_map: int32 [global E], global id to local slot, -1 = elsewhere; None = ids are local.

    Returns:
        sorted_slots int32 [cap], padding is M * k; block_experts int32 [cap / block_size], unused is -1;
        expert_offsets int32 [E + 1] in padded rows; num_slots int32 [1] = expert_offsets[E].
        cap = M * k + E * (block_size - 1) rounded up to block_size: no size depends on the ids.
    """
    return _call(
        _ops.moe_align, _fake._moe_align, (topk_ids, num_experts, block_size), {"expert_map": expert_map}
    )


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    scales: Tensor | None = None,
    qzeros: Tensor | None = None,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    group_size: int = -1,
    bits: int = 4,
    layout: EnumLike = Layout.canonical,
    out: Tensor | None = None,
) -> Tensor:
    """Ragged groups of rows: x[expert_offsets[e] : expert_offsets[e + 1]] @ weight[e].T + bias[e], accumulated in fp32.

    Args:
        x: [R, K] bfloat16, float16 or float32.
        weight: dense [E, N, K] with any strides, or packed canonical codes uint8 [E, N, K * bits / 8] when `scales` is given.
        expert_offsets: int32 or int64 [E + 1], ascending within 0..R. Rows outside every group are zero.
        scales, qzeros: canonical [E, N, C], qzeros uint8 or None (symmetric).
        perm: int32 [E, K]; column j of the codes meets x[:, perm[e, j]].
        bias: [E, N].

    Returns:
        [R, N] in x's dtype, or `out`. A dense int4 Linear is the case E = 1.
    """
    options: dict[str, Any] = {
        "scales": scales,
        "qzeros": qzeros,
        "perm": perm,
        "bias": bias,
        "bits": bits,
        "layout": _number(Layout, layout, "layout"),
        "group_size": 0 if scales is None else _group(group_size, x.shape[-1]),
    }
    args = (x, weight, expert_offsets)
    if out is None:
        return _call(_ops.grouped_gemm, _fake._grouped_gemm, args, options)
    _call(_ops.grouped_gemm_out, _fake._grouped_gemm_out, args, options | {"out": out})
    return _written(out)


def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    global_num_experts: int = -1,
    activation: EnumLike = Activation.silu,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_order: EnumLike = W13Order.halves,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One MoE layer with dense weights: sum over the k slots of topk_weight * (w2 @ act(w13 @ x + w13_bias) + w2_bias).

    Accumulation and activation in fp32; the inner activation is rounded once to x's dtype, the result once at the end; slots are summed
    in slot order.

    Args:
        hidden_states: [M, H] bfloat16, float16 or float32.
        w13: [E, 2I, H] ([E, I, H] for activations without gate), contiguous or a transposed view; never copied.
        w2: [E, H, I], likewise.
        topk_weights: float32 [M, k].
        topk_ids: int32 or int64 [M, k], global expert ids; an id outside [0, global E) is unrouted, duplicates sum.
        w13_bias, w2_bias: [E, 2I], [E, H].
        expert_map: int32 [global E], global id to local slot, -1 = another rank's; None = ids are local.
        global_num_experts: -1, or len(expert_map) (E without a map).
        activation, limit, alpha, beta: see docs/api.md; a parameter that the activation needs must be given, no other may.
        w13_order: `halves` (all gate rows, then all up rows) or `interleaved` (g0, u0, g1, u1, ...).
        apply_router_weight_on_input: k = 1 only: the weight multiplies x, and nothing later.
        out: contiguous [M, H] of x's dtype, or float32, to write instead; must not overlap an argument.

    Returns:
        [M, H] in x's dtype, or `out`.
    """
    args = (hidden_states, w13, w2, topk_weights, topk_ids)
    options: dict[str, Any] = {
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "expert_map": expert_map,
        "global_num_experts": global_num_experts,
        "activation": _number(Activation, activation, "activation"),
        "limit": limit,
        "alpha": alpha,
        "beta": beta,
        "w13_order": _number(W13Order, w13_order, "w13_order"),
        "apply_router_weight_on_input": apply_router_weight_on_input,
    }
    if out is None:
        return _call(_ops.fused_moe, _fake._moe, args, options)
    _call(_ops.fused_moe_out, _fake._moe_out, args, options | {"out": out})
    return _written(out)


def fused_moe_packed(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_scales: Tensor,
    w2_scales: Tensor,
    w13_group_size: int,
    w2_group_size: int,
    *,
    w13_qzeros: Tensor | None = None,
    w2_qzeros: Tensor | None = None,
    w13_perm: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    global_num_experts: int = -1,
    intermediate_size: int = -1,
    w13_bits: int = 4,
    w2_bits: int = 4,
    layout: EnumLike = Layout.canonical,
    activation: EnumLike = Activation.silu,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_order: EnumLike = W13Order.halves,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_moe` with weights that stay packed: each tile is dequantised on its way into the GEMM.

    Args (beyond those of `fused_moe`):
        w13, w2: uint8 [E, 2I, H * w13_bits / 8], [E, H, I * w2_bits / 8], canonical or prepacked as `layout` says.
        w13_scales, w2_scales: [E, 2I, C13], [E, H, C2], bfloat16, float16 or float32 whatever x is.
        w13_group_size, w2_group_size: input columns per group; -1 = per-channel.
        w13_qzeros, w2_qzeros: uint8, shaped like the scales; None = symmetric.
        w13_perm: int32 [E, H], act-order: column j of w13's codes meets x[:, w13_perm[e, j]].
        intermediate_size: -1 or I, checked against w13.
    """
    kind = _number(Activation, activation, "activation")
    if w13_group_size == -1:
        w13_group_size = hidden_states.shape[-1]
    if w2_group_size == -1:
        w2_group_size = w13.shape[1] // (2 if kind < Activation.silu_no_mul else 1)
    routed = (hidden_states, w13, w2, topk_weights, topk_ids)
    args = (*routed, w13_scales, w2_scales, w13_group_size, w2_group_size)
    options: dict[str, Any] = {
        "w13_qzeros": w13_qzeros,
        "w2_qzeros": w2_qzeros,
        "w13_perm": w13_perm,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "expert_map": expert_map,
        "global_num_experts": global_num_experts,
        "intermediate_size": intermediate_size,
        "w13_bits": w13_bits,
        "w2_bits": w2_bits,
        "layout": _number(Layout, layout, "layout"),
        "activation": kind,
        "limit": limit,
        "alpha": alpha,
        "beta": beta,
        "w13_order": _number(W13Order, w13_order, "w13_order"),
        "apply_router_weight_on_input": apply_router_weight_on_input,
    }
    if out is None:
        return _call(_ops.fused_moe_packed, _fake._moe, args, options)
    _call(_ops.fused_moe_packed_out, _fake._moe_out, args, options | {"out": out})
    return _written(out)
