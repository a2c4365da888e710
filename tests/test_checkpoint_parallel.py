"""Expert and tensor parallelism in the loader: the ranks' outputs sum to the whole, and each reads its part
only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import (
    compressed_tensors_config,
    gptq_config,
    pack_rows,
    random_gptq_layers,
    random_gptq_linear,
    split_in_shards,
    write_checkpoint,
)
from checkpoints import require_checkpoint
from int4_emu import Checkpoint, CheckpointError, Experts, make_expert_map

MODES = ["packed", "dequantized"]


@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [(30, 8, [4, 4, 4, 4, 4, 4, 3, 3]), (3, 2, [2, 1]), (2, 4, [1, 1, 0, 0]), (8, 1, [8]), (1, 1, [1])],
)
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_expert_maps(experts: int, ranks: int, counts: list[int], placement: str) -> None:
    """Case 14."""
    maps = [make_expert_map(experts, ranks, rank, placement) for rank in range(ranks)]
    assert [int((m >= 0).sum()) for m in maps] == counts
    assert all(m.dtype == torch.int32 for m in maps)
    assert [m[m >= 0].tolist() for m in maps] == [list(range(n)) for n in counts]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_expert_maps_cover_each_expert_once(placement: str) -> None:
    for experts in range(1, 20):
        for ranks in range(1, 12):
            maps = torch.stack([make_expert_map(experts, ranks, rank, placement) for rank in range(ranks)])
            assert ((maps >= 0).sum(0) == 1).all(), (experts, ranks)


def test_expert_map_placements() -> None:
    assert make_expert_map(5, 2, 1).tolist() == [-1, -1, -1, 0, 1]
    assert make_expert_map(5, 2, 1, placement="round_robin").tolist() == [-1, 0, -1, 1, -1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 1, 0), "num_experts and ep_size must be >= 1, got 0 and 1"),
        ((4, 0, 0), "got 4 and 0"),
        ((4, 2, 2), r"ep_rank must be in \[0, 2\), got 2"),
        ((4, 2, -1), r"ep_rank must be in \[0, 2\), got -1"),
        ((4, 2, 0, "random"), "placement must be linear or round_robin, got 'random'"),
    ],
)
def test_expert_map_arguments(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_expert_map(*args)


def routing(tokens: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:2] for _ in range(tokens)])
    return torch.rand(tokens, 2, generator=rng), ids


def gptq_folder(tmp_path: Path, **options: Any) -> Path:
    tensors, _ = random_gptq_layers(3, **options)
    config = gptq_config(
        group_size=options.get("group_size", 16), sym=False, desc_act=options.get("act_order", False)
    )
    return write_checkpoint(tmp_path, tensors, config, num_experts=4)


def run(experts: Experts, hidden: int, num_experts: int) -> torch.Tensor:
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(5))
    return experts(x, *routing(9, num_experts))


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tensor_parallel_ranks_sum_to_the_whole(
    tp_size: int, act_order: bool, weights: str, tmp_path: Path
) -> None:
    path = gptq_folder(tmp_path, intermediate=64, act_order=act_order)
    checkpoint = Checkpoint(path)
    options: dict[str, Any] = {"weights": weights, "dtype": torch.float32}
    whole = run(checkpoint.load_experts(0, **options), 64, 4)
    ranks = [checkpoint.load_experts(0, tp_rank=r, tp_size=tp_size, **options) for r in range(tp_size)]
    assert [e.intermediate_size for e in ranks] == [64 // tp_size] * tp_size
    total = sum(run(e, 64, 4) for e in ranks)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "awq-autoawq-qwen3moe-gemm-g128",
        "gptq-mixtral-asym-g32-v1",
        "gptq-mixtral-int8-sym-g32-descact-v1",
        "quark-mixtral-int4-sym-channel-reorder",
        "quark-qwen3moe-uint4-asym-g32-order",
        "ct-mixtral-mixed-int4asym-gateup-int8-down",
        "ct-qwen3moe-w4a16-asym-channel",
        "ct-mixtral-w4a16-asym-g32-actorder-group-gidx",
        "ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored",
    ],
)
def test_tensor_and_expert_parallel_ranks_of_real_files(name: str, weights: str) -> None:
    checkpoint = Checkpoint(require_checkpoint(name))
    info = checkpoint.describe()[0]
    options: dict[str, Any] = {"weights": weights, "dtype": torch.float32}
    whole = run(checkpoint.load_experts(0, **options), info.hidden_size, info.num_experts)
    # One group of 128 columns cannot be cut; the experts can always be dealt out.
    tp_size = 1 if "g128" in name else 2
    total = torch.zeros_like(whole)
    for ep_rank in range(3):
        expert_map = make_expert_map(info.num_experts, 3, ep_rank, placement="round_robin")
        ids = torch.where(expert_map >= 0)[0].tolist()
        for tp_rank in range(tp_size):
            experts = checkpoint.load_experts(0, tp_rank=tp_rank, tp_size=tp_size, expert_ids=ids, **options)
            assert torch.equal(experts.expert_map, expert_map)
            total += run(experts, info.hidden_size, info.num_experts)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("weights", MODES)
def test_a_rank_without_experts(weights: str, tmp_path: Path) -> None:
    experts = Checkpoint(gptq_folder(tmp_path)).load_experts(
        0, weights=weights, dtype=torch.float32, expert_ids=[]
    )
    assert experts.num_experts == 0
    assert run(experts, 64, 4).abs().max() == 0


def compressed_layer(hidden: int, intermediate: int, group_size: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(2):
        for name, (rows, columns) in {
            "gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate)
        }.items():  # fmt: skip
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            groups = 1 if group_size == -1 else -(-columns // group_size)
            tensors[f"{module}.weight_packed"] = pack_rows(
                torch.randint(0, 16, (rows, columns), generator=rng)
            )
            tensors[f"{module}.weight_scale"] = torch.rand(rows, groups, generator=rng).to(torch.bfloat16)
    return tensors


@pytest.mark.parametrize("weights", MODES)
def test_w2_scales_are_cut_with_its_columns(weights: str, tmp_path: Path) -> None:
    """Case 20: I = 64, group_size 16, two ranks of 32 columns need scales rows [0:2] and [2:4]."""
    tensors = compressed_layer(64, 64, 16)
    path = write_checkpoint(tmp_path, tensors, compressed_tensors_config(group_size=16), num_experts=2)
    checkpoint = Checkpoint(path)
    whole = checkpoint.load_experts(0, weights="packed", dtype=torch.float32)
    ranks = [
        checkpoint.load_experts(0, weights=weights, dtype=torch.float32, tp_rank=r, tp_size=2)
        for r in range(2)
    ]
    if weights == "packed":
        assert [e.w2_group_size for e in ranks] == [16, 16]
        assert torch.equal(torch.cat([e.w2_scales for e in ranks], -1), whole.w2_scales)
    total = sum(run(e, 64, 2) for e in ranks)
    want = run(whole, 64, 2)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_per_channel_scales_stay_whole(tmp_path: Path) -> None:
    tensors = compressed_layer(64, 64, -1)
    path = write_checkpoint(tmp_path, tensors, compressed_tensors_config(), num_experts=2)
    for rank in range(2):
        experts = Checkpoint(path).load_experts(0, weights="packed", tp_rank=rank, tp_size=2)
        assert experts.w2_scales.shape == (2, 64, 1)
        assert experts.w2_group_size == 32


@pytest.mark.parametrize("weights", [*MODES, "auto"])
@pytest.mark.parametrize(
    ("intermediate", "group_size", "tp_size", "message"),
    [
        (48, 32, 2, r"w2's group, 32, got 48 / 2 = 24; tp_size 1 would work"),
        (64, 16, 3, r"w2's group, 16, got 64 / 3 = 21.3333; tp_size 1, 2, 4 would work"),
        (64, 16, 8, r"w2's group, 16, got 64 / 8 = 8; tp_size 1, 2, 4 would work"),
        (24, -1, 16, r"got 24 / 16 = 1.5; tp_size 1, 2, 3, 4, 6, 12 would work"),
    ],
)
def test_cuts_inside_a_group_are_refused(
    intermediate: int, group_size: int, tp_size: int, message: str, weights: str, tmp_path: Path
) -> None:
    tensors = compressed_layer(64, intermediate, group_size)
    path = write_checkpoint(
        tmp_path, tensors, compressed_tensors_config(group_size=group_size), num_experts=2
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path).load_experts(0, weights=weights, tp_size=tp_size)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tp_rank": 2, "tp_size": 2}, ValueError, "tp_rank must be in"),
        ({"tp_size": 0}, ValueError, "tp_size >= 1"),
        (
            {"expert_ids": [0, 4]},
            ValueError,
            r"expert_ids must be in \[0, num_experts\) = \[0, 4\), got \[0, 4\]",
        ),
        ({"expert_ids": [-1]}, ValueError, "expert_ids must be in"),
        ({"expert_ids": [1, 1]}, ValueError, r"expert_ids must not repeat, got \[1, 1\]"),
        ({"weights": "int4"}, ValueError, "weights must be one of auto, packed, dequantized, got 'int4'"),
        ({"dtype": torch.float64}, TypeError, "dtype must be bfloat16, float16 or float32, got float64"),
        ({"backend": "tpu"}, ValueError, "backend must be one of"),
    ],
)
def test_load_arguments(options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        Checkpoint(gptq_folder(tmp_path)).load_experts(0, **options)


def test_unknown_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer must be one of moe_layers \[0\], got 1"):
        Checkpoint(gptq_folder(tmp_path)).load_experts(1)


def test_a_slice_reads_its_part_only(tmp_path: Path) -> None:
    """One of four ranks and one of four experts: about a sixteenth of the stored bytes."""
    from int4_emu.loading import LayerLoader

    path = gptq_folder(tmp_path, intermediate=128)
    checkpoint = Checkpoint(path)
    counts = []
    original = LayerLoader.load_packed

    def counted(self: LayerLoader) -> Any:
        result = original(self)
        counts.append(self.bytes_read)
        return result

    LayerLoader.load_packed = counted  # type: ignore[method-assign]
    try:
        checkpoint.load_experts(0, weights="packed")
        checkpoint.load_experts(0, weights="packed", tp_rank=1, tp_size=4, expert_ids=[2])
    finally:
        LayerLoader.load_packed = original  # type: ignore[method-assign]
    stored = sum(checkpoint.tensor_info(n).nbytes for n in checkpoint.tensor_names if not n.endswith("g_idx"))
    assert counts == [stored, stored // 16]


def test_shards_give_the_same_experts(tmp_path: Path) -> None:
    tensors, _ = random_gptq_layers(3)
    config = gptq_config(group_size=16, sym=False)
    single = write_checkpoint(tmp_path / "a", tensors, config, num_experts=4)
    sharded = write_checkpoint(tmp_path / "b", tensors, config, num_experts=4)
    split_in_shards(sharded, tensors, 5)
    one, many = (Checkpoint(p).load_experts(0, weights="packed").state_dict() for p in (single, sharded))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[k], many[k]) for k in one)


def test_gate_and_up_that_differ_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="int4_emu.checkpoint")
    tensors, weights = random_gptq_layers(3, act_order=True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    module = "model.layers.0.mlp.experts.2.up_proj"
    tensors[f"{module}.g_idx"] = (torch.arange(64, dtype=torch.int32) // 16)[order]
    config = gptq_config(group_size=16, sym=False, desc_act=True)
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tensors, config, num_experts=4))
    reason = "gate and up of expert 2 in layer 0 have different act-orders"
    assert checkpoint.describe()[0].packed_refusal == reason
    with pytest.raises(CheckpointError, match=rf"weights='packed' is not possible since {reason}"):
        checkpoint.load_experts(0, weights="packed")
    experts = checkpoint.load_experts(0, dtype=torch.float32)
    assert f"layer 0: dequantized weights, because packed is not possible since {reason}" in caplog.text
    assert torch.equal(experts.w13[1, :32], weights["model.layers.0.mlp.experts.1.gate_proj"])


def test_groups_of_uneven_sizes_are_dequantised(tmp_path: Path) -> None:
    tensors, _ = random_gptq_layers(3, experts=4)
    tensors["model.layers.0.mlp.experts.0.down_proj.g_idx"][0] = 1
    checkpoint = Checkpoint(
        write_checkpoint(tmp_path, tensors, gptq_config(group_size=16, sym=False), num_experts=4)
    )
    assert "g_idx gives groups of other sizes than 16" in str(checkpoint.describe()[0].packed_refusal)
    assert not checkpoint.load_experts(0).is_packed


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (
            {r"+:.*up_proj": {"group_size": 32}},
            r"w13 \(gate, up\) of layer 0 has several schemes: int4 group_size 16, int4 group_size 32",
        ),
        (
            {r"+:.*experts\.3\.down_proj": {"bits": 8}},
            r"w2 \(down\) of layer 0 has several schemes: int4 group_size 16, int8 group_size 16",
        ),
    ],
    ids=["gate and up", "one expert"],
)
def test_mixed_schemes_within_a_stack_are_dequantised(
    rules: dict[str, dict[str, int]], reason: str, tmp_path: Path
) -> None:
    tensors, weights = random_gptq_layers(3)
    pattern, override = next(iter(rules.items()))
    rng = torch.Generator().manual_seed(9)
    for module, weight in weights.items():
        if re.fullmatch(pattern.removeprefix("+:"), module):
            options = {"group_size": override.get("group_size", 16), "bits": override.get("bits", 4)}
            linear, weights[module] = random_gptq_linear(rng, *weight.shape, **options)
            tensors |= {f"{module}.{k}": v for k, v in linear.items()}
    config = gptq_config(group_size=16, sym=False, dynamic=rules)
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tensors, config, num_experts=4))
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load_experts(0, weights="packed")
    experts = checkpoint.load_experts(0, dtype=torch.float32)
    assert torch.equal(experts.w13[3, 32:], weights["model.layers.0.mlp.experts.3.up_proj"])
    assert torch.equal(experts.w2[3], weights["model.layers.0.mlp.experts.3.down_proj"])


def test_progress_bar_counts_layers_speed_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, _ = random_gptq_layers(3, layers=3)
    path = write_checkpoint(tmp_path, tensors, gptq_config(group_size=16, sym=False), num_experts=4)
    layers = [number for number, _ in Checkpoint(path).load_layers()]
    assert layers == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "GB/s, peak" in shown


def test_the_source_tells_checkpoints_apart(tmp_path: Path) -> None:
    """The same folder elsewhere and in shards, another layer, configuration, header, router; the experts' own values are not read."""
    tensors, _ = random_gptq_layers(3)
    router = "model.layers.0.mlp.gate.weight"
    tensors = tensors | {router: torch.linspace(-1, 1, 4 * 64).view(4, 64)}
    tensors |= {name.replace(".layers.0.", ".layers.1."): t.clone() for name, t in tensors.items()}
    config = gptq_config(group_size=16, sym=False)

    def source(
        name: str, layer: int = 0, change: dict[str, torch.Tensor] | None = None, **top: Any
    ) -> str | None:
        path = write_checkpoint(tmp_path / name, tensors | (change or {}), config, num_experts=4, **top)
        if name == "shards":
            split_in_shards(path, tensors, 2)
        return Checkpoint(path).load_experts(layer, weights="packed", expert_ids=[layer]).source

    first = source("first")
    assert first is not None and re.fullmatch("layer 0 of checkpoint [0-9a-f]{12}", first)
    assert source("again") == source("shards") == first
    scales = next(n for n in tensors if ".layers.0." in n and ".experts.3." in n and n.endswith("scales"))
    assert source("experts", change={scales: tensors[scales] * 2}) == first
    others = [
        source("layer", layer=1),
        source("config", rope_theta=5.0),
        source("header", change={"model.norm.weight": torch.ones(64)}),
        source("router", change={router: tensors[router] + 1}),
    ]
    assert len({first, *others}) == 5
