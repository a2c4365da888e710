"""AWQ `gemm`: one scheme for all modules but those of `modules_to_not_convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._enums import Format
from .base import (
    GPTQ_NAMES,
    ModelQuantization,
    NamedModules,
    QuantScheme,
    TensorNames,
    as_flag,
    as_names,
    check_group_size,
    known_value,
)


class AwqQuantization(ModelQuantization):
    """AWQ as AutoAWQ and its followers write it. The other packings (gemv, marlin, ...) are refused."""

    method = "awq"
    # `zero_point: false` files carry a qzeros buffer that nobody wrote.
    zeros_ignored_if_symmetric = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = config.get("version", config.get("checkpoint_format", config.get("format", "gemm")))
        known_value(version.lower() if isinstance(version, str) else version, ("gemm",), "version")
        self._scheme = QuantScheme(
            format=Format.awq,
            bits=known_value(config.get("bits", config.get("w_bit")), (4,), "bits"),
            group_size=check_group_size(config.get("group_size", config.get("q_group_size")), "group_size"),
            # The writer's own default; with it the stored zero points are read, never assumed.
            symmetric=not as_flag(config.get("zero_point", True), "zero_point"),
            act_order=False,
        )
        self._skipped = NamedModules(as_names(config.get("modules_to_not_convert"), "modules_to_not_convert"))

    @property
    def names(self) -> TensorNames:
        return GPTQ_NAMES

    def excludes(self, module: str) -> bool:
        return module in self._skipped

    def scheme_for(self, module: str) -> QuantScheme | None:
        # AutoAWQ never converts the head.
        if module.rpartition(".")[2] == "lm_head" or self.excludes(module):
            return None
        return self._scheme
