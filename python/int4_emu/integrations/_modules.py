"""Modules that stand in a transformers model in the place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._enums import W13Order
from ..errors import CheckpointError
from ..experts import Experts
from ._gating import Gating, check_gating


class Pending(nn.Module):
    """Holds the place of a module whose weights the checkpoint reader fills in later.

    It has no parameters, so the host finds nothing missing here. Only while the host computes a device map
    does it carry a meta parameter of the final size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reserved: nn.Parameter | None
        self.register_parameter("reserved", None)

    def reserve(self, nbytes: int) -> None:
        """Shows `nbytes` to the host's device map."""
        self.reserved = nn.Parameter(
            torch.empty(nbytes, dtype=torch.uint8, device="meta"), requires_grad=False
        )

    def release(self) -> None:
        """Ends `reserve`."""
        self.reserved = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raises: the weights are not there yet."""
        raise CheckpointError(
            "this module's weights have not been loaded; load the model with int4_emu.from_pretrained"
        )


class HostedExperts(Pending):
    """The routed experts of one layer, called as transformers calls its own.

    Attributes:
        experts: the `int4_emu.Experts` that compute, None until `fill`.
    """

    def __init__(self, host: nn.Module, name: str) -> None:
        """Takes the plain attributes of `host` (a meta module), so that code reading them still works."""
        super().__init__()
        plain = (bool, int, float, str, torch.dtype)
        for key, value in vars(host).items():
            if not key.startswith("_") and key != "training" and isinstance(value, plain):
                setattr(self, key, value)
        self.config = getattr(host, "config", None)
        self._is_expert_parallel = False
        self._name = name
        self._host = [host]  # in a list: not a submodule
        self._shapes = {key: tuple(p.shape) for key, p in host.named_parameters(recurse=False)}
        self.experts: Experts | None = None
        self.register_state_dict_post_hook(_to_host_names)
        self.register_load_state_dict_pre_hook(_from_host_names)

    def fill(self, experts: Experts) -> None:
        """Puts the loaded experts in place, after checking that they compute what the host's module would.

        Raises:
            CheckpointError: another number of experts, other sizes, or another activation.
        """
        host = self._host.pop()
        gating = Gating(experts.activation, experts.limit, experts.alpha, experts.beta)
        check_gating(host, gating, self._name)
        want = self._host_sizes()
        got = (experts.num_experts, experts.hidden_size, experts.intermediate_size)
        if want is not None and want != got:
            raise CheckpointError(
                f"{self._name}: the model wants (experts, hidden, intermediate) = {want}, "
                f"the checkpoint holds {got}"
            )
        self.release()
        self.experts = experts

    def _host_sizes(self) -> tuple[int, int, int] | None:
        """(E, H, I) of the host's fused parameters, None for a module that has none."""
        down = self._shapes.get("down_proj")  # [E, H, I], transposed [E, I, H]
        if down is None or len(down) != 3:
            return None
        experts, hidden, inner = down
        return (experts, inner, hidden) if getattr(self, "is_transposed", False) else (experts, hidden, inner)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts.

        Args:
            hidden_states: [..., H].
            top_k_index: [M, k] int32 or int64; ids outside the experts count as unrouted.
            top_k_weights: [M, k].

        Returns:
            [..., H], in the dtype of `hidden_states`.
        """
        if self.experts is None:
            return super().forward()
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.experts(x, top_k_weights.float(), top_k_index).view(hidden_states.shape)


class HostedLlama4Experts(HostedExperts):
    """Experts that transformers calls with every token once for every expert, each row times the router's
    weight: zero for the experts that a token is not routed to.
    """

    def __init__(self, host: nn.Module, name: str) -> None:
        super().__init__(host, name)
        self.is_transposed, self.is_concatenated, self.has_gate = True, True, True

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Runs each block of rows through its expert.

        Args:
            hidden_states: [E * M, H], expert by expert.

        Returns:
            [E * M, H].
        """
        if self.experts is None:
            return Pending.forward(self)
        rows, count = hidden_states.shape[0], self.experts.num_experts
        ids = torch.arange(count, device=hidden_states.device).repeat_interleave(rows // count)
        # A row of zeros gives zeros, so that nothing need be computed for it.
        ids = torch.where((hidden_states != 0).any(dim=1), ids, -1).unsqueeze(1)
        ones = torch.ones(rows, 1, dtype=torch.float32, device=hidden_states.device)
        return self.experts(hidden_states, ones, ids)

    def route(self, hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        """The experts' sum [M, H] of x [M, H] with the router's weights [M, 1] on the input; ids [M, 1]."""
        assert self.experts is not None
        return self.experts(hidden_states, top_k_weights, top_k_index, apply_router_weight_on_input=True)


def host_experts(model: nn.Module, name: str, module: nn.Module) -> HostedExperts:
    """The module to put in the place of a host's experts; the block around them may be changed to call it.

    Raises:
        CheckpointError: the host calls its experts in a way that is not known here.
    """
    kind = type(module).__name__
    if kind == "Llama4TextExperts":
        from ._llama4 import RoutedMoe

        model.get_submodule(name.rpartition(".")[0]).__class__ = RoutedMoe
        return HostedLlama4Experts(module, name)
    if not hasattr(module, "_apply_gate"):
        raise CheckpointError(
            f"{name}: {kind} is not one of the experts that transformers calls through experts_implementation, "
            "and is not supported"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise CheckpointError(f"{name}: {kind} norms each expert's output, which int4_emu does not do")
    return HostedExperts(module, name)


def is_host_experts(module: nn.Module) -> bool:
    """Whether `module` is one of transformers' fused routed experts: stacks of matrices, one per expert."""
    fused = {"gate_up_proj", "up_proj", "gate_proj"} & set(module._parameters)
    down = module._parameters.get("down_proj")
    # Shared experts may be stacks too.
    return bool(fused) and down is not None and down.dim() == 3 and hasattr(module, "num_experts")


def _renamings(module: HostedExperts) -> dict[str, str]:
    """Our names to the host's, of dense experts; none for packed ones, whose tensors the host has no names for."""
    if module.experts is None or module.experts.is_packed:
        return {}
    up = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    names = {"w13": up, "w2": "down_proj", "w13_bias": f"{up}_bias", "w2_bias": "down_proj_bias"}
    return {f"experts.{mine}": theirs for mine, theirs in names.items()}


def _to_host_names(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Dense experts save as the host's own parameters, so that what is saved loads without int4_emu."""
    assert isinstance(module, HostedExperts)
    for mine, theirs in _renamings(module).items():
        if prefix + mine in state:
            state[prefix + theirs] = _to_host_order(module, mine, state.pop(prefix + mine))


def _from_host_names(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    assert isinstance(module, HostedExperts)
    for mine, theirs in _renamings(module).items():
        if prefix + theirs in state:
            state[prefix + mine] = _from_host_order(module, mine, state.pop(prefix + theirs))


def _interleaves(module: HostedExperts, mine: str) -> bool:
    """Whether the host alternates gate and up rows where ours has all gate rows first."""
    assert module.experts is not None
    halves = module.experts.w13_order == W13Order.halves
    # Ours alternates only where the checkpoint does, and then its host does too.
    return "w13" in mine and halves and not getattr(module, "is_concatenated", True)


def _to_host_order(module: HostedExperts, mine: str, value: Tensor) -> Tensor:
    if _interleaves(module, mine):  # [E, 2 x I, ...] to [E, I x 2, ...]
        value = value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if value.dim() == 3 and getattr(module, "is_transposed", False):
        value = value.transpose(1, 2).contiguous()
    return value


def _from_host_order(module: HostedExperts, mine: str, value: Tensor) -> Tensor:
    if value.dim() == 3 and getattr(module, "is_transposed", False):
        value = value.transpose(1, 2)
    if _interleaves(module, mine):  # [E, I x 2, ...] to [E, 2 x I, ...]
        value = value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return value.contiguous()
