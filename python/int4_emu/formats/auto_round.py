"""AutoRound: GPTQ v1 without g_idx, or AWQ gemm; per-module settings in `extra_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .._enums import Format
from ..errors import CheckpointError
from .base import (
    GPTQ_NAMES,
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

_PACKINGS = {"auto_round:auto_gptq": Format.gptq_v1, "auto_round:auto_awq": Format.awq}
_BITS = {Format.gptq_v1: (4, 8), Format.awq: (4,)}
# Anything but letters, digits, underscores and dots makes a key a regular expression.
_PLAIN_NAME = re.compile(r"[\w.]+")


class AutoRoundQuantization(ModelQuantization):
    """An exact name in `extra_config` wins over a regular expression; the first expression that matches
    wins.
    """

    method = "auto-round"

    def __init__(self, config: Mapping[str, Any]) -> None:
        packing = known_value(config.get("packing_format"), _PACKINGS, "packing_format")
        fmt = _PACKINGS[packing]
        _check_weight_only(config, "")
        self._base = QuantScheme(
            format=fmt,
            bits=known_value(config.get("bits"), _BITS[fmt], "bits"),
            group_size=check_group_size(config.get("group_size"), "group_size"),
            symmetric=as_flag(config.get("sym", False), "sym"),
            act_order=False,
        )
        blocks = as_names(config.get("block_name_to_quantize"), "block_name_to_quantize")
        self._blocks = NamedModules(blocks) if blocks else None
        self._exact: dict[str, QuantScheme | None] = {}
        self._patterns: list[tuple[re.Pattern[str], QuantScheme | None]] = []
        for key, value in as_mapping(config.get("extra_config"), "extra_config").items():
            what = f"extra_config[{key!r}]"
            scheme = self._override(as_mapping(value, what), what)
            if _PLAIN_NAME.fullmatch(key):
                self._exact[key] = scheme
            else:
                self._patterns.append((compile_pattern(key, "extra_config"), scheme))

    @property
    def names(self) -> TensorNames:
        return GPTQ_NAMES

    def scheme_for(self, module: str) -> QuantScheme | None:
        if module in self._exact:
            return self._exact[module]
        for pattern, scheme in self._patterns:
            if pattern.search(module):
                return scheme
        if self._blocks is not None and module not in self._blocks:
            return None
        return None if module.rpartition(".")[2] == "lm_head" else self._base

    def _override(self, entry: Mapping[str, Any], what: str) -> QuantScheme | None:
        bits = entry.get("bits", self._base.bits)
        if isinstance(bits, int) and bits >= 16:
            return None
        _check_weight_only(entry, what + ".")
        return replace(
            self._base,
            bits=known_value(bits, _BITS[self._base.format], f"{what}.bits"),
            group_size=check_group_size(entry.get("group_size", self._base.group_size), f"{what}.group_size"),
            symmetric=as_flag(entry.get("sym", self._base.symmetric), f"{what}.sym"),
        )


def _check_weight_only(config: Mapping[str, Any], prefix: str) -> None:
    known_value(config.get("data_type", "int"), ("int",), f"{prefix}data_type")
    act_bits = config.get("act_bits")
    if isinstance(act_bits, int) and act_bits < 16:
        raise CheckpointError(
            f"{prefix}act_bits must be 16 or absent (weight-only quantisation), got {act_bits}"
        )
