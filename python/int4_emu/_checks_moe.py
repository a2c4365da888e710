"""Argument rules of the MoE ops."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks as c
from ._enums import Activation, W13Order, parse_enum
from .activations import check_activation


def check_ids(topk_ids: Tensor) -> None:
    c.check_dim(topk_ids, "topk_ids", (2,), "[M, k]")
    c.check_dtype(topk_ids, "topk_ids", c.INTS)


def check_moe_align(topk_ids: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None) -> None:
    check_ids(topk_ids)
    if num_experts < 0:
        raise ValueError(f"num_experts must be >= 0, got {num_experts}")
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}")
    if num_experts * block_size >= 2**31:
        raise ValueError(
            f"num_experts * block_size must be below 2^31, as offsets are int32, got {num_experts} * {block_size}"
        )
    if expert_map is not None:
        c.check_device(topk_ids, "topk_ids", expert_map=expert_map)
        c.check_dtype(expert_map, "expert_map", (torch.int32,))
        c.check_dim(expert_map, "expert_map", (1,), "[global E]")


def _check_dense(w: Tensor, name: str, want: Sequence[int], formula: str, x: Tensor, x_name: str) -> None:
    c.check_dim(w, name, (3,), formula)
    c.check_dtype(w, name, c.FLOATS)
    if w.dtype != x.dtype and x.dtype != torch.float32:
        raise TypeError(
            f"{name} must be {c.dtype_name(x.dtype)} like {x_name} (float32 {x_name} take any), got {c.dtype_name(w.dtype)}"
        )
    c.check_shape(w, name, want, formula, f"E={want[0]}, {x_name} {list(x.shape)}")
    if w.numel() > 0 and w.stride(2) != 1 and w.stride(1) != 1:
        raise ValueError(
            f"{name} must be contiguous {formula} or the transposed view of a contiguous [E, K, N], never copied: stride 1 "
            f"in one of the last two dimensions, got strides {list(w.stride())}"
        )


def _check_packed(
    w: Tensor,
    prefix: str,
    name: str,
    want: tuple[int, int, int],
    n_name: str,
    k_name: str,
    scales: Tensor,
    qzeros: Tensor | None,
    perm: Tensor | None,
    group_size: int,
    bits: int,
    layout: int,
) -> None:
    experts, n, k = want
    c.check_bits(bits, f"{prefix}bits")
    context = f"{n_name}={n}, {k_name}={k}, {prefix}group_size={group_size}, {prefix}bits={bits}"
    c.check_dtype(w, name, (torch.uint8,))
    c.check_shape(w, name, [experts, n, c.row_bytes(k, bits)], f"[E, {n_name}, {k_name} * bits / 8]", context)
    c.check_group_size(group_size, k, f"{prefix}group_size", k_name)
    groups = [experts, n, c.ceil_div(k, group_size)]
    formula = f"[E, {n_name}, {k_name}/group_size]"
    c.check_dtype(scales, f"{prefix}scales", c.FLOATS)
    c.check_shape(scales, f"{prefix}scales", groups, formula, context)
    c.check_layout(layout, n, k, bits, name)
    if qzeros is not None:
        c.check_dtype(qzeros, f"{prefix}qzeros", (torch.uint8,))
        c.check_shape(qzeros, f"{prefix}qzeros", groups, formula, context)
    if perm is not None:
        c.check_dtype(perm, f"{prefix}perm", (torch.int32,))
        c.check_shape(perm, f"{prefix}perm", [experts, k], f"[E, {k_name}]", context)
        c.check_index_range(perm, f"{prefix}perm", k, k_name)


def check_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    scales: Tensor | None,
    qzeros: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    bits: int,
    layout: int,
) -> None:
    c.check_dim(x, "x", (2,), "[R, K]")
    c.check_dtype(x, "x", c.FLOATS)
    c.check_device(
        x,
        "x",
        weight=weight,
        expert_offsets=expert_offsets,
        scales=scales,
        qzeros=qzeros,
        perm=perm,
        bias=bias,
    )
    c.check_dim(weight, "weight", (3,), "[E, N, K]" if scales is None else "[E, N, K * bits / 8]")
    experts, n = weight.shape[:2]
    if scales is not None:
        _check_packed(
            weight,
            "",
            "weight",
            (experts, n, x.shape[1]),
            "N",
            "K",
            scales,
            qzeros,
            perm,
            group_size,
            bits,
            layout,
        )
    else:
        if qzeros is not None or perm is not None:
            raise ValueError("qzeros and perm belong to packed weights: scales must be given with them")
        _check_dense(weight, "weight", [experts, n, x.shape[1]], "[E, N, K]", x, "x")
    if bias is not None:
        c.check_dtype(bias, "bias", c.FLOATS)
        c.check_shape(bias, "bias", [experts, n], "[E, N]")
    c.check_dtype(expert_offsets, "expert_offsets", c.INTS)
    c.check_shape(expert_offsets, "expert_offsets", [experts + 1], "[E + 1]", f"weight {list(weight.shape)}")
    if (
        isinstance(expert_offsets, torch._subclasses.FakeTensor)
        or expert_offsets.is_meta
        or torch.compiler.is_compiling()
    ):
        return
    last = 0
    for e, v in enumerate(expert_offsets.tolist()):
        if v < last or v > x.shape[0]:
            after = f" after {last}" if e else ""
            raise ValueError(
                f"expert_offsets must ascend within 0..R = 0..{x.shape[0]}, got {v} at {e}{after}"
            )
        last = v


def check_fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_scales: Tensor | None = None,
    w2_scales: Tensor | None = None,
    w13_group_size: int = 0,
    w2_group_size: int = 0,
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
    layout: int = 0,
    activation: int = 0,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_order: int = 0,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Rules of fused_moe (scales None) and fused_moe_packed."""
    x, packed = hidden_states, w13_scales is not None
    c.check_dim(x, "hidden_states", (2,), "[M, H]")
    c.check_dtype(x, "hidden_states", c.FLOATS)
    c.check_device(
        x,
        "hidden_states",
        w13=w13,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w13_scales=w13_scales,
        w2_scales=w2_scales,
        w13_qzeros=w13_qzeros,
        w2_qzeros=w2_qzeros,
        w13_perm=w13_perm,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        expert_map=expert_map,
    )
    kind: Activation = check_activation(activation, limit, alpha, beta)
    parse_enum(W13Order, w13_order, "w13_order")
    c.check_dim(w13, "w13", (3,), "[E, 2I, H * bits / 8]" if packed else "[E, 2I, H]")
    c.check_dim(w2, "w2", (3,), "[E, H, I * bits / 8]" if packed else "[E, H, I]")
    (tokens, hidden), experts, rows = x.shape, w13.shape[0], w13.shape[1]
    check_ids(topk_ids)
    k = topk_ids.shape[1]
    c.check_shape(topk_ids, "topk_ids", [tokens, k], "[M, k]", f"hidden_states {list(x.shape)}")
    c.check_dtype(topk_weights, "topk_weights", (torch.float32,))
    c.check_shape(topk_weights, "topk_weights", [tokens, k], "[M, k]", f"topk_ids {list(topk_ids.shape)}")
    if apply_router_weight_on_input and k != 1:
        raise ValueError(f"apply_router_weight_on_input needs k = 1, got k = {k}")
    known = experts
    if expert_map is not None:
        c.check_dtype(expert_map, "expert_map", (torch.int32,))
        c.check_dim(expert_map, "expert_map", (1,), "[global E]")
        known = expert_map.shape[0]
    if global_num_experts not in (-1, known):
        what = "E" if expert_map is None else "len(expert_map)"
        raise ValueError(f"global_num_experts must be -1 or {what} = {known}, got {global_num_experts}")
    factor, n_name = (2, "2I") if kind.is_gated else (1, "I")
    if rows % factor:
        raise ValueError(f"w13 must have 2I rows (gate and up), got {rows} in {list(w13.shape)}")
    inner = rows // factor
    if intermediate_size not in (-1, inner):
        raise ValueError(
            f"intermediate_size must be -1 or I = {inner} as w13 {list(w13.shape)} says, got {intermediate_size}"
        )
    if w13_scales is not None and w2_scales is not None:
        _check_packed(
            w13,
            "w13_",
            "w13",
            (experts, rows, hidden),
            n_name,
            "H",
            w13_scales,
            w13_qzeros,
            w13_perm,
            w13_group_size,
            w13_bits,
            layout,
        )
        _check_packed(
            w2,
            "w2_",
            "w2",
            (experts, hidden, inner),
            "H",
            "I",
            w2_scales,
            w2_qzeros,
            None,
            w2_group_size,
            w2_bits,
            layout,
        )
    else:
        _check_dense(w13, "w13", [experts, rows, hidden], f"[E, {n_name}, H]", x, "hidden_states")
        _check_dense(w2, "w2", [experts, hidden, inner], "[E, H, I]", x, "hidden_states")
    for bias, name, n, letters in ((w13_bias, "w13_bias", rows, n_name), (w2_bias, "w2_bias", hidden, "H")):
        if bias is not None:
            c.check_dtype(bias, name, c.FLOATS)
            c.check_shape(bias, name, [experts, n], f"[E, {letters}]")


def check_moe_out(out: Tensor, hidden_states: Tensor) -> None:
    c.check_device(hidden_states, "hidden_states", out=out)
    c.check_dtype(out, "out", tuple(dict.fromkeys((hidden_states.dtype, torch.float32))))
    c.check_out(out, list(hidden_states.shape), "[M, H]", f"hidden_states {list(hidden_states.shape)}")


def check_known_ids(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> None:
    """Under INT4_EMU_CHECK_IDS=1: an id that is neither -1 nor a known expert raises. Reads the ids on the host."""
    if os.environ.get("INT4_EMU_CHECK_IDS") != "1":
        return
    known = num_experts if expert_map is None else expert_map.numel()
    bad = ((topk_ids < -1) | (topk_ids >= known)).flatten().nonzero().flatten()
    if bad.numel():
        slot = int(bad[0])
        raise ValueError(
            f"topk_ids must be -1 (unrouted) or 0..E-1 = 0..{known - 1}, got {int(topk_ids.flatten()[slot])} at slot {slot} "
            "(INT4_EMU_CHECK_IDS=1)"
        )
