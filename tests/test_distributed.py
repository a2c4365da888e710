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
from filelock import FileLock

import oracle
from checkpoints import require_checkpoint
from distributed_worker import CASES, MODES, case_layer
from int4_emu import Checkpoint
from layers import to_numpy

HERE = Path(__file__).parent
WORLDS = [1, 2, 3, 4]


def run_ranks(job: str, world: int, folder: Path, timeout: float = 60.0, **env: str) -> list[Any]:
    """The results of each rank of a job; None where a rank left none."""
    folder.mkdir()
    command = [sys.executable, str(HERE / "distributed_worker.py"), job]
    environment = (
        os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"} | env
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
    terms = np.zeros(layer.x.shape)
    for j in range(k):
        one = layer.with_(
            topk_weights=layer.topk_weights[:, j : j + 1].nan_to_num(), topk_ids=layer.topk_ids[:, j : j + 1]
        )
        terms += np.abs(one.want(packed=CASES[name][3]).value)
    # The outputs of the slots are equal but for the float32 sums inside the experts, whose batches differ.
    got, want = (to_numpy(results(world)[f"{name}/{mode}"]) for mode in ("all_gather", "all_to_all"))
    assert (np.abs(got - want) <= 2 * (k + 1) * 2.0**-24 * terms + 2.0**-20 * terms).all()


def test_auto_takes_the_cheaper_way(results: Any) -> None:
    """Its result is that of one of the two ways; with every slot on one rank's experts, that of all_to_all."""
    for name in CASES:
        auto, a, b = (results(3)[f"{name}/{mode}"] for mode in ("auto", "all_to_all", "all_gather"))
        assert torch.equal(auto, a) or torch.equal(auto, b)
    assert torch.equal(results(4)["skewed/auto"], results(4)["skewed/all_to_all"])


@pytest.mark.parametrize(
    ("rows", "slots", "tokens", "gathers"),
    [
        # H = 8, bf16, k = 2: a row takes 24 bytes, a slot's output 32, gathering 64 per token and peer.
        ([[0, 4], [4, 0]], [[0, 8], [8, 0]], [4, 4], True),  # 4 * 24 + 8 * 32 = 352 > 4 * 64
        ([[3, 1], [1, 3]], [[7, 1], [1, 7]], [4, 4], False),  # 24 + 32 = 56
        ([[0, 4], [0, 0]], [[0, 5], [0, 0]], [4, 0], False),  # rank 0 sends 96, rank 1 160, gathering 256
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], [0, 0], False),  # a tie
    ],
)
def test_rule(rows: Any, slots: Any, tokens: Any, gathers: bool) -> None:
    from int4_emu.integrations import distributed

    parallel = distributed.ExpertParallel.__new__(distributed.ExpertParallel)
    torch.nn.Module.__init__(parallel)
    parallel.ranks = 2
    sizes = distributed._Sizes(rows, slots, tokens)
    assert parallel._gathering_is_cheaper(sizes, torch.zeros(1, 8, dtype=torch.bfloat16), 2) is gathers


def test_ranks_read_their_own_experts(tmp_path: Path) -> None:
    """A checkpoint's layer over three ranks equals the whole layer in one process."""
    folder = require_checkpoint("ct-mixtral-w4a16-asym-g32-actorder-group-gidx")
    whole = Checkpoint(folder).load_experts(0, weights="packed", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, whole.hidden_size, generator=generator)
    ids = torch.randint(0, whole.num_experts, (14, 2), generator=generator)
    weights = torch.rand(14, 2, generator=generator)
    torch.save((x, weights, ids), tmp_path / "input.pt")
    ranks = run_ranks(
        "checkpoint", 3, tmp_path / "ranks", CHECKPOINT=str(folder), INPUT=str(tmp_path / "input.pt")
    )
    want = whole(x, weights, ids)
    for rank, got in enumerate(ranks):
        torch.testing.assert_close(got, want[rank::3], rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_refusals(tmp_path: Path) -> None:
    """A mistake of rank 0 is an error on every rank, and the group stays in step."""
    told = run_ranks("refusals", 2, tmp_path / "ranks")
    for rank, errors in enumerate(told):
        assert "agree on mode, got ['all_gather', 'all_to_all']" in errors["mode"], errors
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


@pytest.mark.parametrize("how", ["exit", "sleep"])
def test_a_peer_that_fails_is_an_error(tmp_path: Path, how: str) -> None:
    *alive, dead = run_ranks("death", 3, tmp_path / "ranks", timeout=4, HOW=how)
    assert dead is None
    for rank, text in enumerate(alive):
        seconds, _, message = text.partition(" s: ")
        assert message.startswith(
            f"ExpertParallel on rank {rank} of 3: exchanging sizes failed; a peer may have died"
        ), text
        assert float(seconds) < 15
