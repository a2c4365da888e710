"""Finds, checks and reads the projections of a checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from . import ops
from ._shards import TensorFiles
from .act_order import is_trivial
from .errors import CheckpointError
from .formats import ModelQuantization, QuantScheme, TensorAxes, tensor_axes, tensor_names
from .projection import (
    FLOAT_DTYPES,
    Bounds,
    Projection,
    RawTensors,
    check_dtypes,
    check_shape,
    names_of,
    storage_cuts,
)

logger = logging.getLogger("int4_emu.checkpoint")

# What to do with a file that is declared symmetric and holds other zero points than the midpoint.
ContradictingZeros = Literal["raise", "use_label", "use_values"]

_PACKED_SUFFIXES = ("weight_packed", "qweight")


class ProjectionReader:
    """Finds, checks and reads projections; remembers which tensors were used.

    Args:
        files: the checkpoint's tensors.
        quantization: what the configuration declares; None for a floating-point model.
        contradicting_zeros: see `Checkpoint`.
    """

    def __init__(
        self,
        files: TensorFiles,
        quantization: ModelQuantization | None,
        *,
        contradicting_zeros: ContradictingZeros = "raise",
    ) -> None:
        self.files = files
        self.quantization = quantization
        self.contradicting_zeros = contradicting_zeros
        self.consumed: set[str] = set()

    def stored_kind(self, module: str) -> str | None:
        """`quantized`, `float`, or None where no weight of the module is on disk. Tensor types decide, never
        values.
        """
        if any(f"{module}.{s}" in self.files.infos for s in _PACKED_SUFFIXES):
            return "quantized"
        weight = self.files.infos.get(f"{module}.weight")
        if weight is None:
            return None
        # Quark calls the packed tensor .weight too: int32, or int8 with a scale beside it.
        if weight.dtype in (torch.int32, torch.int8, torch.uint8):
            return "quantized"
        return "float"

    def scheme_for(self, module: str) -> QuantScheme | None:
        """The declared scheme, decided together with what is on disk.

        The name on disk is asked first. Where configuration and disk disagree, the names that the same module
        has in other files and in memory are tried before the clash is an error.

        Raises:
            CheckpointError: declared quantised and stored in floating point, or the other way round.
        """
        stored = self.stored_kind(module) == "quantized"
        if self.quantization is None:
            if stored:
                raise CheckpointError(
                    f"{module} is quantised on disk, but config.json has no quantization_config"
                )
            return None
        # A list that names this very module is not outvoted by the module's other spellings.
        names = names_of(module)
        info = self.files.infos.get(f"{module}.weight_packed")
        if info is not None and info.is_part:
            # The tool saw one parameter, without an expert's number in its name.
            names += [re.sub(r"(^|\.)experts\.\d+\.", r"\1experts.", name) for name in names]
        for name in () if stored and self.quantization.excludes(module) else names:
            scheme = self.quantization.scheme_for(name)
            if (scheme is not None) == stored:
                return scheme
        if stored:
            raise CheckpointError(
                f"{module} is quantised on disk, but the quantization_config leaves it in floating point"
            )
        raise CheckpointError(
            f"{module} is in floating point on disk, but the quantization_config declares it quantised"
        )

    def inspect(self, module: str, problems: list[str], like: Projection | None = None) -> Projection | None:
        """Checks one projection by the file headers, and by its `weight_shape` if it has one.

        Args:
            module: its name.
            problems: gets a line for what is missing or malformed.
            like: the same projection of another expert. What it has left of the last word is taken to be
                left here too, and `read()` checks that: a rank needs no page of the experts of others.

        Returns:
            The projection, or None where `problems` got a line for what is missing or malformed.
        """
        kind = self.stored_kind(module)
        if kind is None:
            problems.append(self._missing_weight(module))
            return None
        scheme = self.scheme_for(module)
        if scheme is None:
            return self._inspect_float(module, problems)
        if self.contradicting_zeros == "use_values" and self._stores_zeros(module, scheme):
            scheme = replace(scheme, symmetric=False)
        return self._inspect_quantized(module, scheme, problems, like)

    def _stores_zeros(self, module: str, scheme: QuantScheme) -> bool:
        info = self.files.infos.get(f"{module}.{tensor_names(scheme.format).qzeros}")
        ignored = self.quantization is not None and self.quantization.zeros_ignored_if_symmetric
        return info is not None and info.numel > 0 and not ignored

    def _missing_weight(self, module: str) -> str:
        scheme = self.quantization.scheme_for(module) if self.quantization is not None else None
        suffix = tensor_names(scheme.format).qweight if scheme is not None else "weight"
        return f"{module}.{suffix} is missing"

    def _inspect_float(self, module: str, problems: list[str]) -> Projection | None:
        info = self.files.infos[f"{module}.weight"]
        if info.dtype not in FLOAT_DTYPES or len(info.shape) != 2:
            problems.append(
                f"{info.name} must be a float16, bfloat16 or float32 [O, I], "
                f"got {info.stored_dtype} {list(info.shape)}"
            )
            return None
        rows, columns = info.shape
        has_bias = self._check_bias(module, rows, problems)
        return Projection(module, None, rows, columns, 0, info.dtype, has_bias=has_bias)

    def _inspect_quantized(
        self, module: str, scheme: QuantScheme, problems: list[str], like: Projection | None
    ) -> Projection | None:
        names, axes = tensor_names(scheme.format), tensor_axes(scheme.format, scheme.bits)
        infos = self.files.infos
        qweight, scales = infos.get(f"{module}.{names.qweight}"), infos.get(f"{module}.{names.scales}")
        if qweight is None or scales is None:
            suffix = names.qweight if qweight is None else names.scales
            problems.append(f"{module}.{suffix} is missing")
            return None
        before = len(problems)
        check_dtypes(scheme, axes, qweight, scales, problems)
        if len(problems) > before:
            return None
        per_word = 32 // scheme.bits
        rows = scales.shape[axes.scales.index("O")]
        padded = self._padded_columns(module, scheme)
        assumed = None
        if like is not None and like.scheme == scheme and 0 <= padded - like.in_features < per_word:
            assumed = like.in_features
        columns = self._unpadded_columns(module, scheme, rows) if assumed is None else assumed
        group = columns if scheme.group_size == -1 else scheme.group_size
        groups = -(-columns // group) if group else 0
        sizes = {
            "O": rows,
            "I": columns,
            "C": groups,
            "O*": -(-rows // per_word),
            "I*": -(-columns // per_word),
        }
        for info, dims in ((qweight, axes.qweight), (scales, axes.scales)):
            check_shape(info, dims, sizes, scheme, columns, problems)
        has_qzeros = self._check_qzeros(module, scheme, axes, sizes, columns, problems)
        g_idx = infos.get(f"{module}.{names.g_idx}") if names.g_idx else None
        has_g_idx = g_idx is not None and g_idx.numel > 0
        if g_idx is not None and has_g_idx and (g_idx.dtype is not torch.int32 or g_idx.shape != (columns,)):
            problems.append(
                f"{g_idx.name} must be int32 [I] = [{columns}], got {g_idx.stored_dtype} {list(g_idx.shape)}"
            )
        has_bias = self._check_bias(module, rows, problems)
        if len(problems) > before or scales.dtype is None:
            return None
        return Projection(
            module,
            scheme,
            rows,
            columns,
            groups,
            scales.dtype,
            has_qzeros,
            has_g_idx,
            has_bias,
            assumed is not None,
        )

    def _padded_columns(self, module: str, scheme: QuantScheme) -> int:
        axes = tensor_axes(scheme.format, scheme.bits).qweight
        shape = self.files.infos[f"{module}.{tensor_names(scheme.format).qweight}"].shape
        return shape[axes.index("I*")] * (32 // scheme.bits) if "I*" in axes else shape[axes.index("I")]

    def _unpadded_columns(self, module: str, scheme: QuantScheme, rows: int) -> int:
        """Drops the padding of the last word where `weight_shape` says so and fits the tensors; it is never
        trusted further.
        """
        columns, suffix = self._padded_columns(module, scheme), tensor_names(scheme.format).shape
        info = self.files.infos.get(f"{module}.{suffix}") if suffix else None
        if info is None or info.shape != (2,) or info.dtype not in (torch.int64, torch.int32):
            return columns
        shape = [int(v) for v in self.files.get(info.name)]
        if shape[0] == rows and columns - 32 // scheme.bits < shape[1] <= columns:
            return shape[1]
        logger.warning(
            "%s = %s does not fit the packed tensor [%d, %d] and is ignored", info.name, shape, rows, columns
        )
        return columns

    def _check_qzeros(
        self,
        module: str,
        scheme: QuantScheme,
        axes: TensorAxes,
        sizes: dict[str, int],
        columns: int,
        problems: list[str],
    ) -> bool:
        info = self.files.infos.get(f"{module}.{tensor_names(scheme.format).qzeros}")
        if info is None or info.numel == 0:
            if not scheme.symmetric and sizes["O"] * sizes["C"] > 0:
                state = "is missing" if info is None else f"is empty {list(info.shape)}"
                name = f"{module}.{tensor_names(scheme.format).qzeros}"
                problems.append(
                    f"{name} {state}, and the quantization_config does not declare the weight symmetric"
                )
            return False
        if scheme.symmetric and (
            self.contradicting_zeros == "use_label" or not self._stores_zeros(module, scheme)
        ):
            return False
        packed = any(d.endswith("*") for d in axes.qzeros)
        if info.dtype not in ((torch.int32,) if packed else (torch.int8, torch.uint8)):
            problems.append(
                f"{info.name} must be {'int32' if packed else 'int8 or uint8'}, got {info.stored_dtype}"
            )
        else:
            check_shape(info, axes.qzeros, sizes, scheme, columns, problems)
        return True

    def _check_bias(self, module: str, rows: int, problems: list[str]) -> bool:
        info = self.files.infos.get(f"{module}.bias")
        if info is None:
            return False
        if info.dtype not in FLOAT_DTYPES or info.shape != (rows,):
            problems.append(
                f"{info.name} must be floating point [O] = [{rows}], "
                f"got {info.stored_dtype} {list(info.shape)}"
            )
        return True

    def suffixes_used(self, projection: Projection) -> tuple[str, ...]:
        """The tensors that belong to a projection, by suffix, whether used or empty."""
        known = ("weight",) if projection.scheme is None else tensor_names(projection.scheme.format).all()
        return (*known, "bias")

    def consume(self, projection: Projection) -> None:
        """Marks a projection's tensors as used."""
        names = (f"{projection.module}.{s}" for s in self.suffixes_used(projection))
        self.consumed.update(n for n in names if n in self.files.infos)

    def read_group_order(self, projection: Projection) -> torch.Tensor | None:
        """g_idx int32 [I], validated; None where it is absent, empty or trivial (k // group_size).

        Raises:
            CheckpointError: an entry outside [0, C).
        """
        if projection.scheme is None or not projection.has_g_idx:
            return None
        name = f"{projection.module}.{tensor_names(projection.scheme.format).g_idx}"
        g_idx = self.files.get(name)
        low, high = (int(v) for v in torch.aminmax(g_idx))
        if low < 0 or high >= projection.num_groups:
            wrong = low if low < 0 else high
            raise CheckpointError(f"{name} must be in [0, C) = [0, {projection.num_groups}), got {wrong}")
        return None if is_trivial(g_idx, projection.group_size) else g_idx

    def can_cut(self, projection: Projection, rows: Bounds | None, columns: Bounds | None) -> bool:
        """Whether a range of rows or columns is a whole part of every stored tensor (ignoring g_idx)."""
        return storage_cuts(projection, rows, columns) is not None

    def read(
        self,
        projection: Projection,
        rows: Bounds | None = None,
        columns: Bounds | None = None,
    ) -> RawTensors:
        """Views of the stored tensors, cut where asked. Zero points of symmetric weights are checked and
        dropped.

        Raises:
            CheckpointError: zero points contradict the declaration, and `contradicting_zeros` is "raise";
                or `weight_shape` contradicts the expert that the projection was taken to be like.
        """
        scheme = projection.scheme
        assert scheme is not None, "read() is for quantised projections"
        if projection.in_features_assumed:
            unpadded = self._unpadded_columns(projection.module, scheme, projection.out_features)
            if unpadded != projection.in_features:
                raise CheckpointError(
                    f"{projection.module}.{tensor_names(scheme.format).shape} must say {projection.in_features} "
                    f"columns, as in the first expert, got {unpadded}"
                )
        cuts = storage_cuts(projection, rows, columns)
        assert cuts is not None, "can_cut() was not asked"
        names, axes = tensor_names(scheme.format), tensor_axes(scheme.format, scheme.bits)
        get = self._getter(projection, cuts)
        qzeros = get(names.qzeros, axes.qzeros) if projection.has_qzeros else None
        if qzeros is not None and scheme.symmetric:
            low, high = rows or (0, projection.out_features)
            self._check_midpoint(scheme, qzeros, high - low, f"{projection.module}.{names.qzeros}")
            qzeros = None
        return RawTensors(get(names.qweight, axes.qweight), get(names.scales, axes.scales), qzeros)

    def _getter(
        self, projection: Projection, cuts: dict[str, slice]
    ) -> Callable[[str, tuple[str, ...]], torch.Tensor]:
        def get(suffix: str, dims: tuple[str, ...]) -> torch.Tensor:
            name = f"{projection.module}.{suffix}"
            if not cuts:
                return self.files.get(name)
            return self.files.get_slice(name, tuple(cuts.get(d, slice(None)) for d in dims)).contiguous()

        return get

    def _check_midpoint(self, scheme: QuantScheme, qzeros: torch.Tensor, rows: int, name: str) -> None:
        # out_features drops the padding of the last word, which is nobody's zero point.
        zeros = ops.unpack_zeros(qzeros, format=scheme.format, bits=scheme.bits, out_features=rows)
        if zeros.numel() == 0 or bool((zeros == scheme.midpoint).all()):
            return
        low, high = (int(v) for v in torch.aminmax(zeros))
        raise CheckpointError(
            f"{name} contradicts the configuration: declared symmetric, so every zero point must be "
            f"{scheme.midpoint}, but read as {scheme.format.name} they are "
            f"{low if low == high else f'{low} to {high}'}. "
            f"contradicting_zeros='use_label' takes {scheme.midpoint}, 'use_values' takes the stored ones, "
            f"zero_point_format reads them by another convention"
        )
