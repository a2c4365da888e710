"""The files of a checkpoint: names, links, shards and headers that are not what they claim, and files that
are no data.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_files import gptq_config, random_gptq_layers, split_in_shards, write_checkpoint, write_index
from int4_emu import Checkpoint, CheckpointError

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.0.mlp.experts"


def unsharded(tmp_path: Path) -> tuple[Path, Tensors]:
    """One GPTQ layer in model.safetensors."""
    tensors, _ = random_gptq_layers(0)
    config = gptq_config(group_size=16, sym=False)
    return write_checkpoint(tmp_path / "model", tensors, config, num_experts=4, hidden_size=64), tensors


def load(path: Path, **options: Any) -> None:
    checkpoint = Checkpoint(path, **options)
    for layer in checkpoint.moe_layers:
        checkpoint.load_experts(layer, weights="packed")


def sharded(tmp_path: Path, shards: int = 3) -> tuple[Path, Tensors, dict[str, str]]:
    path, tensors = unsharded(tmp_path)
    return path, tensors, split_in_shards(path, tensors, shards)


def test_shards_load(tmp_path: Path) -> None:
    path, tensors, _ = sharded(tmp_path)
    load(path)
    assert sorted(Checkpoint(path).tensor_names) == sorted(tensors)


@pytest.mark.parametrize(
    "value",
    [
        "../other/model.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "sub/model.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "model.pt",
        "model.safetensors.bin",
        "",
        "..",
        7,
        None,
        ["model.safetensors"],
        {"file": "model.safetensors"},
    ],
)
def test_index_values_are_plain_file_names(value: Any, tmp_path: Path) -> None:
    """Case 28."""
    path, tensors, weight_map = sharded(tmp_path)
    write_index(path, weight_map | {next(iter(tensors)): value})
    with pytest.raises(CheckpointError, match=r"each value must be a plain file name ending in .safetensors"):
        Checkpoint(path)


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    shard = path / weight_map[f"{EXPERT}.0.up_proj.qweight"]
    outside = tmp_path / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"points to .*outside.safetensors, outside the model folder"):
        Checkpoint(path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_linked_json_that_leaves_the_folder(file: str, tmp_path: Path) -> None:
    path, _, _ = sharded(tmp_path)
    outside = tmp_path / "outside.json"
    (path / file).rename(outside)
    (path / file).symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"outside the model folder"):
        Checkpoint(path)


def test_links_of_a_hub_cache_and_inside_the_folder(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    load(snapshot)
    inside = snapshot / weight_map[f"{EXPERT}.0.up_proj.qweight"]
    inside.rename(snapshot / "real.safetensors")
    inside.symlink_to("real.safetensors")
    load(snapshot)


def test_missing_shard(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    shard = sorted(set(weight_map.values()))[1]
    (path / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"names 3 files, of which {shard} missing"):
        Checkpoint(path)


def test_dangling_link(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    shard = path / sorted(set(weight_map.values()))[1]
    shard.unlink()
    shard.symlink_to("gone.safetensors")
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
        Checkpoint(path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    shard = path / sorted(set(weight_map.values()))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{shard.name} in .* is truncated or not a safetensors file"):
        Checkpoint(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path, tensors, weight_map = sharded(tmp_path)
    name = f"{EXPERT}.0.up_proj.qweight"
    split_in_shards(path, tensors, 3)
    other = next(s for s in sorted(set(weight_map.values())) if s != weight_map[name])
    save_file(load_file(path / other) | {name: tensors[name].contiguous()}, path / other)
    with pytest.raises(CheckpointError, match=rf"duplicate tensors: {name} \(in .* and .*\)"):
        Checkpoint(path)


def test_index_names_a_tensor_that_no_file_holds(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    write_index(path, weight_map | {"model.norm.weight": next(iter(weight_map.values()))})
    with pytest.raises(
        CheckpointError, match=r"names 1 tensors that the files do not hold there: model.norm.weight"
    ):
        Checkpoint(path)


def test_index_names_the_wrong_file(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    name = f"{EXPERT}.0.up_proj.qweight"
    other = next(s for s in sorted(set(weight_map.values())) if s != weight_map[name])
    write_index(path, weight_map | {name: other})
    with pytest.raises(CheckpointError, match=rf"do not hold there: {name}"):
        Checkpoint(path)


def test_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    path, _, weight_map = sharded(tmp_path)
    name = f"{EXPERT}.0.up_proj.qweight"
    write_index(path, {k: v for k, v in weight_map.items() if k != name})
    with pytest.raises(CheckpointError, match=rf"1 tensors are in the files but not in .*: {name}"):
        Checkpoint(path)
    with pytest.raises(CheckpointError, match=r"experts.0.up_proj.qweight is missing"):
        load(path, strict=False)


def test_index_and_single_file_that_disagree(tmp_path: Path) -> None:
    path, tensors, _ = sharded(tmp_path)
    save_file({"x": next(iter(tensors.values())).contiguous()}, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"holds both model.safetensors and an .* that does not name it"
    ):
        Checkpoint(path)


@pytest.mark.parametrize(
    "content",
    ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", '{"weight_map": {"a": "b", "a": "c"}}'],
)
def test_malformed_index(content: str, tmp_path: Path) -> None:
    path, _, _ = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        Checkpoint(path)


class _Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_is_refused_and_not_opened(name: str, tmp_path: Path) -> None:
    path, _ = unsharded(tmp_path)
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickle.dumps(_Bomb(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=rf"{name}: pickle files can run code and are never read"):
        Checkpoint(path)
    # The same file under a safetensors name is not a way in either.
    (path / name).rename(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is truncated or not a safetensors file"):
        Checkpoint(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "config.json in .* is not JSON"),
        ("[1, 2]", "config.json in .* must hold a JSON object, got list"),
        ('{"hidden_size": 1, "hidden_size": 2}', "config.json holds the key 'hidden_size' twice"),
        ('{"quantization_config": 4}', "quantization_config must be a JSON object, got int"),
        ("[" * 100000, "config.json in .* is n"),
        ("\udcff", "config.json in .* cannot be read"),
    ],
)
def test_malformed_config(content: str, message: str, tmp_path: Path) -> None:
    path, _ = unsharded(tmp_path)
    (path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config.json is missing in"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(
        CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json is in"
    ):
        Checkpoint(tmp_path)
