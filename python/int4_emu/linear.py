"""Int4Linear: a Linear whose int4 or int8 weight stays packed; the dense Linears of a quantised checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import _checks, _checks_moe, ops
from .act_order import in_input_order

_FIXED_DTYPE = ("qweight", "scales", "qzeros", "perm")


class Int4Linear(nn.Module):
    """x @ dequantize(qweight).T + bias; the weight is dequantised tile by tile in every call (`ops.grouped_gemm` with one expert)."""

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None
    perm: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor | None = None,
        *,
        perm: Tensor | None = None,
        bias: Tensor | None = None,
        bits: int = 4,
        group_size: int,
        in_features: int | None = None,
    ) -> None:
        """Takes canonical tensors over.

        Args:
            qweight: uint8 [O, ceil(I * bits / 8)].
            scales: [O, C] bfloat16, float16 or float32.
            qzeros: uint8 [O, C] or None = symmetric.
            perm: int32 [I], act-order: column j of qweight meets x[..., perm[j]].
            bias: [O].
            bits: 4 or 8.
            group_size: input columns per group, -1 = per-channel.
            in_features: I; None = as many columns as qweight has codes.

        Raises:
            ValueError, TypeError: tensors that contradict each other.
        """
        super().__init__()
        _checks.check_bits(bits)
        _checks.check_dim(qweight, "qweight", (2,), "[O, I * bits / 8]")
        self.out_features = qweight.shape[0]
        self.in_features = qweight.shape[1] * 8 // bits if in_features is None else in_features
        self.bits = bits
        self.group_size = self.in_features if group_size == -1 else group_size
        given = {"qweight": qweight, "scales": scales, "qzeros": qzeros, "perm": perm, "bias": bias}
        for name, tensor in given.items():
            self.register_parameter(
                name, None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            )
        x = scales.new_empty((0, self.in_features), dtype=torch.float32)
        weight, offsets, options = self._arguments(0)
        _checks_moe.check_grouped_gemm(x, weight, offsets, **options)

    def _arguments(self, rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        def stack(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.unsqueeze(0)

        offsets = self.qweight.new_zeros(2, dtype=torch.int64)
        offsets[1:] += rows
        options = {
            "scales": stack(self.scales),
            "qzeros": stack(self.qzeros),
            "perm": stack(self.perm),
            "bias": stack(self.bias),
            "group_size": self.group_size,
            "bits": self.bits,
            "layout": 0,
        }
        return self.qweight.unsqueeze(0), offsets, options

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] in bfloat16, float16 or float32 to [..., O] in the same dtype."""
        # Rows of 2i - 1 and 2i codes take the same bytes, so that the op cannot tell a row that is one column short.
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be [..., I] with I = {self.in_features}, got {list(x.shape)}")
        rows = x.reshape(-1, self.in_features)
        weight, offsets, options = self._arguments(rows.shape[0])
        return ops.grouped_gemm(rows, weight, offsets, **options).view(*x.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The dense weight [O, I], columns in input order."""
        dense = ops.dequantize(
            self.qweight,
            self.scales,
            self.qzeros,
            group_size=self.group_size,
            bits=self.bits,
            in_features=self.in_features,
            dtype=dtype,
        )
        return in_input_order(dense, self.perm)

    def _apply(self, fn: Any, recurse: bool = True) -> Int4Linear:
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            moved = fn(parameter.data)
            # A cast must leave codes, indices and scales alone.
            if name in _FIXED_DTYPE and moved.dtype != parameter.dtype:
                moved = parameter.data.to(moved.device)
            self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        return self

    def extra_repr(self) -> str:
        group = "per-channel" if self.group_size == self.in_features else f"g{self.group_size}"
        kind = "symmetric" if self.qzeros is None else "asymmetric"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int{self.bits} {group} {kind}"
            f"{' act-order' if self.perm is not None else ''}"
        )
