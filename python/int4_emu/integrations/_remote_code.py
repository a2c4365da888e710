"""Model classes in a checkpoint folder's own code, for models that the installed transformers does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ._families import ALIASES, TESTED


def needs_own_code(transformers: Any, config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a model class in its own folder, and transformers has none that does.

    Published folders keep the code of their first days (Kimi-K2, MiniMax-M2, DeepSeek-V3). It runs each expert by
    itself, where transformers' later class for the same model runs them in one call.
    """
    if _model_reference(config) is None:
        return False
    kind = ALIASES.get(config.get("model_type", ""), config.get("model_type"))
    if kind in TESTED and kind in transformers.CONFIG_MAPPING:
        return False
    return not any(hasattr(transformers, name) for name in config.get("architectures") or ())


def own_model_class(
    transformers: Any, path: str | os.PathLike[str], config: Mapping[str, Any], code_revision: str | None
) -> Any:
    """Runs the folder's own code, as transformers does with trust_remote_code=True, and returns the model class.

    Raises:
        CheckpointError: the code is missing, or does not run with this transformers.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    found = _model_reference(config)
    assert found is not None
    auto_class, reference = found
    try:
        kind: Any = get_class_from_dynamic_module(
            reference, os.fspath(path), code_revision=code_revision, local_files_only=True
        )
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise CheckpointError(
            f"{reference}, which auto_map in {os.path.join(path, 'config.json')} names, does not run with "
            f"transformers {transformers.__version__}: {error}"
        ) from error
    kind.register_for_auto_class(auto_class)  # save_pretrained then copies the code
    return add_generation_mixin_to_remote_model(kind)


def _model_reference(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(auto class, module.Class) of the model in auto_map: the architecture's, else the causal language model."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    models = {k: v for k, v in auto_map.items() if k.startswith("AutoModel") and isinstance(v, str)}
    for auto_class, reference in models.items():
        if reference.rpartition(".")[2] in (config.get("architectures") or ()):
            return auto_class, reference
    causal = models.get("AutoModelForCausalLM")
    return None if causal is None else ("AutoModelForCausalLM", causal)
