"""How `make host-check` counts its parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").is_file(), reason="runs in a source checkout")


def test_a_part_says_what_became_of_it() -> None:
    from vllm_environment import Failure, Skip

    from host_check import run_part

    def raising(error: Exception) -> str:
        raise error

    assert run_part(lambda: "76 ids") == ("ran", "76 ids")
    assert run_part(lambda: raising(Skip("no such device"))) == ("skipped", "no such device")
    assert run_part(lambda: raising(Failure("75 of 76"))) == ("FAILED", "75 of 76")
    state, told = run_part(lambda: raising(KeyError("ids")))
    assert state == "FAILED" and "KeyError" in told and "Traceback" in told


@pytest.mark.parametrize(
    ("states", "status"),
    [(["ran", "ran"], 0), (["ran", "skipped"], 3), (["skipped", "FAILED"], 1), (["FAILED", "ran"], 1)],
)
def test_the_exit_status(states: list[str], status: int) -> None:
    from host_check import exit_status

    assert exit_status(dict(zip("ab", states, strict=True))) == status


def test_unknown_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from host_check import main

    assert main(["vllm-gredy"]) == 2
    assert "parts are vllm-greedy, " in capsys.readouterr().err


def test_ids_are_judged_as_a_whole() -> None:
    from vllm_environment import Failure
    from vllm_parts import IDS, check_ids, prompt_ids

    rest = IDS[len(prompt_ids()) :]
    check_ids({"ids": [rest, rest]})
    with pytest.raises(Failure, match=f"{len(IDS) - 1} of {len(IDS)} reference ids"):
        check_ids({"ids": [rest, [*rest[:-1], rest[-1] + 1]]})
    with pytest.raises(Failure, match="what vLLM said"):
        check_ids({"error": "what vLLM said"})
