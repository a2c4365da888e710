"""Writes the experts of a transformers model as other projects' tools store them, for tests only.

Nothing here is the package's: `oracle.store` packs, and the names are a table of its own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import oracle
from checkpoint_files import awq_config, compressed_tensors_config, gptq_config

Tensors = dict[str, torch.Tensor]
# Format name to (suffixes of codes, scales and zero points, dtype of the scales).
FORMATS = {
    "compressed_tensors": (("weight_packed", "weight_scale", "weight_zero_point"), "bfloat16"),
    "gptq_v1": (("qweight", "scales", "qzeros"), "float16"),
    "awq": (("qweight", "scales", "qzeros"), "float16"),
}
# How the families name an expert's projections, and the role of each.
PUBLISHED = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_EXPERT = re.compile(
    r"(?P<block>.*layers\.(?P<layer>\d+)(?:\.\w+)?)\.experts\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight"
)
# All experts in one tensor.
_STACKED = re.compile(
    r"(?P<block>.*layers\.(?P<layer>\d+)(?:\.(?!experts\.)\w+)?)\.(?:experts\.)?"
    r"(?:gate_up_proj|up_proj|down_proj|input_linear|output_linear|fc1|fc2|w13_weight|w2_weight)(?:_bias|\.weight)?"
)


@dataclass(frozen=True)
class Rounded:
    """A weight rounded to int4: what is stored, and the float32 weight [O, I] that it stands for."""

    tensors: Tensors
    exact: torch.Tensor


def round_to_int4(
    weight: torch.Tensor, format: str, group_size: int, g_idx: NDArray | None = None, bits: int = 4
) -> Rounded:
    """Rounds [O, I] to asymmetric int4 (int8) in groups of columns, to nearest, and stores it.

    Args:
        group_size: -1 = one group.
        g_idx: the group of each column; None = columns in order.
    """
    suffixes, scales_dtype = FORMATS[format]
    w = weight.detach().double().numpy()
    rows, columns = w.shape
    top = (1 << bits) - 1
    group_size = columns if group_size == -1 else group_size
    order = np.arange(columns) // group_size if g_idx is None else g_idx
    groups = -(-columns // group_size)
    scales, zeros = np.empty((rows, groups)), np.empty((rows, groups), np.int64)
    for g in range(groups):
        part = w[:, order == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, g] = oracle.round_to(np.maximum((high - low) / top, 1e-4), scales_dtype)
        zeros[:, g] = np.clip(np.rint(-low / scales[:, g]), 0, top)
    codes = np.clip(np.rint(w / scales[:, order]) + zeros[:, order], 0, top).astype(np.int64)
    exact = torch.from_numpy((codes - zeros[:, order]) * scales[:, order]).float()
    parts = oracle.store(format, codes, scales, zeros, bits)
    dtype = getattr(torch, scales_dtype)
    tensors = {
        suffix: torch.from_numpy(np.ascontiguousarray(part)).to(dtype if i == 1 else torch.int32)
        for i, (suffix, part) in enumerate(zip(suffixes, parts, strict=True))
        if part is not None
    }
    if format == "compressed_tensors":
        tensors["weight_shape"] = torch.tensor([rows, columns])
    if format == "gptq_v1":
        tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
    return Rounded(tensors, exact)


def experts_of(model: Any) -> dict[int, Any]:
    """Layer number to the module that holds the stacked experts of that layer."""
    found = {}
    for name, module in model.named_modules():
        down = module._parameters.get("down_proj")
        layer = re.search(r"layers\.(\d+)\.", name + ".")  # not so the experts of vision towers
        if layer and down is not None and down.dim() == 3 and hasattr(module, "num_experts"):
            found[int(layer[1])] = module
    return found


def projections_of(module: Any) -> dict[str, torch.Tensor]:
    """Role to a view [E, O, I] of a host's stacked experts."""
    transposed = getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
    w2 = module.down_proj.data
    name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    w13 = getattr(module, name).data
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return _split(module, w13, 1) | {"down": w2}


def biases_of(module: Any) -> dict[str, torch.Tensor]:
    """Role to a view [E, O]; empty where the experts have none."""
    if not getattr(module, "has_bias", False):
        return {}
    return _split(module, module.gate_up_proj_bias.data, 1) | {"down": module.down_proj_bias.data}


def _split(module: Any, w13: torch.Tensor, dim: int) -> dict[str, torch.Tensor]:
    if not getattr(module, "has_gate", True):
        return {"up": w13}
    if getattr(module, "is_concatenated", True):
        gate, up = w13.chunk(2, dim)
    else:
        gate, up = w13[:, 0::2], w13[:, 1::2]
    return {"gate": gate, "up": up}


def write_pair(model: Any, folder: Path, format: str, group_size: int) -> tuple[Path, Path]:
    """Rounds a model's experts, and writes it twice: as transformers saves it, holding the dequantised weights
    in the family's published names, and with its experts in int4.

    Returns:
        (the floating-point folder, the int4 folder).
    """
    plain, quantised = folder / "plain", folder / format
    rounded: dict[tuple[int, int, str], Tensors] = {}
    exact: dict[tuple[int, int, str], torch.Tensor] = {}
    for layer, module in experts_of(model).items():
        biases = biases_of(module)
        for role, stack in projections_of(module).items():
            for expert in range(len(stack)):
                result = round_to_int4(stack[expert], format, group_size)
                stack[expert].copy_(result.exact)
                key = (layer, expert, role)
                rounded[key], exact[key] = result.tensors, result.exact
                if biases:
                    rounded[key] = rounded[key] | {"bias": biases[role][expert].clone()}
    model.save_pretrained(plain)
    tensors = _as_published(plain)
    stored, taken = _stored_experts(tensors, rounded, exact)
    rest = {name: tensor for name, tensor in tensors.items() if name not in taken}
    quantised.mkdir()
    save_file(rest | stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = _quantization(format, group_size, rest)
    (quantised / "config.json").write_text(json.dumps(config))
    for other in plain.glob("generation_config.json"):
        shutil.copy(other, quantised)
    return plain, quantised


def _as_published(plain: Path) -> Tensors:
    """The tensors that transformers has saved. 5.24 saves the text layers of Kimi-K2.5 under the name that its vision
    tower's have; they are published as layers.
    """
    tensors = load_file(plain / "model.safetensors")
    wrong, right = "language_model.model.blocks.", "language_model.model.layers."
    if any(name.startswith(wrong) for name in tensors):
        tensors = {name.replace(wrong, right): tensor for name, tensor in tensors.items()}
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return tensors


def write_mixed(
    plain: Path,
    folder: Path,
    format: str,
    choose: Callable[[str], tuple[int, int] | None],
    quantization: dict[str, Any],
    extra: Tensors | None = None,
    **config: Any,
) -> tuple[Path, Path]:
    """Rounds any Linears of a saved floating-point checkpoint, experts or not, each as `choose` says.

    Args:
        choose: module name to (bits, group size), None = floating point.
        extra: tensors for the quantised folder only.

    Returns:
        As `write_pair`.
    """
    tensors = load_file(plain / "model.safetensors")
    exact, stored = dict(tensors), dict(extra or {})
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        scheme = choose(module) if module != name and tensor.dim() == 2 else None
        if scheme is None:
            stored[name] = tensor
            continue
        rounded = round_to_int4(tensor, format, scheme[1], bits=scheme[0])
        exact[name] = rounded.exact
        stored |= {f"{module}.{suffix}": part for suffix, part in rounded.tensors.items()}
    contents = json.loads((plain / "config.json").read_text())
    for path, held, more in (
        (folder / "plain", exact, {}),
        (folder / "mixed", stored, {"quantization_config": quantization, **config}),
    ):
        path.mkdir(parents=True)
        save_file(held, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(contents | more))
    return folder / "plain", folder / "mixed"


def _stored_experts(
    tensors: Tensors,
    rounded: dict[tuple[int, int, str], Tensors],
    exact: dict[tuple[int, int, str], torch.Tensor],
) -> tuple[Tensors, set[str]]:
    """The int4 tensors of all experts by name, and the names that they replace."""
    stored: Tensors = {}
    taken: set[str] = set()
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            key = int(match["layer"]), int(match["expert"]), PUBLISHED[match["leaf"]]
            assert torch.equal(tensor, exact[key]), f"{name} is not {key}"
            stored |= {f"{name.removesuffix('.weight')}.{s}": t for s, t in rounded[key].items()}
            taken.add(name)
    if stored:
        assert len(taken) == len(rounded)
        return stored, taken
    for name, tensor in tensors.items():
        if (match := _STACKED.fullmatch(name)) and tensor.dim() >= 2 + (not name.endswith("_bias")):
            taken.add(name)
            prefix = f"{match['block']}.experts"
            for (layer, expert, role), parts in rounded.items():
                if layer == int(match["layer"]):
                    module = f"{prefix}.{expert}.{role}_proj"
                    stored |= {f"{module}.{s}": t for s, t in parts.items()}
    assert taken, "no experts found among the saved tensors"
    return stored, taken


def _quantization(format: str, group_size: int, rest: Tensors) -> dict[str, Any]:
    """A configuration that leaves everything but the experts in floating point, as each tool says it."""
    if format == "compressed_tensors":
        config = compressed_tensors_config(group_size=group_size, symmetric=False)
        config["config_groups"]["group_0"]["targets"] = [r"re:.*\.experts\.\d+\..*"]
        return config
    if format == "gptq_v1":
        return gptq_config(group_size=group_size, sym=False, dynamic={r"-:^(?!.*\.experts\.\d)": {}})
    modules = sorted(n.removesuffix(".weight") for n in rest if n.endswith(".weight"))
    return awq_config(group_size=group_size, modules_to_not_convert=modules)
