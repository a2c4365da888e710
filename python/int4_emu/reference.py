"""Every op in readable PyTorch: the yardstick of the tests, and the backend of last resort on any device.

The functions have the names, arguments and results of `torch.ops.int4_emu.*` (documented in `int4_emu.ops`); they assume validated
arguments. Nothing here is fast, and the loops over experts synchronise with the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._enums import Activation, Format, Layout, W13Order

# Column j of eight sits in this slot of an AWQ word.
AWQ_SLOT_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
# Slot p of a cpu_n16 word holds column N16_COLUMN_OF_SLOT[p] of its eight.
N16_COLUMN_OF_SLOT = (0, 2, 4, 6, 1, 3, 5, 7)

_QUARK = range(Format.quark_int_order, Format.quark_uint_channel_reorder + 1)
_INTERLEAVED = (
    Format.awq,
    Format.quark_int_reorder,
    Format.quark_uint_reorder,
    Format.quark_int_channel_reorder,
    Format.quark_uint_channel_reorder,
)
_SIGNED = (
    Format.quark_int_order,
    Format.quark_int_reorder,
    Format.quark_int_channel_order,
    Format.quark_int_channel_reorder,
)
_CHANNEL = (
    Format.quark_int_channel_order,
    Format.quark_int_channel_reorder,
    Format.quark_uint_channel_order,
    Format.quark_uint_channel_reorder,
)
_GPTQ = (Format.gptq_v1, Format.gptq_v2, Format.gptq_v1_nibble)
# Formats whose words hold neighbours along the output axis.
_PACKED_ALONG_OUT = (
    Format.awq,
    Format.quark_int_order,
    Format.quark_int_reorder,
    Format.quark_uint_order,
    Format.quark_uint_reorder,
)
# Formats whose tensors have the input axis first.
_TRANSPOSED = _GPTQ + _PACKED_ALONG_OUT


def _unpack_words(words: Tensor, bits: int, interleaved: bool = False) -> Tensor:
    """int32 [..., W] or uint8 [..., W] to codes uint8 [..., W * codes per word], lowest code first."""
    per_word = words.element_size() * 8 // bits
    slots = AWQ_SLOT_OF_COLUMN if interleaved and bits == 4 else range(per_word)
    wide = words.to(torch.int32)
    shifts = torch.tensor([s * bits for s in slots], dtype=torch.int32, device=words.device)
    # int32 >> is arithmetic: mask after the shift.
    return ((wide.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _unsign(codes: Tensor, bits: int) -> Tensor:
    """Two's complement codes to unsigned ones: -8..7 to 0..15, -128..127 to 0..255."""
    return codes ^ (1 << (bits - 1))


def unpack(qweight: Tensor, *, format: int = 0, bits: int = 4, in_features: int = -1) -> Tensor:
    """Codes uint8 [..., O, I] in unsigned form."""
    fmt = Format(format)
    if fmt in _QUARK and bits == 8:
        codes = qweight.view(torch.uint8)
        codes = codes if fmt in _CHANNEL else codes.transpose(-1, -2)
    elif fmt in _PACKED_ALONG_OUT:
        codes = _unpack_words(qweight, bits, fmt in _INTERLEAVED).transpose(-1, -2)
    elif fmt in _GPTQ:
        codes = _unpack_words(qweight.transpose(-1, -2), bits)
    else:
        codes = _unpack_words(qweight, bits, fmt in _INTERLEAVED)
    if fmt in _SIGNED:
        codes = _unsign(codes, bits)
    if in_features >= 0:
        codes = codes[..., :in_features]
    return codes.clone(memory_format=torch.contiguous_format)


def unpack_zeros(qzeros: Tensor, *, format: int = 0, bits: int = 4, out_features: int = -1) -> Tensor:
    """True zero points uint8 [..., O, C]."""
    fmt = Format(format)
    if fmt is Format.canonical:
        zeros = qzeros
    elif fmt in _QUARK and bits == 8:
        zeros = qzeros.view(torch.uint8)
        zeros = zeros.unsqueeze(-1) if fmt in _CHANNEL else zeros.transpose(-1, -2)
    elif fmt is Format.compressed_tensors:
        zeros = _unpack_words(qzeros.transpose(-1, -2), bits).transpose(-1, -2)
    else:
        if fmt is Format.gptq_v1:
            # The writer subtracted 1 from every code as one 32-bit word, with borrow: add it back the same way.
            ones = 0x11111111 if bits == 4 else 0x01010101
            word = (qzeros.to(torch.int64) + ones) & 0xFFFFFFFF
            qzeros = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
        zeros = _unpack_words(qzeros, bits, fmt in _INTERLEAVED)
        if fmt is Format.gptq_v1_nibble:
            zeros = (zeros + 1) & (2**bits - 1)
        zeros = zeros.unsqueeze(-1) if fmt in _CHANNEL else zeros.transpose(-1, -2)
    if fmt in _SIGNED:
        zeros = _unsign(zeros, bits)
    if out_features >= 0:
        zeros = zeros[..., :out_features, :]
    return zeros.clone(memory_format=torch.contiguous_format)


def _plain_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Scales as [..., O, C]."""
    if fmt in _CHANNEL:
        return scales.unsqueeze(-1)
    return scales.transpose(-1, -2) if fmt in _TRANSPOSED else scales


def dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    format: int = 0,
    bits: int = 4,
    in_features: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(q - z) * s with the product in fp32 and one rounding; [..., O, I]."""
    fmt = Format(format)
    codes = unpack(qweight, format=fmt, bits=bits, in_features=in_features)
    s = _plain_scales(scales, fmt).float()
    z = torch.full_like(s, float(1 << (bits - 1)))
    if qzeros is not None:
        z = unpack_zeros(qzeros, format=fmt, bits=bits, out_features=codes.shape[-2]).float()
    group = (
        torch.arange(codes.shape[-1], device=codes.device) // group_size if g_idx is None else g_idx.long()
    )
    group = group.unsqueeze(-2).expand(codes.shape)
    w = (codes.float() - z.gather(-1, group)) * s.gather(-1, group)
    return w.to(dtype or scales.dtype)


def pack_canonical(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., I] to canonical bytes [..., ceil(I * bits / 8)], low nibble = even index."""
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def repack(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    format: int,
    bits: int = 4,
    in_features: int = -1,
    in_perm: Tensor | None = None,
    out_perm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Any format to canonical; the third result is empty where `qzeros` is None."""
    fmt = Format(format)
    codes = unpack(qweight, format=fmt, bits=bits, in_features=in_features)
    s = _plain_scales(scales, fmt).clone(memory_format=torch.contiguous_format)
    z = scales.new_empty((0,), dtype=torch.uint8)
    if qzeros is not None:
        z = unpack_zeros(qzeros, format=fmt, bits=bits, out_features=codes.shape[-2])
    if in_perm is not None:
        codes = codes[..., in_perm.long()]
    if out_perm is not None:
        rows = out_perm.long()
        codes, s = codes[..., rows, :], s[..., rows, :]
        z = z[..., rows, :] if qzeros is not None else z
    return pack_canonical(codes, bits), s, z


def prepack(qweight: Tensor, *, layout: int, bits: int = 4) -> Tensor:
    """Canonical bytes [..., N, W] to the order of `layout`, same shape."""
    if layout == Layout.canonical or qweight.numel() == 0:
        return qweight.clone(memory_format=torch.contiguous_format)
    *batch, n, width = qweight.shape
    words = qweight.contiguous().view(torch.int32)  # [..., N, width / 4]
    if bits == 4:
        words = _reorder_nibbles(words, N16_COLUMN_OF_SLOT)
    blocks = words.reshape(*batch, n // 16, 16, width // 4).transpose(-1, -2)
    return blocks.contiguous().view(torch.uint8).reshape(qweight.shape)


def unprepack(qweight: Tensor, *, layout: int, bits: int = 4) -> Tensor:
    """The inverse of `prepack`, bit for bit."""
    if layout == Layout.canonical or qweight.numel() == 0:
        return qweight.clone(memory_format=torch.contiguous_format)
    *batch, n, width = qweight.shape
    words = qweight.contiguous().view(torch.int32).reshape(*batch, n // 16, width // 4, 16).transpose(-1, -2)
    words = words.reshape(*batch, n, width // 4)
    if bits == 4:
        words = _reorder_nibbles(words, tuple(N16_COLUMN_OF_SLOT.index(c) for c in range(8)))
    return words.contiguous().view(torch.uint8)


def _reorder_nibbles(words: Tensor, source: tuple[int, ...]) -> Tensor:
    """Nibble p of each result word is nibble source[p] of the word."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    out = sum(((wide >> (4 * c)) & 15) << (4 * p) for p, c in enumerate(source))
    assert isinstance(out, Tensor)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def _local_experts(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Local expert of each slot, int64 like topk_ids, -1 where unrouted. The bound test comes before any look-up."""
    ids = topk_ids.long()
    known = num_experts if expert_map is None else expert_map.numel()
    inside = (ids >= 0) & (ids < known)
    if expert_map is None:
        return torch.where(inside, ids, -1)
    if known == 0:
        return torch.full_like(ids, -1)
    local = expert_map.long()[ids.clamp(0, known - 1)]
    return torch.where(inside & (local >= 0) & (local < num_experts), local, -1)


def moe_align(
    topk_ids: Tensor, num_experts: int, block_size: int = 1, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots sorted by local expert, each run padded to `block_size`."""
    local = _local_experts(topk_ids, expert_map, num_experts).flatten()
    slots, device = local.numel(), topk_ids.device
    capacity = -(-(slots + num_experts * (block_size - 1)) // block_size) * block_size
    sorted_slots = torch.full((capacity,), slots, dtype=torch.int32, device=device)
    block_experts = torch.full((capacity // block_size,), -1, dtype=torch.int32, device=device)
    expert_offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    end = 0
    for e in range(num_experts):
        mine = (local == e).nonzero().flatten()
        sorted_slots[end : end + mine.numel()] = mine.int()
        padded = -(-mine.numel() // block_size) * block_size
        block_experts[end // block_size : (end + padded) // block_size] = e
        end += padded
        expert_offsets[e + 1] = end
    return sorted_slots, block_experts, expert_offsets, expert_offsets[-1:].clone()


def _expert_weight(
    weight: Tensor,
    e: int,
    scales: Tensor | None,
    qzeros: Tensor | None,
    group_size: int,
    bits: int,
    layout: int,
    in_features: int,
) -> Tensor:
    """One expert's dense fp32 matrix [N, K]: cast, or dequantised exactly from its codes."""
    if scales is None:
        return weight[e].float()
    codes = unprepack(weight[e], layout=layout, bits=bits)
    return dequantize(
        codes,
        scales[e],
        None if qzeros is None else qzeros[e],
        group_size=group_size,
        bits=bits,
        in_features=in_features,
        dtype=torch.float32,
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
    group_size: int = 0,
    bits: int = 4,
    layout: int = 0,
) -> Tensor:
    """Rows expert_offsets[e]..expert_offsets[e + 1] of x times weight[e]^T; other rows are zero."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    ends = expert_offsets.tolist()
    for e in range(weight.shape[0]):
        rows = slice(ends[e], ends[e + 1])
        if rows.start == rows.stop:
            continue
        w = _expert_weight(weight, e, scales, qzeros, group_size, bits, layout, x.shape[1])
        mine = x[rows].float() if perm is None else x[rows].float()[:, perm[e].long()]
        y = mine @ w.t()
        out[rows] = (y if bias is None else y + bias[e].float()).to(x.dtype)
    return out


def activate(
    h: Tensor,
    *,
    activation: int,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_order: int = 0,
) -> Tensor:
    """fp32 [R, 2I or I] to fp32 [R, I]; the formulas are those of the activation table in docs/api.md."""
    kind = Activation(activation)
    if kind.is_gated:
        g, u = (h[..., 0::2], h[..., 1::2]) if w13_order == W13Order.interleaved else h.chunk(2, dim=-1)
    else:
        g, u = h, None
    if limit is not None:
        g = g.clamp(max=limit)
        u = u.clamp(-limit, limit) if u is not None else None
    if kind is Activation.swigluoai:
        assert alpha is not None
        assert beta is not None
        assert u is not None
        return g * torch.sigmoid(alpha * g) * (u + beta)
    name = kind.name.removesuffix("_no_mul")
    if name == "silu":
        a = F.silu(g)
    elif name == "relu2":
        a = F.relu(g).square()
    else:
        a = F.gelu(g, approximate="tanh" if name == "gelu_tanh" else "none")
    return a if u is None else a * u


def fused_moe_packed(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_scales: Tensor | None,
    w2_scales: Tensor | None,
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
    layout: int = 0,
    activation: int = 0,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_order: int = 0,
    apply_router_weight_on_input: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The whole layer, one expert after another; scales None = dense weights. The result comes in `dtype`, None = that of x."""
    out_dtype = hidden_states.dtype if dtype is None else dtype
    tokens, hidden = hidden_states.shape
    x, dtype = hidden_states, hidden_states.dtype
    local = _local_experts(topk_ids, expert_map, w13.shape[0])
    # fp32 outputs of every slot, summed in slot order at the end; an unrouted slot stays an exact zero.
    y = torch.zeros(*topk_ids.shape, hidden, dtype=torch.float32, device=x.device)
    inner = intermediate_size
    if inner < 0:
        inner = w13.shape[1] // (2 if Activation(activation).is_gated else 1)
    for e in local.unique().tolist():
        if e < 0:
            continue
        token, slot = (local == e).nonzero(as_tuple=True)
        rows = x[token].float()
        if apply_router_weight_on_input:
            rows = (rows * topk_weights[token, slot].unsqueeze(1)).to(dtype).float()
        if w13_perm is not None:
            rows = rows[:, w13_perm[e].long()]
        h = (
            rows
            @ _expert_weight(w13, e, w13_scales, w13_qzeros, w13_group_size, w13_bits, layout, hidden).t()
        )
        if w13_bias is not None:
            h = h + w13_bias[e].float()
        h = (
            activate(h, activation=activation, limit=limit, alpha=alpha, beta=beta, w13_order=w13_order)
            .to(dtype)
            .float()
        )
        o = h @ _expert_weight(w2, e, w2_scales, w2_qzeros, w2_group_size, w2_bits, layout, inner).t()
        if w2_bias is not None:
            o = o + w2_bias[e].float()
        y[token, slot] = o if apply_router_weight_on_input else o * topk_weights[token, slot].unsqueeze(1)
    out = torch.zeros(tokens, hidden, dtype=torch.float32, device=x.device)
    for j in range(topk_ids.shape[1]):
        out += y[:, j]
    return out.to(out_dtype)


def fused_moe(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """The whole layer with dense weights [E, 2I, H] and [E, H, I]."""
    return fused_moe_packed(hidden_states, w13, w2, topk_weights, topk_ids, None, None, 0, 0, **options)
