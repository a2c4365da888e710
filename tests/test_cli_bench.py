"""`bench`: what it writes is complete and consistent; times themselves are not judged here."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from int4_emu.cli import main
from int4_emu.cli._bench_layers import MODELS, Shape, exact_rows, linear_loop, make_batch, make_problem
from int4_emu.cli._bench_timing import Machine, floor_seconds, time_interleaved
from int4_emu.cli._problems import LIMITS, relative_error

QUICK = ["bench", "--model", "tiny", "--quick", "--threads", "1", "--seconds", "0.02", "--tokens", "1,5"]


def test_bench_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]) == 0
    out = capsys.readouterr().out
    document = json.loads((tmp_path / "b.json").read_text())
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "b.png"]
    rows = document["results"]
    assert [(r["tokens"], r["candidate"]) for r in rows] == [
        (t, c) for t in (1, 5) for c in ("packed", "dequantized", "F.linear loop")
    ]
    for r in rows:
        assert 0 < r["min_s"] <= r["median_s"]
        assert r["error"] < 1e-2
        assert r["share_of_floor"] == pytest.approx(r["floor_s"] / r["median_s"])
    assert document["dequantize"]["ratio"] > 0
    assert "of floor" in out
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("file", [["-"], []])
def test_json_on_stdout_is_nothing_but_json(file: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *QUICK,
                "--json",
                *file,
                "--weights",
                "packed",
                "--no-peer",
                "--dtype",
                "fp32",
                "--group-size",
                "64",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [r["candidate"] for r in document["results"]] == ["packed", "packed"]
    assert max(r["error"] for r in document["results"]) < 1e-5
    assert "g64" in document["shape"]
    assert "median ms" in captured.err


def test_too_little_memory_is_told_before_allocating(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("int4_emu.cli.bench.available_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("int4_emu.cli.bench.make_problem", lambda *a, **k: pytest.fail("allocated"))
    assert main(["bench", "--model", "mixtral-8x7b"]) == 1
    assert "1.0 GiB are available: --experts N takes fewer" in capsys.readouterr().err


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_candidates_compute_the_layer(activation: str) -> None:
    from int4_emu import Activation

    shape = Shape(96, 64, 4, 2, 32, Activation[activation])
    rng = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        problem = make_problem(shape, dtype, ["packed", "dequantized"], peer=True)
        batch = make_batch(shape, 9, dtype, rng)
        rows = torch.tensor([8, 0, 3])
        want = exact_rows(problem, batch, rows)
        assert problem.packed is not None
        assert problem.dense is not None
        for run in (problem.packed, problem.dense):
            y = run(batch.x, batch.topk_weights, batch.topk_ids)
            assert relative_error(y[rows], want) < LIMITS[dtype]
        assert relative_error(linear_loop(problem)(batch)[rows], want) < 2 * LIMITS[dtype]


def test_floor_counts_bytes_and_products() -> None:
    shape = Shape(64, 32, 8, 2, 32)
    batch = make_batch(shape, 3, torch.bfloat16, torch.Generator().manual_seed(0))
    weights = batch.experts_hit * 3 * 64 * 32
    moved = weights * 2 + 2 * 3 * 64 * 2
    fast = Machine(read=1e3, gemm=1e30, gemm_dtype="float32")
    assert floor_seconds(shape, batch, "dequantized", torch.bfloat16, fast) == pytest.approx(moved / 1e3)
    packed = weights * (0.5 + 2 / 32) + 2 * 3 * 64 * 2
    assert floor_seconds(shape, batch, "packed", torch.bfloat16, fast) == pytest.approx(packed / 1e3)
    slow = Machine(read=1e30, gemm=1e3, gemm_dtype="float32")
    assert floor_seconds(shape, batch, "packed", torch.bfloat16, slow) == pytest.approx(
        2 * 6 * 3 * 64 * 32 / 1e3
    )


def test_rounds_interleave_and_end() -> None:
    calls: list[str] = []
    batches = [make_batch(MODELS["tiny"], 1, torch.float32, torch.Generator().manual_seed(0))]
    times, results = time_interleaved(
        {"a": lambda b: calls.append("a") or 1, "b": lambda b: calls.append("b") or 2}, batches, 1e-3
    )
    assert results == {"a": 1, "b": 2}
    assert times["a"].rounds == times["b"].rounds >= 1
    assert calls[:4] == ["a", "b", "a", "b"]


def test_a_slow_candidate_is_called_once() -> None:
    batches = [make_batch(MODELS["tiny"], 1, torch.float32, torch.Generator().manual_seed(0))]
    calls: list[str] = []
    run = {"fast": lambda b: calls.append("fast"), "slow": lambda b: calls.append("slow") or time.sleep(0.05)}
    times, _ = time_interleaved(run, batches, 0.02)
    assert calls.count("slow") == times["slow"].rounds == 1
    assert times["slow"].median >= 0.05
    assert calls.count("fast") > 3


@pytest.mark.parametrize(
    ("device", "sentence"), [("xpu", "must be cpu or cuda"), ("nonsense", "must be cpu or cuda")]
)
def test_unknown_devices_are_refused(device: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--device", device]) == 2
    assert sentence in capsys.readouterr().err


def test_bench_on_a_gpu_or_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([*QUICK, "--device", "cuda", "--json", str(tmp_path / "b.json")])
    if not torch.cuda.is_available():
        assert status == 2 and "sees no GPU" in capsys.readouterr().err
        return
    document = json.loads((tmp_path / "b.json").read_text())
    assert status == 0 and document["device"] == "cuda"
    assert all(r["error"] < 1e-2 for r in document["results"])
