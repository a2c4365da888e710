"""experts_implementation="int4_emu" for models in floating point, of every type that transformers lets choose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from int4_emu.integrations import transformers as integration
from int4_emu.integrations._families import TESTED
from int4_writer import experts_of
from tiny_models import tiny_model

transformers = pytest.importorskip("transformers")

# Llama-4's blocks call their experts directly, and a composite's text model is in the list by itself.
TYPES = [
    kind for kind in TESTED if kind not in ("gemma4", "llama4", "llama4_text", "minimax_m3_vl", "qwen3_5_moe")
]
SOME = ["aria_text", "deepseek_v4", "gemma4_text", "gpt_oss", "minimax_m3_vl_text", "mixtral", "nemotron_h"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register_experts()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS.to(model.device)).logits.double()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [SOME, pytest.param(TYPES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_types_compute_what_eager_computes(kinds: list[str], device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    # PyTorch's own float32 matrix products on a GPU may be rounded to TF32, ours are not.
    bound = 3e-6 if device == "cpu" else 1e-4
    failed = {}
    for kind in kinds:
        model = tiny_model(kind).to(device)
        want = logits(model)
        model.set_experts_implementation(integration.EXPERTS_IMPLEMENTATION)
        if (got := error(logits(model), want)) > bound:
            failed[kind] = got
    assert not failed


def test_chosen_while_loading_and_generating(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    want, got = (
        auto.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation=name).generate(
            IDS[:1], max_new_tokens=8, do_sample=False
        )
        for name in ("eager", "int4_emu")
    )
    assert torch.equal(got, want)


def test_parameters_stay_where_they_are(tmp_path: Path) -> None:
    """gpt-oss stores its matrices input first: the op reads them so, without a copy."""
    model = tiny_model("gpt_oss")
    want, before = logits(model), copy.deepcopy(model.state_dict())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    model.set_experts_implementation("int4_emu")
    assert error(logits(model), want) < 3e-6
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert error(logits(stock), want) < 3e-6


def test_slots_of_other_ranks_are_skipped() -> None:
    module = next(iter(experts_of(tiny_model("qwen3_moe")).values()))
    module.config._experts_implementation = "int4_emu"
    x, weights = torch.randn(3, 64), torch.tensor([[0.5, 0.0], [1.0, 0.0], [0.0, 0.0]])
    ids = torch.tensor([[1, 4], [0, 9], [4, 4]])  # 4 and up: experts of other ranks
    with torch.inference_mode():
        got = module(x, ids, weights)
        alone = module(x[:2], ids[:2, :1], weights[:2, :1])
    assert torch.equal(got[:2], alone)
    assert torch.equal(got[2], torch.zeros(64))


def test_an_activation_that_is_not_known_is_refused() -> None:
    model = tiny_model("qwen3_moe")
    for module in experts_of(model).values():
        module.act_fn = torch.nn.Tanh()
    model.set_experts_implementation("int4_emu")
    with pytest.raises(ValueError, match="no known activation gives the values of Qwen3MoeExperts"):
        logits(model)
