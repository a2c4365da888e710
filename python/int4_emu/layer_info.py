"""What `Checkpoint.describe` and `inspect` say about a layer."""

from __future__ import annotations

from dataclasses import dataclass

from .group_order import GroupOrders
from .layer_plan import LayerPlan


@dataclass(frozen=True)
class ProjectionInfo:
    """How one or more projections of a layer are stored.

    Attributes:
        roles: `gate`, `up` (or `gate_up`, both in one tensor), `down`: those stored this way.
        format: storage format, or the dtype of a floating-point weight.
        bits: 4, 8, or the width of the float.
        group_size: -1 is per channel; None for floats.
        symmetric: None for floats.
        act_order: a permuted g_idx is on disk.
        scales_dtype: dtype of the scales, None for floats.
    """

    roles: tuple[str, ...]
    format: str
    bits: int
    group_size: int | None
    symmetric: bool | None
    act_order: bool
    scales_dtype: str | None


@dataclass(frozen=True)
class LayerInfo:
    """One MoE layer.

    Attributes:
        layer: its number; `name` is the full name of the MoE block.
        projections: one entry for each way in which projections are stored; mostly one.
        activation: name, with `limit`, `alpha`, `beta` where it takes them.
        packed_bytes, dequantized_bytes: of all experts; dequantised in 16 bits.
        packed_refusal: why the layer cannot stay packed on any backend, or None.
    """

    layer: int
    name: str
    num_experts: int
    top_k: int | None
    hidden_size: int
    intermediate_size: int
    projections: tuple[ProjectionInfo, ...]
    activation: str
    limit: float | None
    alpha: float | None
    beta: float | None
    has_bias: bool
    packed_bytes: int
    dequantized_bytes: int
    packed_refusal: str | None


def describe_layer(plan: LayerPlan, orders: GroupOrders, top_k: int | None) -> LayerInfo:
    """Sums a plan up; reads nothing but g_idx, which `orders` holds."""
    ways: dict[tuple[object, ...], list[str]] = {}
    for (expert, role), projection in plan.projections.items():
        scheme, dtype = projection.scheme, str(projection.dtype).removeprefix("torch.")
        if scheme is None:
            way: tuple[object, ...] = (dtype, projection.dtype.itemsize * 8, None, None, False, None)
        else:
            act_order = (expert, role) in orders.g_idx
            way = (scheme.format.name, scheme.bits, scheme.group_size, scheme.symmetric, act_order, dtype)
        roles = ways.setdefault(way, [])
        if role not in roles:
            roles.append(role)
    spec = plan.activation
    return LayerInfo(
        layer=plan.layer.number,
        name=plan.layer.block,
        num_experts=plan.num_experts,
        top_k=top_k,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        projections=tuple(ProjectionInfo(tuple(roles), *way) for way, roles in ways.items()),  # type: ignore[arg-type]
        activation=spec.activation.name,
        limit=spec.limit,
        alpha=spec.alpha,
        beta=spec.beta,
        has_bias=plan.has_bias,
        packed_bytes=plan.packed_bytes(),
        dequantized_bytes=plan.num_experts
        * (plan.w13_parts + 1)
        * plan.hidden_size
        * plan.intermediate_size
        * 2,
        packed_refusal=plan.packed_refusal() or orders.refusal,
    )
