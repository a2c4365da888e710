"""`Experts.from_*`: one constructor for each format of checkpoint tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .stacking import canonical_experts

if TYPE_CHECKING:
    from typing_extensions import Self


class FromFormats:
    """Mixed into `Experts`, whose constructor these call."""

    if TYPE_CHECKING:

        def __init__(self, w13: Tensor, w2: Tensor, **options: Any) -> None: ...

    @classmethod
    def from_dense(cls, w13: Tensor, w2: Tensor, **options: Any) -> Self:
        """Floating-point weights [E, 2I, H] and [E, H, I]; options as in the constructor."""
        return cls(w13, w2, **options)

    @classmethod
    def from_format(
        cls, format: Any, gate: Any, up: Any, down: Any, *, group_size: int, **options: Any
    ) -> Self:
        """Stacked checkpoint tensors of any format; see `int4_emu.stacking.canonical_experts` for the arguments."""
        weights, rest = canonical_experts(format, gate, up, down, group_size=group_size, options=options)
        return cls(**weights, **rest)

    @classmethod
    def from_compressed_tensors(
        cls, gate: Any, up: Any, down: Any, *, group_size: int, **options: Any
    ) -> Self:
        """compressed-tensors pack-quantized: weight_packed, weight_scale, weight_zero_point, weight_g_idx."""
        return cls.from_format("compressed_tensors", gate, up, down, group_size=group_size, **options)

    @classmethod
    def from_gptq(
        cls, gate: Any, up: Any, down: Any, *, group_size: int, version: int = 1, **options: Any
    ) -> Self:
        """GPTQ: qweight, qzeros, scales, g_idx. version 1 stores zero - 1 (`gptq`), 2 the zero itself (`gptq_v2`)."""
        if version not in (1, 2):
            raise ValueError(f"version must be 1 or 2, got {version}")
        return cls.from_format(f"gptq_v{version}", gate, up, down, group_size=group_size, **options)

    @classmethod
    def from_awq(cls, gate: Any, up: Any, down: Any, *, group_size: int, **options: Any) -> Self:
        """AWQ `gemm`: qweight, qzeros, scales."""
        return cls.from_format("awq", gate, up, down, group_size=group_size, **options)

    @classmethod
    def from_auto_round(
        cls,
        gate: Any,
        up: Any,
        down: Any,
        *,
        group_size: int,
        packing_format: str = "auto_round:auto_gptq",
        **options: Any,
    ) -> Self:
        """AutoRound: `auto_round:auto_gptq` is GPTQ v1 without g_idx, `auto_round:auto_awq` is AWQ gemm."""
        formats = {"auto_round:auto_gptq": "gptq_v1", "auto_round:auto_awq": "awq"}
        if packing_format not in formats:
            raise ValueError(f"packing_format must be one of {', '.join(formats)}, got {packing_format!r}")
        return cls.from_format(formats[packing_format], gate, up, down, group_size=group_size, **options)

    @classmethod
    def from_quark(
        cls,
        gate: Any,
        up: Any,
        down: Any,
        *,
        group_size: int,
        dtype_name: str = "int4",
        pack_method: str = "reorder",
        **options: Any,
    ) -> Self:
        """AMD Quark: weight, weight_scale, weight_zero_point; dtype_name int4, uint4, int8 or uint8, group_size -1 = per_channel."""
        kinds = {"int4": ("int", 4), "uint4": ("uint", 4), "int8": ("int", 8), "uint8": ("uint", 8)}
        if dtype_name not in kinds or pack_method not in ("order", "reorder"):
            raise ValueError(
                f"dtype_name must be one of {', '.join(kinds)} and pack_method order or reorder, got {dtype_name!r}, {pack_method!r}"
            )
        sign, bits = kinds[dtype_name]
        channel = "_channel" if group_size == -1 else ""
        return cls.from_format(
            f"quark_{sign}{channel}_{pack_method}",
            gate,
            up,
            down,
            group_size=group_size,
            bits=bits,
            **options,
        )
