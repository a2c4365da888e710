"""Where a checkpoint keeps its routed experts: the naming schemes of the field, brought to (layer, expert,
role).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ._shards import listed
from .errors import CheckpointError

logger = logging.getLogger("int4_emu.checkpoint")

# Names of the MoE block inside a decoder layer.
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "moe", "ffn")
# Names of a projection and the role it plays. w1 is the gate, w3 the up and w2 the down projection; gate_up_proj
# holds the rows of both.
ROLES = {
    "gate_proj": "gate", "w1": "gate",
    "up_proj": "up", "w3": "up",
    "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up",
}  # fmt: skip
# Decoder stacks that predict further tokens: their layers count from zero again and are no part of the model
# proper. By how their names begin: mtp, mtp_layers, mtp_block, mtp_dspark.
_EXTRA_STACKS = ("mtp", "nextn", "eagle")

_LAYER = r"(?P<stack>(?:[^.]+\.)*?)layers\.(?P<layer>\d+)"
_BLOCK = r"\.(?P<block>[^.]+)"
# Some models keep the experts in the decoder layer itself, without a block around them.
_EXPERT = re.compile(
    _LAYER + f"(?:{_BLOCK})?" + r"\.experts\.(?P<expert>\d+)\.(?P<projection>[^.]+)\.(?P<tensor>.+)"
)
_ROUTER = re.compile(_LAYER + _BLOCK + r"\.(?:gate|router)\.weight")
# Anything else below an `experts` component: tensors of all experts in one, or names nobody told us about.
_OTHER = re.compile(_LAYER + f"(?:{_BLOCK})?" + r"\.experts\.(?P<rest>.+)")
# Tensors of the router that some models keep beside their experts.
_ROUTER_TENSORS = ("e_score_correction_bias",)


@dataclass
class MoELayer:
    """One layer's routed experts by name.

    Attributes:
        number: the layer number.
        block: full name of the MoE block, `model.layers.3.mlp`.
        modules: (expert, role) to the projection's full module name; roles are gate, up, down, or gate_up and
            down.
        tensors: module name to the suffixes of its tensors.
        unknown: tensors below the experts that no known name explains.
    """

    number: int
    block: str
    modules: dict[tuple[int, str], str] = field(default_factory=dict)
    tensors: dict[str, set[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def expert_ids(self) -> set[int]:
        """Experts with at least one tensor."""
        return {expert for expert, _ in self.modules}

    @property
    def has_gate(self) -> bool:
        """Whether any expert has a gate projection."""
        return any(role in ("gate", "gate_up") for _, role in self.modules)

    @property
    def joins_gate_and_up(self) -> bool:
        """Whether gate and up projection of an expert are one tensor."""
        return any(role == "gate_up" for _, role in self.modules)

    @property
    def w13_roles(self) -> tuple[str, ...]:
        """The projections stacked in w13, in row order."""
        if self.joins_gate_and_up:
            return ("gate_up",)
        return ("gate", "up") if self.has_gate else ("up",)

    @property
    def roles(self) -> tuple[str, ...]:
        """The projections that each expert must have."""
        return (*self.w13_roles, "down")

    def expected_module(self, expert: int, role: str) -> str:
        """The name of a projection, or the name it would have by the pattern of its neighbours."""
        if (expert, role) in self.modules:
            return self.modules[expert, role]
        leaves = {r: m.rpartition(".")[2] for (_, r), m in self.modules.items()}
        short = any(leaf in ("w1", "w2", "w3") for leaf in leaves.values())
        names = (
            {"gate": "w1", "up": "w3", "down": "w2"}
            if short
            else {r: f"{r}_proj" for r in ("gate", "up", "down", "gate_up")}
        )
        return f"{self.block}.experts.{expert}.{leaves.get(role, names[role])}"


def discover_moe_layers(
    names: Iterable[str], leave: Callable[[str], bool] = lambda name: False
) -> dict[int, MoELayer]:
    """Finds the MoE layers among tensor names, in layer order.

    Args:
        names: all tensor names.
        leave: whether a tensor below `experts` that belongs to no numbered expert is somebody else's to read;
            such a layer is not listed.

    Raises:
        CheckpointError: experts stored all in one tensor, an expert with two names for one role, two stacks
            that claim the same layer, a router whose experts are missing, a block of an unknown name, or layers
            without gate projections beside layers with them.
    """
    found: dict[tuple[str, int], MoELayer] = {}
    routers: dict[tuple[str, int], str] = {}
    fused: list[str] = []
    left: set[tuple[str, int]] = set()
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is None:
            if other := _OTHER.fullmatch(name):
                if is_extra(other["stack"]) or other["rest"] in _ROUTER_TENSORS:
                    continue
                if leave(name):
                    left.add((other["stack"], int(other["layer"])))
                else:
                    fused.append(name)
            elif router := _ROUTER.fullmatch(name):
                routers[router["stack"], int(router["layer"])] = (
                    f"{router['stack']}layers.{router['layer']}.{router['block']}"
                )
            continue
        if is_extra(match["stack"]):
            continue
        if match["block"] not in (None, *BLOCKS):
            raise CheckpointError(
                f"{name}: the MoE block must be one of {', '.join(BLOCKS)}, got {match['block']}"
            )
        _add(found, match, name)
    if fused:
        raise CheckpointError(
            f"{len(fused)} tensors below `experts` do not belong to one numbered expert "
            "(experts.N.<projection>.<tensor>), nor are they compressed-tensors' packed weights [E, O, I / k] of all E "
            f"experts with what goes with them [E, ...], and are not understood: {listed(fused)}"
        )
    for key, block in routers.items():
        if key not in found and key not in left and not is_extra(key[0]) and _looks_routed(block, found):
            raise CheckpointError(f"layer {key[1]} has the router of {block} but no tensor of its experts")
    return _by_number(found)


def is_extra(stack: str) -> bool:
    """Whether a name belongs to a stack that predicts further tokens."""
    return any(part.startswith(_EXTRA_STACKS) for part in stack.split("."))


def _looks_routed(block: str, found: dict[tuple[str, int], MoELayer]) -> bool:
    """Whether a block with a `gate` is of the kind that has experts in other layers (a dense gate is
    something else).
    """
    return not found or any(
        layer.block.rpartition(".")[2] == block.rpartition(".")[2] for layer in found.values()
    )


def _add(found: dict[tuple[str, int], MoELayer], match: re.Match[str], name: str) -> None:
    number, expert = int(match["layer"]), int(match["expert"])
    block = f"{match['stack']}layers.{match['layer']}"
    if match["block"] is not None:
        block += f".{match['block']}"
    layer = found.setdefault((match["stack"], number), MoELayer(number, block))
    if layer.block != block:
        raise CheckpointError(f"layer {number} has experts under {layer.block} and under {block}")
    role = ROLES.get(match["projection"])
    if role is None:
        layer.unknown.append(name)
        return
    module = f"{block}.experts.{match['expert']}.{match['projection']}"
    if layer.modules.setdefault((expert, role), module) != module:
        raise CheckpointError(
            f"expert {expert} of layer {number} has two {role} projections: "
            f"{layer.modules[expert, role]}, {module}"
        )
    layer.tensors.setdefault(module, set()).add(match["tensor"])


def _by_number(found: dict[tuple[str, int], MoELayer]) -> dict[int, MoELayer]:
    layers: dict[int, MoELayer] = {}
    for layer in sorted(found.values(), key=lambda item: item.number):
        if layer.number in layers:
            raise CheckpointError(
                f"two stacks hold experts of layer {layer.number}: "
                f"{layers[layer.number].block} and {layer.block}"
            )
        layers[layer.number] = layer
    # An activation with a gate and one without are both plausible; what tells a missing gate is its neighbours.
    ungated = [n for n, layer in layers.items() if layer.modules and not layer.has_gate]
    gated = [n for n, layer in layers.items() if layer.has_gate]
    if gated and ungated:
        raise CheckpointError(
            f"no expert of layers {listed(map(str, ungated))} has a gate projection, but the experts of layers "
            f"{listed(map(str, gated))} have: gate projections are missing"
        )
    return layers
