"""A checkpoint folder, read strictly: safetensors only, every expert tensor accounted for, converted expert
by expert.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import ops
from ._enums import Format
from ._fingerprint import Fingerprint
from ._shards import TensorFiles, TensorInfo, check_inside, listed, read_json_object
from .errors import CheckpointError
from .formats import ModelQuantization, QuantScheme, parse_quantization_config
from .group_order import GroupOrders, intermediate_cut, read_group_orders
from .layer_info import LayerInfo, describe_layer
from .layer_plan import LayerPlan, plan_layer
from .loading import LayerLoader, LoadRequest, check_scales
from .model_config import ActivationSpec, MoEModelConfig, parse_model_config, quantization_config
from .moe_layout import discover_moe_layers
from .progress import LoadProgress
from .projection import FLOAT_DTYPES, Projection
from .projection_reader import ContradictingZeros, ProjectionReader
from .quantized_weight import QuantizedWeight, load_quantized_weight
from .weights_choice import Placement, choose_weights, moe_config

if TYPE_CHECKING:
    from .experts import Experts
    from .quant_config import MoEConfig

logger = logging.getLogger("int4_emu.checkpoint")


class Checkpoint:
    """A folder with config.json and safetensors files.

    Opening reads headers and configuration only. Views that methods return are of the mapped files: copy
    before writing.

    Args:
        path: the model folder.
        strict: unknown tensors under the experts, tensors that the index does not name, and NaN or infinite
            scales raise; otherwise they are logged.
        zero_point_format: reads GPTQ zero points by another convention than the declared one: `gptq_v1`,
            `gptq_v2`, `gptq_v1_nibble`.
        contradicting_zeros: a weight declared symmetric whose stored zero points are not the midpoint raises
            (`raise`), is read with the midpoint (`use_label`) or with the stored ones (`use_values`).
        leave_stacked: floating-point experts that are stored all in one tensor are left to the caller, and
            their layers are not in `moe_layers`; otherwise they raise.

    Attributes:
        config: config.json.
        model: its MoE part.
        quantization: the declared quantisation, None for a floating-point model.

    Raises:
        CheckpointError: anything missing, duplicate, truncated, unsafe or contradictory; the message names
            it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        zero_point_format: Format | int | str | None = None,
        contradicting_zeros: ContradictingZeros = "raise",
        leave_stacked: bool = False,
    ) -> None:
        if contradicting_zeros not in ("raise", "use_label", "use_values"):
            raise ValueError(
                f"contradicting_zeros must be raise, use_label or use_values, got {contradicting_zeros!r}"
            )
        self.path = Path(path)
        self.strict = strict
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder")
        check_inside(self.path, "config.json")
        self.config: dict[str, Any] = read_json_object(self.path / "config.json")
        self.model: MoEModelConfig = parse_model_config(self.config)
        declared = quantization_config(self.config)
        self.quantization: ModelQuantization | None = None
        if declared is not None:
            self.quantization = parse_quantization_config(declared, zero_point_format=zero_point_format)
        self._files = TensorFiles(self.path, strict=strict)
        self._reader = ProjectionReader(
            self._files, self.quantization, contradicting_zeros=contradicting_zeros
        )
        self._layers = discover_moe_layers(
            self._files.infos,
            leave=lambda name: leave_stacked and self._files.infos[name].dtype in FLOAT_DTYPES,
        )
        self._plans: dict[int, LayerPlan] = {}

    # -- names and tensors -----------------------------------------------------------------------------------

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the layers with routed experts, ascending."""
        return list(self._layers)

    def moe_block(self, layer: int) -> str:
        """The full name of a layer's MoE block, `model.layers.3.mlp`."""
        block: str = self._layer(layer).block
        return block

    @property
    def tensor_names(self) -> list[str]:
        """All tensor names, file by file."""
        return list(self._files.infos)

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, from the header.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._files.infos:
            raise CheckpointError(f"tensor {name} is not in {self.path}")
        return self._files.infos[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, a view of the mapped file; counts as consumed."""
        tensor = self._files.get(name)
        self._reader.consumed.add(name)
        return tensor

    def use_activation(self, activation: ActivationSpec) -> None:
        """Takes the experts' activation from the host that is going to run them, where it is known better than
        from the configuration's words.
        """
        self.model = replace(self.model, known_activation=activation)

    def mark_consumed(self, names: Iterable[str]) -> None:
        """Counts tensors as used that the caller read by other ways."""
        self._reader.consumed.update(names)

    def unconsumed(self) -> list[str]:
        """Tensors that nothing has used: after a whole model is loaded, this list must be empty."""
        return [n for n in self._files.infos if n not in self._reader.consumed]

    def expert_tensor_names(self, layer: int) -> list[str]:
        """The tensors of a layer's routed experts."""
        names = self._layer(layer)
        return [
            f"{module}.{s}" for module, suffixes in names.tensors.items() for s in sorted(suffixes)
        ] + names.unknown

    def expert_modules(self, layer: int) -> list[str]:
        """The projections of a layer's routed experts, by full module name."""
        return list(self._layer(layer).modules.values())

    # -- Linears other than experts --------------------------------------------------------------------------

    def quantized_linears(
        self, skip: Callable[[str], bool] = lambda name: False, experts_of: Container[int] = ()
    ) -> dict[str, QuantScheme]:
        """The quantised Linears that are no routed experts (attention, dense and shared MLPs), by full module
        name.

        Args:
            skip: tensor names that are not looked at.
            experts_of: layers whose routed experts count as Linears too.

        Raises:
            CheckpointError: a module is quantised on disk and not declared so; a `*_proj` matrix is declared
                quantised and stored in floating point.
        """
        experts = {m for n in self._layers if n not in experts_of for m in self.expert_modules(n)}
        schemes: dict[str, QuantScheme] = {}
        for name, info in self._files.infos.items():
            module, _, suffix = name.rpartition(".")
            if suffix not in ("weight", "weight_packed", "qweight") or module in experts or skip(name):
                continue
            kind = self._reader.stored_kind(module)
            if kind == "float" and not (module.endswith("_proj") and len(info.shape) == 2):
                # Embeddings, norms and routers: configurations do not list what their tool never quantises.
                continue
            scheme = self._reader.scheme_for(module)
            if scheme is not None:
                schemes[module] = scheme
        return schemes

    def load_linear(self, module: str) -> QuantizedWeight:
        """One quantised Linear in the canonical layout, on the CPU.

        Raises:
            CheckpointError: missing or malformed tensors, or a Linear in floating point.
        """
        projection = self._inspect(module)
        if projection.scheme is None:
            raise CheckpointError(f"{module} is in floating point: read {module}.weight with get_tensor")
        return load_quantized_weight(projection, self._reader, strict=self.strict)

    def linear_shape(self, module: str) -> tuple[int, int]:
        """[O, I] of a Linear, quantised or not, expert or not."""
        projection = self._inspect(module)
        return projection.out_features, projection.in_features

    def dequantize_linear(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        """One quantised projection, expert or not, as a dense weight [O, I] with its columns in input order.

        Raises:
            CheckpointError: missing or malformed tensors, or a Linear in floating point.
        """
        projection = self._inspect(module)
        scheme = projection.scheme
        if scheme is None:
            raise CheckpointError(f"{module} is in floating point: read {module}.weight with get_tensor")
        g_idx = self._reader.read_group_order(projection)
        raw = self._reader.read(projection)
        if self.strict:
            check_scales(projection, raw.scales)
        return ops.dequantize(
            raw.qweight,
            raw.scales,
            raw.qzeros,
            g_idx,
            group_size=projection.group_size,
            format=scheme.format,
            bits=scheme.bits,
            in_features=projection.in_features,
            dtype=dtype,
        )

    def _inspect(self, module: str) -> Projection:
        problems: list[str] = []
        projection = self._reader.inspect(module, problems)
        if projection is None or problems:
            raise CheckpointError(listed(problems))
        return projection

    # -- experts ---------------------------------------------------------------------------------------------

    def describe(self) -> list[LayerInfo]:
        """Formats, shapes and sizes of each MoE layer, without reading weights."""
        infos = []
        for number in self._layers:
            plan = self.plan(number)
            infos.append(describe_layer(plan, self._orders(plan, None), self.model.top_k))
        return infos

    def plan(self, layer: int) -> LayerPlan:
        """The checked plan of a layer: its coverage table, sizes and activation."""
        if layer not in self._plans:
            plan = plan_layer(self._layer(layer), self._reader, self.model)
            if plan.unknown:
                message = f"layer {layer}: unknown tensors under the experts: {listed(plan.unknown)}"
                if self.strict:
                    raise CheckpointError(f"{message} (strict=False ignores them)")
                logger.warning("%s; ignored", message)
            self._plans[layer] = plan
        return self._plans[layer]

    def moe_config(
        self,
        layer: int,
        *,
        weights: str = "packed",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> MoEConfig:
        """The layer as `select_backend` asks for it, so that one can see who would serve it before loading.

        Raises:
            CheckpointError: `packed` of a layer that cannot stay packed; the message has the reason.
        """
        plan = self.plan(layer)
        orders = self._orders(plan, None)
        refusal = plan.packed_refusal() or orders.refusal
        if weights == "packed" and refusal is not None:
            raise CheckpointError(
                f"weights='packed' is not possible since {refusal}; weights='dequantized' is"
            )
        placement = Placement(dtype, torch.device(device), plan.num_experts, top_k=self.model.top_k)
        return moe_config(plan, orders, placement, packed=weights == "packed")

    def load_experts(
        self,
        layer: int,
        *,
        weights: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        expert_ids: Sequence[int] | None = None,
        backend: str | None = None,
    ) -> Experts:
        """Loads the routed experts of one layer.

        Args:
            layer: one of `moe_layers`.
            weights: `packed` keeps int4, `dequantized` unpacks while loading, `auto` takes packed where a
                compiled backend serves it, else dequantised where that fits in the available memory.
            dtype: compute dtype, and dtype of dequantised weights: bfloat16, float16 or float32.
            device: where the experts live; None is the CPU.
            tp_rank, tp_size: this rank's slice of the intermediate size; the ranks' outputs sum to the whole.
            expert_ids: global ids of the experts to load, in the order of the local slots; None loads all.
            backend: passed to `Experts`.

        Raises:
            CheckpointError: see the class; a tensor-parallel cut inside a group; `packed` asked of a layer
                that cannot be.
            BackendError: `auto` found no way; both sizes are in the message.
            ValueError: an unknown layer, rank, id or mode.
            TypeError: a dtype that is not one of the three.
        """
        experts, _ = self._load(layer, weights, dtype, device, (tp_rank, tp_size), expert_ids, backend)
        return experts

    def load_layers(
        self,
        layers: Iterable[int] | None = None,
        *,
        progress: bool = True,
        weights: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        expert_ids: Sequence[int] | None = None,
        backend: str | None = None,
    ) -> Iterator[tuple[int, Experts]]:
        """Loads several layers, one after the other, under a progress bar; the options are those of
        `load_experts`.

        Yields:
            (layer number, Experts), in the order given; all MoE layers by default.
        """
        numbers = self.moe_layers if layers is None else list(layers)
        ranks = (tp_rank, tp_size)
        with LoadProgress(len(numbers), enabled=progress) as bar:
            for number in numbers:
                experts, count = self._load(number, weights, dtype, device, ranks, expert_ids, backend)
                bar.layer_done(count)
                yield number, experts

    def _load(
        self,
        layer: int,
        weights: str,
        dtype: torch.dtype,
        device: torch.device | str | None,
        ranks: tuple[int, int],
        expert_ids: Sequence[int] | None,
        backend: str | None,
    ) -> tuple[Experts, int]:
        from .experts import Experts

        if dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"dtype must be bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}"
            )
        plan = self.plan(layer)
        ids = _local_ids(expert_ids, plan.num_experts)
        orders = self._orders(plan, ids)
        target = torch.device("cpu") if device is None else torch.device(device)
        bounds = intermediate_cut(plan, *ranks)
        placement = Placement(
            dtype=dtype,
            device=target,
            num_experts=len(ids),
            tp_size=ranks[1],
            expert_parallel=expert_ids is not None,
            top_k=self.model.top_k,
            backend=backend,
        )
        choice = choose_weights(plan, orders, weights, placement)
        logger.info("layer %d: %s weights, because %s", layer, choice.weights, choice.reason)
        request = LoadRequest(ids, bounds, dtype, target, self.strict, keep_w2_bias=ranks[0] == 0)
        loader = LayerLoader(plan, self._reader, orders, request)
        tensors = loader.load_packed() if choice.weights == "packed" else loader.load_dense()
        spec = plan.activation
        expert_map = None
        if expert_ids is not None:
            expert_map = torch.full((plan.num_experts,), -1, dtype=torch.int32)
            expert_map[torch.tensor(ids, dtype=torch.int64)] = torch.arange(len(ids), dtype=torch.int32)
            expert_map = expert_map.to(target)
        experts = Experts(
            **tensors,
            intermediate_size=bounds[1] - bounds[0],
            activation=spec.activation.name,
            limit=spec.limit,
            alpha=spec.alpha,
            beta=spec.beta,
            w13_order=plan.w13_order,
            expert_map=expert_map,
            global_num_experts=plan.num_experts if expert_map is not None else -1,
            top_k=self.model.top_k,
            dtype=dtype,
            backend=backend,
        )
        experts.source = self._fingerprint.of_layer(layer, plan.layer.block)
        return experts, loader.bytes_read

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(self.config, self._files)

    def _orders(self, plan: LayerPlan, ids: list[int] | None) -> GroupOrders:
        return read_group_orders(plan, self._reader, list(range(plan.num_experts)) if ids is None else ids)

    def _layer(self, layer: int) -> Any:
        if layer not in self._layers:
            raise ValueError(f"layer must be one of moe_layers {self.moe_layers}, got {layer}")
        return self._layers[layer]


def _local_ids(expert_ids: Sequence[int] | None, num_experts: int) -> list[int]:
    if expert_ids is None:
        return list(range(num_experts))
    ids = [int(i) for i in expert_ids]
    if any(not 0 <= i < num_experts for i in ids):
        raise ValueError(f"expert_ids must be in [0, num_experts) = [0, {num_experts}), got {ids}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"expert_ids must not repeat, got {ids}")
    return ids
