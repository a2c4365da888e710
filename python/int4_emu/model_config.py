"""What a model's config.json says about its MoE layers. Nothing is guessed: what cannot be mapped raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._enums import Activation, W13Order
from .errors import CheckpointError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
# A name may be one of these; the last two are the same formula (the tanh approximation).
_ACTIVATIONS = {
    "silu": Activation.silu,
    "swish": Activation.silu,
    "gelu": Activation.gelu,
    "relu2": Activation.relu2,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu_new": Activation.gelu_tanh,
}
# Keys that hold the activation of the MLPs, the most specific first.
_ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_activation", "hidden_act")
_NO_GATE = {
    Activation.silu: Activation.silu_no_mul,
    Activation.gelu: Activation.gelu_no_mul,
    Activation.gelu_tanh: Activation.gelu_tanh_no_mul,
    Activation.relu2: Activation.relu2_no_mul,
}
# Models whose experts use swiglu-oai although their configuration says silu. The values are constants of the
# model's code.
_SWIGLUOAI_MODELS = {"gpt_oss": {"limit": 7.0, "alpha": 1.702, "beta": 1.0}}
# Models whose experts always have a gate: files without one have lost it, whatever the activation is called.
_GATED_MODELS = frozenset(
    [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "minimax",
        "minimax_m2",
        "olmoe",
        "granitemoe",
        "phimoe",
        "llama4",
        "llama4_text",
        "gpt_oss",
    ]
)
# Models whose joint gate_up_proj alternates gate and up rows; all others have the gate's rows first.
_INTERLEAVED_MODELS = frozenset(["gpt_oss"])
_KNOWN_SWIGLU_KEYS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
_ROUTER_WEIGHT_ON_INPUT = ("llama4", "llama4_text")


@dataclass(frozen=True)
class ActivationSpec:
    """An activation with its parameters, ready for `Experts`."""

    activation: Activation
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None


@dataclass(frozen=True)
class MoEModelConfig:
    """The MoE part of a model configuration; None where the configuration is silent.

    Attributes:
        config: the object that holds the text model's keys (config.json itself or its `text_config`).
        known_activation: what the experts compute, where a host has said so.
    """

    config: Mapping[str, Any]
    model_type: str
    num_experts: int | None
    top_k: int | None
    hidden_size: int | None
    intermediate_size: int | None
    apply_router_weight_on_input: bool
    known_activation: ActivationSpec | None = None

    @property
    def gate_up_order(self) -> W13Order:
        """The order of the rows where a checkpoint stores gate and up projection in one tensor."""
        return W13Order.interleaved if self.model_type in _INTERLEAVED_MODELS else W13Order.halves

    def activation(self, *, gated: bool) -> ActivationSpec:
        """The experts' activation.

        Raises:
            CheckpointError: the configuration names none, an unknown one, or parameters that fit no known
                formula.
        """
        known = self.known_activation
        if known is not None and known.activation.is_gated == gated:
            return known
        return _activation(self.config, self.model_type, gated)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the text model's keys: `text_config` where it describes experts, else the whole."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and not any(k in config for k in _NUM_EXPERTS):
        return inner
    return config


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` object, wherever it is; None for a floating-point model."""
    for holder in (config, config.get("text_config")):
        if isinstance(holder, Mapping):
            for key in ("quantization_config", "compression_config"):
                if holder.get(key) is not None:
                    value = holder[key]
                    if not isinstance(value, Mapping):
                        raise CheckpointError(f"{key} must be a JSON object, got {type(value).__name__}")
                    return value
    return None


def parse_model_config(config: Mapping[str, Any]) -> MoEModelConfig:
    """Reads expert counts, sizes and routing rules.

    Raises:
        CheckpointError: a size that is not a positive whole number, or two keys for one thing that disagree.
    """
    text = text_config(config)
    model_type = text.get("model_type", config.get("model_type", ""))
    # Where experts work in a latent space of their own, hidden_size is not their input size.
    latent = _size(text, ("moe_latent_size",))
    return MoEModelConfig(
        config=text,
        model_type=model_type if isinstance(model_type, str) else "",
        num_experts=_size(text, _NUM_EXPERTS),
        top_k=_size(text, _TOP_K),
        hidden_size=latent or _size(text, ("hidden_size",)),
        intermediate_size=_size(text, ("moe_intermediate_size",)),
        apply_router_weight_on_input=model_type in _ROUTER_WEIGHT_ON_INPUT,
    )


def _size(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = {k: config[k] for k in keys if config.get(k) is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{key} of the model configuration must be a positive whole number, got {value!r}"
            )
    if len(set(values.values())) > 1:
        raise CheckpointError(
            "the model configuration contradicts itself: "
            + ", ".join(f"{k} = {v}" for k, v in values.items())
        )
    return next(iter(values.values()), None)


def _activation(config: Mapping[str, Any], model_type: str, gated: bool) -> ActivationSpec:
    unknown = [
        k for k in config if k.startswith("swiglu") and k not in _KNOWN_SWIGLU_KEYS and config[k] is not None
    ]
    if unknown:
        raise CheckpointError(
            f"the model configuration has {', '.join(unknown)}, which no known activation takes"
        )
    if not gated and model_type in _GATED_MODELS:
        raise CheckpointError(
            f"experts of {model_type} have a gate projection (gate_proj or w1), and the files hold none"
        )
    limit, alpha, beta = (_number(config, k) for k in _KNOWN_SWIGLU_KEYS)
    if model_type in _SWIGLUOAI_MODELS:
        fixed = _SWIGLUOAI_MODELS[model_type]
        return ActivationSpec(
            Activation.swigluoai,
            fixed["limit"] if limit is None else limit,
            fixed["alpha"] if alpha is None else alpha,
            fixed["beta"] if beta is None else beta,
        )
    named = next((config[k] for k in _ACTIVATION_KEYS if config.get(k) is not None), None)
    if named not in _ACTIVATIONS:
        keys, known = ", ".join(_ACTIVATION_KEYS), ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"the experts' activation ({keys}) must be one of {known}, got {named!r}")
    kind = _ACTIVATIONS[named]
    if not gated:
        kind = _NO_GATE[kind]
    if alpha is not None:
        if kind is not Activation.silu or limit is None:
            raise CheckpointError(
                f"swiglu_alpha needs swiglu_limit and a gated silu, got limit {limit} and {kind.name}"
            )
        # u' + 1 is part of the formula that alpha belongs to; a configuration that means another constant
        # says so.
        return ActivationSpec(Activation.swigluoai, limit, alpha, 1.0 if beta is None else beta)
    if beta is not None or (limit is not None and kind is not Activation.silu):
        raise CheckpointError(
            f"swiglu_limit = {limit} and swiglu_beta = {beta} do not fit the activation {kind.name}"
        )
    return ActivationSpec(kind, limit)


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{key} of the model configuration must be a number, got {value!r}")
    return float(value)
