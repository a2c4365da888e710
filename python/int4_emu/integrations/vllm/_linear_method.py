"""vLLM's Linears on int4_emu. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearMethodBase

from ...errors import CheckpointError
from ...formats import ModelQuantization
from ._captured import known_suffixes, placeholder, take_intake
from ._linear_intake import LinearIntake, LinearRequest

_SHARDS = {"q": 0, "k": 1, "v": 2, "index_q": 3, "index_k": 4}


class Int4EmuLinearMethod(LinearMethodBase):
    """Collects a Linear's tensors through placeholders that vLLM's loader finds by name, and runs int4_emu's modules."""

    def __init__(
        self, quantization: ModelQuantization, prefix: str, names: tuple[str, ...], weights: str
    ) -> None:
        self.quantization = quantization
        self.prefix = prefix
        self.names = names
        self.weights = weights

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        names = self.names
        if len(names) != len(output_partition_sizes):
            if len(output_partition_sizes) != 1:
                raise CheckpointError(
                    f"{self.prefix}: vLLM stacks {len(output_partition_sizes)} Linears, and their names are not known: "
                    f"{', '.join(names)}"
                )
            names = (self.prefix,)
        low = layer.tp_rank * input_size_per_partition if input_size != input_size_per_partition else 0
        request = LinearRequest(
            modules=names,
            rows=tuple(output_partition_sizes),
            fused_rows=_fused_rows(layer, len(names)),
            in_features=input_size,
            columns=(low, low + input_size_per_partition),
            tp_rank=layer.tp_rank,
            tp_size=layer.tp_size,
            dtype=params_dtype,
            device=torch.empty(0).device,  # vLLM builds models under the target device
            weights=self.weights,
        )
        layer.int4_emu_intake = LinearIntake(request, self.quantization, self.prefix)
        for suffix in known_suffixes(self.quantization):
            layer.register_parameter(suffix, placeholder(suffix, _loader(layer, suffix)))

    def process_weights_after_loading(self, layer: Any) -> None:
        modules = take_intake(layer, self.prefix).finish()
        for suffix in known_suffixes(self.quantization):
            del layer._parameters[suffix]
        layer.int4_emu_parts = torch.nn.ModuleList(modules)
        if len(modules) == 1 and isinstance(modules[0], torch.nn.Linear):
            # What a host that reads the weight itself expects of a Linear in floating point.
            layer.weight = modules[0].weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = [part(x) for part in layer.int4_emu_parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias


def _fused_rows(layer: Any, parts: int) -> tuple[int, ...] | None:
    """Output rows of each part of the whole layer, for checkpoints that store the parts as one."""
    if parts == 1:
        return None
    if hasattr(layer, "total_num_kv_heads"):  # vLLM's output_sizes count replicated heads once a rank
        q = layer.total_num_heads * layer.head_size
        k, v = layer.total_num_kv_heads * layer.head_size, layer.total_num_kv_heads * layer.v_head_size
        return (q, k, v) if parts == 3 else None
    sizes = getattr(layer, "output_sizes", None)
    return tuple(sizes) if sizes is not None and len(sizes) == parts else None


def _loader(layer: Any, suffix: str) -> Any:
    """vLLM's `weight_loader` of one placeholder."""

    def load(param: Any, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        part = _SHARDS.get(loaded_shard_id) if isinstance(loaded_shard_id, str) else loaded_shard_id
        if part is not None and not isinstance(part, int):
            raise CheckpointError(
                f"{suffix} of parts {loaded_shard_id!r} of a stacked Linear in one tensor is not supported"
            )
        if loaded_shard_id is not None and part is None:
            raise CheckpointError(f"shard id must be one of {', '.join(_SHARDS)}, got {loaded_shard_id!r}")
        layer.int4_emu_intake.put(part, suffix, loaded_weight)

    return load
