"""What goes where: the modules of a host model that are filled here, and the tensors left to the host."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._shards import listed
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..model_config import ActivationSpec
from ._gating import find_gating
from ._linears import load_linear, packed_linear_bytes
from ._modules import HostedExperts, Pending, host_experts, is_host_experts
from ._predicting import predicting_layers

if TYPE_CHECKING:
    from ._host_names import HostNames

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class StoredTensor:
    """A tensor that is read when the host indexes it, in the manner of safetensors' slices.

    It is copied out of the mapped file: a model must survive its checkpoint being written over.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._info = checkpoint.tensor_info(name)

    def get_dtype(self) -> str:
        """The dtype in safetensors' spelling."""
        return self._info.stored_dtype

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._checkpoint.get_tensor(self._info.name)[index].clone()


class Plan:
    """The loading of one checkpoint into one host model.

    Args:
        checkpoint: the opened checkpoint.
        weights: "auto", "packed" or "dequantized".
        dtype: compute dtype.

    Attributes:
        packed_modules: modules that keep packed weights, after `fill`.
    """

    def __init__(self, checkpoint: Checkpoint, *, weights: str, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.path = checkpoint.path
        self.weights = weights
        self.dtype = dtype
        self.packed_modules = 0
        self._predicting = predicting_layers(checkpoint)
        self._layers = [n for n in checkpoint.moe_layers if n not in self._predicting.layers]
        # What is not loaded need not agree with the configuration: some tools copy these layers as they were.
        self._schemes = checkpoint.quantized_linears(self._predicting.owns)
        self._host = self._host_tensors()
        self._experts: dict[int, str] = {}  # layer number to module name in the model
        self._left: dict[int, str] = {}  # the same, of experts that the host loads
        self._linears: dict[str, list[str]] = {}  # module name in the model to the checkpoint's modules in it
        self._placeholders: dict[str, Pending] = {}  # module name in the model to what stands there
        self._sizes: dict[str, int] = {}  # module name in the model to bytes when loaded
        self._features: dict[str, tuple[int, int]] = {}  # module name in the model to the [out, in] it wants
        self._shapes: dict[str, torch.Size] = {}  # parameters that the host loads

    def host_tensors(self) -> dict[str, StoredTensor]:
        """The floating-point tensors of no routed expert and no quantised Linear; nothing is read yet. `install`
        gives some of them the names that the host knows.
        """
        return self._host

    @property
    def leaves_experts(self) -> bool:
        """Whether some layer's experts are the host's own, in floating point."""
        return bool(self._left)

    def _host_tensors(self) -> dict[str, StoredTensor]:
        mine = {name for layer in self._layers for name in self.checkpoint.expert_tensor_names(layer)}
        return {
            name: StoredTensor(self.checkpoint, name)
            for name in self.checkpoint.tensor_names
            if name not in mine
            and name.rpartition(".")[0] not in self._schemes
            and not self._predicting.owns(name)
        }

    # While the host builds the model

    def install(self, model: Any, names: HostNames) -> None:
        """Puts placeholders into the skeleton (on the meta device) of the host model.

        Args:
            model: the skeleton.
            names: the host's names of a checkpoint's tensors.

        Raises:
            CheckpointError: model and checkpoint have other MoE layers, or a quantised module is no Linear
            of the model.
        """
        for name in list(self._host):
            if (known := names.parameter(name)) != name:
                self._host[known] = self._host.pop(name)
        self._install_experts(model, names)
        self._install_linears(model, names)
        tied = {key.rpartition(".")[0] for key in _tied_keys(model)}
        if clash := sorted(tied & set(self._placeholders)):
            raise CheckpointError(
                f"{listed(clash)} is quantised, but the configuration ties it to other weights"
            )
        self._shapes = {key: value.shape for key, value in model.state_dict().items()}

    def _install_experts(self, model: Any, names: HostNames) -> None:
        hosts: dict[int, tuple[str, nn.Module]] = {}
        for name, module in model.named_modules():
            if is_host_experts(module) and (match := _LAYER.search(f"{name}.")):
                if int(match[1]) in hosts:
                    raise CheckpointError(
                        f"{type(model).__name__} has two stacks with experts in layer {match[1]}: "
                        f"{hosts[int(match[1])][0]} and {name}"
                    )
                hosts[int(match[1])] = (name, module)
        self._take_apart(model, names, [layer for layer in self._layers if layer not in hosts])
        if not set(self._layers) <= set(hosts):
            raise CheckpointError(self._other_layers(model, sorted(hosts)))
        self._left = {layer: name for layer, (name, _) in hosts.items() if layer not in self._layers}
        for layer in self._layers:
            name, module = hosts[layer]
            hosted = host_experts(model, name, module)
            self._experts[layer] = name
            self._know_activation(module, name)
            plan = self.checkpoint.plan(layer)
            nbytes = plan.dense_bytes(self.dtype) if self.weights == "dequantized" else plan.packed_bytes()
            self._put(model, name, hosted, nbytes)
            # The host's block may initialise the parameters of its experts (Qwen3-Omni's does): it has none now.
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True

    def _take_apart(self, model: Any, names: HostNames, layers: list[int]) -> None:
        """Treats the experts of these layers as so many Linears, where the model has a Linear for each projection:
        code that is not transformers' own keeps them so, and computes with them as it likes.
        """
        apart = {
            layer
            for layer in layers
            if not any(isinstance(names.linear(m), str) for m in self.checkpoint.expert_modules(layer))
        }
        if not apart:
            return
        logger.info(
            "%s keeps each expert by itself: its projections are Linears like others, one call for each",
            type(model).__name__,
        )
        self._layers = [layer for layer in self._layers if layer not in apart]
        self._schemes = self.checkpoint.quantized_linears(self._predicting.owns, apart)
        for name, tensor in self._host_tensors().items():
            if (known := names.parameter(name)) not in self._host:
                self._host[known] = tensor

    def _other_layers(self, model: Any, hosts: list[int]) -> str:
        if not hosts:
            return (
                f"{type(model).__name__} has no experts in reach, which are Linears with the checkpoint's names or "
                "stacks that transformers calls through experts_implementation; the checkpoint has experts in layers "
                f"{sorted(self._layers)}"
            )
        return (
            f"{type(model).__name__} has experts in layers {hosts}, the checkpoint in layers "
            f"{sorted(self._layers)}"
        )

    def _know_activation(self, module: nn.Module, name: str) -> None:
        """Asks the host where the configuration's words for the activation are not understood. Where they are,
        `HostedExperts.fill` compares.
        """
        gated = getattr(module, "has_gate", True)
        try:
            self.checkpoint.model.activation(gated=gated)
        except CheckpointError as error:
            try:
                found = find_gating(module, name)
            except ValueError as unknown:
                raise CheckpointError(f"{error}; {unknown}") from None
            self.checkpoint.use_activation(
                ActivationSpec(found.activation, found.limit, found.alpha, found.beta)
            )

    def _install_linears(self, model: Any, names: HostNames) -> None:
        parts: dict[str, dict[int, str]] = {}
        wanted: dict[str, int] = {}
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        for module in self._schemes:
            place = names.linear(module)
            if not isinstance(place, str):
                parts.setdefault(place.name, {})[place.part] = module
                wanted[place.name] = place.parts
            elif any(re.search(pattern, f"{module}.weight") for pattern in ignored):
                self.checkpoint.mark_consumed(
                    n for n in self.checkpoint.tensor_names if n.rpartition(".")[0] == module
                )
            else:
                raise CheckpointError(
                    f"{module} is quantised in the checkpoint, but {type(model).__name__} {place}"
                )
        for name, found in parts.items():
            if len(found) != wanted[name]:
                raise CheckpointError(
                    f"{type(model).__name__} joins {wanted[name]} tensors in {name}, of which the checkpoint "
                    f"has only {listed(sorted(found.values()))} quantised"
                )
            modules = [found[index] for index in sorted(found)]
            linear = model.get_submodule(name)
            self._linears[name] = modules
            self._features[name] = (linear.out_features, linear.in_features)
            share = linear.weight.numel() // len(modules)
            packed = sum(packed_linear_bytes(share, self._schemes[module]) for module in modules)
            dense = linear.weight.numel() * self.dtype.itemsize
            self._put(model, name, Pending(), dense if self.weights == "dequantized" else packed)

    def _put(self, model: Any, name: str, placeholder: Pending, nbytes: int) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, placeholder)
        self._placeholders[name] = placeholder
        self._sizes[name] = nbytes

    def reserve(self) -> None:
        """Shows the host the final sizes, while it computes a device map."""
        for name, placeholder in self._placeholders.items():
            placeholder.reserve(self._sizes[name])

    def release(self) -> None:
        """Ends `reserve`, before the host looks for tensors to load."""
        for placeholder in self._placeholders.values():
            placeholder.release()

    def check_device_map(self, device_map: dict[str, Any]) -> None:
        """Refuses maps that leave weights on the disk, nowhere, or apart from where they are computed with.

        Raises:
            ValueError: the map uses the disk, the meta device, or the CPU beside an accelerator.
        """
        places = {str(place) for place in device_map.values()}
        if places & {"disk", "meta"} or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map must place every module on the CPU, or every one on accelerators, "
                f"got {sorted(places)}: weights cannot be offloaded; use more devices, "
                'weights="packed", or device="cpu"'
            )

    # After the host has loaded its part

    def check_loaded(self, model: Any, info: dict[str, Any], *, strict: bool) -> None:
        """Raises where the host found a weight without a tensor, a tensor without a use, or another size.

        Raises:
            CheckpointError: with the names.
        """
        missing = sorted(info["missing_keys"])
        if any(key.startswith(f"{name}.") for key in missing for name in self._left.values()):
            raise CheckpointError(
                self._other_layers(model, sorted([*self._experts, *self._left]))
                + f"; missing {listed(missing)}"
            )
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}: {listed(missing)}"
            )
        got = {key: value.shape for key, value in model.state_dict().items()}
        wrong = {
            key: (tuple(got[key]), tuple(shape))
            for key, shape in self._shapes.items()
            if got.get(key) != shape
        }
        wrong |= {key: (tuple(a), tuple(b)) for key, a, b in info["mismatched_keys"]}
        if wrong:
            said = [f"{key} is {list(a)}, the model wants {list(b)}" for key, (a, b) in sorted(wrong.items())]
            raise CheckpointError(f"{len(wrong)} tensors have other sizes: {listed(said)}")
        errors = list(info.get("error_msgs") or ()) + list((info.get("conversion_errors") or {}).values())
        if errors:
            raise CheckpointError(f"transformers could not convert {len(errors)} tensors: {errors[0]}")
        unexpected = sorted(info["unexpected_keys"])
        if unexpected:
            message = f"{type(model).__name__} has no use for {len(unexpected)} tensors: {listed(unexpected)}"
            if strict:
                raise CheckpointError(f"{message} (strict=False ignores them)")
            logger.warning("%s; ignored", message)

    def fill(self, model: Any, *, strict: bool, progress: bool) -> None:
        """Loads experts and quantised Linears, one module after another, each straight onto its device.

        Raises:
            CheckpointError: a tensor is missing, contradictory or of no use.
            BackendError: packed weights were asked for and no backend supports them.
        """
        for name, modules in self._linears.items():
            self._fill_linear(model, name, modules)
        if self._linears:
            packed = self.packed_modules
            logger.info("%d Linears beside the experts: %d packed, %d dequantized, because weights=%r",
                        len(self._linears), packed, len(self._linears) - packed, self.weights)  # fmt: skip
        # One device after the other: usually there is one.
        for device, layers in groupby(
            sorted(self._experts), key=lambda layer: _device(model, self._experts[layer])
        ):
            loaded = self.checkpoint.load_layers(
                list(layers), progress=progress, weights=self.weights, dtype=self.dtype, device=device
            )
            for layer, experts in loaded:
                hosted = self._placeholders[self._experts[layer]]
                assert isinstance(hosted, HostedExperts)
                hosted.fill(experts)
                self.packed_modules += experts.is_packed
        left = [key for key, value in _tensors(model) if value.is_meta]
        if left:
            raise CheckpointError(f"{len(left)} weights of the model were filled by nobody: {listed(left)}")
        if extra := [name for name in self.checkpoint.unconsumed() if self._predicting.owns(name)]:
            logger.info(
                "%d tensors of layers that predict further tokens are not loaded: %s",
                len(extra),
                listed(extra),
            )
            self.checkpoint.mark_consumed(extra)
        if unused := self.checkpoint.unconsumed():
            message = f"{len(unused)} tensors of the checkpoint have no use: {listed(unused)}"
            if strict:
                raise CheckpointError(f"{message} (strict=False ignores them)")
            logger.warning("%s; ignored", message)

    def _fill_linear(self, model: Any, name: str, modules: list[str]) -> None:
        parts = [self.checkpoint.load_linear(module) for module in modules]
        want = self._features[name]
        got = (sum(part.out_features for part in parts), parts[0].in_features)
        if want != got:
            raise CheckpointError(
                f"{' and '.join(modules)} is [out, in] = {list(got)} in the checkpoint, "
                f"the model wants {list(want)}"
            )
        linear = load_linear(
            parts, " and ".join(modules), weights=self.weights, dtype=self.dtype, device=_device(model, name)
        )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear.eval())
        self.packed_modules += not isinstance(linear, nn.Linear)


def _device(model: Any, name: str) -> torch.device:
    """Where a module belongs: by the host's device map, else where the model's other weights are."""
    device_map: dict[str, Any] | None = getattr(model, "hf_device_map", None)
    if device_map:
        parts = name.split(".")
        for end in range(len(parts), -1, -1):
            if (key := ".".join(parts[:end])) in device_map:
                place = device_map[key]
                return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return next((value.device for _, value in _tensors(model) if not value.is_meta), torch.device("cpu"))


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tied_keys(model: Any) -> set[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return set(tied) | set(tied.values())
