"""Loads int4 and int8 MoE checkpoints into transformers models. transformers is imported when called."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..model_config import quantization_config
from ..projection_reader import ContradictingZeros
from ..weights_choice import WEIGHTS_MODES
from ._families import ALIASES, check_model_type
from ._plan import Plan
from ._remote_code import needs_own_code, own_model_class

logger = logging.getLogger(__name__)

MINIMUM_VERSION = (5, 17)
EXPERTS_IMPLEMENTATION = "int4_emu"

# Arguments that ask for what is done anyway; `offload_folder` is for weights that find no room, which raise.
_DONE_ANYWAY = {
    "use_safetensors": True,
    "ignore_mismatched_sizes": False,
    "subfolder": "",
    "local_files_only": True,
}
# Arguments of transformers that name another source of weights or another way to spread them.
_SHARDED = "use int4_emu.Checkpoint(...).load_experts(tp_rank=, tp_size=, expert_ids=) for a sharded model"
_REFUSED = {
    "quantization_config": "the checkpoint's own configuration is read",
    "state_dict": "the weights come from the checkpoint folder",
    "gguf_file": "GGUF files are not read",
    "distributed_config": _SHARDED,
    "tp_plan": _SHARDED,
    "tp_size": _SHARDED,
    "device_mesh": _SHARDED,
    "ignore_mismatched_sizes": "a tensor of another size is an error here",
    "subfolder": "give the path of the folder itself",
    "variant": "the folder's model.safetensors or its index is read",
    "use_safetensors": "nothing but safetensors is read",
    "local_files_only": "the path is a folder here, and nothing is downloaded",
}
# Arguments that transformers takes beside the configuration's own attributes.
_MODEL_ARGUMENTS = (
    "attn_implementation",
    "experts_implementation",
    "device_map",
    "max_memory",
    "key_mapping",
    "generation_config",
    "use_kernels",
    "kernel_config",
    "fusion_config",
)


def _import_transformers() -> Any:
    """transformers, or an ImportError that names the extra.

    Raises:
        ImportError: it is missing, or older than the hooks that are used.
    """
    wanted = ".".join(map(str, MINIMUM_VERSION))
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"from_pretrained needs transformers >= {wanted}: install the extra, "
            'pip install "int4_emu[transformers]"'
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM_VERSION:
        raise ImportError(
            f"from_pretrained needs transformers >= {wanted}, found {found}: pip install --upgrade "
            '"int4_emu[transformers]"'
        )
    import transformers

    return transformers


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    weights: str = "auto",
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str | int | None = None,
    strict: bool = True,
    progress: bool = True,
    zero_point_format: str | None = None,
    contradicting_zeros: ContradictingZeros = "raise",
    **hf_kwargs: Any,
) -> Any:
    """Loads a quantised checkpoint folder as a transformers model that runs on int4_emu.

    The experts become `int4_emu.Experts`, the other quantised Linears `int4_emu.Int4Linear` (packed) or
    plain Linears (dequantised); everything in floating point is loaded by transformers. Every tensor of the
    checkpoint must find its place and every weight of the model its tensor.

    Args:
        path: folder with config.json and safetensors files. GPTQ, AWQ, compressed-tensors, AutoRound and
            Quark configurations are understood without the packages of those names; a checkpoint without a
            quantisation loads too.
        weights: "packed" keeps the weights int4 (int8) in memory, "dequantized" expands them to `dtype`,
            "auto" packs what a compiled backend supports and expands the rest where that fits in memory.
        dtype: dtype of activations, of unquantised weights and of dequantised ones; also by name, or "auto" for
            the configuration's. transformers' older spelling `torch_dtype` says the same.
        device: device of the whole model; None is the CPU, or what `device_map` says.
        strict: tensors that the model has no use for raise; False only logs them. Missing ones always raise.
        progress: shows a bar.
        zero_point_format, contradicting_zeros: as in `int4_emu.Checkpoint`, for files whose zero points belie
            their configuration.
        **hf_kwargs: passed on to transformers: `attn_implementation`, `config`, `device_map`, `max_memory`,
            attributes of the configuration, and so on. `trust_remote_code=True` lets the folder's own model code
            run where transformers has no class for the model; where it has one, that is used and no code of the
            folder runs, which is logged.

    Returns:
        The model in evaluation mode; with `output_loading_info=True` the pair (model, loading information).

    Raises:
        ImportError: transformers is missing or too old.
        CheckpointError: the folder, its configuration or its tensors are not complete and consistent.
        BackendError: packed weights were asked for and no backend supports a layer.
        ValueError: an argument that cannot be honoured.
    """
    transformers = _import_transformers()
    if weights not in WEIGHTS_MODES:
        raise ValueError(f'weights must be "auto", "packed" or "dequantized", got {weights!r}')
    dtype = _named_dtype(dtype, hf_kwargs.pop("torch_dtype", None))
    for name, value in _DONE_ANYWAY.items():
        if hf_kwargs.get(name) == value:
            del hf_kwargs[name]
    hf_kwargs.pop("offload_folder", None)
    for name, why in _REFUSED.items():
        if hf_kwargs.pop(name, None) is not None:
            raise ValueError(f"int4_emu.from_pretrained does not take {name}: {why}")
    trusted = bool(hf_kwargs.pop("trust_remote_code", False))
    if device is not None and hf_kwargs.get("device_map") is not None:
        raise ValueError(
            "give device or device_map, not both; "
            f"got device={device!r} and device_map={hf_kwargs['device_map']!r}"
        )
    target = None if device is None else torch.device(device)
    if target is not None and target.type == "meta":
        raise ValueError("device must be one that holds weights, got 'meta'")
    want_info = hf_kwargs.pop("output_loading_info", False)

    checkpoint = Checkpoint(
        path,
        strict=strict,
        zero_point_format=zero_point_format,
        contradicting_zeros=contradicting_zeros,
        leave_stacked=True,
    )
    check_model_type(checkpoint.config)
    if not isinstance(dtype, torch.dtype):
        dtype = _stored_dtype(checkpoint.model.config, checkpoint.config)
    own_code = trusted and needs_own_code(transformers, checkpoint.config)
    if trusted and not own_code and "auto_map" in checkpoint.config:
        logger.info(
            "trust_remote_code=True: transformers %s itself has a class for model_type %r, which is used; no code "
            "of the folder is run",
            transformers.__version__,
            checkpoint.config.get("model_type"),
        )
    known_type = ALIASES.get(checkpoint.config.get("model_type", ""))
    if known_type is not None and hf_kwargs.get("config") is None:
        hf_kwargs["config"] = _config_of_type(transformers, known_type, checkpoint.config, hf_kwargs)
    code_revision = hf_kwargs.get("code_revision")
    config, kwargs = _read_config(transformers, path, hf_kwargs, own_code)
    model_class = (
        own_model_class(transformers, path, checkpoint.config, code_revision)
        if own_code
        else _model_class(transformers, config)
    )
    if "experts_implementation" in kwargs:
        register_experts()
    plan = Plan(checkpoint, weights=weights, dtype=dtype)
    from ._hf_quantizer import Int4EmuConfig

    with _without_bar(transformers):
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=plan.host_tensors(),
            quantization_config=Int4EmuConfig(dict(quantization_config(checkpoint.config) or {}), plan),
            dtype=dtype,
            # Sizes are judged below, with names; transformers' own check differs between versions.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **kwargs,
        )
    plan.check_loaded(model, info, strict=strict)
    if target is not None:
        model.to(target)
    plan.fill(model, strict=strict, progress=progress)
    if plan.leaves_experts and "experts_implementation" not in kwargs:
        # Experts in floating point that transformers has loaded: they keep their parameters.
        register_experts()
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    _finish(transformers, model, plan, path, kwargs)
    return (model, info) if want_info else model


def register_experts() -> None:
    """Makes `experts_implementation="int4_emu"` known to transformers, for models in floating point.

    Such a model keeps its own parameters; only its experts' forward runs through `int4_emu.ops.fused_moe`.
    """
    _import_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from ._experts_function import experts_forward
    from ._llama4 import let_choose_experts

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
    let_choose_experts(EXPERTS_IMPLEMENTATION)


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _named_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """One of the three dtypes or "auto", from both spellings of the argument.

    Raises:
        TypeError: another dtype.
        ValueError: the spellings disagree.
    """
    if torch_dtype is not None:
        if dtype not in (torch.bfloat16, torch_dtype):  # the first is the default
            raise ValueError(f"give dtype or torch_dtype, not both; got {dtype!r} and {torch_dtype!r}")
        dtype = torch_dtype
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.removeprefix("torch."), dtype)
    if dtype != "auto" and dtype not in _DTYPES.values():
        raise TypeError(
            f'dtype must be torch.bfloat16, torch.float16, torch.float32, one of their names or "auto", got {dtype!r}'
        )
    return dtype


def _stored_dtype(*configs: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a configuration names, bfloat16 where it names none of the three."""
    for config in configs:
        for key in ("dtype", "torch_dtype"):
            if (found := _DTYPES.get(str(config.get(key)).removeprefix("torch."))) is not None:
                return found
    return torch.bfloat16


def _read_config(
    transformers: Any, path: str | os.PathLike[str], hf_kwargs: dict[str, Any], own_code: bool
) -> tuple[Any, dict[str, Any]]:
    """The model's configuration without its quantisation, and the arguments that are left for the model."""
    given = hf_kwargs.pop("config", None)
    kwargs = {name: hf_kwargs.pop(name) for name in _MODEL_ARGUMENTS if name in hf_kwargs}
    if isinstance(given, transformers.PreTrainedConfig):
        config, kwargs = copy.deepcopy(given), {**hf_kwargs, **kwargs}
    else:
        try:
            config, unused = transformers.AutoConfig.from_pretrained(
                os.fspath(given if given is not None else path),
                return_unused_kwargs=True,
                local_files_only=True,
                # Unset, transformers asks on a terminal whether to run the folder's own code.
                trust_remote_code=own_code,
                **hf_kwargs,
            )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{Path(path) / 'config.json'} is no configuration that transformers reads: {error}"
            ) from error
        for name in ("local_files_only", "trust_remote_code"):
            unused.pop(name, None)
        kwargs = {**unused, **kwargs}
    # Our wrapper goes in as an argument: left in place, the stock quantiser of that name would take over.
    for part in (config, config.get_text_config()):
        # A saved model must not name code that it was not made by either.
        for name in ("quantization_config", *(() if own_code else ("auto_map",))):
            if hasattr(part, name):
                delattr(part, name)
    return config, kwargs


def _config_of_type(
    transformers: Any, model_type: str, contents: dict[str, Any], hf_kwargs: dict[str, Any]
) -> Any:
    """A configuration read as another model type's; takes attributes of it out of `hf_kwargs`."""
    kind = transformers.CONFIG_MAPPING[model_type]
    plain = {name: value for name, value in contents.items() if name not in ("model_type", "auto_map")}
    config = kind.from_dict(plain)
    for name in [name for name in hf_kwargs if hasattr(config, name)]:
        setattr(config, name, hf_kwargs.pop(name))
    return config


def _model_class(transformers: Any, config: Any) -> Any:
    """The model class that the configuration names, else the one that transformers has for its type: what writes
    text, and of a model around a text model the whole.
    """
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    tasks = ["CausalLM", "ImageTextToText", "MultimodalLM", "TokenClassification"]
    if config.get_text_config() is not config:
        tasks.append(tasks.pop(0))
    for task in tasks:
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise CheckpointError(
        f"transformers {transformers.__version__} has no model class for "
        f"architectures={config.architectures}, model_type={config.model_type!r}"
    )


def _finish(
    transformers: Any, model: Any, plan: Plan, path: str | os.PathLike[str], kwargs: dict[str, Any]
) -> None:
    """What transformers does for a model that it loads from a folder, and the end of the quantiser's work."""
    folder = Path(path)
    if (
        kwargs.get("generation_config") is None
        and model.can_generate()
        and (folder / "generation_config.json").is_file()
    ):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.name_or_path = model.config.name_or_path = os.fspath(path)
    model.hf_quantizer.forget_plan()
    if plan.packed_modules == 0:
        # Nothing quantised is left: the model saves and casts like any other.
        model.hf_quantizer.remove_quantization_config(model)
        if hasattr(model, "_weight_conversions"):
            del model._weight_conversions


@contextmanager
def _without_bar(transformers: Any) -> Iterator[None]:
    """Hides transformers' bar over the small floating-point part; ours counts the layers."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
