"""The Experts module: the routed experts of one MoE layer, packed or dequantised, on whatever backend serves them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from . import _checks, _checks_moe, ops
from ._enums import Layout, W13Order, parse_enum
from .activations import check_activation
from .backends import MoEWeights
from .experts_from import FromFormats
from .oracle import Selection, select_backend
from .quant_config import MoEConfig, QuantConfig

log = logging.getLogger(__name__)

# Tensors that a dtype cast must leave alone: codes and indices, and scales, which are as in the checkpoint.
_FIXED_DTYPE = (
    "w13_qweight",
    "w2_qweight",
    "w13_scales",
    "w2_scales",
    "w13_qzeros",
    "w2_qzeros",
    "w13_perm",
    "expert_map",
)
_CODES = ("w13_qweight", "w2_qweight")


class Experts(nn.Module, FromFormats):
    """sum over the k routed slots of topk_weight * (w2 @ act(w13 @ x + w13_bias) + w2_bias).

    Packed codes are kept in the order that the chosen backend wants (`layout`); `state_dict` always holds the canonical tensors
    `w13_qweight`, `w13_scales`, ... (docs/design.md), so that it moves between devices and backends. Dense weights are `w13`, `w2`.
    Casts (`.half()`, `.to(dtype)`) change dense weights and biases only.
    """

    # Parameters; None where the layer has none. Dense layers have w13 and w2, packed ones the codes.
    w13: Tensor
    w2: Tensor
    w13_qweight: Tensor
    w2_qweight: Tensor
    w13_scales: Tensor | None
    w2_scales: Tensor | None
    w13_qzeros: Tensor | None
    w2_qzeros: Tensor | None
    w13_perm: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        w13_scales: Tensor | None = None,
        w2_scales: Tensor | None = None,
        w13_qzeros: Tensor | None = None,
        w2_qzeros: Tensor | None = None,
        w13_perm: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        w13_group_size: int | None = None,
        w2_group_size: int | None = None,
        w13_bits: int = 4,
        w2_bits: int = 4,
        intermediate_size: int | None = None,
        activation: Any = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        w13_order: Any = "halves",
        expert_map: Tensor | None = None,
        global_num_experts: int = -1,
        top_k: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str | None = None,
    ) -> None:
        """Takes canonical tensors over; scales given = packed codes, else dense weights.

        Args:
            w13: uint8 [E, 2I, H * bits / 8] or floating [E, 2I, H] (I rows for activations without gate).
            w2: uint8 [E, H, I * bits / 8] or floating [E, H, I].
            w13_scales, w2_scales: [E, 2I, C13], [E, H, C2], as in the checkpoint.
            w13_qzeros, w2_qzeros: uint8, shaped like the scales; None = symmetric.
            w13_perm: int32 [E, H], act-order gather of x.
            w13_group_size, w2_group_size: input columns per group, -1 = per-channel; required with scales.
            intermediate_size: I; None = from w13.
            expert_map: int32 [global E] default map for `forward`.
            top_k: k, for selection only.
            dtype: dtype of the activations.
            backend: a backend name to insist on.

        Raises:
            ValueError, TypeError: tensors or options that contradict each other.
            BackendError: no backend can serve the layer.
        """
        super().__init__()
        self.activation = check_activation(activation, limit, alpha, beta)
        self.limit, self.alpha, self.beta = limit, alpha, beta
        self.w13_order = parse_enum(W13Order, w13_order, "w13_order")
        self.is_packed = w13_scales is not None
        _checks.check_dim(w13, "w13", (3,), "[E, 2I, H * bits / 8]" if self.is_packed else "[E, 2I, H]")
        _checks.check_dim(w2, "w2", (3,), "[E, H, I * bits / 8]" if self.is_packed else "[E, H, I]")
        self.num_experts = w13.shape[0]
        self.hidden_size = w2.shape[1]
        self.intermediate_size = w13.shape[1] // (2 if self.activation.is_gated else 1)
        if intermediate_size not in (None, self.intermediate_size):
            raise ValueError(
                f"intermediate_size must be I = {self.intermediate_size} as w13 {list(w13.shape)} says, got {intermediate_size}"
            )
        self.w13_bits, self.w2_bits = w13_bits, w2_bits
        if self.is_packed and (w2_scales is None or w13_group_size is None or w2_group_size is None):
            raise ValueError(
                "packed experts need w13_scales, w2_scales, w13_group_size and w2_group_size together"
            )
        self.w13_group_size = self.hidden_size if w13_group_size == -1 else w13_group_size or 0
        self.w2_group_size = self.intermediate_size if w2_group_size == -1 else w2_group_size or 0
        self.global_num_experts = global_num_experts
        self.top_k = top_k
        self.dtype = dtype
        self.backend = backend
        self.layout = Layout.canonical
        self.source: str | None = None  # the checkpoint and layer, as `Checkpoint` says them
        tensors = {
            ("w13_qweight" if self.is_packed else "w13"): w13,
            ("w2_qweight" if self.is_packed else "w2"): w2,
            "w13_scales": w13_scales,
            "w2_scales": w2_scales,
            "w13_qzeros": w13_qzeros,
            "w2_qzeros": w2_qzeros,
            "w13_perm": w13_perm,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
        }
        for name, tensor in tensors.items():
            self.register_parameter(
                name, None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            )
        self.register_buffer("expert_map", expert_map, persistent=False)
        self._check()
        self.selection = self._select()

    # --- choice of the backend ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._w13.device

    @property
    def _w13(self) -> Tensor:
        return self.w13_qweight if self.is_packed else self.w13

    @property
    def config(self) -> MoEConfig:
        """The layer as backend selection sees it."""
        quant = None
        if self.is_packed:
            quant = QuantConfig(
                self.w13_bits,
                self.w2_bits,
                self.w13_group_size,
                self.w2_group_size,
                self.w13_qzeros is None,
                self.w13_perm is not None,
                self.limit,
                self.alpha,
                self.beta,
            )
        return MoEConfig(
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            1 if self.top_k is None else self.top_k,
            self.dtype,
            self.device,
            quant,
            self.activation,
            self.w13_bias is not None or self.w2_bias is not None,
            self.expert_map is not None,
            limit=self.limit,
            alpha=self.alpha,
            beta=self.beta,
        )

    def _select(self) -> Selection:
        """Asks for a backend and puts the codes into its order."""
        config = self.config
        selection = select_backend(
            config, weights="packed" if self.is_packed else "dequantized", backend=self.backend
        )
        if self.is_packed and self.device.type != "meta":
            self._set_layout(selection.implementation.layout(config))
        log.debug(
            "Experts E=%d H=%d I=%d: %s",
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            selection,
        )
        return selection

    def _set_layout(self, layout: Layout) -> None:
        """Reorders the codes one expert at a time, in place: only one copy is resident."""
        if layout == self.layout:
            return
        for name, bits in zip(_CODES, (self.w13_bits, self.w2_bits), strict=True):
            codes = getattr(self, name).data
            for e in range(self.num_experts):
                plain = ops.unprepack(codes[e], layout=self.layout, bits=bits)
                codes[e] = ops.prepack(plain, layout=layout, bits=bits)
        self.layout = layout

    def _check(self) -> None:
        """The same rules as the op's, applied once at construction with an empty batch."""
        x = self._w13.new_empty((0, self.hidden_size), dtype=self.dtype if self.is_packed else self.w13.dtype)
        if not self.is_packed and x.dtype not in _checks.FLOATS:
            raise TypeError(
                f"w13 must be bfloat16, float16 or float32, got {str(x.dtype).removeprefix('torch.')} (packed codes need w13_scales)"
            )
        k = 1
        weights = self._weights()
        args: tuple[Any, ...] = (
            x,
            weights.w13,
            weights.w2,
            x.new_empty((0, k), dtype=torch.float32),
            x.new_empty((0, k), dtype=torch.int32),
        )
        options = self._options(self.expert_map, self.global_num_experts, False)
        options |= {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        if self.is_packed:
            args += (self.w13_scales, self.w2_scales, self.w13_group_size, self.w2_group_size)
            options |= {
                n: getattr(self, n) for n in ("w13_qzeros", "w2_qzeros", "w13_perm", "w13_bits", "w2_bits")
            }
        _checks_moe.check_fused_moe(*args, **options)

    # --- forward -----------------------------------------------------------------------------------------------------------------

    def _weights(self) -> MoEWeights:
        if not self.is_packed:
            return MoEWeights(self.w13, self.w2, w13_bias=self.w13_bias, w2_bias=self.w2_bias)
        return MoEWeights(
            self.w13_qweight,
            self.w2_qweight,
            self.w13_scales,
            self.w2_scales,
            self.w13_qzeros,
            self.w2_qzeros,
            self.w13_perm,
            self.w13_bias,
            self.w2_bias,
            self.w13_group_size,
            self.w2_group_size,
            self.w13_bits,
            self.w2_bits,
            self.layout,
        )

    def _options(
        self, expert_map: Tensor | None, global_num_experts: int, weight_on_input: bool
    ) -> dict[str, Any]:
        return {
            "expert_map": expert_map,
            "global_num_experts": global_num_experts,
            "activation": int(self.activation),
            "limit": self.limit,
            "alpha": self.alpha,
            "beta": self.beta,
            "w13_order": int(self.w13_order),
            "apply_router_weight_on_input": weight_on_input,
        }

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        expert_map: Tensor | None = None,
        global_num_experts: int = -1,
        apply_router_weight_on_input: bool = False,
    ) -> Tensor:
        """Runs the routed experts; no parameter or buffer is written.

        Args:
            hidden_states: [..., H] in the dtype of dense weights, or any of bfloat16, float16, float32 for packed ones.
            topk_weights: [M, k] floating point, M = the product of the leading dimensions.
            topk_ids: [M, k] int32 or int64, global expert ids; outside the known experts = unrouted.
            expert_map: int32 [global E]; None = the module's own.
            global_num_experts: -1, or the length of the map (E without one).
            apply_router_weight_on_input: k = 1 only.

        Returns:
            [..., H], dtype of hidden_states.
        """
        if hidden_states.dim() == 0:
            raise ValueError(f"hidden_states must be [..., H] with H = {self.hidden_size}, got no dimension")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if expert_map is None and self.expert_map is not None:
            expert_map = self.expert_map
            if global_num_experts == -1:
                global_num_experts = self.global_num_experts
        weights = topk_weights if topk_weights.dtype == torch.float32 else topk_weights.float()
        options = self._options(expert_map, global_num_experts, apply_router_weight_on_input)
        y = self.selection.implementation.run(self._weights(), x, weights, topk_ids, options)
        return y.view(hidden_states.shape)

    def partial_sums(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """`forward` before its last rounding, for sums that go on on other ranks.

        Args:
            hidden_states: [M, H], as in `forward`.
            topk_weights: float32 [M, k].
            topk_ids: [M, k] int32 or int64, global expert ids; local slots without a map.
            expert_map: int32 [global E] or None; the module's own is not used.

        Returns:
            float32 [M, H]; a token without an expert here is zero.
        """
        options = self._options(expert_map, -1, False)
        run = self.selection.implementation.run_float32
        return run(self._weights(), hidden_states, topk_weights, topk_ids, options)

    # --- moving, saving, copying -------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        def keep_dtype(name: str, tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if name in _FIXED_DTYPE and moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            return moved

        device = self.device
        # Meta tensors and other devices hold canonical codes; the new backend reorders them again.
        if self.layout != Layout.canonical and fn(torch.empty(0, device=device)).device != device:
            self._set_layout(Layout.canonical)
        for name, parameter in list(self._parameters.items()):
            if parameter is not None:
                self._parameters[name] = nn.Parameter(keep_dtype(name, parameter.data), requires_grad=False)
        if self.expert_map is not None:
            self.expert_map = keep_dtype("expert_map", self.expert_map)
        if not self.is_packed:
            self.dtype = self.w13.dtype
        if self.device.type != "meta":
            self.selection = self._select()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != Layout.canonical:
            for name, bits in zip(_CODES, (self.w13_bits, self.w2_bits), strict=True):
                destination[prefix + name] = ops.unprepack(
                    getattr(self, name).data, layout=self.layout, bits=bits
                )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        layout, state = self.layout, dict(state_dict)
        if layout != Layout.canonical:
            for name, bits in zip(_CODES, (self.w13_bits, self.w2_bits), strict=True):
                codes = state.get(prefix + name)
                if codes is not None and codes.shape == getattr(self, name).shape:
                    state[prefix + name] = ops.prepack(codes.to(self.device), layout=layout, bits=bits)
        super()._load_from_state_dict(state, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["selection"]  # asked again where it is loaded
        if self.layout != Layout.canonical:
            parameters = dict(self._parameters)
            for name, bits in zip(_CODES, (self.w13_bits, self.w2_bits), strict=True):
                codes = ops.unprepack(getattr(self, name).data, layout=self.layout, bits=bits)
                parameters[name] = nn.Parameter(codes, requires_grad=False)
            state |= {"_parameters": parameters, "layout": Layout.canonical}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.selection = self._select()

    def extra_repr(self) -> str:
        kind = (
            str(self.config.quant)
            if self.is_packed
            else f"dense {str(self.w13.dtype).removeprefix('torch.')}"
        )
        return (
            f"E={self.num_experts}, H={self.hidden_size}, I={self.intermediate_size}, {kind}, activation={self.activation.name}, "
            f"backend={self.selection.backend}"
        )
