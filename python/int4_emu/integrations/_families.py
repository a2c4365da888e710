"""Which of transformers' MoE model types run on int4_emu, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

# Compared with stock transformers by tests/test_transformers_types.py, with the transformers that it names.
TESTED = (
    "afmoe", "aria", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm5_next", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl", "inkling_mm_model", "inkling_text", "jamba",
    "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4", "llama4_text", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text", "mistral4", "mistral_large4",
    "mixtral", "nemotron_h", "olmoe", "openai_privacy_filter", "phimoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp",
    "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "unlimited_ocr", "zaya",
)  # fmt: skip
# Model types of published configurations that transformers does not know and another type's code runs.
ALIASES = {"kimi_k2": "deepseek_v3"}

_SOFT_CAPPED = "the activation of its experts is soft-capped, which no activation of int4_emu is"
# Model type to the end of "int4_emu does not run TYPE: ...".
REFUSED = {
    "dbrx": "transformers keeps its experts in flat matrices of their own, not called through experts_implementation",
    "diffusion_gemma": "its encoder and its decoder are two stacks of layers that share their experts",
    "ernie4_5_vl_moe": "its text and vision experts of different sizes are counted through in one list",
    "inkling2": _SOFT_CAPPED,
    "inkling2_text": _SOFT_CAPPED,
    "inkling2_loop": _SOFT_CAPPED,
    "inkling2_loop_text": _SOFT_CAPPED,
    "jetmoe": "its attention heads are experts too, and both are of a kind of its own",
    "longcat_flash": "some of its experts hand their input through instead of computing",
    "muse_spark": "it norms each expert's output before the sum",
    "nllb-moe": "its experts are modules of an encoder-decoder that drops tokens beyond a capacity",
    "qwen3_omni_moe": "its thinker and its talker both have experts in layers of the same numbers",
    "step3p7": "its experts clamp the gate after the activation, which no activation of int4_emu does",
    "switch_transformers": "its experts are modules of an encoder-decoder that drops tokens beyond a capacity",
}  # fmt: skip


def check_model_type(config: Mapping[str, Any]) -> None:
    """Refuses the model types that are known not to work. Unknown ones pass: what can be checked is checked
    when the model is built.

    Raises:
        CheckpointError: with the type and the reason.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        kind = part.get("model_type")
        if isinstance(kind, str) and kind in REFUSED:
            raise CheckpointError(f"int4_emu does not run model_type {kind!r}: {REFUSED[kind]}")
