"""requirements cases 18-21 and 28: checkpoints that other loaders read wrongly, incompletely or too
trustingly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import oracle
from int4_emu import Checkpoint, CheckpointError
from layers import Layer, make_layer, to_numpy, to_torch

Tensors = dict[str, torch.Tensor]
SUFFIXES = ("qweight", "scales", "qzeros")
HIDDEN, INTER, EXPERTS = 64, 32, 4


def some_layer(seed: int = 0, **options: Any) -> Layer:
    defaults = {
        "experts": EXPERTS,
        "hidden": HIDDEN,
        "intermediate": INTER,
        "group_sizes": (16, 16),
        "scales_dtype": torch.float16,
    }
    return make_layer(np.random.default_rng(seed), **(defaults | options))


def projections(layer: Layer, expert: int) -> dict[str, tuple[Any, slice]]:
    half = layer.w13.codes.shape[1] // 2
    return {
        "gate_proj": (layer.w13, slice(0, half)),
        "up_proj": (layer.w13, slice(half, 2 * half)),
        "down_proj": (layer.w2, slice(None)),
    }


def packed_tensors(layer: Layer, number: int, name: str = "gptq_v1") -> Tensors:
    """The experts of one layer as GPTQ or AWQ tensors under Qwen's names."""
    tensors: Tensors = {}
    for e in range(len(layer.w13.codes)):
        for projection, (w, rows) in projections(layer, e).items():
            codes = w.codes[e, rows]
            zeros = (
                np.full_like(w.scale_values[e, rows], 8) if w.zero_values is None else w.zero_values[e, rows]
            )
            parts = oracle.store(name, codes, w.scale_values[e, rows], zeros.astype(np.int64))
            prefix = f"model.layers.{number}.mlp.experts.{e}.{projection}"
            for suffix, part in zip(SUFFIXES, parts, strict=True):
                tensors[f"{prefix}.{suffix}"] = (
                    to_torch(part, torch.float16) if suffix == "scales" else torch.from_numpy(part)
                )
    return tensors


def bf16(exact: np.ndarray) -> torch.Tensor:
    return to_torch(oracle.round_to(exact, "bfloat16"), torch.bfloat16)


def float_tensors(layer: Layer, number: int) -> Tensors:
    """The same experts as bf16 `.weight`s."""
    return {
        f"model.layers.{number}.mlp.experts.{e}.{projection}.weight": bf16(w.exact[e, rows])
        for e in range(len(layer.w13.codes))
        for projection, (w, rows) in projections(layer, e).items()
    }  # fmt: skip


def gptq(group_size: int = 16, sym: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": sym,
        "desc_act": False,
        **more,
    }


def awq(excluded: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": excluded,
    }  # fmt: skip


def write(
    folder: Path,
    tensors: Tensors,
    quantization: dict[str, Any],
    shards: dict[str, Tensors] | None = None,
    **model: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config | model))
    for file, part in (shards or {"model.safetensors": tensors}).items():
        save_file(part, folder / file)
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def judge(checkpoint: Checkpoint, number: int, layer: Layer, **options: Any) -> None:
    """fp32 experts, so that only the layer's own arithmetic separates them from the oracle."""
    experts = checkpoint.load_experts(number, dtype=torch.float32, **options)
    got = experts(layer.x, layer.topk_weights, layer.topk_ids)
    oracle.check(to_numpy(got), layer.want(packed=True))


# 18: excluded modules.


@pytest.mark.parametrize("form", ["layer", "leaves"])
def test_case_18_float_layer_beside_int4_layer(tmp_path: Path, form: str) -> None:
    zero, one = some_layer(0), some_layer(1)
    floats = float_tensors(zero, 0)
    excluded = ["model.layers.0."] if form == "layer" else [n.removesuffix(".weight") for n in floats]
    checkpoint = Checkpoint(write(tmp_path, floats | packed_tensors(one, 1, "awq"), awq(excluded)))
    assert checkpoint.moe_layers == [0, 1]
    judge(checkpoint, 1, one)
    experts = checkpoint.load_experts(0, dtype=torch.bfloat16)
    x = zero.x.bfloat16()
    got = experts(x, zero.topk_weights, zero.topk_ids)
    oracle.check(to_numpy(got), zero.with_(x=x).want(packed=False))


def test_case_18_layer_1_is_not_layer_10(tmp_path: Path) -> None:
    one, ten = some_layer(1), some_layer(10)
    tensors = float_tensors(one, 1) | packed_tensors(ten, 10, "awq")
    checkpoint = Checkpoint(write(tmp_path, tensors, awq(["model.layers.1"])))
    judge(checkpoint, 10, ten)
    assert not checkpoint.load_experts(1).is_packed


@pytest.mark.parametrize("excluded", [["model.layers.0."], ["model.layers.0.mlp.experts.2.up_proj"]])
def test_case_18_the_list_is_checked_against_the_files(tmp_path: Path, excluded: list[str]) -> None:
    """A module that the list calls float but that is packed on disk: an error that names it."""
    checkpoint_path = write(tmp_path, packed_tensors(some_layer(), 0, "awq"), awq(excluded))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.\d+\.\w+_proj"):
        Checkpoint(checkpoint_path).load_experts(0)


def test_case_18_a_layer_partly_float_is_served_or_refused_by_name(tmp_path: Path) -> None:
    layer = some_layer()
    prefix = "model.layers.0.mlp.experts.2."
    tensors = {k: v for k, v in packed_tensors(layer, 0, "awq").items() if not k.startswith(prefix)}
    floats = {k: v for k, v in float_tensors(layer, 0).items() if k.startswith(prefix)}
    excluded = [k.removesuffix(".weight") for k in floats]
    checkpoint = Checkpoint(write(tmp_path, tensors | floats, awq(excluded)))
    with pytest.raises(CheckpointError, match=r"3 projections of layer 0 are in floating point.*experts\.2"):
        checkpoint.load_experts(0, weights="packed")
    experts = checkpoint.load_experts(0, dtype=torch.bfloat16)
    assert not experts.is_packed
    x = layer.x.bfloat16()
    got = experts(x, layer.topk_weights, layer.topk_ids)
    oracle.check(to_numpy(got), layer.with_(x=x).want(packed=False))


# 19: absent and empty tensors.

EMPTY_LIST: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
    lambda z: None,
    lambda z: z.new_empty(0),
    lambda z: z.new_empty(z.shape[0], 0),
    lambda z: z,
]


def test_case_19_absent_and_empty_zeros_in_one_file(tmp_path: Path) -> None:
    """Four layers of a symmetric file: no qzeros, shape [0], shape [C, 0], real ones at the midpoint."""
    layer_list = [some_layer(i, symmetric=True) for i in range(4)]
    tensors: Tensors = {}
    for number, (layer, change) in enumerate(zip(layer_list, EMPTY_LIST, strict=True)):
        for name, tensor in packed_tensors(layer, number).items():
            kept = change(tensor) if name.endswith("qzeros") else tensor
            if kept is not None:
                tensors[name] = kept
    checkpoint = Checkpoint(write(tmp_path, tensors, gptq(sym=True)))
    for number, layer in enumerate(layer_list):
        judge(checkpoint, number, layer)


@pytest.mark.parametrize("change", EMPTY_LIST[:3], ids=["absent", "[0]", "[C, 0]"])
def test_case_19_an_asymmetric_file_must_have_its_zeros(tmp_path: Path, change: Callable[..., Any]) -> None:
    tensors = packed_tensors(some_layer(), 0)
    for name in [n for n in tensors if n.endswith("experts.1.up_proj.qzeros")]:
        kept = change(tensors.pop(name))
        if kept is not None:
            tensors[name] = kept
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.qzeros"):
        Checkpoint(write(tmp_path, tensors, gptq())).load_experts(0)


def test_case_19_symmetric_label_with_other_zeros_stops(tmp_path: Path) -> None:
    """The other convention's midpoint everywhere: not decided by values, stopped with an override."""
    tensors = packed_tensors(some_layer(symmetric=True), 0)
    wrong = {k: torch.full_like(v, -0x77777778) if k.endswith("qzeros") else v for k, v in tensors.items()}
    path = write(tmp_path, wrong, gptq(sym=True))
    with pytest.raises(CheckpointError, match=r"(?i)zero|symmetric"):
        Checkpoint(path).load_experts(0)
    for choice in ("use_label", "use_values"):
        assert Checkpoint(path, contradicting_zeros=choice).load_experts(0).is_packed


@pytest.mark.parametrize("kind", ["absent", "empty", "trivial"])
def test_case_19_absent_empty_and_trivial_g_idx_are_one(tmp_path: Path, kind: str) -> None:
    layer = some_layer()
    tensors = packed_tensors(layer, 0)
    for name in [n for n in tensors if n.endswith("qweight")]:
        columns = 8 * tensors[name].shape[0]
        if kind != "absent":
            trivial = torch.arange(columns, dtype=torch.int32) // 16
            tensors[name.replace("qweight", "g_idx")] = trivial if kind == "trivial" else trivial[:0].clone()
    judge(Checkpoint(write(tmp_path, tensors, gptq())), 0, layer)


# 20: tensor parallelism.


@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_case_20_ranks_sum_to_the_whole(tmp_path: Path, group_size: int, weights: str) -> None:
    """I=64, TP=2: w2's scales are cut with its columns, whole groups a rank; per-channel ones stay whole."""
    layer = some_layer(intermediate=64, group_sizes=(group_size, group_size))
    path = write(tmp_path, packed_tensors(layer, 0), gptq(group_size), moe_intermediate_size=64)
    total = np.zeros(layer.x.shape)
    for rank in range(2):
        experts = Checkpoint(path).load_experts(
            0, weights=weights, dtype=torch.float32, tp_rank=rank, tp_size=2
        )
        assert experts.intermediate_size == 32
        total += to_numpy(experts(layer.x, layer.topk_weights, layer.topk_ids))
    oracle.check(total, layer.want(packed=True), slack=3.0)


def test_case_20_a_cut_inside_a_group_is_refused(tmp_path: Path) -> None:
    """I=48, groups of 32, TP=2: 24 columns are no whole number of groups; the sizes that work are named."""
    layer = some_layer(intermediate=48, group_sizes=(32, 32))
    path = write(tmp_path, packed_tensors(layer, 0), gptq(32), moe_intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"(?s)(?=.*24)(?=.*32)"):
        Checkpoint(path).load_experts(0, tp_rank=0, tp_size=2)
    Checkpoint(path).load_experts(0, weights="dequantized")


# 21: incomplete files.


def test_case_21_a_missing_tensor_is_listed(tmp_path: Path) -> None:
    tensors = {k: v for k, v in packed_tensors(some_layer(), 0).items() if "experts.3.down_proj" not in k}
    with pytest.raises(CheckpointError, match=r"(?s)(?=.*experts\.3\.down_proj)(?=.*qweight)"):
        Checkpoint(write(tmp_path, tensors, gptq())).load_experts(0)


def test_case_21_unknown_fused_names_do_not_load_as_nothing(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_qweight_fused": torch.zeros(4, 8, 64, dtype=torch.int32),
        "model.layers.0.mlp.experts.down_proj_qweight_fused": torch.zeros(4, 4, 64, dtype=torch.int32),
    }
    with pytest.raises(CheckpointError, match="experts"):
        Checkpoint(write(tmp_path, tensors, gptq())).load_experts(0)


def test_case_21_an_extra_tensor_follows_the_strict_switch(tmp_path: Path) -> None:
    layer = some_layer()
    extra = {"model.layers.0.mlp.experts.1.up_proj.mystery": torch.zeros(3)}
    path = write(tmp_path, packed_tensors(layer, 0) | extra, gptq())
    with pytest.raises(CheckpointError, match="mystery"):
        Checkpoint(path).load_experts(0)
    judge(Checkpoint(path, strict=False), 0, layer)


def test_case_21_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = packed_tensors(some_layer(), 0)
    names = sorted(tensors)
    first, second = ({n: tensors[n] for n in part} for part in (names[:20], names[19:]))
    path = write(tmp_path, {}, gptq(), {"a.safetensors": first, "b.safetensors": second})
    write_index(path, dict.fromkeys(names[:20], "a.safetensors") | dict.fromkeys(names[20:], "b.safetensors"))
    with pytest.raises(CheckpointError, match=names[19].replace(".", r"\.")):
        Checkpoint(path).load_experts(0)


def test_case_21_nan_scales_are_a_gap_too(tmp_path: Path) -> None:
    tensors = packed_tensors(some_layer(), 0)
    name = "model.layers.0.mlp.experts.2.gate_proj.scales"
    tensors[name][1, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.2\.gate_proj.*scales.*NaN"):
        Checkpoint(write(tmp_path, tensors, gptq())).load_experts(0)


# 28: paths in the index.


@pytest.mark.parametrize(
    "target",
    [
        "../other/model.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "a/b.safetensors",
        "model.bin",
        "model.pt",
        7,
        None,
        ["x"],
        "",
        ".safetensors/",
        "x.safetensors\0",
    ],
)
def test_case_28_the_index_stays_inside_the_folder(tmp_path: Path, target: Any) -> None:
    """Refused before any open: the file that it points at exists outside and would load."""
    tensors = packed_tensors(some_layer(), 0)
    outside = tmp_path / "other"
    outside.mkdir()
    save_file(tensors, outside / "model.safetensors")
    path = write(tmp_path / "model", {}, gptq(), {"shard.safetensors": tensors})
    names = sorted(tensors)
    write_index(path, dict.fromkeys(names, "shard.safetensors") | {names[0]: target})
    with pytest.raises(CheckpointError):
        Checkpoint(path).load_experts(0)


def test_case_28_a_symlink_that_points_out(tmp_path: Path) -> None:
    tensors = packed_tensors(some_layer(), 0)
    outside = tmp_path / "outside.safetensors"
    save_file(tensors, outside)
    path = write(tmp_path / "model", {}, gptq(), {"unused.safetensors": {"x": torch.zeros(1)}})
    os.remove(path / "unused.safetensors")
    (path / "shard.safetensors").symlink_to(outside)
    write_index(path, dict.fromkeys(tensors, "shard.safetensors"))
    with pytest.raises(CheckpointError, match=r"(?i)shard\.safetensors"):
        Checkpoint(path).load_experts(0)


def test_case_28_the_hub_cache_layout_is_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/file -> ../../blobs/<hash> is how hub caches look."""
    layer = some_layer()
    real = write(tmp_path / "blobs", packed_tensors(layer, 0), gptq())
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (real / file).rename(real / f"hash-of-{file}")
        (snapshot / file).symlink_to(f"../../blobs/hash-of-{file}")
    judge(Checkpoint(snapshot), 0, layer)


def test_case_28_the_index_is_checked_against_the_files(tmp_path: Path) -> None:
    tensors = packed_tensors(some_layer(), 0)
    names = sorted(tensors)
    shards = {
        "a.safetensors": {n: tensors[n] for n in names[:20]},
        "b.safetensors": {n: tensors[n] for n in names[20:]},
    }
    path = write(tmp_path, {}, gptq(), shards)
    write_index(path, dict.fromkeys(names[:21], "a.safetensors") | dict.fromkeys(names[21:], "b.safetensors"))
    with pytest.raises(CheckpointError, match=names[20].replace(".", r"\.")):
        Checkpoint(path).load_experts(0)


def test_case_28_a_pickle_is_never_opened(tmp_path: Path) -> None:
    path = write(tmp_path, {}, gptq(), {"unused.safetensors": {"x": torch.zeros(1)}})
    os.remove(path / "unused.safetensors")
    torch.save(packed_tensors(some_layer(), 0), path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"(?i)safetensors"):
        Checkpoint(path).load_experts(0)
