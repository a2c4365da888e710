"""One small call of each op, by schema name: what opcheck, aliasing, fake kernels and graph tests run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import oracle
from layers import Layer, make_layer, to_torch

Call = tuple[tuple[Any, ...], dict[str, Any]]

OP_LIST = [
    "unpack", "unpack_zeros", "dequantize", "dequantize_out", "repack", "repack_out", "prepack", "unprepack",
    "moe_align", "grouped_gemm", "grouped_gemm_out", "fused_moe", "fused_moe_out", "fused_moe_packed",
    "fused_moe_packed_out",
]  # fmt: skip


def small_layer(tokens: int = 3, **options: Any) -> Layer:
    """A bf16 layer of three experts."""
    options = {
        "experts": 3,
        "hidden": 32,
        "intermediate": 16,
        "group_sizes": (16, 8),
        "dtype": torch.bfloat16,
    } | options
    return make_layer(np.random.default_rng(1), tokens=tokens, **options)


def awq_projection() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qweight, scales, qzeros of a [16, 32] matrix in groups of 8."""
    rng = np.random.default_rng(2)
    codes, zeros = rng.integers(0, 16, (16, 32)), rng.integers(0, 16, (16, 4))
    parts = oracle.store("awq", codes, np.full((16, 4), 0.5), zeros)
    return torch.from_numpy(parts[0]), to_torch(parts[1], torch.float16), torch.from_numpy(parts[2])


def call_of(name: str) -> Call:
    """(args, kwargs) of a call of `torch.ops.int4_emu.<name>`."""
    qweight, scales, qzeros = awq_projection()
    layer = small_layer()
    if name in ("unpack", "unpack_zeros"):
        return (qweight if name == "unpack" else qzeros,), {"format": 4}
    if name.startswith("dequantize"):
        out = {"out": torch.zeros(16, 32)} if name.endswith("_out") else {"dtype": torch.float32}
        return (qweight, scales, qzeros), dict(group_size=8, format=4, **out)
    if name.startswith("repack"):
        outs = {
            "out_qweight": torch.zeros(16, 16, dtype=torch.uint8),
            "out_scales": torch.zeros(16, 4, dtype=torch.float16),
            "out_qzeros": torch.zeros(16, 4, dtype=torch.uint8),
        }
        return (qweight, scales, qzeros), dict(format=4, **(outs if name.endswith("_out") else {}))
    if name in ("prepack", "unprepack"):
        return (layer.w13.qweight[:, :16],), {"layout": 1}
    if name == "moe_align":
        return (layer.topk_ids, 3, 4), {}
    if name.startswith("grouped_gemm"):
        w = layer.w13
        offsets = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
        out = {"out": torch.zeros(3, 32, dtype=torch.bfloat16)} if name.endswith("_out") else {}
        return (layer.x, w.qweight, offsets), dict(scales=w.scales, qzeros=w.qzeros, group_size=16, **out)
    out = {"out": torch.zeros_like(layer.x)} if name.endswith("_out") else {}
    if name.startswith("fused_moe_packed"):
        return layer.packed_args(), layer.packed_options() | out
    return (layer.x, *layer.dense_weights(), layer.topk_weights, layer.topk_ids), layer.options | out
