"""`selftest` passes on a sound machine, and finds each kind of fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from int4_emu import MoEConfig, QuantConfig, ops
from int4_emu.backends import ReferenceBackend, all_backends
from int4_emu.cli import _checks, main
from int4_emu.cli._problems import formats
from int4_emu.cli.selftest import _groups


def test_selftest_passes_and_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    assert main(["selftest"]) == 0
    seconds = time.process_time() - start
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("passed: ")
    assert not [line for line in lines if line.startswith("FAIL")]
    layer = MoEConfig(64, 32, 4, 2, torch.bfloat16, "cpu", QuantConfig.int4_w4a16(32))
    serving = [name for name, b in all_backends().items() if not b.is_supported(layer, "packed")]
    assert "cpu" in serving and "reference" in serving
    for backend in serving:
        for fmt, bits in formats():
            for mode in ("packed", "dequantized"):
                wanted = f"{mode} {fmt.name} int{bits}"
                assert any(x.startswith("ok") and backend in x and wanted in x for x in lines), wanted
        assert any(backend in x and "identity probe" in x for x in lines)
    for op in (
        "unpack ",
        "unpack_zeros ",
        "repack ",
        "dequantize ",
        "prepack ",
        "unprepack ",
        "moe_align",
        "grouped_gemm ",
    ):
        assert any(f"ops        {op}" in x for x in lines), op
    assert seconds < 60  # of one core; 30 s of two


def test_quick_runs_the_compiled_backends_with_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    from int4_emu import is_compiled

    if not is_compiled():
        pytest.skip("tests the compiled backends")
    start = time.process_time()
    assert main(["selftest", "--quick"]) == 0
    assert time.process_time() - start < 10
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ok")]
    subjects = {line.split()[1] for line in lines}
    assert {"ops", "cpu"} <= subjects and "reference" not in subjects
    for part in ("dequantize", "moe_align", "grouped_gemm", "packed canonical int4", "permutation probe"):
        assert any(part in line for line in lines), part
    named = {f"{fmt.name} int{bits}" for fmt, bits in formats()}
    assert {n for n in named for line in lines if n in line} == {"canonical int4"}


def _wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def run(self: ReferenceBackend, *args: Any, **options: Any) -> torch.Tensor:
        return change(original(self, *args, **options))

    original = ReferenceBackend.run
    return run


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        (lambda y: y * 1.02, "packed canonical int4"),
        (lambda y: y.roll(1, dims=-1), "permutation probe"),
        (lambda y: torch.where(torch.arange(y.shape[-1]) == 17, y + 1, y), "identity probe"),
        (lambda y: y * float("nan"), "dequantized awq int4"),
        (lambda y: y[:, :-1], "packed options"),
    ],
    ids=["scale", "lanes", "one column", "nan", "shape"],
)
def test_a_wrong_backend_fails(
    change: Callable[[torch.Tensor], torch.Tensor], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceBackend, "run", _wrong(change))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    # One format is enough here; every format is in the test above.
    monkeypatch.setattr(
        _checks.problems,
        "formats",
        lambda: [f for f in formats() if f[0].name in ("canonical", "awq") and f[1] == 4],
    )
    results = list(_checks.check_backend("reference", torch.device("cpu"), all_dtypes=False))
    assert any(r.what == failing and not r.passed for r in results)


def test_a_wrong_op_fails_and_the_rest_still_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from int4_emu import is_compiled

    if not is_compiled():
        pytest.skip("tests the compiled ops")

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(ops, "unpack_zeros", broken)
    monkeypatch.setattr("int4_emu.cli.selftest.check_backend", lambda *a, **k: iter(()))
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  ops        unpack_zeros gptq_v1 int4" in out
    assert "RuntimeError: no such instruction" in out
    assert "ok    ops        dequantize gptq_v1 int4" in out
    assert "FAILED: " in out.splitlines()[-1]


def test_one_line_for_each_op_and_format() -> None:
    results = list(_checks.check_ops())
    groups = list(_groups(results))
    assert sum(map(len, groups)) == len(results)
    keys = [(g[0].subject, g[0].what) for g in groups]
    assert len(set(keys)) == len(keys)
