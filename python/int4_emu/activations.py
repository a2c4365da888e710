"""Which parameters each activation takes: the one place that Python code asks."""

from __future__ import annotations

import math

from ._enums import Activation, parse_enum

_TAKES: dict[Activation, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # activation: (required parameters, optional parameters)
    Activation.silu: ((), ("limit",)),
    Activation.swigluoai: (("limit", "alpha", "beta"), ()),
}


def check_activation(
    activation: Activation | int | str,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> Activation:
    """Validates an activation with its parameters; none is ever dropped or defaulted.

    Returns:
        The enum member.

    Raises:
        ValueError: unknown activation, a required parameter is missing, one is given that it does not take, `limit` is not positive,
            or `alpha` or `beta` is not finite.
    """
    kind = parse_enum(Activation, activation, "activation")
    required, optional = _TAKES.get(kind, ((), ()))
    given = {"limit": limit, "alpha": alpha, "beta": beta}
    missing = [n for n in required if given[n] is None]
    if missing:
        raise ValueError(f"activation {kind.name} needs {', '.join(required)}; missing {', '.join(missing)}")
    extra = [f"{n}={v}" for n, v in given.items() if v is not None and n not in required + optional]
    if extra:
        takes = ", ".join(required + optional) or "no parameter"
        raise ValueError(f"activation {kind.name} takes {takes}, got {', '.join(extra)}")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value} (activation {kind.name})")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be > 0, got {limit} (activation {kind.name})")
    return kind
