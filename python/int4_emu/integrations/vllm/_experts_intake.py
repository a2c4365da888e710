"""Takes the tensors of one layer's routed experts as the host finds them and turns them into `Experts`, once all are there."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..._enums import Activation
from ..._shards import TensorFiles, listed
from ...activations import check_activation
from ...errors import CheckpointError
from ...experts import Experts
from ...formats import ModelQuantization
from ...group_order import intermediate_cut, read_group_orders
from ...layer_plan import LayerPlan, plan_layer
from ...loading import LayerLoader, LoadRequest
from ...model_config import ActivationSpec, MoEModelConfig
from ...moe_layout import MoELayer
from ...projection_reader import ProjectionReader
from ...weights_choice import Placement, choose_weights
from ._captured import CapturedTensors, declared_scheme, required_suffixes

logger = logging.getLogger(__name__)

# vLLM's names of activations: with the parameters that its own code has as constants.
_ACTIVATIONS = {
    "silu": Activation.silu,
    "gelu": Activation.gelu,
    "gelu_tanh": Activation.gelu_tanh,
    "relu2": Activation.relu2,
    "swigluoai": Activation.swigluoai,
    "swigluoai_uninterleave": Activation.swigluoai,
    "silu_no_mul": Activation.silu_no_mul,
    "gelu_no_mul": Activation.gelu_no_mul,
    "gelu_tanh_no_mul": Activation.gelu_tanh_no_mul,
    "relu2_no_mul": Activation.relu2_no_mul,
}
_SWIGLUOAI_CONSTANTS = (7.0, 1.702, 1.0)


def activation_spec(
    name: str, limit: float | None, alpha: float | None, beta: float | None
) -> ActivationSpec:
    """vLLM's activation of a layer in our terms.

    Raises:
        ValueError: an activation that int4_emu does not have, or parameters that it does not take.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"int4_emu has no MoE activation {name!r}: the known ones are {', '.join(_ACTIVATIONS)}"
        )
    kind = _ACTIVATIONS[name]
    if name == "swigluoai":
        # gpt-oss says no parameters: vLLM's function of this name has them as constants.
        given = (limit, alpha, beta)
        limit, alpha, beta = (c if v is None else v for v, c in zip(given, _SWIGLUOAI_CONSTANTS, strict=True))
    check_activation(kind, limit, alpha, beta)
    return ActivationSpec(kind, limit, alpha, beta)


@dataclass(frozen=True)
class ExpertsRequest:
    """What the host knows of a layer before any tensor comes.

    Attributes:
        prefix: full name of the module whose children are the numbered experts.
        projections: role (gate, up, down) to the name of its module below an expert.
        expert_ids: global ids of the local experts, in slot order.
        hidden_size, intermediate_size: H and I of the whole layer.
        tp_rank, tp_size: this rank's slice of I.
        weights: packed, dequantized or auto.
        has_bias: every projection has a bias.
    """

    prefix: str
    projections: dict[str, str]
    expert_ids: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    tp_rank: int
    tp_size: int
    activation: ActivationSpec
    top_k: int
    dtype: torch.dtype
    device: torch.device
    weights: str
    has_bias: bool


class ExpertsIntake:
    """Collects one layer. `experts` is there once every tensor has come, and nothing else is kept then."""

    def __init__(self, request: ExpertsRequest, quantization: ModelQuantization) -> None:
        self.request = request
        self.quantization = quantization
        self.experts: Experts | None = None
        self._captured = CapturedTensors()
        self._local = set(request.expert_ids)
        self._pending = {
            f"{module}.{suffix}" for module in self._modules() for suffix in self._required(module)
        }

    def module(self, expert: int, role: str) -> str:
        """The full name of a projection."""
        return f"{self.request.prefix}.{expert}.{self.request.projections[role]}"

    def _modules(self) -> list[str]:
        return [self.module(e, r) for e in self.request.expert_ids for r in self.request.projections]

    def _required(self, module: str) -> tuple[str, ...]:
        bias = ("bias",) if self.request.has_bias else ()
        return (*required_suffixes(declared_scheme(self.quantization, module)), *bias)

    def put(self, expert: int, role: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Takes one tensor; the last one that is needed builds the layer.

        Returns:
            False for an expert of another rank.

        Raises:
            CheckpointError: a tensor that comes twice, or after the layer was built without it.
        """
        if expert not in self._local:
            return False
        name = f"{self.module(expert, role)}.{suffix}"
        if self.experts is not None:
            if tensor.numel():
                raise CheckpointError(f"{name} came after its layer was complete")
            return True
        self._captured.put(name, tensor)
        self._pending.discard(name)
        if not self._pending:
            self._build()
        return True

    def finish(self) -> Experts:
        """The layer, when the host has no more tensors.

        Raises:
            CheckpointError: tensors are missing or contradict each other or the configuration.
        """
        if self.experts is None:
            self._build()
        assert self.experts is not None
        return self.experts

    # --- conversion --------------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        request = self.request
        if not request.expert_ids:
            self.experts = self._no_experts()
            return
        reader = ProjectionReader(cast(TensorFiles, self._captured), self.quantization)
        plan = self._plan(reader)
        slots = list(range(len(request.expert_ids)))
        orders = read_group_orders(plan, reader, slots)
        bounds, weights = self._cut(plan)
        placement = Placement(
            dtype=request.dtype,
            device=request.device,
            num_experts=len(slots),
            tp_size=request.tp_size,
            expert_parallel=True,
            top_k=request.top_k,
        )
        choice = choose_weights(plan, orders, weights, placement)
        logger.debug("%s: %s weights, because %s", request.prefix, choice.weights, choice.reason)
        load = LoadRequest(
            slots, bounds, request.dtype, request.device, True, keep_w2_bias=request.tp_rank == 0
        )
        loader = LayerLoader(plan, reader, orders, load)
        tensors = loader.load_packed() if choice.weights == "packed" else loader.load_dense()
        self.experts = self._module(tensors, bounds[1] - bounds[0])
        self._captured = CapturedTensors()

    def _plan(self, reader: ProjectionReader) -> LayerPlan:
        request = self.request
        number = re.search(r"\.layers\.(\d+)\.", f".{request.prefix}.")
        layer = MoELayer(int(number[1]) if number else 0, request.prefix.rpartition(".")[0])
        for slot, expert in enumerate(request.expert_ids):
            for role in request.projections:
                layer.modules[slot, role] = self.module(expert, role)
        for name in self._captured.infos:
            module, _, suffix = name.rpartition(".")
            layer.tensors.setdefault(module, set()).add(suffix)
        model = MoEModelConfig(
            config={},
            model_type="",
            num_experts=len(request.expert_ids),
            top_k=request.top_k,
            hidden_size=request.hidden_size,
            intermediate_size=request.intermediate_size,
            apply_router_weight_on_input=False,
            known_activation=request.activation,
        )
        plan = plan_layer(layer, reader, model)
        if plan.unknown:
            raise CheckpointError(
                f"layer {layer.number}: unknown tensors under the experts: {listed(plan.unknown)}"
            )
        return plan

    def _cut(self, plan: LayerPlan) -> tuple[tuple[int, int], str]:
        """This rank's part of I, and the weights to ask for: a cut inside a group leaves only dense ones."""
        request = self.request
        try:
            return intermediate_cut(plan, request.tp_rank, request.tp_size), request.weights
        except CheckpointError as error:
            if request.weights == "packed" or plan.intermediate_size % request.tp_size:
                raise
            logger.info("%s: dequantized weights, because %s", request.prefix, error)
            part = plan.intermediate_size // request.tp_size
            return (request.tp_rank * part, (request.tp_rank + 1) * part), "dequantized"

    def _no_experts(self) -> Experts:
        """A rank that holds none of the experts: every slot is another rank's."""
        request = self.request
        part = request.intermediate_size // request.tp_size
        rows = part * (len(request.projections) - 1)
        options: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
        tensors = {
            "w13": torch.empty(0, rows, request.hidden_size, **options),
            "w2": torch.empty(0, request.hidden_size, part, **options),
        }
        return self._module(tensors, part)

    def _module(self, tensors: dict[str, Any], intermediate_size: int) -> Experts:
        spec = self.request.activation
        return Experts(
            **tensors,
            intermediate_size=intermediate_size,
            activation=spec.activation,
            limit=spec.limit,
            alpha=spec.alpha,
            beta=spec.beta,
            top_k=self.request.top_k,
            dtype=self.request.dtype,
        )
