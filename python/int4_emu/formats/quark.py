"""AMD Quark: a global weight scheme, overrides by name pattern or class, an exclude list, a pack method."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from .._enums import Format
from ..errors import CheckpointError
from .base import (
    QUARK_NAMES,
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

_DTYPES = {"int4": ("int", 4), "uint4": ("uint", 4), "int8": ("int", 8), "uint8": ("uint", 8)}
_PACK_METHODS = ("reorder", "order")


class QuarkQuantization(ModelQuantization):
    """`layer_quant_config` (first pattern that matches) before `layer_type_quant_config` before
    `global_quant_config`.
    """

    method = "quark"

    def __init__(self, config: Mapping[str, Any]) -> None:
        export = as_mapping(config.get("export"), "export")
        pack_method = known_value(export.get("pack_method", "reorder"), _PACK_METHODS, "export.pack_method")
        known_value(
            export.get("weight_format", "real_quantized"), ("real_quantized",), "export.weight_format"
        )
        if config.get("kv_cache_quant_config") or export.get("kv_cache_group"):
            logger.warning("kv_cache_quant_config is ignored: the cache keeps the compute dtype")
        self._global = _scheme(config.get("global_quant_config"), pack_method, "global_quant_config")
        layers = as_mapping(config.get("layer_quant_config"), "layer_quant_config")
        self._layers = {k: _scheme(v, pack_method, f"layer_quant_config[{k!r}]") for k, v in layers.items()}
        types = as_mapping(config.get("layer_type_quant_config"), "layer_type_quant_config")
        self._linear = {
            k: _scheme(v, pack_method, f"layer_type_quant_config[{k!r}]") for k, v in types.items()
        }
        exclude = as_names(config.get("exclude"), "exclude")
        self._excluded_names = NamedModules(exclude)
        self._excluded_patterns = tuple(e for e in exclude if e.startswith("re:") or set(e) & set("*?["))
        for entry in self._excluded_patterns:
            if entry.startswith("re:"):
                compile_pattern(entry[3:], "exclude")

    @property
    def names(self) -> TensorNames:
        return QUARK_NAMES

    def excludes(self, module: str) -> bool:
        return module in self._excluded_names or any(_matches(e, module) for e in self._excluded_patterns)

    def scheme_for(self, module: str) -> QuantScheme | None:
        if self.excludes(module):
            return None
        for pattern, scheme in self._layers.items():
            if _matches(pattern, module):
                return scheme
        return self._linear.get("Linear", self._global)


def _matches(entry: str, module: str) -> bool:
    """Quark's own rule: a shell pattern, in which a name without wildcards is itself; `re:` as in exports for
    servers.
    """
    if entry.startswith("re:"):
        return compile_pattern(entry[3:], "exclude").match(module) is not None
    return fnmatch.fnmatchcase(module, entry)


def _scheme(config: Any, pack_method: str, what: str) -> QuantScheme | None:
    config = as_mapping(config, what)
    for tensors in ("input_tensors", "output_tensors"):
        if config.get(tensors) is not None:
            raise CheckpointError(
                f"{what}.{tensors} must be null (weight-only quantisation), got {config[tensors]!r}"
            )
    if config.get("weight") is None:
        return None
    weight = as_mapping(config["weight"], f"{what}.weight")
    if weight.get("is_dynamic"):
        raise CheckpointError(f"{what}.weight.is_dynamic must be false, got {weight['is_dynamic']!r}")
    sign, bits = _DTYPES[known_value(weight.get("dtype"), _DTYPES, f"{what}.weight.dtype")]
    qscheme = known_value(weight.get("qscheme"), ("per_group", "per_channel"), f"{what}.weight.qscheme")
    group_size = -1
    axes: tuple[int, ...] = (0,)
    if qscheme == "per_group":
        group_size = check_group_size(weight.get("group_size"), f"{what}.weight.group_size")
        axes = (-1, 1)
    known_value(weight.get("ch_axis", axes[0]), axes, f"{what}.weight.ch_axis ({qscheme})")
    channel = "" if qscheme == "per_group" else "_channel"
    return QuantScheme(
        format=Format[f"quark_{sign}{channel}_{pack_method}"],
        bits=bits,
        group_size=group_size,
        symmetric=as_flag(weight.get("symmetric"), f"{what}.weight.symmetric"),
        act_order=False,
    )
