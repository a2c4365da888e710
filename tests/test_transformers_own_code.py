"""trust_remote_code: folders whose auto_map names model code of their own."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import int4_emu
import own_model_code as own
from checkpoint_files import compressed_tensors_config
from int4_emu import CheckpointError
from int4_emu.integrations._modules import HostedExperts
from int4_writer import write_mixed, write_pair
from layers import relative_error
from tiny_models import IDS, logits, tiny_model

transformers = pytest.importorskip("transformers")

BOUND = 3e-6
FILE = "modeling_own.py"


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers copies the code of folders to run it."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds the place
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def load(path: Path, **options: Any) -> Any:
    return int4_emu.from_pretrained(path, **{"dtype": torch.float32, "progress": False, **options})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def give_code(folder: Path, architecture: str) -> None:
    shutil.copy(own.__file__, folder / FILE)
    module = FILE.removesuffix(".py")
    auto_map = {
        "AutoConfig": f"{module}.OwnConfig",
        "AutoModel": f"{module}.OwnModel",
        "AutoModelForCausalLM": f"{module}.{architecture}",
    }
    edit_config(folder, architectures=[architecture], auto_map=auto_map)


def write_own(folder: Path, architecture: str) -> tuple[Path, Path]:
    """A model of a type that transformers does not know: its experts and one expert layer's router in float."""
    torch.manual_seed(0)
    model = own.OwnForCausalLM(own.OwnConfig())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "first")
    quantization = compressed_tensors_config(group_size=16, symmetric=False)
    quantization["ignore"] = ["lm_head", "re:.*mlp.gate$", "model.layers.1.mlp.experts.2.up_proj"]

    def choose(module: str) -> tuple[int, int] | None:
        return (4, 16) if module.endswith("_proj") and "1.mlp.experts.2.up" not in module else None

    plain, mixed = write_mixed(folder / "first", folder, "compressed_tensors", choose, quantization)
    give_code(plain, "OwnForCausalLM")
    give_code(mixed, architecture)
    return plain, mixed


def stock_logits(path: Path) -> torch.Tensor:
    auto = transformers.AutoModelForCausalLM
    return logits(auto.from_pretrained(path, dtype=torch.float32, trust_remote_code=True))


@pytest.mark.parametrize("weights", ["auto", "dequantized"])
def test_experts_that_own_code_keeps_one_by_one(
    weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, mixed = write_own(tmp_path, "OwnForCausalLM")
    want = stock_logits(plain)
    with caplog.at_level(logging.INFO, logger="int4_emu"):
        model, info = load(mixed, weights=weights, trust_remote_code=True, output_loading_info=True)
    assert "OwnForCausalLM keeps each expert by itself" in caplog.text
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts[2].up_proj, torch.nn.Linear)
    kind = int4_emu.Int4Linear if weights == "auto" and int4_emu.is_compiled() else torch.nn.Linear
    assert type(experts[2].gate_proj) is kind
    assert relative_error(logits(model), want) < BOUND
    assert model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 14)
    if weights == "dequantized":
        model.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / FILE).is_file()
        assert relative_error(stock_logits(tmp_path / "saved"), want) < BOUND


def test_experts_that_own_code_stacks_in_transformers_way(tmp_path: Path) -> None:
    plain, mixed = write_own(tmp_path, "StackedForCausalLM")
    model = load(mixed, trust_remote_code=True)
    assert type(model).__name__ == "StackedForCausalLM"
    assert len([module for module in model.modules() if isinstance(module, HostedExperts)]) == 2
    assert relative_error(logits(model), stock_logits(plain)) < BOUND


@pytest.mark.parametrize("strict", [True, False])
def test_experts_out_of_reach_are_refused(strict: bool, tmp_path: Path) -> None:
    _, mixed = write_own(tmp_path, "HiddenForCausalLM")
    with pytest.raises(
        CheckpointError, match=r"HiddenForCausalLM has no experts in reach, .* in layers \[0, 1\]"
    ):
        load(mixed, trust_remote_code=True, strict=strict)


@pytest.mark.parametrize("unset", [{}, {"trust_remote_code": False}, {"trust_remote_code": None}])
def test_own_code_runs_only_when_it_is_trusted(unset: dict[str, Any], tmp_path: Path) -> None:
    _, mixed = write_own(tmp_path, "OwnForCausalLM")
    (mixed / FILE).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="custom code which must be executed"):
        load(mixed, **unset)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("code", "why"),
    [(None, "modeling_own.py"), ("import no_such_package_of_any_kind", "no_such_package"), ("", "OwnFor")],
)
def test_own_code_that_does_not_run(code: str | None, why: str, tmp_path: Path) -> None:
    _, mixed = write_own(tmp_path, "OwnForCausalLM")
    edit_config(mixed, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, model_type="qwen2")
    (mixed / FILE).unlink() if code is None else (mixed / FILE).write_text(code)
    with pytest.raises(
        CheckpointError, match=rf"modeling_own.OwnForCausalLM, which auto_map in .* does not run .*{why}"
    ):
        load(mixed, trust_remote_code=True)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_what_transformers_has_itself_runs_no_code_of_the_folder(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, quantised = write_pair(tiny_model("deepseek_v3"), tmp_path, "compressed_tensors", 16)
    want = logits(transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    (quantised / FILE).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {
        "AutoConfig": "modeling_own.Config",
        "AutoModelForCausalLM": "modeling_own.DeepseekV3ForCausalLM",
    }
    edit_config(quantised, auto_map=auto_map, model_type=model_type)
    with caplog.at_level(logging.INFO, logger="int4_emu"):
        model = load(quantised, weights="dequantized", trust_remote_code=True)
    assert "no code of the folder is run" in caplog.text
    assert not (tmp_path / "ran").exists()
    assert type(model) is transformers.DeepseekV3ForCausalLM
    assert relative_error(logits(model), want) < BOUND
    model.save_pretrained(tmp_path / "saved")  # without the code, and without its names
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert relative_error(stock_logits(tmp_path / "saved"), want) < BOUND
