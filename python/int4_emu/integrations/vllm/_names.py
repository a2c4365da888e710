"""Names: vLLM's fused layers and the checkpoint's modules behind them; a configuration's lists in vLLM's names. No vLLM here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

# Fused layers that some models of vLLM build without saying so in their packed_modules_mapping.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# Models whose MoE block vLLM calls block_sparse_moe, and some tools, after transformers, mlp.
_BLOCK_SPARSE_MOE = ("mixtral", "minimax_m2", "phimoe")


def renamings(model_type: str) -> dict[re.Pattern[str], str | None]:
    """Regular expressions on a checkpoint's tensor names, and what vLLM's model has in their place."""
    if model_type not in _BLOCK_SPARSE_MOE:
        return {}
    return {re.compile(r"\.mlp\.(experts|gate)\."): r".block_sparse_moe.\1."}


def part_names(prefix: str, packed_modules: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The Linears that vLLM's `prefix` stacks, in row order; the one itself where it stacks none."""
    parent, _, leaf = prefix.rpartition(".")
    parts = packed_modules.get(leaf) or _FUSED.get(leaf) or (leaf,)
    return tuple(f"{parent}.{part}" if parent else part for part in parts)


def expert_projections(layer: Any) -> dict[str, str]:
    """Role (gate, up, down) to the name of its module below an expert, of a vLLM layer."""
    if layer.ckpt_up_proj_name is None:  # no gate: vLLM files the only upper projection under the gate's name
        return {"up": layer.ckpt_gate_proj_name, "down": layer.ckpt_down_proj_name}
    return {
        "gate": layer.ckpt_gate_proj_name,
        "up": layer.ckpt_up_proj_name,
        "down": layer.ckpt_down_proj_name,
    }


def map_names(config: Mapping[str, Any], rename: Callable[[str], str | None]) -> dict[str, Any]:
    """A quantization_config whose module names are vLLM's. Patterns stay as they are.

    Args:
        config: the object as the checkpoint has it.
        rename: a module's name in vLLM, None for one that vLLM does not load.
    """

    def one(name: Any) -> Any:
        is_path = isinstance(name, str) and "." in name and not name.startswith("re:")
        if not is_path or set(name) & set("*?[\\^$("):
            return name
        return rename(name) or name

    mapped = deepcopy(dict(config))
    for key in ("ignore", "exclude", "modules_to_not_convert"):
        if isinstance(mapped.get(key), list):
            mapped[key] = [one(name) for name in mapped[key]]
    for key in ("extra_config", "layer_quant_config"):
        if isinstance(mapped.get(key), Mapping):
            mapped[key] = {one(name): value for name, value in mapped[key].items()}
    groups = mapped.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, dict) and isinstance(group.get("targets"), list):
            group["targets"] = [one(name) for name in group["targets"]]
    return mapped
