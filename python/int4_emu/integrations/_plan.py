"""What goes where: the modules of a host model that are filled here, and the tensors left to the host."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .._shards import listed
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ._linears import load_linear, packed_linear_bytes
from ._modules import HostedExperts, Pending, is_host_experts

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
        self._schemes = checkpoint.quantized_linears()
        self._experts: dict[int, str] = {}  # layer number to module name in the model
        self._linears: dict[str, str] = {}  # checkpoint module to module name in the model
        self._placeholders: dict[str, Pending] = {}  # module name in the model to what stands there
        self._sizes: dict[str, int] = {}  # module name in the model to bytes when loaded
        self._features: dict[
            str, tuple[int, int]
        ] = {}  # checkpoint module to the [out, in] that the model wants
        self._shapes: dict[str, torch.Size] = {}  # parameters that the host loads

    def host_tensors(self) -> dict[str, StoredTensor]:
        """The floating-point tensors of no routed expert and no quantised Linear; nothing is read yet."""
        layers = self.checkpoint.moe_layers
        mine = {name for layer in layers for name in self.checkpoint.expert_tensor_names(layer)}
        return {
            name: StoredTensor(self.checkpoint, name)
            for name in self.checkpoint.tensor_names
            if name not in mine and name.rpartition(".")[0] not in self._schemes
        }

    # While the host builds the model

    def install(self, model: Any, host_name: Callable[[str], str]) -> None:
        """Puts placeholders into the skeleton (on the meta device) of the host model.

        Args:
            model: the skeleton.
            host_name: the host's name of a checkpoint's parameter.

        Raises:
            CheckpointError: model and checkpoint have other MoE layers, or a quantised module is no Linear
            of the model.
        """
        self._install_experts(model)
        for module, scheme in self._schemes.items():
            name = self._find_linear(model, module, host_name)
            if name is None:
                continue
            linear = model.get_submodule(name)
            self._linears[module] = name
            self._features[module] = (linear.out_features, linear.in_features)
            dense = linear.weight.numel() * self.dtype.itemsize
            packed = packed_linear_bytes(linear.weight.numel(), scheme)
            self._put(model, name, Pending(), dense if self.weights == "dequantized" else packed)
        tied = {key.rpartition(".")[0] for key in _tied_keys(model)}
        if clash := sorted(tied & set(self._placeholders)):
            raise CheckpointError(
                f"{listed(clash)} is quantised, but the configuration ties it to other weights"
            )
        self._shapes = {key: value.shape for key, value in model.state_dict().items()}

    def _install_experts(self, model: Any) -> None:
        hosts: dict[int, tuple[str, nn.Module]] = {}
        for name, module in model.named_modules():
            if is_host_experts(module) and (match := _LAYER.search(f"{name}.")):
                hosts[int(match[1])] = (name, module)
        if sorted(hosts) != sorted(self.checkpoint.moe_layers):
            raise CheckpointError(
                f"{type(model).__name__} has experts in layers {sorted(hosts)}, the checkpoint in layers "
                f"{sorted(self.checkpoint.moe_layers)}"
            )
        for layer, (name, module) in hosts.items():
            self._experts[layer] = name
            plan = self.checkpoint.plan(layer)
            nbytes = plan.dense_bytes(self.dtype) if self.weights == "dequantized" else plan.packed_bytes()
            self._put(model, name, HostedExperts(module, name), nbytes)

    def _find_linear(self, model: Any, module: str, host_name: Callable[[str], str]) -> str | None:
        """The name of the Linear in the model; None for a module that the model's class says it never
        loads.
        """
        # The plain name first: most models keep it, and the host's renamings cost a walk over the model.
        prefix = getattr(model, "base_model_prefix", "")
        names = [module, module.removeprefix(f"{prefix}."), f"{prefix}.{module}"]
        for name in names:
            if isinstance(_submodule(model, name), nn.Linear):
                return name
        renamed = host_name(f"{module}.weight").removesuffix(".weight")
        if isinstance(_submodule(model, renamed), nn.Linear):
            return renamed
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        if any(re.search(pattern, f"{module}.weight") for pattern in ignored):
            self.checkpoint.mark_consumed(
                n for n in self.checkpoint.tensor_names if n.rpartition(".")[0] == module
            )
            return None
        raise CheckpointError(
            f"{module} is quantised in the checkpoint, but {type(model).__name__} has no Linear of that name"
        )

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
        """Refuses maps that leave weights on the disk or apart from where they are computed with.

        Raises:
            ValueError: the map uses the disk, or the CPU beside an accelerator.
        """
        places = {str(place) for place in device_map.values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
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
        for module, name in self._linears.items():
            self._fill_linear(model, module, name)
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
        if unused := self.checkpoint.unconsumed():
            message = f"{len(unused)} tensors of the checkpoint have no use: {listed(unused)}"
            if strict:
                raise CheckpointError(f"{message} (strict=False ignores them)")
            logger.warning("%s; ignored", message)

    def _fill_linear(self, model: Any, module: str, name: str) -> None:
        weight = self.checkpoint.load_linear(module)
        want, got = self._features[module], (weight.out_features, weight.in_features)
        if want != got:
            raise CheckpointError(
                f"{module} is [out, in] = {list(got)} in the checkpoint, the model wants {list(want)}"
            )
        linear = load_linear(
            weight, module, weights=self.weights, dtype=self.dtype, device=_device(model, name)
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


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
