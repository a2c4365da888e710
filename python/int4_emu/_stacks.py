"""Experts that a file keeps all in one quantised tensor, told apart: `experts.up_proj.weight_packed` [E, O, I / 8] stands
for E tensors `experts.N.up_proj.weight_packed` [O, I / 8].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import CheckpointError

# compressed-tensors names what belongs to a parameter after it (`up_proj_packed`), and to a Linear below it
# (`up_proj.weight_packed`).
_STACK = re.compile(
    r"(?P<experts>(?:.+\.)?experts)\.(?P<projection>(?:gate_up|gate|up|down)_proj)"
    r"(?:[._]weight_|[._](?=bias)|_)(?P<part>packed|scale|zero_point|shape|bias)"
)


# Twenty times what the largest models have. A header may claim any number of experts of no size at all.
_MOST_PARTS = 1 << 22


@dataclass(frozen=True)
class Slice:
    """Where one expert's tensor lies.

    Attributes:
        stack: the stored tensor's name.
        index: the expert, or what it takes of a tensor that says the same of all.
        shape: of the expert's part.
    """

    stack: str
    index: int | slice
    shape: tuple[int, ...]


def slices_of_stacks(stored: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, list[tuple[str, Slice]]]:
    """The experts' tensors by name, for each stack that holds packed weights.

    Args:
        stored: (name, shape) of the tensors on disk.

    Returns:
        Name of the stack to (name, slice) of its parts. A projection whose tensors are not all stacks of the same number
        of experts is left as it is.

    Raises:
        CheckpointError: more experts than any model has.
    """
    groups: dict[tuple[str, str], dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in stored:
        if match := _STACK.fullmatch(name):
            groups.setdefault((match["experts"], match["projection"]), {})[match["part"]] = (name, shape)
    found: dict[str, list[tuple[str, Slice]]] = {}
    total = 0
    for (experts, projection), parts in groups.items():
        packed = parts.get("packed", ("", ()))[1]
        if len(packed) != 3 or any(
            shape[:1] != packed[:1] and not (part == "shape" and shape == (3,))
            for part, (_, shape) in parts.items()
        ):
            continue
        total += packed[0] * len(parts)
        if total > _MOST_PARTS:
            raise CheckpointError(
                f"{experts}.{projection} has {packed[0]} experts: no model has {total} tensors of experts"
            )
        for part, (name, shape) in parts.items():
            suffix = part if part == "bias" else f"weight_{part}"
            for expert in range(packed[0]):
                # The shape of the whole stack [E, O, I] ends in the shape of one.
                own = Slice(name, slice(1, 3), (2,)) if shape == (3,) else Slice(name, expert, shape[1:])
                found.setdefault(name, []).append((f"{experts}.{expert}.{projection}.{suffix}", own))
    return found
