"""The names of vLLM's quantization methods that int4_emu claims, and whether another plug-in has them. Imports vLLM."""

from __future__ import annotations

from vllm.model_executor.layers import quantization as registry

_claims: dict[str, type] = {}


def claim(configs: dict[str, type]) -> None:
    """Registers a config class for each name, once a process.

    Raises:
        ValueError: another plug-in has one of the names.
    """
    _claims.update(configs)
    check_claims()
    for name, config in _claims.items():
        if registry._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(name) is not config:
            registry.register_quantization_config(name)(config)


def check_claims() -> None:
    """Stops where another plug-in has a name of ours, whichever of the two came first.

    Raises:
        ValueError: the name and both classes.
    """
    for name, mine in _claims.items():
        other = registry._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(name, mine)
        if other is not mine:
            raise ValueError(
                f"two plug-ins claim vLLM's quantization method {name!r}: {other.__module__}.{other.__qualname__} and "
                f"{mine.__module__}.{mine.__qualname__}; VLLM_PLUGINS=<names> loads only the one that is meant"
            )
