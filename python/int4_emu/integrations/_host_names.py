"""The names of a checkpoint's tensors in a transformers model. Imports transformers: import it lazily."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key

# What other tools call the block that transformers calls mlp; some write it for dense layers too.
_BLOCK_ALIASES = ((".block_sparse_moe.", ".mlp."),)


@dataclass(frozen=True)
class LinearPlace:
    """Where a Linear of the checkpoint belongs in the model.

    Attributes:
        name: the model's module.
        part, parts: it is the rows of this part of so many that the model keeps in one Linear.
    """

    name: str
    part: int = 0
    parts: int = 1


class HostNames:
    """Names by the renamings that transformers has for the model. Made while the model is whole, before modules
    are taken out of it.
    """

    def __init__(self, model: Any) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = getattr(model, "base_model_prefix", "")
        with torch.device("meta"):
            self._known = model.state_dict()
        self._linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def parameter(self, name: str) -> str:
        """The name under which transformers should meet a tensor: `name`, or the spelling of it that the model
        knows.
        """
        if self._rename(name)[0] in self._known:
            return name
        for old, new in _BLOCK_ALIASES:
            other = name.replace(old, new)
            if other != name and self._rename(other)[0] in self._known:
                return other
        return name

    def linear(self, module: str) -> LinearPlace | str:
        """Where a quantised Linear belongs, or the reason why it has no place."""
        # The plain name first: most models keep it.
        for name in (module, module.removeprefix(f"{self._prefix}."), f"{self._prefix}.{module}"):
            if name in self._linears:
                return LinearPlace(name)
        spellings = [module] + [module.replace(old, new) for old, new in _BLOCK_ALIASES]
        for spelling in dict.fromkeys(spellings):
            renamed, pattern = self._rename(f"{spelling}.weight")
            name = renamed.removesuffix(".weight")
            if name not in self._linears:
                continue
            if pattern is None:
                return LinearPlace(name)
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            operations = converter.operations
            stacks_rows = (
                len(operations) == 1 and isinstance(operations[0], Concatenate) and operations[0].dim == 0
            )
            if not stacks_rows:
                told = ", ".join(type(o).__name__ for o in operations)
                return f"makes {name} of it by {told}, which is done to floating-point weights only"
            return LinearPlace(name, converter.source_patterns.index(pattern), len(converter.source_patterns))
        return "has no Linear of that name"

    def _rename(self, name: str) -> tuple[str, str | None]:
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
