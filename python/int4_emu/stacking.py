"""From stacked checkpoint tensors of gate, up and down to the tensors that `Experts` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._enums import Activation, Format, parse_enum
from .act_order import group_permutation, is_trivial
from .activations import check_activation

# What a projection's tensors are called here and in each family of checkpoints.
_ALIASES = {
    "qweight": ("qweight", "weight_packed", "weight"),
    "scales": ("scales", "weight_scale"),
    "qzeros": ("qzeros", "weight_zero_point"),
    "g_idx": ("g_idx", "weight_g_idx"),
}


def _tensors(projection: Mapping[str, Tensor | None], name: str) -> dict[str, Tensor | None]:
    known = {alias: key for key, aliases in _ALIASES.items() for alias in aliases}
    unknown = [k for k in projection if k not in known]
    if unknown:
        raise ValueError(
            f"{name} must map {', '.join(known)} to stacked tensors [E, ...], got {', '.join(unknown)}"
        )
    found: dict[str, Tensor | None] = dict.fromkeys(_ALIASES)
    for alias, tensor in projection.items():
        if tensor is not None and tensor.numel():
            found[known[alias]] = tensor
    for key in ("qweight", "scales"):
        if found[key] is None:
            raise ValueError(
                f"{name} must have {' or '.join(_ALIASES[key])}, got {', '.join(projection) or 'nothing'}"
            )
    return found


def canonical_experts(
    format: Any,
    gate: Mapping[str, Tensor | None] | None,
    up: Mapping[str, Tensor | None],
    down: Mapping[str, Tensor | None],
    *,
    group_size: int,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Converts stacked projections.

    Args:
        format: how the tensors are stored (`Format`).
        gate, up, down: checkpoint tensors stacked over experts ([E, ...]) under their checkpoint names or as qweight, scales, qzeros,
            g_idx. gate is None for activations without gate. Missing qzeros = symmetric.
        group_size: input columns per group, -1 = per-channel.
        options: `bits` (4), `weights` ("packed" or "dequantized"), and anything else that `Experts` takes.

    Returns:
        (tensor arguments of Experts, its other arguments).

    Raises:
        ValueError: missing or unknown tensors; gate and up with different act-orders, or groups that no permutation sorts, where packed
            weights were asked for ("dequantized" serves them).
    """
    rest = dict(options)
    bits, weights = rest.pop("bits", 4), rest.pop("weights", "packed")
    if weights not in ("packed", "dequantized"):
        raise ValueError(f"weights must be packed or dequantized, got {weights!r}")
    kind: Activation = check_activation(
        rest.get("activation", "silu"), rest.get("limit"), rest.get("alpha"), rest.get("beta")
    )
    if kind.is_gated != (gate is not None):
        raise ValueError(f"gate must be {'given' if kind.is_gated else 'None'} for activation {kind.name}")
    fmt = parse_enum(Format, format, "format")
    parts = [_tensors(p, n) for p, n in ((gate, "gate"), (up, "up")) if p is not None]
    lower = _tensors(down, "down")
    if weights == "dequantized":
        dtype = rest.get("dtype", torch.bfloat16)
        dense = [_dense(p, fmt, bits, group_size, dtype) for p in (*parts, lower)]
        return {"w13": torch.cat(dense[:-1], dim=1), "w2": dense[-1]}, rest

    # act-order: w2's permutation becomes w13's row order (and its bias's), w13's the gather of x.
    in_perms = [
        _permutations(p, group_size, n) for p, n in zip(parts, ("gate", "up")[-len(parts) :], strict=True)
    ]
    if len({None if p is None else tuple(p.flatten().tolist()) for p in in_perms}) > 1:
        raise ValueError("gate and up have different act-orders, which only weights='dequantized' serves")
    down_perms = _permutations(lower, group_size, "down")
    upper = [_repack(p, fmt, bits, in_perms[0], down_perms) for p in parts]
    w2, w2_scales, w2_qzeros = _repack(lower, fmt, bits, down_perms, None)
    if down_perms is not None and rest.get("w13_bias") is not None:
        rows = down_perms.long()
        if kind.is_gated:
            rows = torch.cat([rows, rows + rows.shape[1]], dim=1)
        rest["w13_bias"] = rest["w13_bias"].gather(1, rows)
    zeros = [z for _, _, z in upper]
    if any(z is None for z in zeros) and not all(z is None for z in zeros):
        zeros = [
            torch.full_like(s, 1 << (bits - 1), dtype=torch.uint8) if z is None else z for _, s, z in upper
        ]
    tensors = {
        "w13": torch.cat([q for q, _, _ in upper], dim=1),
        "w13_scales": torch.cat([s for _, s, _ in upper], dim=1),
        "w13_qzeros": None if zeros[0] is None else torch.cat([z for z in zeros if z is not None], dim=1),
        "w13_perm": in_perms[0],
        "w13_bits": bits,
        "w13_group_size": group_size,
        "w2": w2,
        "w2_scales": w2_scales,
        "w2_qzeros": w2_qzeros,
        "w2_bits": bits,
        "w2_group_size": group_size,
    }
    return tensors, rest


def _dense(
    p: Mapping[str, Tensor | None], fmt: Format, bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    qweight, scales = p["qweight"], p["scales"]
    assert qweight is not None
    assert scales is not None
    return ops.dequantize(
        qweight, scales, p["qzeros"], p["g_idx"], group_size=group_size, format=fmt, bits=bits, dtype=dtype
    )


def _permutations(p: Mapping[str, Tensor | None], group_size: int, name: str) -> Tensor | None:
    """int32 [E, I], or None where every expert is in group order."""
    g_idx = p["g_idx"]
    if g_idx is None or group_size == -1 or is_trivial(g_idx, group_size):
        return None
    perms = []
    for e, row in enumerate(g_idx):
        perm = group_permutation(row, group_size)
        if perm is None:
            raise ValueError(
                f"{name} g_idx of expert {e} does not hold {group_size} columns in each group, which only "
                "weights='dequantized' serves"
            )
        perms.append(perm)
    return torch.stack(perms)


def _repack(
    p: Mapping[str, Tensor | None], fmt: Format, bits: int, in_perms: Tensor | None, out_perms: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    qweight, scales, qzeros = p["qweight"], p["scales"], p["qzeros"]
    assert qweight is not None
    assert scales is not None
    if in_perms is None and out_perms is None:
        return ops.repack(qweight, scales, qzeros, format=fmt, bits=bits)
    done = [
        ops.repack(
            qweight[e],
            scales[e],
            None if qzeros is None else qzeros[e],
            format=fmt,
            bits=bits,
            in_perm=None if in_perms is None else in_perms[e],
            out_perm=None if out_perms is None else out_perms[e],
        )
        for e in range(qweight.shape[0])
    ]
    zeros = [z for _, _, z in done if z is not None]
    return (
        torch.stack([q for q, _, _ in done]),
        torch.stack([s for _, s, _ in done]),
        torch.stack(zeros) if zeros else None,
    )
