"""Layers of the vLLM plug-in, built without vLLM from tensors that come one by one, against the checkpoints' own references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from checkpoints import BARD, reference_tensors, require_checkpoint
from int4_emu import Activation, Checkpoint, CheckpointError
from int4_emu.formats import parse_quantization_config
from int4_emu.integrations.vllm._experts_intake import ExpertsIntake, ExpertsRequest
from int4_emu.integrations.vllm._linear_intake import LinearIntake, LinearRequest
from int4_emu.model_config import ActivationSpec

SILU = ActivationSpec(Activation.silu)
# One of each way of storing; all but the first and the last are in the full set of checkpoints only.
LAYER_LIST = [
    BARD,
    "ct-mixtral-w4a16-asym-g32-actorder-group-gidx",
    "ct-mixtral-mixed-int4asym-gateup-int8-down",
    "gptq-mixtral-int8-sym-g32-descact-v1",
    "gptq-mixtral-asym-g32-v1",
    "awq-autoawq-qwen3moe-gemm-g128",
    "quark-mixtral-int4-sym-channel-reorder",
]


# --- experts ---------------------------------------------------------------------------------------------------------------------


class Layer:
    """The last MoE layer of a checkpoint, as a host would hand it over."""

    def __init__(self, name: str) -> None:
        self.path = require_checkpoint(name)
        checkpoint = Checkpoint(self.path)
        self.number = checkpoint.moe_layers[-1]
        self.plan = checkpoint.plan(self.number)
        self.quantization = parse_quantization_config(checkpoint.config["quantization_config"])
        self.tensors = {}
        for (expert, role), projection in self.plan.projections.items():
            for full in checkpoint.tensor_names:
                module, _, suffix = full.rpartition(".")
                if module == projection.module:
                    self.tensors[expert, role, suffix] = checkpoint.get_tensor(full)

    def intake(
        self, *, ids: Any = None, rank: int = 0, ranks: int = 1, weights: str = "auto"
    ) -> ExpertsIntake:
        module = self.plan.projections[0, "up"].module
        prefix = module.rpartition(".")[0].rpartition(".")[0]
        request = ExpertsRequest(
            prefix=prefix,
            projections={
                r: self.plan.projections[0, r].module.rpartition(".")[2] for r in self.plan.layer.roles
            },
            expert_ids=tuple(range(self.plan.num_experts)) if ids is None else tuple(ids),
            hidden_size=self.plan.hidden_size,
            intermediate_size=self.plan.intermediate_size,
            tp_rank=rank,
            tp_size=ranks,
            activation=SILU,
            top_k=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
            weights=weights,
            has_bias=False,
        )
        return ExpertsIntake(request, self.quantization)

    def feed(self, intake: ExpertsIntake, *, seed: int = 0, without: Any = None) -> ExpertsIntake:
        """In an order that no file has."""
        items = [(k, t) for k, t in self.tensors.items() if k != without]
        random.Random(seed).shuffle(items)
        for (expert, role, suffix), tensor in items:
            intake.put(expert, role, suffix, tensor)
        return intake

    def error(self, *modules: Any, **options: Any) -> float:
        """Of the summed outputs, against the experts' output that the checkpoint came with (relative, 2-norm)."""
        reference = reference_tensors(self.path)
        if not reference:
            pytest.skip("this copy has no reference tensors")
        moe = f"moe.{self.number}"
        x, weights = reference[f"{moe}.experts_in"], reference[f"{moe}.top_k_weights"].float()
        out = sum(m(x, weights, reference[f"{moe}.top_k_index"], **options) for m in modules)
        want = reference[f"{moe}.experts_out"]
        return float((out - want).norm() / want.norm())


# The references' weights were rounded to the scales' dtype, bf16 (an error of 2^-9 a weight) or fp16.
REFERENCE_BOUND = 4e-3


@pytest.mark.parametrize("weights", ["packed", "dequantized"])
@pytest.mark.parametrize("name", LAYER_LIST)
def test_a_layer_fed_in_any_order_computes_the_reference(name: str, weights: str) -> None:
    layer = Layer(name)
    experts = layer.feed(layer.intake(weights=weights)).finish()
    assert experts.is_packed == (weights == "packed")
    assert layer.error(experts) < REFERENCE_BOUND


@pytest.mark.parametrize("name", LAYER_LIST)
def test_tensor_parallel_ranks_sum_to_the_reference(name: str) -> None:
    """Also where act-order scatters a rank's columns over all groups, and a cut falls inside a group (dequantised then)."""
    layer = Layer(name)
    ranks = [layer.feed(layer.intake(rank=r, ranks=4), seed=r).finish() for r in range(4)]
    assert {m.intermediate_size for m in ranks} == {layer.plan.intermediate_size // 4}
    assert layer.error(*ranks) < REFERENCE_BOUND
    assert layer.error(*ranks[:3]) > 0.05  # every rank is needed


def test_expert_parallel_ranks_sum_to_the_reference() -> None:
    layer = Layer(BARD)
    count = layer.plan.num_experts
    ids_list = [list(range(0, count, 2)), list(range(1, count, 2)), []]
    maps, ranks = [], []
    for ids in ids_list:
        intake = layer.feed(layer.intake(ids=ids))
        ranks.append(intake.finish())
        assert ranks[-1].num_experts == len(ids)
        expert_map = torch.full((count,), -1, dtype=torch.int32)
        expert_map[ids] = torch.arange(len(ids), dtype=torch.int32)
        maps.append(expert_map)
    runs = [lambda *a, m=m, e=e: m(*a, expert_map=e) for m, e in zip(ranks, maps, strict=True)]
    assert layer.error(*runs) < REFERENCE_BOUND


def test_a_layer_is_built_as_soon_as_nothing_is_missing() -> None:
    layer = Layer(BARD)
    intake = layer.intake()
    items = list(layer.tensors.items())
    for (expert, role, suffix), tensor in items[:-1]:
        intake.put(expert, role, suffix, tensor)
    assert intake.experts is None
    (expert, role, suffix), tensor = items[-1]
    intake.put(expert, role, suffix, tensor)
    assert intake.experts is not None
    with pytest.raises(CheckpointError, match=r"experts\.0\.\w+\.bias came after its layer was complete"):
        intake.put(0, "up", "bias", torch.zeros(4))


def test_missing_repeated_and_foreign_tensors() -> None:
    layer = Layer(BARD)
    intake = layer.intake(ids=[0, 1])
    assert intake.put(7, "up", "weight_scale", torch.zeros(1)) is False
    first = layer.tensors[0, "up", "weight_packed"]
    intake.put(0, "up", "weight_packed", first)
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.up_proj\.weight_packed is in the checkpoint twice"
    ):
        intake.put(0, "up", "weight_packed", first)
    lost = (3, "down", "weight_scale")
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight_scale is missing"):
        layer.feed(layer.intake(), without=lost).finish()


def test_packed_weights_are_refused_where_a_rank_would_cut_a_group() -> None:
    layer = Layer(BARD)  # I = 128 in groups of 32
    with pytest.raises(CheckpointError, match="must be a multiple of w2's group, 32, got 128 / 8 = 16"):
        layer.feed(layer.intake(rank=1, ranks=8, weights="packed")).finish()


# --- Linears ---------------------------------------------------------------------------------------------------------------------


def linear_request(modules: Any, rows: Any, columns: Any, **changes: Any) -> LinearRequest:
    options: dict[str, Any] = {
        "modules": tuple(modules),
        "rows": tuple(rows),
        "fused_rows": None,
        "in_features": columns[1],
        "columns": tuple(columns),
        "tp_rank": 0,
        "tp_size": 1,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "weights": "auto",
    }
    return LinearRequest(**{**options, **changes})


class Attention:
    """The attention Linears of layer 0 of a checkpoint."""

    def __init__(self, name: str) -> None:
        self.path = require_checkpoint(name)
        self.checkpoint = Checkpoint(self.path)
        self.quantization = parse_quantization_config(self.checkpoint.config["quantization_config"])
        self.prefix = "model.layers.0.self_attn"

    def put(self, intake: LinearIntake, part: int | None, module: str) -> None:
        for name in self.checkpoint.tensor_names:
            if name.rpartition(".")[0] == module:
                intake.put(part, name.rpartition(".")[2], self.checkpoint.get_tensor(name))

    def weight(self, leaf: str) -> torch.Tensor:
        return self.checkpoint.dequantize_linear(f"{self.prefix}.{leaf}", torch.float32)

    def outputs(self, intake: LinearIntake, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m(x) for m in intake.finish()], dim=-1)


LINEAR_LIST = [
    BARD,
    "gptq-qwen3moe-sym-g32-descact-v1",
    "gptq-qwen3moe-dynamic-mixed-v1",
    "quark-mixtral-int4-sym-channel-reorder",
    "awq-autoawq-qwen3moe-gemm-g128",
]
# Products of a few hundred terms in fp32 against the same in another order.
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("weights", ["auto", "dequantized"])
@pytest.mark.parametrize("name", LINEAR_LIST)
def test_query_key_and_value_of_each_rank(name: str, weights: str, rng: Any) -> None:
    """Two ranks; keys and values have their heads on both where there is but one."""
    attention = Attention(name)
    leaves = ("q_proj", "k_proj", "v_proj")
    dense = [attention.weight(leaf) for leaf in leaves]
    x = torch.from_numpy(rng.standard_normal((5, dense[0].shape[1]))).float()
    for rank in range(2):
        rows = [dense[0].shape[0] // 2, dense[1].shape[0], dense[2].shape[0] // 2]
        request = linear_request(
            [f"{attention.prefix}.{leaf}" for leaf in leaves],
            rows,
            (0, x.shape[1]),
            tp_rank=rank,
            tp_size=2,
            weights=weights,
        )
        intake = LinearIntake(request, attention.quantization, f"{attention.prefix}.qkv_proj")
        for part in (2, 0, 1):
            attention.put(intake, part, request.modules[part])
        wanted = [dense[0][rank * rows[0] :][: rows[0]], dense[1], dense[2][rank * rows[2] :][: rows[2]]]
        torch.testing.assert_close(attention.outputs(intake, x), x @ torch.cat(wanted).T, **ROUNDING)


@pytest.mark.parametrize("name", LINEAR_LIST)
def test_ranks_of_a_row_parallel_linear_sum_up(name: str, rng: Any) -> None:
    attention = Attention(name)
    module = f"{attention.prefix}.o_proj"
    if attention.checkpoint.quantized_linears().get(module) is None:
        dense = attention.checkpoint.get_tensor(f"{module}.weight").float()
    else:
        dense = attention.weight("o_proj")
    columns = dense.shape[1]
    x = torch.from_numpy(rng.standard_normal((5, columns))).float()
    total = torch.zeros(5, dense.shape[0])
    for rank in range(2):
        part = (rank * columns // 2, (rank + 1) * columns // 2)
        request = linear_request(
            [module], [dense.shape[0]], part, in_features=columns, tp_rank=rank, tp_size=2
        )
        intake = LinearIntake(request, attention.quantization, module)
        attention.put(intake, None, module)
        total += attention.outputs(intake, x[:, slice(*part)])
    torch.testing.assert_close(total, x @ dense.T, **ROUNDING)


def test_parts_stored_as_one_are_split_by_their_sizes(rng: Any) -> None:
    attention = Attention(BARD)
    module = f"{attention.prefix}.q_proj"
    dense = attention.weight("q_proj")
    half = dense.shape[0] // 2
    x = torch.from_numpy(rng.standard_normal((3, dense.shape[1]))).float()
    request = linear_request(
        ["mlp.gate_proj", "mlp.up_proj"],
        [half // 2, half // 2],
        (0, x.shape[1]),
        fused_rows=(half, half),
        tp_rank=1,
        tp_size=2,
    )
    intake = LinearIntake(request, attention.quantization, module)
    attention.put(intake, None, module)
    want = torch.cat([dense[half // 2 : half], dense[half + half // 2 :]])
    torch.testing.assert_close(attention.outputs(intake, x), x @ want.T, **ROUNDING)


def test_a_linear_in_floating_point_is_taken_as_it_is(rng: Any) -> None:
    """Configurations do not list the routers that their tools never quantise."""
    attention = Attention(BARD)
    weight = torch.from_numpy(rng.standard_normal((8, 32))).float()
    intake = LinearIntake(linear_request(["mlp.other"], [8], (0, 32)), attention.quantization, "mlp.other")
    intake.put(None, "weight", weight)
    (module,) = intake.finish()
    assert isinstance(module, torch.nn.Linear) and torch.equal(module.weight, weight)


def test_bad_linears_name_what_is_wrong() -> None:
    attention = Attention(BARD)
    module = f"{attention.prefix}.o_proj"
    dense = attention.weight("o_proj")

    def finish(request: LinearRequest) -> None:
        intake = LinearIntake(request, attention.quantization, module)
        attention.put(intake, None, module)
        intake.finish()

    empty = linear_request([module], [dense.shape[0]], (0, dense.shape[1]))
    with pytest.raises(
        CheckpointError, match=r"the checkpoint has no model\.layers\.0\.self_attn\.o_proj\.weight_packed"
    ):
        LinearIntake(empty, attention.quantization, module).finish()
    with pytest.raises(CheckpointError, match=f"has {dense.shape[0]} output rows, which 1 ranks of 24 rows"):
        finish(linear_request([module], [24], (0, dense.shape[1])))
    with pytest.raises(CheckpointError, match=f"must have 8 input columns, got {dense.shape[1]}"):
        finish(linear_request([module], [dense.shape[0]], (0, 8)))
    inside = linear_request(
        [module], [dense.shape[0]], (0, 8), in_features=dense.shape[1], tp_size=1, weights="packed"
    )
    with pytest.raises(CheckpointError, match=r"columns 0 to 8 of .*o_proj are no whole groups of 32"):
        finish(inside)
