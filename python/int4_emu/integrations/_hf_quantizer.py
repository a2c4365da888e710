"""The quantiser that transformers calls while it loads a model. Imports transformers: import it lazily."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._host_names import HostNames
from ._plan import Plan

METHOD = "int4_emu"

_SAVE_PACKED = (
    "save_pretrained cannot write a model whose weights are packed, and nothing in it differs from its "
    'checkpoint: copy the folder {path}, write a floating-point checkpoint with "int4-emu convert", '
    'or load with weights="dequantized"'
)


@register_quantization_config(METHOD)
class Int4EmuConfig(QuantizationConfigMixin):
    """Wraps a checkpoint's own `quantization_config`, so that none of the built-in quantisers takes it.

    Attributes:
        inner: the checkpoint's `quantization_config`.
        plan: what `int4_emu.from_pretrained` is about to load; never saved nor copied.
    """

    def __init__(self, inner: dict[str, Any] | None = None, plan: Plan | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # the enum lists the built-in ones
        self.inner = dict(inner or {})
        self.plan = plan

    def to_dict(self) -> dict[str, Any]:
        """The part that can be saved."""
        return {"quant_method": METHOD, "inner": self.inner}

    def __deepcopy__(self, memo: dict[int, Any]) -> Int4EmuConfig:
        return Int4EmuConfig(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None}


@register_quantizer(METHOD)
class Int4EmuQuantizer(HfQuantizer):
    """Clears the quantised modules out of a model's skeleton; `int4_emu.from_pretrained` fills them
    afterwards.
    """

    requires_calibration = False

    def __init__(self, quantization_config: Int4EmuConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if quantization_config.plan is None:
            raise ValueError(f'quant_method "{METHOD}" is loaded by int4_emu.from_pretrained(path) only')
        self.plan: Plan = quantization_config.plan
        self.path = self.plan.path

    def forget_plan(self) -> None:
        """Lets go of the opened checkpoint, so that the model can be copied and pickled."""
        assert isinstance(self.quantization_config, Int4EmuConfig)
        self.quantization_config.plan = None
        del self.plan

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called before the model is built, and again with a device map that transformers has computed."""
        self.plan.release()
        if isinstance(device_map, dict):
            self.plan.check_device_map(device_map)

    def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, **kwargs: Any) -> Any:
        self.plan.install(model, HostNames(model))
        if isinstance(device_map, str):
            self.plan.reserve()
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """False: what transformers itself loads is floating point."""
        return False

    def is_serializable(self) -> bool:
        """Raises while any weight is packed: the checkpoint is the saved form."""
        raise ValueError(_SAVE_PACKED.format(path=self.path))

    @property
    def is_trainable(self) -> bool:
        """False: inference only."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: the ops trace."""
        return True
