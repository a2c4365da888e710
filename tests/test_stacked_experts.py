"""Quantised experts that a file keeps all in one tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import int4_emu
from int4_emu import CheckpointError
from int4_emu.convert import convert_checkpoint
from int4_writer import Tensors, write_pair
from layers import relative_error
from test_transformers_types import BOUND, hosted, load, stock_logits
from tiny_models import logits, tiny_model

pytest.importorskip("transformers")

GROUP = 16
_PART = re.compile(r"(?P<experts>.*experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)\.(?P<suffix>\w+)")
LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# As a Linear's tensors are named, as a parameter's are.
SPELLINGS: list[Callable[[str, str], str]] = [
    lambda leaf, suffix: f"{leaf}.{suffix}",
    lambda leaf, suffix: f"{leaf}_{suffix.removeprefix('weight_')}",
]


def stack(tensors: Tensors, spell: Callable[[str, str], str], *, whole_shape: bool = False) -> Tensors:
    """All experts in one tensor, the rows of gate and up projection one after the other."""
    found: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            leaf = LEAVES.get(match["leaf"], match["leaf"])
            found.setdefault((match["experts"], leaf, match["suffix"]), {})[int(match["expert"])] = tensor
        else:
            rest[name] = tensor
    stacks = {key: torch.stack([parts[e] for e in range(len(parts))]) for key, parts in found.items()}
    for (experts, leaf, suffix), value in stacks.items():
        if leaf == "gate_proj":
            continue
        gate = stacks.get((experts, "gate_proj", suffix))
        if leaf == "up_proj" and gate is not None:
            leaf = "gate_up_proj"
            value = gate + value if suffix == "weight_shape" else torch.cat([gate, value], dim=1)
            if suffix == "weight_shape":
                value[:, 1] //= 2
        if suffix == "weight_shape" and whole_shape:
            value = torch.tensor([len(value), *value[0]])
        rest[f"{experts}.{spell(leaf, suffix)}"] = value
    return rest


def restore(source: Path, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {k: v.contiguous() for k, v in change(load_file(source / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("spell", SPELLINGS, ids=["of a Linear", "of a parameter"])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "mixtral", "nemotron_h", "qwen3_vl_moe"])
def test_experts_in_one_tensor_give_the_logits_of_stock_transformers(
    kind: str, spell: Callable[[str, str], str], tmp_path: Path
) -> None:
    plain, quantised = write_pair(tiny_model(kind), tmp_path, "compressed_tensors", GROUP)
    whole = spell is SPELLINGS[1]
    folder = restore(quantised, tmp_path / "stacked", lambda t: stack(t, spell, whole_shape=whole))
    names = load_file(folder / "model.safetensors")
    assert not any(re.search(r"experts\.\d", name) for name in names)
    want = stock_logits(plain)
    for weights in ("packed", "dequantized"):
        model, info = load(folder, weights=weights, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert all(module.experts.is_packed == (weights == "packed") for module in hosted(model))
        assert relative_error(logits(model), want) < BOUND


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    _, quantised = write_pair(tiny_model("qwen3_moe"), tmp_path, "compressed_tensors", GROUP)
    folder = restore(quantised, tmp_path / "stacked", lambda t: stack(t, SPELLINGS[0]))
    one_by_one, stacked = int4_emu.Checkpoint(quantised), int4_emu.Checkpoint(folder)
    for options in ({"expert_ids": [1, 3]}, {"tp_rank": 1, "tp_size": 3}):
        got, want = (
            checkpoint.load_experts(1, weights="packed", **options).state_dict()
            for checkpoint in (stacked, one_by_one)
        )
        assert set(got) == set(want)
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_list_may_name_the_whole_stack(tmp_path: Path) -> None:
    """Targets by the parameter's own name, which has no expert's number in it."""
    plain, quantised = write_pair(tiny_model("qwen3_moe"), tmp_path, "compressed_tensors", GROUP)
    folder = restore(quantised, tmp_path / "stacked", lambda t: stack(t, SPELLINGS[1]))
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = [r"re:.*\.experts\.(gate_up|down)_proj$"]
    (folder / "config.json").write_text(json.dumps(config))
    assert relative_error(logits(load(folder)), stock_logits(plain)) < BOUND


def both_ways(tensors: Tensors) -> Tensors:
    return tensors | stack(tensors, SPELLINGS[0])


def other_counts(tensors: Tensors) -> Tensors:
    stacked = stack(tensors, SPELLINGS[0])
    name = next(name for name in stacked if name.endswith("down_proj.weight_scale"))
    return stacked | {name: stacked[name][:3]}


def input_first(tensors: Tensors) -> Tensors:
    """As gpt-oss keeps its matrices, packed along the rows of the weight."""
    stacked = stack(tensors, SPELLINGS[1])
    name = next(name for name in stacked if name.endswith("gate_up_proj_packed"))
    return stacked | {name: torch.zeros(4, 64, 12, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (both_ways, r"stored by themselves and in one tensor of all experts: .*experts\.0\.down_proj"),
        (
            other_counts,
            r"3 tensors below `experts` .* packed weights .* of all E experts .*down_proj\.weight_packed",
        ),
        (input_first, r"experts\.0\.gate_up_proj\.weight_packed.*\[64, 12\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Tensors], Tensors], sentence: str, tmp_path: Path
) -> None:
    # Without a gate, the names of both ways are the same.
    model = tiny_model("nemotron_h" if change is both_ways else "qwen3_moe")
    _, quantised = write_pair(model, tmp_path, "compressed_tensors", GROUP)
    folder = restore(quantised, tmp_path / "stacked", change)
    with pytest.raises(CheckpointError, match=sentence):
        load(folder)


def test_the_stacks_of_other_formats_are_refused(tmp_path: Path) -> None:
    _, quantised = write_pair(tiny_model("qwen3_moe"), tmp_path, "gptq_v1", GROUP)
    folder = restore(quantised, tmp_path / "stacked", lambda t: stack(t, SPELLINGS[0]))
    with pytest.raises(
        CheckpointError, match=r"12 tensors below `experts` .* compressed-tensors' .*down_proj\.qweight"
    ):
        load(folder)


def test_experts_of_no_size_are_not_counted_out(tmp_path: Path) -> None:
    def claim(tensors: Tensors) -> Tensors:
        stacked = stack(tensors, SPELLINGS[0])
        name = next(name for name in stacked if name.endswith("down_proj.weight_packed"))
        parts = [n for n in stacked if n.startswith(name.removesuffix("_packed"))]
        return stacked | {n: stacked[n].new_empty((1 << 40, 0, 8)) for n in parts}

    _, quantised = write_pair(tiny_model("qwen3_moe"), tmp_path, "compressed_tensors", GROUP)
    folder = restore(quantised, tmp_path / "stacked", claim)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has 1099511627776 experts: no model has"):
        int4_emu.Checkpoint(folder)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_convert_writes_gate_and_up_apart(kind: str, tmp_path: Path) -> None:
    """transformers joins them when it loads, and knows no experts that come joined one by one."""
    plain, quantised = write_pair(tiny_model(kind), tmp_path, "compressed_tensors", GROUP)
    folder = restore(quantised, tmp_path / "stacked", lambda t: stack(t, SPELLINGS[1]))
    convert_checkpoint(int4_emu.Checkpoint(folder), tmp_path / "out", dtype=torch.float32)
    got, want = (load_file(path / "model.safetensors") for path in (tmp_path / "out", plain))
    assert set(got) == set(want)
    assert all(torch.equal(got[name], value) for name, value in want.items())
