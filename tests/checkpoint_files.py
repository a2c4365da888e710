"""Writes small checkpoints for tests: configurations of each tool, tensors from literal words or from
codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODEL_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
}


def int32(*rows: list[int]) -> torch.Tensor:
    """Rows of 32-bit words as int32 [len(rows), n]; words above 2^31 wrap to negative numbers."""
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in rows], dtype=torch.int32)


def compressed_tensors_config(
    *, bits: int = 4, group_size: int = -1, symmetric: bool = True, actorder: str | None = None, **top: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size, "symmetric": symmetric, "dynamic": False,
        "actorder": actorder,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], **top,
    }  # fmt: skip


def gptq_config(*, bits: int = 4, group_size: int = -1, sym: bool = True, **top: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": False,
        **top,
    }


def awq_config(*, group_size: int = -1, zero_point: bool = True, **top: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": zero_point,
        "version": "gemm", **top,
    }  # fmt: skip


def auto_round_config(packing: str, *, group_size: int = -1, sym: bool = True, **top: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": group_size,
        "sym": sym, "data_type": "int", **top,
    }  # fmt: skip


def quark_config(
    dtype: str, pack_method: str, *, group_size: int | None = None, symmetric: bool = True, **top: Any
) -> dict[str, Any]:
    weight = {
        "dtype": dtype, "qscheme": "per_channel" if group_size is None else "per_group",
        "ch_axis": 0 if group_size is None else -1, "group_size": group_size, "symmetric": symmetric,
        "is_dynamic": False,
    }  # fmt: skip
    scheme = {"weight": weight, "input_tensors": None, "output_tensors": None}
    return {
        "quant_method": "quark", "export": {"pack_method": pack_method, "weight_format": "real_quantized"},
        "global_quant_config": scheme, "layer_quant_config": {}, "layer_type_quant_config": {},
        "exclude": ["lm_head"], **top,
    }  # fmt: skip


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], quantization: dict[str, Any] | None, **config: Any
) -> Path:
    """A folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    full = dict(MODEL_CONFIG, **config)
    if quantization is not None:
        full["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(full))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def split_in_shards(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> dict[str, str]:
    """Replaces model.safetensors by shards and an index; returns the index's weight_map."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def pack_rows(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes [R, n] to int32 words [R, ceil(n / per word)], lowest code first: written out, no code of the
    package.
    """
    per_word = 32 // bits
    rows = []
    for row in codes.tolist():
        row = row + [0] * (-len(row) % per_word)
        words = [
            sum(c << (bits * i) for i, c in enumerate(row[k : k + per_word]))
            for k in range(0, len(row), per_word)
        ]
        rows.append(words)
    return int32(*rows)


def random_gptq_linear(
    rng: torch.Generator,
    rows: int,
    columns: int,
    *,
    group_size: int,
    bits: int = 4,
    sym: bool = False,
    v1: bool = True,
    act_order: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a GPTQ Linear and its exact weight float32 [O, I]."""
    groups = -(-columns // group_size)
    top, midpoint = 2**bits, 2 ** (bits - 1)
    codes = torch.randint(0, top, (rows, columns), generator=rng)
    zeros = torch.full((rows, groups), midpoint)
    if not sym:
        zeros = torch.randint(0, top, (rows, groups), generator=rng)
    scales = (torch.rand(rows, groups, generator=rng) * 0.05 + 0.01).to(torch.float16)
    g_idx = torch.arange(columns) // group_size
    if act_order:
        g_idx = g_idx[torch.randperm(columns, generator=rng)]
    words = pack_rows(zeros.T, bits)
    if v1:
        ones = 0x11111111 if bits == 4 else 0x01010101
        words = ((words.long() - ones + 2**31) % 2**32 - 2**31).to(torch.int32)
    weight = (codes - zeros[:, g_idx]).float() * scales.float()[:, g_idx]
    tensors = {
        "qweight": pack_rows(codes, bits).T.contiguous(),
        "qzeros": words,
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.to(torch.int32),
    }
    return tensors, weight


def random_gptq_layers(
    seed: int,
    *,
    layers: int = 1,
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 32,
    group_size: int = 16,
    block: str = "mlp",
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of whole MoE layers, and module name to exact weight."""
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for expert in range(experts):
            # gate and up share the order of their columns, as in real files: they see one input.
            order_seed = int(torch.randint(0, 2**31, (1,), generator=rng))
            for name, (rows, columns) in {
                "gate_proj": (intermediate, hidden),
                "up_proj": (intermediate, hidden),
                "down_proj": (hidden, intermediate),
            }.items():
                module = f"model.layers.{layer}.{block}.experts.{expert}.{name}"
                linear, weight = random_gptq_linear(rng, rows, columns, group_size=group_size, **options)
                if options.get("act_order") and name != "down_proj":
                    linear, weight = _same_order(linear, weight, order_seed, group_size)
                tensors |= {f"{module}.{k}": v for k, v in linear.items()}
                weights[module] = weight
    return tensors, weights


def _same_order(
    linear: dict[str, torch.Tensor], weight: torch.Tensor, seed: int, group_size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Moves the columns so that g_idx depends on the seed alone; codes and weight move along."""
    columns = weight.shape[1]
    target = (torch.arange(columns) // group_size)[
        torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    ]
    source = torch.empty(columns, dtype=torch.long)
    source[torch.argsort(target, stable=True)] = torch.argsort(linear["g_idx"], stable=True)
    per_word = columns // linear["qweight"].shape[0]
    bits = 32 // per_word
    shifts = torch.arange(per_word) * bits
    codes = ((linear["qweight"].long().unsqueeze(1) >> shifts[None, :, None]) & (2**bits - 1)).flatten(0, 1)
    moved = dict(
        linear, qweight=pack_rows(codes[source].T, bits).T.contiguous(), g_idx=target.to(torch.int32)
    )
    return moved, weight[:, source]
