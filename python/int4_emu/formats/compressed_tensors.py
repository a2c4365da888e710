"""compressed-tensors `pack-quantized`: several config groups, each with targets; an ignore list."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from .._enums import Format
from ..errors import CheckpointError
from .base import (
    COMPRESSED_TENSORS_NAMES,
    ModelQuantization,
    NamedModules,
    QuantScheme,
    TensorNames,
    as_flag,
    as_mapping,
    as_names,
    check_group_size,
    compile_pattern,
    known_value,
)

logger = logging.getLogger("int4_emu.formats")

_PACKED = "pack-quantized"
# "group" and its old name "dynamic" store columns out of group order; "weight" and "static" leave nothing on
# disk.
_ACT_ORDER = {
    None: False,
    False: False,
    "weight": False,
    "static": False,
    "group": True,
    "dynamic": True,
    True: True,
}
# Module classes that a target may name. Every Linear is one; a Conv or an Embedding never holds these
# tensors.
_LINEAR_CLASSES = ("Linear",)


class CompressedTensorsQuantization(ModelQuantization):
    """Targets in the order of the tool: exact name, then regular expression, then class; ties in sorted
    order.
    """

    method = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = as_mapping(config.get("config_groups"), "config_groups")
        if not groups:
            raise CheckpointError("compressed-tensors needs config_groups with at least one group, got none")
        _refuse_transforms(config)
        self._schemes: dict[str, QuantScheme] = {}
        for name, group in groups.items():
            what = f"config_groups.{name}"
            group = as_mapping(group, what)
            scheme = _group_scheme(group, config.get("format"), what)
            for target in as_names(group.get("targets"), f"{what}.targets"):
                if self._schemes.setdefault(target, scheme) != scheme:
                    raise CheckpointError(
                        f"{what}.targets holds {target!r}, which an earlier group targets with another scheme"
                    )
        self._patterns = {
            t: compile_pattern(t[3:], "config_groups.targets")
            for t in sorted(self._schemes)
            if t.startswith("re:")
        }
        ignore = as_names(config.get("ignore"), "ignore")
        self._ignored = NamedModules(e for e in ignore if not e.startswith("re:"))
        self._ignored_patterns = tuple(
            compile_pattern(e[3:], "ignore") for e in ignore if e.startswith("re:")
        )

    @property
    def names(self) -> TensorNames:
        return COMPRESSED_TENSORS_NAMES

    def excludes(self, module: str) -> bool:
        return module in self._ignored or any(p.match(module) for p in self._ignored_patterns)

    def scheme_for(self, module: str) -> QuantScheme | None:
        if self.excludes(module):
            return None
        if module in self._schemes:
            return self._schemes[module]
        for target, pattern in self._patterns.items():
            if pattern.match(module):
                return self._schemes[target]
        for name in _LINEAR_CLASSES:
            if name in self._schemes:
                return self._schemes[name]
        return None


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    """Stops at settings that change what the stored weights mean."""
    sparsity = as_mapping(config.get("sparsity_config"), "sparsity_config")
    if sparsity.get("format", "dense") not in ("dense", None):
        raise CheckpointError(f"sparsity_config.format must be dense, got {sparsity['format']!r}")
    transforms = as_mapping(config.get("transform_config"), "transform_config")
    if transforms.get("config_groups"):
        raise CheckpointError(
            "transform_config must be empty: weights that were rotated need their transforms at run time"
        )
    status = config.get("quantization_status")
    if status is not None:
        known_value(status, ("compressed", "frozen"), "quantization_status")
    if config.get("kv_cache_scheme"):
        logger.warning("kv_cache_scheme is ignored: the cache keeps the compute dtype")


def _group_scheme(group: Mapping[str, Any], model_format: Any, what: str) -> QuantScheme:
    known_value(group.get("format") or model_format, (_PACKED,), f"{what}.format")
    for activations in ("input_activations", "output_activations"):
        if group.get(activations) is not None:
            raise CheckpointError(
                f"{what}.{activations} must be null (weight-only quantisation), got {group[activations]!r}"
            )
    weights = as_mapping(group.get("weights"), f"{what}.weights")
    bits = known_value(weights.get("num_bits"), (4, 8), f"{what}.weights.num_bits")
    known_value(weights.get("type", "int"), ("int",), f"{what}.weights.type")
    if weights.get("dynamic"):
        raise CheckpointError(f"{what}.weights.dynamic must be false, got {weights['dynamic']!r}")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "channel" if weights.get("group_size") in (None, -1) else "group"
    strategy = known_value(strategy, ("group", "channel"), f"{what}.weights.strategy")
    group_size = -1
    if strategy == "group":
        group_size = check_group_size(weights.get("group_size"), f"{what}.weights.group_size")
    actorder = weights.get("actorder")
    if isinstance(actorder, str):
        actorder = re.sub(r".*\.", "", actorder).lower()
    actorder = known_value(actorder, _ACT_ORDER, f"{what}.weights.actorder")
    return QuantScheme(
        format=Format.compressed_tensors,
        bits=bits,
        group_size=group_size,
        symmetric=as_flag(weights.get("symmetric"), f"{what}.weights.symmetric"),
        act_order=_ACT_ORDER[actorder],
    )
