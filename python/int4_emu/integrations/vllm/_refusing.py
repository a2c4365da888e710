"""What stands for the method `int4_emu` in a vLLM that the plug-in was not tested with. Imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


def register(refusal: str) -> None:
    """Any use of `--quantization int4_emu` raises `refusal`."""

    @register_quantization_config("int4_emu")
    class Refusing(QuantizationConfig):
        """Raises wherever it is asked."""

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: Any, user_quant: str | None, *args: Any, **kwargs: Any
        ) -> str | None:
            if user_quant == "int4_emu":
                raise ValueError(refusal)
            return None

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            raise ValueError(refusal)

        def get_name(self) -> str:
            raise ValueError(refusal)

        def get_supported_act_dtypes(self) -> list[Any]:
            raise ValueError(refusal)

        @classmethod
        def get_min_capability(cls) -> int:
            raise ValueError(refusal)

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            raise ValueError(refusal)
