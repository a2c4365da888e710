"""Layers of a checkpoint that predict further tokens (MTP): hosts have no modules for them."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint import Checkpoint
from ..moe_layout import is_extra

# How many of them follow the model's own layers, in the numbering of those.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class PredictingLayers:
    """Which tensors of a checkpoint are theirs.

    Attributes:
        layers: their numbers, where they are counted on from the model's own.
        prefixes: of their tensors' names.
    """

    layers: frozenset[int]
    prefixes: tuple[str, ...]

    def owns(self, name: str) -> bool:
        """Whether a tensor is one of theirs."""
        return name.startswith(self.prefixes) or is_extra(name)


def predicting_layers(checkpoint: Checkpoint) -> PredictingLayers:
    """Finds them by the configuration's counts; layers past the model's own that it does not count are none."""
    text = checkpoint.model.config
    own = text.get("num_hidden_layers")
    count = max((text[k] for k in _COUNTS if isinstance(text.get(k), int)), default=0)
    if not isinstance(own, int) or count < 1:
        return PredictingLayers(frozenset(), ())
    stacks = {checkpoint.moe_block(layer).rpartition(f"layers.{layer}")[0] for layer in checkpoint.moe_layers}
    numbers = range(own, own + count)
    prefixes = tuple(f"{stack}layers.{number}." for stack in stacks for number in numbers)
    return PredictingLayers(frozenset(numbers), prefixes)
