"""The arguments of from_pretrained: places, dtypes, what transformers' own users pass by habit, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import int4_emu
from bard_models import load, logits
from int4_emu.data import BARD

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def packed() -> Any:
    return load(weights="packed")


@pytest.mark.parametrize(
    "place", [{"device": "cpu"}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}]
)
def test_places(place: dict[str, Any], packed: Any) -> None:
    if "device_map" in place:
        pytest.importorskip("accelerate")
    model = load(weights="packed", **place)
    # "auto" prefers an accelerator where there is one.
    automatic = place.get("device_map") == "auto" and torch.cuda.is_available()
    want = "cuda" if automatic else "cpu"
    assert {value.device.type for value in model.state_dict().values()} == {want}
    assert torch.equal(logits(model.to("cpu")), logits(packed))


def test_device_map_that_offloads_is_refused() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(
        ValueError, match="device_map must place every module on the CPU, or every one on accelerators"
    ):
        load(device_map="auto", max_memory={"cpu": 100_000})


def test_arguments_that_ask_for_what_is_done_anyway(packed: Any) -> None:
    habits = {
        "use_safetensors": True, "ignore_mismatched_sizes": False, "subfolder": "", "local_files_only": True,
        "offload_folder": "offload", "low_cpu_mem_usage": True, "token": None, "revision": "main",
        "trust_remote_code": True, "variant": None, "cache_dir": None, "force_download": False,
    }  # fmt: skip
    assert torch.equal(logits(load(weights="packed", **habits)), logits(packed))


def test_arguments_reach_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.delitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "int4_emu", raising=False)
    model = load(attn_implementation="eager", use_cache=False, experts_implementation="int4_emu")
    assert model.config._experts_implementation == "int4_emu"
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    config = transformers.AutoConfig.from_pretrained(BARD)
    config.num_experts_per_tok = 1
    fewer = load(config=config)
    assert fewer.model.layers[0].mlp.gate.top_k == 1
    assert (
        config.quantization_config["quant_method"] == "compressed-tensors"
    )  # the caller's object is left alone


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"weights": "int4"}, ValueError, 'weights must be "auto", "packed" or "dequantized", got \'int4\''),
        (
            {"dtype": torch.int8},
            TypeError,
            'dtype must be torch.bfloat16, torch.float16, torch.float32, one of their names or "auto", got torch.int8',
        ),
        ({"dtype": "int8"}, TypeError, "dtype must be torch.bfloat16.*got 'int8'"),
        (
            {"dtype": torch.float16, "torch_dtype": torch.float32},
            ValueError,
            "give dtype or torch_dtype, not both",
        ),
        ({"quantization_config": {}}, ValueError, "does not take quantization_config: the checkpoint's own"),
        ({"tp_plan": "auto"}, ValueError, "does not take tp_plan: use int4_emu.Checkpoint"),
        ({"device": "cpu", "device_map": "auto"}, ValueError, "give device or device_map, not both"),
        ({"device": "meta"}, ValueError, "device must be one that holds weights, got 'meta'"),
        (
            {"device_map": "meta"},
            ValueError,
            r"device_map must place every module on the CPU, .* got \['meta'\]",
        ),
        (
            {"use_safetensors": False},
            ValueError,
            "does not take use_safetensors: nothing but safetensors is read",
        ),
        (
            {"local_files_only": False},
            ValueError,
            "does not take local_files_only: the path is a folder here",
        ),
    ],
)
def test_refused_arguments(options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        load(**options)


@pytest.mark.parametrize(
    ("spelling", "want"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": torch.float16}, torch.float16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),  # bard's configuration says so
        ({}, torch.bfloat16),
    ],
)
def test_spellings_of_the_dtype(spelling: dict[str, Any], want: torch.dtype) -> None:
    model = int4_emu.from_pretrained(BARD, weights="packed", progress=False, **spelling)
    assert model.dtype is want
    assert model.model.layers[0].mlp.experts.experts.dtype is want
