"""What a user sets, and what it means. No vLLM here."""

from __future__ import annotations

from typing import Any

from ...weights_choice import WEIGHTS_MODES


def parse_weights(additional_config: Any) -> str:
    """`{"int4_emu": {"weights": ...}}` of `--additional-config`: packed, dequantized, or auto where it is silent.

    Raises:
        ValueError: another value or another key.
    """
    options = additional_config.get("int4_emu", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(options, dict) or set(options) - {"weights"}:
        raise ValueError(
            f'additional_config["int4_emu"] must be an object with the key "weights", got {options!r}'
        )
    weights = options.get("weights", "auto")
    if weights not in WEIGHTS_MODES:
        raise ValueError(
            f'additional_config["int4_emu"]["weights"] must be one of {", ".join(WEIGHTS_MODES)}, got {weights!r}'
        )
    return str(weights)


def expert_weights(weights: str, moe_backend: str) -> str:
    """What `--moe-backend` makes of the setting: `emulation` is the word for dequantized weights, in vLLM as here.

    Raises:
        ValueError: packed weights and emulation at once, or a kernel of vLLM's own.
    """
    if moe_backend == "auto":
        return weights
    if moe_backend != "emulation":
        raise ValueError(
            f"--moe-backend {moe_backend} is a kernel of vLLM's own: int4_emu serves experts with auto, or with emulation "
            "(dequantized weights)"
        )
    if weights == "packed":
        raise ValueError(
            '--moe-backend emulation contradicts additional_config["int4_emu"]["weights"] = "packed"'
        )
    return "dequantized"
