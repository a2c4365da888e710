"""from_pretrained as a citizen of transformers: saving, moving, arguments, refusals, and gaps that raise."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import int4_emu
from bard_models import IDS, load, logits
from checkpoints import require_checkpoint
from int4_emu import CheckpointError
from int4_emu.data import BARD
from int4_emu.integrations import transformers as integration
from int4_emu.integrations._modules import HostedExperts
from int4_writer import write_pair
from tiny_models import tiny_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def packed() -> Any:
    return load(weights="packed")


@pytest.fixture(scope="module")
def dense() -> Any:
    return load(weights="dequantized")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of bard that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(BARD / name, tmp_path / name)
    return tmp_path


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_modes_agree_and_packed_is_smaller(packed: Any, dense: Any) -> None:
    assert torch.allclose(logits(packed), logits(dense), rtol=1e-3, atol=1e-3)
    sizes = [
        sum(t.nbytes for name, t in m.state_dict().items() if "proj" in name or "experts" in name)
        for m in (packed, dense)
    ]
    # 4 bits, and of each group of 32 weights 16 bits of scale and 8 of zero point: 4.75 of 32 bits.
    assert sizes[0] == pytest.approx(sizes[1] * 4.75 / 32)


def test_embeddings_are_tied(packed: Any) -> None:
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


def test_auto_packs_where_a_compiled_backend_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="int4_emu"):
        model = load(weights="auto")
    experts = model.model.layers[0].mlp.experts.experts
    assert experts.is_packed == (int4_emu.is_compiled())
    text = caplog.text
    assert all(f"layer {layer}" in text for layer in range(4))
    assert ("packed" if experts.is_packed else "dequantized") in text


def test_dequantised_model_saves_a_plain_checkpoint(dense: Any, tmp_path: Path) -> None:
    dense.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in saved
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(logits(stock), logits(dense), rtol=1e-4, atol=1e-4)
    again = load(tmp_path)  # a checkpoint without a quantisation loads too
    assert torch.allclose(logits(again), logits(dense), rtol=1e-4, atol=1e-4)


def test_mixtral_saves_under_the_names_of_its_own(tmp_path: Path) -> None:
    source = require_checkpoint("gptq-mixtral-asym-g32-v1")
    model = load(source, weights="dequantized")
    model.save_pretrained(tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight" in load_file(tmp_path / "model.safetensors")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    small = IDS % 256
    with torch.inference_mode():
        got, want = stock(input_ids=small).logits, model(input_ids=small).logits
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


def test_model_outlives_its_checkpoint(folder: Path, packed: Any) -> None:
    model = load(folder, weights="packed")
    for file in folder.iterdir():
        file.write_bytes(b"")  # in place: a mapping of the file would turn into a bus error
    assert torch.equal(logits(model), logits(packed))


def test_pickles(packed: Any) -> None:
    assert torch.equal(logits(pickle.loads(pickle.dumps(packed))), logits(packed))


def test_forward_works_with_gradients_on_and_backward_raises(packed: Any) -> None:
    out = packed(input_ids=IDS).logits
    assert out.requires_grad
    assert torch.equal(out.detach(), logits(packed))
    with pytest.raises(NotImplementedError, match="inference only"):
        out.sum().backward()


def test_experts_compile_whole(packed: Any) -> None:
    experts = packed.model.layers[0].mlp.experts
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (3, 7):
        x, index, scores = torch.randn(tokens, 256), torch.randint(0, 16, (tokens, 4)), torch.rand(tokens, 4)
        with torch.inference_mode():
            assert torch.equal(compiled(x, index, scores), experts(x, index, scores))


def test_packed_model_refuses_to_save(packed: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save_pretrained cannot write .* packed.*copy the folder .*bard"):
        packed.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_dequantised_model_casts(dense: Any) -> None:
    model = copy.deepcopy(dense).to(torch.bfloat16)
    assert model.model.layers[0].mlp.experts.experts.w13.dtype is torch.bfloat16
    assert (
        torch.nn.functional.cosine_similarity(logits(model).float().flatten(), logits(dense).flatten(), dim=0)
        > 0.999
    )


def test_state_dict_round_trip(packed: Any, dense: Any) -> None:
    for model in (packed, dense):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[1].self_attn.q_norm.weight.zero_()
        result = other.load_state_dict(model.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.equal(logits(other), logits(model))


def test_a_packed_model_casts_what_is_in_floating_point(packed: Any) -> None:
    model = copy.deepcopy(packed).to(torch.bfloat16)
    experts = model.model.layers[0].mlp.experts.experts
    assert experts.w13_qweight.dtype is torch.uint8
    assert experts.w13_scales.dtype is packed.model.layers[0].mlp.experts.experts.w13_scales.dtype
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(
        logits(model).float().flatten(), logits(packed).flatten(), dim=0
    )
    assert cosine > 0.999


def test_generates_with_a_static_cache_and_compiled(tmp_path: Path) -> None:
    _, folder = write_pair(tiny_model("qwen3_moe"), tmp_path, "compressed_tensors", 16)
    model, ids = load(folder, weights="packed"), IDS % 96
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    assert want.shape[1] > ids.shape[1]
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # One step after another through the compiled whole, without a graph break.
    model.forward = torch.compile(model.forward, fullgraph=True, backend=keep, dynamic=False)
    got = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(got, want)
    assert 0 < len(graphs) <= 3  # the prompt, and the steps


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(integration.importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r'transformers >= 5\.17.*pip install "int4_emu\[transformers\]"'):
        load()


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration.importlib.metadata, "version", lambda name: "5.9.1")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17, found 5\.9\.1"):
        load()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.7.down_proj.weight_scale",
        "model.layers.1.self_attn.q_proj.weight_zero_point",
        "model.layers.1.self_attn.q_norm.weight",
        "model.embed_tokens.weight",
        "model.layers.3.mlp.gate.weight",
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_tensor_raises(name: str, strict: bool, folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(folder, strict=strict)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.extra", "model.layers.0.mlp.experts.3.up_proj.extra", "extra.weight"]
)
def test_an_unexpected_tensor_raises_when_strict(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(folder)
    model = load(folder, strict=False)
    assert torch.isfinite(logits(model)).all()
    assert name in caplog.text


def test_a_tensor_of_another_size_raises(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
    with pytest.raises(CheckpointError, match=r"q_norm\.weight is \[32\], the model wants \[64\]"):
        load(folder)


def test_a_quantised_linear_of_another_size_raises(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(num_key_value_heads=4))
    with pytest.raises(
        CheckpointError,
        match=r"k_proj is \[out, in\] = \[128, 256\] in the checkpoint, the model wants \[256, 256\]",
    ):
        load(folder)


def test_more_layers_than_the_checkpoint_holds_raises(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(num_hidden_layers=5))
    with pytest.raises(
        CheckpointError,
        match=r"has experts in layers \[0, 1, 2, 3, 4\], the checkpoint in layers \[0, 1, 2, 3\]",
    ):
        load(folder)


def test_another_activation_than_the_model_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from int4_emu.integrations import _modules

    real = _modules.Gating
    monkeypatch.setattr(_modules, "Gating", lambda *args: real(int4_emu.Activation.gelu))
    with pytest.raises(CheckpointError, match="the configuration says activation gelu"):
        load(folder)


def test_unknown_architecture_raises(folder: Path) -> None:
    edit_config(
        folder, lambda config: config.update(model_type="no_such_model", architectures=["NoSuchModel"])
    )
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


def moe_config(kind: str) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    sizes = {**heads, **layers, "vocab_size": 64, "num_experts_per_tok": 2}
    if kind == "gpt_oss":  # interleaved, transposed, biases, swiglu-oai
        return transformers.GptOssConfig(**sizes, num_local_experts=4, layer_types=["full_attention"] * 2)
    if kind == "gelu":
        return transformers.Qwen3MoeConfig(
            **sizes, num_experts=4, moe_intermediate_size=24, hidden_act="gelu_pytorch_tanh"
        )
    return transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gpt_oss"])
def test_experts_function_for_models_in_floating_point(kind: str) -> None:
    integration.register_experts()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        moe_config(kind), experts_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        want = model(input_ids=ids).logits
        model.set_experts_implementation(integration.EXPERTS_IMPLEMENTATION)
        got = model(input_ids=ids).logits
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)
    assert not torch.equal(got, torch.zeros_like(got))


def test_experts_in_another_order_save_as_the_host_does() -> None:
    """gpt-oss keeps gate and up interleaved and its matrices transposed; ours are in halves, rows first."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        moe_config("gpt_oss"), experts_implementation="eager"
    )
    host = model.model.layers[0].mlp.experts.eval()
    for parameter in host.parameters():
        torch.nn.init.normal_(parameter)
    rows, bias = host.gate_up_proj.detach().transpose(1, 2), host.gate_up_proj_bias.detach()
    experts = int4_emu.Experts(
        torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1),
        host.down_proj.detach().transpose(1, 2).contiguous(),
        w13_bias=torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1),
        w2_bias=host.down_proj_bias.detach(),
        activation="swigluoai",
        limit=7.0,
        alpha=1.702,
        beta=1.0,
        dtype=torch.float32,
    )
    hosted = HostedExperts(host, "experts")
    hosted.fill(experts)
    state, want = hosted.state_dict(), host.state_dict()
    assert set(state) == set(want)
    assert all(torch.equal(state[key], value) for key, value in want.items())
    with torch.no_grad():
        experts.w13.zero_()
    hosted.load_state_dict(want)
    x, index, scores = torch.randn(6, 32), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.inference_mode():
        assert torch.allclose(hosted(x, index, scores), host(x, index, scores), rtol=1e-4, atol=1e-3)
