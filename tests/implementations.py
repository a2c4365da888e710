"""What the numeric tests run on: the same cases judge every implementation that is present."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

import int4_emu
from int4_emu import _library
from int4_emu import ops as compiled_ops
from int4_emu import reference as reference_ops


class OnGpu:
    """`int4_emu.ops` for callers with CPU tensors: arguments travel to the GPU, results and `out` tensors back."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(compiled_ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moved = {key: _to_gpu(value) for key, value in kwargs.items()}
            result = op(*map(_to_gpu, args), **moved)
            for key, value in kwargs.items():
                if key.startswith("out") and isinstance(value, Tensor) and key != "out_perm":
                    value.copy_(moved[key])
                    if moved[key] is result:
                        return value
            return _to_cpu(result)

        return call


def _to_gpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Strides stay: they are what some tests are about.
    span = (
        sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
    )
    flat = value.detach().as_strided((span,), (1,), value.storage_offset())
    return flat.to("cuda").as_strided(value.shape, value.stride())


def _to_cpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_to_cpu, value))
    return value.cpu() if isinstance(value, Tensor) else value


# Each offers every op under one name.
IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference_ops}
if int4_emu.is_compiled():
    IMPLEMENTATIONS["cpu"] = compiled_ops
if torch.cuda.is_available() and _library.gpu_architectures()[0] is not None:
    IMPLEMENTATIONS["gpu"] = cast(ModuleType, OnGpu())
