"""What loading one MoE layer will do, decided and checked before a byte of its weights is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ._enums import W13Order
from ._shards import listed
from .errors import CheckpointError
from .model_config import ActivationSpec, MoEModelConfig
from .moe_layout import MoELayer
from .projection import Projection
from .projection_reader import ProjectionReader


@dataclass
class LayerPlan:
    """One layer's projections, all of them present and of agreeing shapes.

    Attributes:
        layer: its names.
        num_experts, hidden_size, intermediate_size: E, H, I.
        projections: (expert, role) to projection.
        activation: with its parameters.
        w13_order: how gate and up rows lie in w13.
    """

    layer: MoELayer
    num_experts: int
    hidden_size: int
    intermediate_size: int
    projections: dict[tuple[int, str], Projection]
    activation: ActivationSpec
    w13_order: W13Order = W13Order.halves
    unknown: list[str] = field(default_factory=list)

    @property
    def is_quantized(self) -> bool:
        """Whether any projection is quantised."""
        return any(p.scheme is not None for p in self.projections.values())

    @property
    def w13_roles(self) -> tuple[str, ...]:
        """The projections stacked in w13, in row order."""
        return self.layer.w13_roles

    @property
    def w13_parts(self) -> int:
        """How many times I the rows of w13 are: gate and up, or up alone."""
        return 2 if self.layer.has_gate else 1

    @property
    def has_bias(self) -> bool:
        """Whether any projection has a bias."""
        return any(p.has_bias for p in self.projections.values())

    def of_roles(self, roles: Iterable[str]) -> list[Projection]:
        """All experts' projections of the given roles."""
        wanted = tuple(roles)
        return [p for (_, role), p in self.projections.items() if role in wanted]

    def packed_refusal(self) -> str | None:
        """Why the layer cannot stay packed, from headers alone; None where it can."""
        if not self.is_quantized:
            return f"layer {self.layer.number} is in floating point"
        plain = [p.module for p in self.projections.values() if p.scheme is None]
        if plain:
            return (
                f"{len(plain)} projections of layer {self.layer.number} are in floating point beside "
                f"{len(self.projections) - len(plain)} quantised ones ({listed(sorted(plain), 4)})"
            )
        for name, roles in (("w13", self.w13_roles), ("w2", ("down",))):
            kinds = {
                (p.scheme.bits, p.scheme.group_size) for p in self.of_roles(roles) if p.scheme is not None
            }
            if len(kinds) > 1:
                found = ", ".join(f"int{bits} group_size {group}" for bits, group in sorted(kinds))
                return (
                    f"{name} ({', '.join(roles)}) of layer {self.layer.number} has several schemes: {found}"
                )
        return None

    def bits(self, roles: Iterable[str]) -> int:
        """The one width of the given roles (`packed_refusal` is None)."""
        scheme = self.of_roles(roles)[0].scheme
        assert scheme is not None
        return scheme.bits

    def group_size(self, roles: Iterable[str]) -> int:
        """The one group size of the given roles, -1 resolved."""
        return self.of_roles(roles)[0].group_size

    def scales_dtype(self, roles: Iterable[str]) -> torch.dtype:
        """The dtype that holds all scales of the given roles exactly."""
        dtypes = {p.dtype for p in self.of_roles(roles)}
        return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32

    def has_qzeros(self, roles: Iterable[str]) -> bool:
        """Whether any weight of the given roles may have zero points of its own."""
        return any(
            p.has_qzeros and p.scheme is not None and not p.scheme.symmetric for p in self.of_roles(roles)
        )

    def packed_bytes(self, experts: int | None = None, tp_size: int = 1) -> int:
        """Bytes of codes, scales and zero points in the canonical layout."""
        total = 0.0
        for projection in self.projections.values():
            scheme = projection.scheme
            weights = projection.out_features * projection.in_features
            if scheme is None:
                total += weights * projection.dtype.itemsize
                continue
            scales = projection.out_features * projection.num_groups
            asymmetric = projection.has_qzeros and not scheme.symmetric
            total += weights * scheme.bits / 8 + scales * (projection.dtype.itemsize + asymmetric)
        share = (self.num_experts if experts is None else experts) / self.num_experts
        return round(total * share / tp_size)

    def dense_bytes(self, dtype: torch.dtype, experts: int | None = None, tp_size: int = 1) -> int:
        """Bytes of the dequantised weights in a dtype."""
        rows = self.w13_parts + 1
        count = self.num_experts if experts is None else experts
        return count * rows * self.hidden_size * self.intermediate_size * dtype.itemsize // tp_size


def plan_layer(layer: MoELayer, reader: ProjectionReader, model: MoEModelConfig) -> LayerPlan:
    """Builds the coverage table of a layer: each (expert, projection, tensor) must be there in full.

    Raises:
        CheckpointError: tensors are missing or malformed (all of them listed), or sizes contradict each other
            or the configuration.
    """
    ids = layer.expert_ids
    if not ids:
        raise CheckpointError(
            f"layer {layer.number} has no expert under a known name; found {listed(layer.unknown)}"
        )
    count = model.num_experts if model.num_experts is not None else max(ids) + 1
    if extra := sorted(i for i in ids if i >= count):
        raise CheckpointError(
            f"layer {layer.number} has experts {extra}, but the model configuration has {count} experts"
        )
    problems: list[str] = []
    projections: dict[tuple[int, str], Projection] = {}
    roles = layer.roles
    for expert in range(count):
        for role in roles:
            first = projections.get((0, role))
            projection = reader.inspect(layer.expected_module(expert, role), problems, first)
            if projection is not None:
                projections[expert, role] = projection
    if problems:
        raise CheckpointError(f"layer {layer.number}: {len(problems)} problems: {listed(problems)}")
    _check_biases(layer, projections)
    hidden, intermediate = _check_sizes(layer, projections, model)
    plan = LayerPlan(layer, count, hidden, intermediate, projections, model.activation(gated=layer.has_gate))
    if layer.joins_gate_and_up:
        plan.w13_order = model.gate_up_order
    plan.unknown = layer.unknown + _unknown_tensors(layer, projections, reader)
    return plan


def _check_biases(layer: MoELayer, projections: dict[tuple[int, str], Projection]) -> None:
    """A role has a bias in every expert or in none: zeros in place of a lost one would go unseen."""
    for role in layer.roles:
        alike = [p for (_, r), p in projections.items() if r == role]
        missing = [f"{p.module}.bias" for p in alike if not p.has_bias]
        if 0 < len(missing) < len(alike):
            raise CheckpointError(
                f"layer {layer.number}: {len(alike) - len(missing)} of {len(alike)} experts have a {role} bias; "
                f"missing are {listed(missing)}"
            )


def _check_sizes(
    layer: MoELayer, projections: dict[tuple[int, str], Projection], model: MoEModelConfig
) -> tuple[int, int]:
    down = projections[0, "down"]
    hidden, intermediate = down.out_features, down.in_features
    for key, value, what in (
        ("hidden_size", hidden, "rows of down"),
        ("moe_intermediate_size", intermediate, "columns of down"),
    ):
        wanted = model.hidden_size if key == "hidden_size" else model.intermediate_size
        if wanted is not None and wanted != value:
            raise CheckpointError(f"{down.module}: {what} must be {key} = {wanted}, got {value}")
    for (_, role), projection in projections.items():
        rows = 2 * intermediate if role == "gate_up" else intermediate
        wanted_shape = (hidden, intermediate) if role == "down" else (rows, hidden)
        if (projection.out_features, projection.in_features) != wanted_shape:
            raise CheckpointError(
                f"{projection.module} must be [O, I] = {list(wanted_shape)}, "
                f"got {[projection.out_features, projection.in_features]} (H={hidden}, I={intermediate})"
            )
    return hidden, intermediate


def _unknown_tensors(
    layer: MoELayer, projections: dict[tuple[int, str], Projection], reader: ProjectionReader
) -> list[str]:
    unknown: list[str] = []
    for projection in projections.values():
        known = reader.suffixes_used(projection)
        unknown += (
            f"{projection.module}.{s}"
            for s in sorted(layer.tensors.get(projection.module, ()))
            if s not in known
        )
    return unknown
