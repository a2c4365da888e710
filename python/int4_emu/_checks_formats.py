"""Argument rules of the ops over checkpoint tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _checks as c
from ._enums import Format, parse_enum
from .reference import _CHANNEL, _PACKED_ALONG_OUT, _QUARK, _SIGNED, _TRANSPOSED


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
    c.check_bits(bits)
    c.check_dtype(qweight, "qweight", (_code_dtype(fmt, bits),))
    c.check_dim(qweight, "qweight", (2, 3), "a matrix or a stack [E, ...] of matrices")
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
        raise ValueError(
            f"in_features must be {want}, got {in_features} (qweight {list(qweight.shape)}, "
            f"format {fmt.name}, {bits} bits)"
        )
    return MatrixShape(fmt, bits, list(qweight.shape[:-2]), o, i if in_features == -1 else in_features)


def check_scales(m: MatrixShape, qweight: Tensor, scales: Tensor, qzeros: Tensor | None) -> None:
    """Checks scales and zero points against the codes and completes `m` with O and C."""
    c.check_device(qweight, "qweight", scales=scales, qzeros=qzeros)
    c.check_dtype(scales, "scales", c.FLOATS)
    dims = (1 if m.format in _CHANNEL else 2) + len(m.batch)
    c.check_dim(
        scales,
        "scales",
        (dims,),
        {1: "[O]", 3: "[E, O, C] or its transposed form"}.get(dims, "2-dimensional"),
    )
    if m.format in _CHANNEL:
        o, m.groups = scales.shape[-1], 1
    elif m.format in _TRANSPOSED:
        m.groups, o = scales.shape[-2:]
    else:
        o, m.groups = scales.shape[-2:]
    padded = m.format in _PACKED_ALONG_OUT and not _plain_int8(m.format, m.bits)
    slack = 32 // m.bits if padded else 1
    if o > m.out_features or o <= m.out_features - slack or (m.batch and scales.shape[0] != m.batch[0]):
        raise ValueError(
            f"scales must have O = {m.out_features} output rows like qweight {list(qweight.shape)}, "
            f"got {list(scales.shape)} (format {m.format.name})"
        )
    m.out_features = o
    if qzeros is None:
        return
    c.check_dtype(qzeros, "qzeros", (_code_dtype(m.format, m.bits),))
    packed = o if m.format is Format.canonical else c.ceil_div(o, codes_per_element(m.format, m.bits))
    word = "ceil(O / codes per word)"
    if m.format in _CHANNEL:
        c.check_shape(qzeros, "qzeros", [*m.batch, packed], f"[..., {word}]", m.context)
    elif m.format in _TRANSPOSED:
        c.check_shape(qzeros, "qzeros", [*m.batch, m.groups, packed], f"[..., C, {word}]", m.context)
    else:
        c.check_shape(qzeros, "qzeros", [*m.batch, packed, m.groups], f"[..., {word}, C]", m.context)


def check_dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    g_idx: Tensor | None,
    *,
    group_size: int,
    format: int,
    bits: int,
    in_features: int,
    dtype: torch.dtype | None,
) -> MatrixShape:
    m = check_codes(qweight, format, bits, in_features)
    if dtype is not None and dtype not in c.FLOATS:
        raise TypeError(
            f"dtype must be {' or '.join(map(c.dtype_name, c.FLOATS))}, got {c.dtype_name(dtype)}"
        )
    check_scales(m, qweight, scales, None)
    c.check_group_size(group_size, m.in_features, "group_size", "I")
    if g_idx is not None:
        c.check_device(qweight, "qweight", g_idx=g_idx)
        c.check_dtype(g_idx, "g_idx", (torch.int32,))
        c.check_shape(g_idx, "g_idx", [*m.batch, m.in_features], "[..., I]", m.context)
        c.check_index_range(g_idx, "g_idx", m.groups, "C")
    elif m.groups != c.ceil_div(m.in_features, group_size):
        raise ValueError(
            f"scales must have C = ceil(I / group_size) = {c.ceil_div(m.in_features, group_size)} groups, got {m.groups} in "
            f"{list(scales.shape)} (I={m.in_features}, group_size={group_size}, format {m.format.name})"
        )
    check_scales(m, qweight, scales, qzeros)
    return m


def check_unpack_zeros(qzeros: Tensor, format: int, bits: int, out_features: int) -> list[int]:
    """Returns the shape [..., O, C] of the result."""
    fmt = parse_enum(Format, format, "format")
    c.check_bits(bits)
    c.check_dtype(qzeros, "qzeros", (_code_dtype(fmt, bits),))
    dims = 1 if fmt in _CHANNEL else 2
    c.check_dim(
        qzeros,
        "qzeros",
        (dims, dims + 1),
        "[..., O]" if dims == 1 else "a matrix or a stack [E, ...] of matrices",
    )
    per = 1 if fmt is Format.canonical else codes_per_element(fmt, bits)
    o_axis = -1 if fmt in _CHANNEL or fmt in _TRANSPOSED else -2
    o = qzeros.shape[o_axis] * per
    if out_features != -1 and (out_features > o or out_features <= o - per):
        raise ValueError(
            f"out_features must be {o - per + 1}..{o}, got {out_features} (qzeros {list(qzeros.shape)}, format {fmt.name})"
        )
    groups = 1 if fmt in _CHANNEL else qzeros.shape[-2 if o_axis == -1 else -1]
    return [*qzeros.shape[:-dims], o if out_features == -1 else out_features, groups]


def check_repack(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    *,
    format: int,
    bits: int,
    in_features: int,
    in_perm: Tensor | None,
    out_perm: Tensor | None,
) -> MatrixShape:
    m = check_codes(qweight, format, bits, in_features)
    check_scales(m, qweight, scales, qzeros)
    c.check_device(qweight, "qweight", in_perm=in_perm, out_perm=out_perm)
    for perm, name, n, letter in (
        (in_perm, "in_perm", m.in_features, "I"),
        (out_perm, "out_perm", m.out_features, "O"),
    ):
        if perm is not None:
            c.check_dtype(perm, name, (torch.int32,))
            c.check_shape(perm, name, [n], f"[{letter}]")
            c.check_index_range(perm, name, n, letter)
    return m


def check_repack_out(
    m: MatrixShape,
    scales: Tensor,
    qzeros: Tensor | None,
    out_qweight: Tensor,
    out_scales: Tensor,
    out_qzeros: Tensor | None,
) -> None:
    groups = [*m.batch, m.out_features, m.groups]
    c.check_dtype(out_qweight, "out_qweight", (torch.uint8,))
    c.check_out(
        out_qweight,
        [*m.batch, m.out_features, c.row_bytes(m.in_features, m.bits)],
        "[..., O, I * bits / 8]",
        m.context,
        "out_qweight",
    )
    c.check_dtype(out_scales, "out_scales", (scales.dtype,))
    c.check_out(out_scales, groups, "[..., O, C]", m.context, "out_scales")
    if (qzeros is None) != (out_qzeros is None):
        raise ValueError("out_qzeros must be given exactly when qzeros is")
    if out_qzeros is not None:
        c.check_dtype(out_qzeros, "out_qzeros", (torch.uint8,))
        c.check_out(out_qzeros, groups, "[..., O, C]", m.context, "out_qzeros")


def check_prepack(qweight: Tensor, layout: int, bits: int) -> None:
    c.check_bits(bits)
    c.check_dtype(qweight, "qweight", (torch.uint8,))
    c.check_dim(qweight, "qweight", (2, 3), "canonical codes [..., N, K * bits / 8]")
    c.check_layout(layout, qweight.shape[-2], qweight.shape[-1] * 8 // bits, bits, "qweight")
