"""The argument rules of every op in Python: fake kernels and the reference use them, and so gets a failed call its precise error type.

The compiled ops check the same rules in `csrc/torch/check.cpp`, with the same sentences; raw `torch.ops` calls there can only raise
ValueError, whereas these raise TypeError for a wrong dtype or device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._enums import Activation, Format, Layout, W13Order, parse_enum
from .activations import check_activation
from .reference import _CHANNEL, _PACKED_ALONG_OUT, _QUARK, _SIGNED, _TRANSPOSED

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_bytes(k: int, bits: int) -> int:
    """Bytes of one canonical row of k codes."""
    return (k * bits + 7) // 8


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(t: Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(_name, allowed))}, got {_name(t.dtype)}")


def check_device(like: Tensor, like_name: str, **tensors: Tensor | None) -> None:
    """All tensors of a call live on one device."""
    for name, t in tensors.items():
        if t is not None and t.device != like.device:
            raise TypeError(f"{name} must be on {like.device} like {like_name}, got {t.device}")


def check_dim(t: Tensor, name: str, allowed: Sequence[int], meaning: str) -> None:
    if t.dim() not in allowed:
        raise ValueError(f"{name} must be {meaning}, got {t.dim()} dimensions {list(t.shape)}")


def check_shape(t: Tensor, name: str, want: Sequence[int], formula: str, context: str = "") -> None:
    if t.dim() != len(want) or any(a != b for a, b in zip(t.shape, want, strict=True)):
        tail = f" ({context})" if context else ""
        raise ValueError(f"{name} must be {formula} = {list(want)}, got {list(t.shape)}{tail}")


def check_out(out: Tensor, want: Sequence[int], formula: str, context: str, name: str = "out") -> None:
    check_shape(out, name, want, formula, context)
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(out.shape)} with other strides")


def check_bits(bits: int, name: str = "bits") -> None:
    if bits not in (4, 8):
        raise ValueError(f"{name} must be 4 or 8, got {bits}")


def check_group_size(group_size: int, k: int, name: str, k_name: str) -> None:
    if group_size < 1 or (group_size > k and k > 0):
        raise ValueError(f"{name} must be 1..{k_name} = 1..{k} (per-channel is {k_name} itself), got {group_size}")


def check_index_range(t: Tensor, name: str, end: int, end_name: str) -> None:
    """Values of a real tensor lie in [0, end); a fake one has none to look at."""
    if t.is_meta or torch.compiler.is_compiling() or isinstance(t, torch._subclasses.FakeTensor) or t.numel() == 0:
        return
    low, high = t.aminmax()
    if int(low) < 0 or int(high) >= end:
        bad = int(low) if int(low) < 0 else int(high)
        raise ValueError(f"{name} values must be 0..{end_name}-1 = 0..{end - 1}, got {bad}")


@dataclass
class MatrixShape:
    """What the tensors of one checkpoint matrix (or a stack of E) say of it."""

    format: Format
    bits: int
    batch: list[int]
    out_features: int
    in_features: int
    groups: int = 0

    @property
    def context(self) -> str:
        return f"O={self.out_features}, I={self.in_features}, C={self.groups}, format {self.format.name}, {self.bits} bits"


def _plain_int8(fmt: Format, bits: int) -> bool:
    return fmt in _QUARK and bits == 8


def _code_dtype(fmt: Format, bits: int) -> torch.dtype:
    if fmt is Format.canonical:
        return torch.uint8
    if _plain_int8(fmt, bits):
        return torch.int8 if fmt in _SIGNED else torch.uint8
    return torch.int32


def codes_per_element(fmt: Format, bits: int) -> int:
    """Codes in one element of the packed axis."""
    if _plain_int8(fmt, bits):
        return 1
    return (8 if fmt is Format.canonical else 32) // bits


def check_codes(qweight: Tensor, format: int, bits: int, in_features: int) -> MatrixShape:
    fmt = parse_enum(Format, format, "format")
    check_bits(bits)
    check_dtype(qweight, "qweight", (_code_dtype(fmt, bits),))
    check_dim(qweight, "qweight", (2, 3), "a matrix or a stack [E, ...] of matrices")
    rows, columns = qweight.shape[-2:]
    per = codes_per_element(fmt, bits)
    along_out = fmt not in _CHANNEL if _plain_int8(fmt, bits) else fmt in _PACKED_ALONG_OUT
    if along_out:
        o, i = columns * per, rows
    elif fmt in _TRANSPOSED:
        o, i = columns, rows * per
    else:
        o, i = rows, columns * per
    slack = 1 if along_out else per
    if in_features != -1 and (in_features > i or in_features <= i - slack):
        want = str(i) if slack == 1 else f"{i - slack + 1}..{i}"
        raise ValueError(f"in_features must be {want}, got {in_features} (qweight {list(qweight.shape)}, "
                         f"format {fmt.name}, {bits} bits)")
    return MatrixShape(fmt, bits, list(qweight.shape[:-2]), o, i if in_features == -1 else in_features)


def check_scales(m: MatrixShape, qweight: Tensor, scales: Tensor, qzeros: Tensor | None) -> None:
    """Checks scales and zero points against the codes and completes `m` with O and C."""
    check_device(qweight, "qweight", scales=scales, qzeros=qzeros)
    check_dtype(scales, "scales", FLOATS)
    dims = (1 if m.format in _CHANNEL else 2) + len(m.batch)
    check_dim(scales, "scales", (dims,), {1: "[O]", 3: "[E, O, C] or its transposed form"}.get(dims, "2-dimensional"))
    if m.format in _CHANNEL:
        o, m.groups = scales.shape[-1], 1
    elif m.format in _TRANSPOSED:
        m.groups, o = scales.shape[-2:]
    else:
        o, m.groups = scales.shape[-2:]
    padded = m.format in _PACKED_ALONG_OUT and not _plain_int8(m.format, m.bits)
    slack = 32 // m.bits if padded else 1
    if o > m.out_features or o <= m.out_features - slack or (m.batch and scales.shape[0] != m.batch[0]):
        raise ValueError(f"scales must have O = {m.out_features} output rows like qweight {list(qweight.shape)}, "
                         f"got {list(scales.shape)} (format {m.format.name})")
    m.out_features = o
    if qzeros is None:
        return
    check_dtype(qzeros, "qzeros", (_code_dtype(m.format, m.bits),))
    packed = o if m.format is Format.canonical else _ceil_div(o, codes_per_element(m.format, m.bits))
    word = "ceil(O / codes per word)"
    if m.format in _CHANNEL:
        check_shape(qzeros, "qzeros", [*m.batch, packed], f"[..., {word}]", m.context)
    elif m.format in _TRANSPOSED:
        check_shape(qzeros, "qzeros", [*m.batch, m.groups, packed], f"[..., C, {word}]", m.context)
    else:
        check_shape(qzeros, "qzeros", [*m.batch, packed, m.groups], f"[..., {word}, C]", m.context)


def check_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, g_idx: Tensor | None, *, group_size: int, format: int,
                     bits: int, in_features: int, dtype: torch.dtype | None) -> MatrixShape:
    m = check_codes(qweight, format, bits, in_features)
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype must be {' or '.join(map(_name, FLOATS))}, got {_name(dtype)}")
    check_scales(m, qweight, scales, None)
    check_group_size(group_size, m.in_features, "group_size", "I")
    if g_idx is not None:
        check_device(qweight, "qweight", g_idx=g_idx)
        check_dtype(g_idx, "g_idx", (torch.int32,))
        check_shape(g_idx, "g_idx", [*m.batch, m.in_features], "[..., I]", m.context)
        check_index_range(g_idx, "g_idx", m.groups, "C")
    elif m.groups != _ceil_div(m.in_features, group_size):
        raise ValueError(f"scales must have C = ceil(I / group_size) = {_ceil_div(m.in_features, group_size)} groups, got {m.groups} in "
                         f"{list(scales.shape)} (I={m.in_features}, group_size={group_size}, format {m.format.name})")
    check_scales(m, qweight, scales, qzeros)
    return m


def check_unpack_zeros(qzeros: Tensor, format: int, bits: int, out_features: int) -> list[int]:
    """Returns the shape [..., O, C] of the result."""
    fmt = parse_enum(Format, format, "format")
    check_bits(bits)
    check_dtype(qzeros, "qzeros", (_code_dtype(fmt, bits),))
    dims = 1 if fmt in _CHANNEL else 2
    check_dim(qzeros, "qzeros", (dims, dims + 1), "[..., O]" if dims == 1 else "a matrix or a stack [E, ...] of matrices")
    per = 1 if fmt is Format.canonical else codes_per_element(fmt, bits)
    o_axis = -1 if fmt in _CHANNEL or fmt in _TRANSPOSED else -2
    o = qzeros.shape[o_axis] * per
    if out_features != -1 and (out_features > o or out_features <= o - per):
        raise ValueError(f"out_features must be {o - per + 1}..{o}, got {out_features} (qzeros {list(qzeros.shape)}, format {fmt.name})")
    groups = 1 if fmt in _CHANNEL else qzeros.shape[-2 if o_axis == -1 else -1]
    return [*qzeros.shape[:-dims], o if out_features == -1 else out_features, groups]


def check_repack(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, *, format: int, bits: int, in_features: int,
                 in_perm: Tensor | None, out_perm: Tensor | None) -> MatrixShape:
    m = check_codes(qweight, format, bits, in_features)
    check_scales(m, qweight, scales, qzeros)
    check_device(qweight, "qweight", in_perm=in_perm, out_perm=out_perm)
    for perm, name, n, letter in ((in_perm, "in_perm", m.in_features, "I"), (out_perm, "out_perm", m.out_features, "O")):
        if perm is not None:
            check_dtype(perm, name, (torch.int32,))
            check_shape(perm, name, [n], f"[{letter}]")
            check_index_range(perm, name, n, letter)
    return m


def check_repack_out(m: MatrixShape, scales: Tensor, qzeros: Tensor | None, out_qweight: Tensor, out_scales: Tensor,
                     out_qzeros: Tensor | None) -> None:
    o, c = m.out_features, m.groups
    check_dtype(out_qweight, "out_qweight", (torch.uint8,))
    check_out(out_qweight, [*m.batch, o, row_bytes(m.in_features, m.bits)], "[..., O, I * bits / 8]", m.context, "out_qweight")
    check_dtype(out_scales, "out_scales", (scales.dtype,))
    check_out(out_scales, [*m.batch, o, c], "[..., O, C]", m.context, "out_scales")
    if (qzeros is None) != (out_qzeros is None):
        raise ValueError("out_qzeros must be given exactly when qzeros is")
    if out_qzeros is not None:
        check_dtype(out_qzeros, "out_qzeros", (torch.uint8,))
        check_out(out_qzeros, [*m.batch, o, c], "[..., O, C]", m.context, "out_qzeros")


def check_layout(layout: int, n: int, k: int, bits: int, name: str) -> None:
    kind = parse_enum(Layout, layout, "layout")
    if kind is Layout.cpu_n16 and (n % 16 or k % (32 // bits)):
        raise ValueError(f"layout cpu_n16 needs N % 16 == 0 and K % {32 // bits} == 0, got N={n}, K={k} ({name}, {bits} bits)")


def check_prepack(qweight: Tensor, layout: int, bits: int) -> None:
    check_bits(bits)
    check_dtype(qweight, "qweight", (torch.uint8,))
    check_dim(qweight, "qweight", (2, 3), "canonical codes [..., N, K * bits / 8]")
    check_layout(layout, qweight.shape[-2], qweight.shape[-1] * 8 // bits, bits, "qweight")


def check_ids(topk_ids: Tensor) -> None:
    check_dim(topk_ids, "topk_ids", (2,), "[M, k]")
    check_dtype(topk_ids, "topk_ids", INTS)


def check_moe_align(topk_ids: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None) -> None:
    check_ids(topk_ids)
    if num_experts < 0:
        raise ValueError(f"num_experts must be >= 0, got {num_experts}")
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}")
    if expert_map is not None:
        check_device(topk_ids, "topk_ids", expert_map=expert_map)
        check_dtype(expert_map, "expert_map", (torch.int32,))
        check_dim(expert_map, "expert_map", (1,), "[global E]")


def _check_dense(w: Tensor, name: str, want: Sequence[int], formula: str, x: Tensor, x_name: str) -> None:
    check_dim(w, name, (3,), formula)
    check_dtype(w, name, FLOATS)
    if w.dtype != x.dtype and x.dtype != torch.float32:
        raise TypeError(f"{name} must be {_name(x.dtype)} like {x_name} (float32 {x_name} take any), got {_name(w.dtype)}")
    check_shape(w, name, want, formula, f"E={want[0]}, {x_name} {list(x.shape)}")
    if w.numel() > 0 and w.stride(2) != 1 and w.stride(1) != 1:
        raise ValueError(f"{name} must be contiguous {formula} or the transposed view of a contiguous [E, K, N], never copied: stride 1 "
                         f"in one of the last two dimensions, got strides {list(w.stride())}")


def _check_packed(w: Tensor, prefix: str, name: str, want: tuple[int, int, int], n_name: str, k_name: str, scales: Tensor,
                  qzeros: Tensor | None, perm: Tensor | None, group_size: int, bits: int, layout: int) -> None:
    experts, n, k = want
    check_bits(bits, f"{prefix}bits")
    context = f"{n_name}={n}, {k_name}={k}, {prefix}group_size={group_size}, {prefix}bits={bits}"
    check_dtype(w, name, (torch.uint8,))
    check_shape(w, name, [experts, n, row_bytes(k, bits)], f"[E, {n_name}, {k_name} * bits / 8]", context)
    check_group_size(group_size, k, f"{prefix}group_size", k_name)
    groups = [experts, n, _ceil_div(k, group_size)]
    formula = f"[E, {n_name}, {k_name}/group_size]"
    check_dtype(scales, f"{prefix}scales", FLOATS)
    check_shape(scales, f"{prefix}scales", groups, formula, context)
    check_layout(layout, n, k, bits, name)
    if qzeros is not None:
        check_dtype(qzeros, f"{prefix}qzeros", (torch.uint8,))
        check_shape(qzeros, f"{prefix}qzeros", groups, formula, context)
    if perm is not None:
        check_dtype(perm, f"{prefix}perm", (torch.int32,))
        check_shape(perm, f"{prefix}perm", [experts, k], f"[E, {k_name}]", context)
        check_index_range(perm, f"{prefix}perm", k, k_name)


def check_grouped_gemm(x: Tensor, weight: Tensor, expert_offsets: Tensor, *, scales: Tensor | None, qzeros: Tensor | None,
                       perm: Tensor | None, bias: Tensor | None, group_size: int, bits: int, layout: int) -> None:
    check_dim(x, "x", (2,), "[R, K]")
    check_dtype(x, "x", FLOATS)
    check_device(x, "x", weight=weight, expert_offsets=expert_offsets, scales=scales, qzeros=qzeros, perm=perm, bias=bias)
    check_dim(weight, "weight", (3,), "[E, N, K]" if scales is None else "[E, N, K * bits / 8]")
    experts, n = weight.shape[:2]
    if scales is not None:
        _check_packed(weight, "", "weight", (experts, n, x.shape[1]), "N", "K", scales, qzeros, perm, group_size, bits, layout)
    else:
        if qzeros is not None or perm is not None:
            raise ValueError("qzeros and perm belong to packed weights: scales must be given with them")
        _check_dense(weight, "weight", [experts, n, x.shape[1]], "[E, N, K]", x, "x")
    if bias is not None:
        check_dtype(bias, "bias", FLOATS)
        check_shape(bias, "bias", [experts, n], "[E, N]")
    check_dtype(expert_offsets, "expert_offsets", INTS)
    check_shape(expert_offsets, "expert_offsets", [experts + 1], "[E + 1]", f"weight {list(weight.shape)}")
    if isinstance(expert_offsets, torch._subclasses.FakeTensor) or expert_offsets.is_meta or torch.compiler.is_compiling():
        return
    last = 0
    for e, v in enumerate(expert_offsets.tolist()):
        if v < last or v > x.shape[0]:
            after = f" after {last}" if e else ""
            raise ValueError(f"expert_offsets must ascend within 0..R = 0..{x.shape[0]}, got {v} at {e}{after}")
        last = v


def check_fused_moe(hidden_states: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
                    w13_scales: Tensor | None = None, w2_scales: Tensor | None = None, w13_group_size: int = 0, w2_group_size: int = 0, *,
                    w13_qzeros: Tensor | None = None, w2_qzeros: Tensor | None = None, w13_perm: Tensor | None = None,
                    w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, expert_map: Tensor | None = None,
                    global_num_experts: int = -1, intermediate_size: int = -1, w13_bits: int = 4, w2_bits: int = 4, layout: int = 0,
                    activation: int = 0, limit: float | None = None, alpha: float | None = None, beta: float | None = None,
                    w13_order: int = 0, apply_router_weight_on_input: bool = False) -> None:
    """Rules of fused_moe (scales None) and fused_moe_packed."""
    x, packed = hidden_states, w13_scales is not None
    check_dim(x, "hidden_states", (2,), "[M, H]")
    check_dtype(x, "hidden_states", FLOATS)
    check_device(x, "hidden_states", w13=w13, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids, w13_scales=w13_scales,
                 w2_scales=w2_scales, w13_qzeros=w13_qzeros, w2_qzeros=w2_qzeros, w13_perm=w13_perm, w13_bias=w13_bias, w2_bias=w2_bias,
                 expert_map=expert_map)
    kind: Activation = check_activation(activation, limit, alpha, beta)
    parse_enum(W13Order, w13_order, "w13_order")
    check_dim(w13, "w13", (3,), "[E, 2I, H * bits / 8]" if packed else "[E, 2I, H]")
    check_dim(w2, "w2", (3,), "[E, H, I * bits / 8]" if packed else "[E, H, I]")
    (tokens, hidden), experts, rows = x.shape, w13.shape[0], w13.shape[1]
    check_ids(topk_ids)
    k = topk_ids.shape[1]
    check_shape(topk_ids, "topk_ids", [tokens, k], "[M, k]", f"hidden_states {list(x.shape)}")
    check_dtype(topk_weights, "topk_weights", (torch.float32,))
    check_shape(topk_weights, "topk_weights", [tokens, k], "[M, k]", f"topk_ids {list(topk_ids.shape)}")
    if apply_router_weight_on_input and k != 1:
        raise ValueError(f"apply_router_weight_on_input needs k = 1, got k = {k}")
    known = experts
    if expert_map is not None:
        check_dtype(expert_map, "expert_map", (torch.int32,))
        check_dim(expert_map, "expert_map", (1,), "[global E]")
        known = expert_map.shape[0]
    if global_num_experts not in (-1, known):
        what = "E" if expert_map is None else "len(expert_map)"
        raise ValueError(f"global_num_experts must be -1 or {what} = {known}, got {global_num_experts}")
    factor, n_name = (2, "2I") if kind.is_gated else (1, "I")
    if rows % factor:
        raise ValueError(f"w13 must have 2I rows (gate and up), got {rows} in {list(w13.shape)}")
    inner = rows // factor
    if intermediate_size not in (-1, inner):
        raise ValueError(f"intermediate_size must be -1 or I = {inner} as w13 {list(w13.shape)} says, got {intermediate_size}")
    if w13_scales is not None and w2_scales is not None:
        _check_packed(w13, "w13_", "w13", (experts, rows, hidden), n_name, "H", w13_scales, w13_qzeros, w13_perm, w13_group_size,
                      w13_bits, layout)
        _check_packed(w2, "w2_", "w2", (experts, hidden, inner), "H", "I", w2_scales, w2_qzeros, None, w2_group_size, w2_bits, layout)
    else:
        _check_dense(w13, "w13", [experts, rows, hidden], f"[E, {n_name}, H]", x, "hidden_states")
        _check_dense(w2, "w2", [experts, hidden, inner], "[E, H, I]", x, "hidden_states")
    for bias, name, n, letters in ((w13_bias, "w13_bias", rows, n_name), (w2_bias, "w2_bias", hidden, "H")):
        if bias is not None:
            check_dtype(bias, name, FLOATS)
            check_shape(bias, name, [experts, n], f"[E, {letters}]")


def check_moe_out(out: Tensor, hidden_states: Tensor) -> None:
    check_device(hidden_states, "hidden_states", out=out)
    check_dtype(out, "out", (hidden_states.dtype,))
    check_out(out, list(hidden_states.shape), "[M, H]", f"hidden_states {list(hidden_states.shape)}")
