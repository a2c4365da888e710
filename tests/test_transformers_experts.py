"""experts_implementation="int4_emu" for models in floating point, of every type that transformers lets choose."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from int4_emu import ops
from int4_emu.integrations import transformers as integration
from int4_emu.integrations._families import TESTED
from int4_writer import experts_of
from layers import relative_error
from tiny_models import IDS, logits, tiny_model

transformers = pytest.importorskip("transformers")

SOME = [
    "aria_text", "deepseek_v4", "gemma4_text", "gpt_oss", "llama4_text", "minimax_m3_vl_text", "mixtral", "nemotron_h",
]  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register_experts()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [SOME, pytest.param(TESTED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_types_compute_what_eager_computes(
    kinds: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    # PyTorch's own float32 matrix products on a GPU may be rounded to TF32, ours are not.
    bound = 3e-6 if device == "cpu" else 1e-4
    calls, compute = [], ops.fused_moe
    monkeypatch.setattr(ops, "fused_moe", lambda *args, **more: calls.append(0) or compute(*args, **more))
    failed = {}
    for kind in kinds:
        model = tiny_model(kind).to(device)
        want = logits(model)
        assert not calls
        model.set_experts_implementation(integration.EXPERTS_IMPLEMENTATION)
        got = relative_error(logits(model), want)
        if got > bound or len(calls) < len(experts_of(model)):
            failed[kind] = (got, len(calls))
        calls.clear()
    assert not failed


def test_other_choices_for_llama_4_are_what_they_were(tmp_path: Path) -> None:
    tiny_model("llama4_text").save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="calls its experts without grouped_mm"):
        model.set_experts_implementation("grouped_mm")
    want = logits(model)
    chosen = auto.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="int4_emu")
    got = logits(chosen)
    assert 0 < relative_error(got, want) < 3e-6  # other sums: not the host's own
    chosen.set_experts_implementation("eager")
    assert torch.equal(logits(chosen), want)


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


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_compiles_whole_at_the_first_call(kind: str) -> None:
    torch.compiler.reset()
    model = tiny_model(kind)
    blocks = {"gpt_oss": "mlp", "llama4_text": "feed_forward"}
    block = getattr(model.model.layers[0], blocks[kind])
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        want = block(x)[0]
        model.set_experts_implementation("int4_emu")
        got = torch.compile(block, fullgraph=True, backend="eager")(x)[0]
    assert 0 < relative_error(got, want) < 3e-6
    torch.compiler.reset()


def test_parameters_stay_where_they_are(tmp_path: Path) -> None:
    """gpt-oss stores its matrices input first: the op reads them so, without a copy."""
    model = tiny_model("gpt_oss")
    want, before = logits(model), copy.deepcopy(model.state_dict())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    model.set_experts_implementation("int4_emu")
    assert relative_error(logits(model), want) < 3e-6
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert relative_error(logits(stock), want) < 3e-6


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


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_moe", "Qwen3MoeExperts"), ("llama4_text", "Llama4TextExperts")]
)
def test_an_activation_that_is_not_known_is_refused(kind: str, name: str) -> None:
    model = tiny_model(kind)
    for module in experts_of(model).values():
        module.act_fn = torch.nn.Tanh()
    model.set_experts_implementation("int4_emu")
    with pytest.raises(ValueError, match=f"no known activation gives the values of {name}"):
        logits(model)
