"""GPTQ: one base scheme, per-module overrides and skips in `dynamic`, two zero-point conventions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._enums import Format
from ..errors import CheckpointError
from .base import (
    GPTQ_NAMES,
    ModelQuantization,
    QuantScheme,
    TensorNames,
    as_flag,
    as_mapping,
    check_group_size,
    compile_pattern,
    known_value,
)

# `gptq` stores the zero point minus one, `gptq_v2` the zero point itself.
_FORMATS = {"gptq": Format.gptq_v1, "gptq_v2": Format.gptq_v2}
_BITS = (4, 8)
# Entries of an override that would change how the tensors are read.
_FIXED_KEYS = ("checkpoint_format", "format", "method", "quant_method", "pack_dtype")


@dataclass(frozen=True)
class _Rule:
    """One entry of `dynamic`; `overrides` is None where it skips."""

    pattern: re.Pattern[str]
    overrides: Mapping[str, Any] | None


class GptqQuantization(ModelQuantization):
    """The first entry of `dynamic` that matches a module decides, as in the writer."""

    method = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        stored = config.get("checkpoint_format", config.get("format"))
        stored = "gptq" if stored is None else stored
        known_value(stored, _FORMATS, "checkpoint_format")
        if config.get("is_marlin_format"):
            raise CheckpointError(
                f"checkpoint_format must be one of {', '.join(_FORMATS)}, got marlin (is_marlin_format)"
            )
        known_value(config.get("pack_dtype", "int32"), ("int32",), "pack_dtype")
        self._base = QuantScheme(
            format=_FORMATS[stored],
            bits=known_value(config.get("bits"), _BITS, "bits"),
            group_size=check_group_size(config.get("group_size"), "group_size"),
            # Without the entry nothing is declared: the stored zero points are read.
            symmetric=as_flag(config.get("sym", False), "sym"),
            act_order=as_flag(config.get("desc_act", False), "desc_act"),
        )
        self._quantize_head = as_flag(config.get("lm_head", False), "lm_head")
        self._rules = tuple(
            _parse_rule(key, value, self._base)
            for key, value in as_mapping(config.get("dynamic"), "dynamic").items()
        )
        self._only = _inner_modules(config.get("modules_in_block_to_quantize"))

    @property
    def names(self) -> TensorNames:
        return GPTQ_NAMES

    def scheme_for(self, module: str) -> QuantScheme | None:
        if module.rpartition(".")[2] == "lm_head" and not self._quantize_head:
            return None
        for rule in self._rules:
            if rule.pattern.match(module):
                return None if rule.overrides is None else _override(self._base, rule.overrides)
        if self._only and not any(module == m or module.endswith("." + m) for m in self._only):
            return None
        return self._base


def _parse_rule(key: Any, value: Any, base: QuantScheme) -> _Rule:
    if not isinstance(key, str):
        raise CheckpointError(f"dynamic must have string keys, got {key!r}")
    if key.startswith("-:"):
        return _Rule(compile_pattern(key[2:], "dynamic"), None)
    overrides = as_mapping(value, f"dynamic[{key!r}]")
    for name in _FIXED_KEYS:
        if name in overrides:
            raise CheckpointError(f"dynamic[{key!r}] must not change {name}, got {overrides[name]!r}")
    _override(base, overrides)
    return _Rule(compile_pattern(key.removeprefix("+:"), "dynamic"), overrides)


def _override(base: QuantScheme, overrides: Mapping[str, Any]) -> QuantScheme:
    """The base scheme with a `dynamic` entry applied; settings of the quantiser itself (damping, ...) mean
    nothing here.
    """
    return replace(
        base,
        bits=known_value(overrides.get("bits", base.bits), _BITS, "dynamic bits"),
        group_size=check_group_size(overrides.get("group_size", base.group_size), "dynamic group_size"),
        symmetric=as_flag(overrides.get("sym", base.symmetric), "dynamic sym"),
        act_order=as_flag(overrides.get("desc_act", base.act_order), "dynamic desc_act"),
    )


def _inner_modules(value: Any) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`: a list of lists of names below a decoder layer, flat."""
    if value is None:
        return ()
    flat: list[str] = []
    for entry in value if isinstance(value, (list, tuple)) else (value,):
        flat.extend(entry if isinstance(entry, (list, tuple)) else (entry,))
    if not all(isinstance(name, str) for name in flat):
        raise CheckpointError(f"modules_in_block_to_quantize must be lists of strings, got {value!r}")
    return tuple(flat)
