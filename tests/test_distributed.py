"""ExpertParallel on gloo: one to four processes, each case in each mode, against float64 and against one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import oracle
from checkpoints import require_checkpoint
from distributed_worker import CAPACITY, CASES, MODES, case_layer, even, local_experts
from int4_emu import Checkpoint, make_expert_map
from int4_emu.integrations import _wire
from int4_emu.integrations.distributed import ExpertParallel
from layers import to_numpy
from on_gpu import captured, needs_gpu

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))
import wire  # noqa: E402

WORLDS = [1, 2, 3, 4]


def run_ranks(job: str, world: int, folder: Path, timeout: float = 60.0, **env: str) -> list[Any]:
    """The results of each rank of a job; None where a rank left none."""
    folder.mkdir()
    command = [sys.executable, str(HERE / "distributed_worker.py"), job]
    environment = (
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "OMP_NUM_THREADS": "1",
        }
        | env
    )
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder), str(timeout)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        errors = [p.communicate(timeout=150)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(e[-2000:] for e in errors)
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(f) if f.exists() else None for f in files]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """results(world): name/mode -> the ranks' outputs in rank order, one run for all workers of the test session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of(world: int) -> dict[str, torch.Tensor]:
        folder = shared / f"world{world}"
        with FileLock(f"{folder}.lock"):
            done = folder.exists()
            ranks = (
                [torch.load(folder / f"{r}.pt") for r in range(world)]
                if done
                else run_ranks("cases", world, folder)
            )
        return {key: torch.cat([rank[key] for rank in ranks]) for key in ranks[0]}

    return of


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_numbers(results: Any, name: str, world: int) -> None:
    """Every mode against float64, whatever the ranks; a token without expert is an exact zero."""
    layer = case_layer(name)
    if name == "weight_on_input":
        layer = layer.with_(options=layer.options | {"apply_router_weight_on_input": True})
    want = layer.with_(topk_weights=layer.topk_weights.nan_to_num()).want(packed=CASES[name][3])
    for mode in MODES:
        got = results(world)[f"{name}/{mode}"]
        assert got.dtype == layer.dtype
        oracle.check(to_numpy(got), want)


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_rank(results: Any, name: str, world: int) -> None:
    one = results(1)[f"{name}/all_to_all"]
    for mode in ("all_to_all", "padded"):
        assert torch.equal(results(world)[f"{name}/{mode}"], one), mode


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["dense", "unrouted", "bias"])
def test_reduced_partial_sums(results: Any, name: str, world: int) -> None:
    """all_gather adds the same k terms in another order: each float32 sum is off by at most k * 2^-24 of their magnitudes."""
    layer = case_layer(name)
    k = layer.topk_ids.shape[1]
    # The slots' weighted outputs as float32, k = 1 leaving nothing to sum. Both ways add the same ones: with k terms and zeros each sum,
    # in whatever order, is off by at most k * 2^-24 of their magnitudes, a product's own rounding included.
    experts = local_experts(layer, CASES[name][3], make_expert_map(10, 1, 0))
    terms = np.zeros(layer.x.shape)
    for j in range(k):
        weights, ids = (t[:, j : j + 1] for t in (layer.topk_weights, layer.topk_ids))
        terms += np.abs(to_numpy(experts.partial_sums(layer.x, weights, ids)))
    got, want = (to_numpy(results(world)[f"{name}/{mode}"]) for mode in ("all_gather", "all_to_all"))
    assert (np.abs(got - want) <= 2 * k * 2.0**-24 * terms).all()


def test_auto_takes_the_cheaper_way(results: Any) -> None:
    """Its result is that of one of the two ways; with every slot on one rank's experts, that of all_to_all."""
    for name in CASES:
        auto, a, b = (results(3)[f"{name}/{mode}"] for mode in ("auto", "all_to_all", "all_gather"))
        assert torch.equal(auto, a) or torch.equal(auto, b)
    assert torch.equal(results(4)["skewed/auto"], results(4)["skewed/all_to_all"])


@pytest.mark.parametrize(
    ("rows", "slots", "tokens", "gathers"),
    [
        # H = 8, bf16, k = 2: a row takes 16 + 8 + 8 bytes, a slot's output 32, gathering 64 per token and peer.
        ([[0, 4], [4, 0]], [[0, 8], [8, 0]], [4, 4], True),  # 4 * 32 + 8 * 32 = 384 > 4 * 64
        ([[3, 1], [1, 3]], [[7, 1], [1, 7]], [4, 4], False),  # 32 + 32 = 64
        ([[0, 4], [0, 0]], [[0, 5], [0, 0]], [4, 0], False),  # rank 0 sends 128, rank 1 160, gathering 256
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], [0, 0], False),  # a tie
    ],
)
def test_rule(rows: Any, slots: Any, tokens: Any, gathers: bool) -> None:
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    row = _wire.pack(x, torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2)).nbytes
    assert _wire.gathering_is_cheaper(_wire.Sizes(rows, slots, tokens), row, 8) is gathers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [1, 6, 7, 8])
def test_packed_rows(hidden: int, dtype: torch.dtype) -> None:
    """What is packed comes out again, bit for bit, whatever the strides and offsets; filled rows are unrouted."""
    wide = torch.randn(6, hidden + 3).to(dtype)
    ids = torch.arange(10, dtype=torch.int32).view(5, 2)
    weights = torch.tensor([[float("nan"), 1.0]]).repeat(5, 1)
    for x in (wide[:5, :hidden], wide[1:, 1 : hidden + 1], wide[:, :hidden].contiguous()[1:]):
        packed = _wire.padded_to(_wire.pack(x, ids, weights), 7)
        got, got_ids, got_weights = _wire.unpack(packed, dtype, hidden, 2)
        assert torch.equal(got[:5], x) and torch.equal(got_ids[:5], ids) and bool((got_ids[5:] == -1).all())
        assert torch.equal(got_weights[:5].nan_to_num(), weights.nan_to_num())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])])
@pytest.mark.parametrize("k", [1, 2, 8, 22])
def test_slots_are_summed_in_slot_order(k: int, device: str) -> None:
    """Bit for bit one addition after the other, for widths with and without a vector's tail."""
    for hidden in (1, 33, 256, 2049):
        rows = (torch.randn(3 * k + 1, hidden) * 10.0 ** torch.randint(-4, 4, (3 * k + 1, 1))).to(device)
        at = torch.randint(0, 3 * k + 1, (5, k), device=device)
        want = rows[at[:, 0]]
        for j in range(1, k):
            want = want + rows[at[:, j]]
        assert torch.equal(_wire.slot_sums(rows, at), want), hidden


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["all_to_all", "padded", "all_gather"])
def test_one_rank_never_waits_for_its_gpu(mode: str) -> None:
    """Every mode without a wait, and in a CUDA graph, replayed over other ids."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = case_layer("packed")
        options: dict[str, Any] = MODES[mode]
        experts = local_experts(layer, True, make_expert_map(10, 1, 0)).to("cuda")
        parallel = ExpertParallel(experts, **options)
    finally:
        dist.destroy_process_group()
    x, weights, ids = layer.x.cuda(), layer.topk_weights.cuda(), layer.topk_ids.cuda()
    with torch.no_grad():
        graph, y = captured(lambda: parallel(x, weights, ids))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for change in (0, 3, -4):  # other experts; then many slots unrouted
                ids.add_(change)
                graph.replay()
                again = parallel(x, weights, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(y, again) and bool(y.isfinite().all())


# Operators that do work, collectives among them, of one call: on one rank and on several. On a GPU each is a launch or several.
LAUNCHES = {"all_to_all": (5, 27), "padded": (5, 13), "all_gather": (2, 9), "auto": (5, 27)}


@pytest.mark.parametrize("world", WORLDS)
def test_costs(results: Any, world: int) -> None:
    """How many operators a call takes, and which bytes it sends: those that the rows and slots of this routing need."""
    layer = case_layer("packed")
    ids, counts = layer.topk_ids.numpy(), even(layer.x.shape[0], world)
    maps = [make_expert_map(10, world, r).numpy() for r in range(world)]
    owner = np.stack(maps).argmax(0)[ids]  # [M, k]
    home = np.repeat(np.arange(world), counts)
    hidden, k = 64, ids.shape[1]
    for rank in range(world):
        costs = {mode: results(world)[f"costs/{mode}"].view(world, 2)[rank].tolist() for mode in MODES}
        for mode, (operators, _) in costs.items():
            assert operators <= LAUNCHES[mode][world > 1], (mode, operators)
        row = 2 * hidden + 8 * k
        mine, others = owner[home == rank], owner[home != rank]
        sent_rows = sum(len(set(slots) - {rank}) for slots in mine.tolist())
        sizes = (world - 1) * 8
        want = {
            "all_to_all": sent_rows * row + (others == rank).sum() * 4 * hidden + sizes * (2 * world + 1),
            "padded": (world - 1) * CAPACITY * (row + k * 4 * hidden),
            "all_gather": (world - 1) * max(counts) * (row + 4 * hidden) + sizes,
        }
        assert {mode: costs[mode][1] for mode in want} == (want if world > 1 else dict.fromkeys(want, 0))
    # The formulas on paper, where the routing does not matter: 24 tokens, in padded mode as many as fit.
    model = wire.Model("", hidden, 48, 10, k, 1, 0)
    total = {
        mode: sum(int(results(world)[f"costs/{mode}"].view(world, 2)[r, 1]) for r in range(world))
        for mode in want
    }
    per_token = wire.bytes_per_token(model, world)
    assert total["padded"] == per_token["padded"] * CAPACITY * world
    assert total["all_gather"] == per_token["all_gather"] * 24 + world * sizes


def test_ranks_read_their_own_experts(tmp_path: Path) -> None:
    """A checkpoint's layer over three ranks equals the whole layer in one process; each rank reads the bytes of its experts."""
    folder = require_checkpoint("ct-mixtral-w4a16-asym-g32-actorder-group-gidx")
    checkpoint = Checkpoint(folder)
    whole = checkpoint.load_experts(0, weights="packed", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, whole.hidden_size, generator=generator)
    ids = torch.randint(0, whole.num_experts, (14, 2), generator=generator)
    weights = torch.rand(14, 2, generator=generator)
    torch.save((x, weights, ids), tmp_path / "input.pt")
    ranks = run_ranks(
        "checkpoint", 3, tmp_path / "ranks", CHECKPOINT=str(folder), INPUT=str(tmp_path / "input.pt")
    )
    want = whole(x, weights, ids)
    for rank, (got, read) in enumerate(ranks):
        torch.testing.assert_close(got, want[rank::3], rtol=1e-5, atol=1e-5 * float(want.abs().max()))
        mine = set((make_expert_map(whole.num_experts, 3, rank) >= 0).nonzero().flatten().tolist())
        names = {e: [n for n in checkpoint.expert_tensor_names(0) if f".experts.{e}." in n] for e in mine}
        held = {n: checkpoint.tensor_info(n).nbytes for e in mine for n in names[e]}
        # The first expert's shapes stand for every expert's.
        shapes = {n for n in checkpoint.expert_tensor_names(0) if ".experts.0." in n and n.endswith("_shape")}
        assert {n for n in read if ".experts." in n} == set(held) | shapes
        # These are looked at twice: g_idx for the order of the columns, and both with the rest.
        once = {n: b for n, b in held.items() if not n.endswith(("g_idx", "weight_shape"))}
        assert {n: b for n, b in read.items() if n in once} == once
        beside = {n: b for n, b in read.items() if n not in held}
        assert sum(beside.values()) <= 4096 * 4, beside


def test_refusals(tmp_path: Path) -> None:
    """A mistake of rank 0 is an error on every rank, and the group stays in step."""
    told = run_ranks("refusals", 2, tmp_path / "ranks")
    for rank, errors in enumerate(told):
        assert "agree on mode, got ['all_gather', 'all_to_all']" in errors["mode"], errors
        assert (
            errors["layer"]
            == "ValueError: the ranks must agree on checkpoint, got ['layer 0 of checkpoint "
            + errors["source"]
        ), errors
        assert "agree on activation, got ['silu', 'gelu']" in errors["activation"], errors
        assert "agree on intermediate_size, got [48, 32]" in errors["intermediate"], errors
        assert "must have the same global E >= 1 entries on every rank, got [10, 12]" in errors["map"], errors
        assert errors["no mode"].startswith("ValueError: rank 1: mode must be one of auto, all_to_all"), (
            errors
        )
        assert errors["no capacity"].endswith("in padded mode and None in others, got None with padded"), (
            errors
        )
        assert (
            errors["flat"]
            == "ValueError: rank 1: expert_map must be int32 [global E], got torch.int32 [2, 5]"
        )
        assert "agree on dtype, got ['torch.bfloat16', 'torch.float16']" in errors["dtype"], errors
        assert "expert 0 must be held by exactly one rank, got [0, 1]" in errors["twice"], errors
        assert "k must be the same on every rank, got [2, 3]" in errors["k"], errors
        assert (
            errors["x dtype"]
            == "TypeError: hidden_states must be torch.bfloat16 like the experts, got torch.float16"
        )
        assert errors["grad"].startswith("NotImplementedError: ExpertParallel is inference only"), errors
        assert errors["after"] == "True", (rank, errors)
        assert "at most capacity = 10 tokens, got 24" in errors["capacity"], errors
    assert told[0]["shape"] == "ValueError: hidden_states must be [..., H] with H = 64, got [24, 40]"
    assert told[1]["shape"].startswith(
        "RuntimeError: ExpertParallel on rank 1 of 2: rank 0 refused its arguments"
    )


@pytest.mark.parametrize(
    ("how", "step"),
    [("exit", "exchanging sizes"), ("in its experts", "combine"), ("sleep", "dispatch")],
)
def test_a_peer_that_fails_is_an_error(tmp_path: Path, how: str, step: str) -> None:
    """Dead before or amid its call, or asleep beyond the timeout: the others say the step, in time."""
    *alive, dead = run_ranks("death", 3, tmp_path / "ranks", timeout=4, HOW=how)
    assert dead is None
    for rank, text in enumerate(alive):
        seconds, _, message = text.partition(" s: ")
        assert message.startswith(
            f"ExpertParallel on rank {rank} of 3: {step} failed; a peer may have died"
        ), text
        assert float(seconds) < 15
