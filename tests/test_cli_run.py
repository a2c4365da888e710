"""`run`: bard and the checkpoints that other tools wrote, with and without a tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints import CHECKPOINT_NAMES, require_checkpoint
from int4_emu.cli import main

pytest.importorskip("transformers")
BARD = Path(__file__).parents[1] / "python" / "int4_emu" / "data" / "bard"
# One of each kind; the rest are slow tests.
SOME = [
    "awq-autoawq-qwen3moe-gemm-g128",
    "ct-mixtral-mixed-int4asym-gateup-int8-down",
    "ct-mixtral-w4a16-asym-g32-actorder-group-gidx",
    "ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored",
    "gptq-qwen3moe-dynamic-mixed-v1",
    "quark-mixtral-int4-sym-channel-reorder",
]


def test_run_without_arguments_speaks_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """`make run`: fp32 so that the text is the stored greedy continuation."""
    assert main(["run", "--dtype", "fp32", "--max-new-tokens", "24"]) == 0
    out = capsys.readouterr().out
    stored = json.loads((BARD / "reference" / "reference.json").read_text())
    begin = out.index("ROMEO.\nBut soft, what light")
    said = out[begin : out.index("\n\n24 tokens")]
    assert stored["greedy_text"].startswith(said)
    assert len(said) > 60
    assert re.search(r"24 tokens; the first after [\d.]+ s \(\d+ prompt tokens\), then [\d.]+ tokens/s", out)
    found = re.search(r"perplexity ([\d.]+) over 63 rows of 256 tokens", out)
    assert found
    assert float(found[1]) == pytest.approx(stored["perplexity_val_16k_tokens"], rel=2e-4)
    assert "stored reference 44.144" in out
    for mode in ("packed", "dequantized"):
        assert re.search(rf"^{mode} +[\d.]+ MiB +[\d.]+ MiB +(measured|computed)", out, re.MULTILINE)
    assert re.search(r"^loaded in [\d.]+ s", out, re.MULTILINE)


def test_a_perplexity_that_is_not_the_stored_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from int4_emu import generation

    monkeypatch.setattr(
        generation, "perplexity", lambda *a, **k: generation.Perplexity(44.4, 63, k["context"], 0)
    )
    assert main(["run", "--max-new-tokens", "1"]) == 1
    assert "FAILED: the perplexity is not the stored one" in capsys.readouterr().out


def test_perplexity_of_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Now is the winter of our discontent. " * 30)
    assert (
        main(["run", str(BARD), "--perplexity", str(text), "--context", "64", "--max-new-tokens", "1"]) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"perplexity [\d.]+ over [1-9]\d* rows of 64 tokens", out)
    assert "stored reference" not in out


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in CHECKPOINT_NAMES]
)
@pytest.mark.parametrize("weights", ["auto", "dequantized"])
def test_run_every_checkpoint(name: str, weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = require_checkpoint(name)
    options = ["--max-new-tokens", "3", "--no-perplexity", "--weights", weights]
    assert main(["run", str(folder), *options]) == 0
    out = capsys.readouterr().out
    assert "3 tokens; the first after" in out or "tokens; the first after" in out
    assert ("with packed weights" in out) == (weights == "auto")
    if not (folder / "tokenizer.json").is_file():
        assert re.search(r"^ids \d+( \d+){7} -> \d+ \d+ \d+$", out, re.MULTILINE)


def test_ids_instead_of_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BARD, folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    shutil.rmtree(folder / "reference")
    assert main(["run", str(folder), "--prompt", "594, 45 37", "--max-new-tokens", "2"]) == 0
    assert re.search(r"^ids 594 45 37 -> \d+ \d+$", capsys.readouterr().out, re.MULTILINE)
    assert main(["run", str(folder), "--max-new-tokens", "2"]) == 0
    assert re.search(r"^ids 0 -> ", capsys.readouterr().out, re.MULTILINE)
    for prompt, sentence in (
        ("Now is", "--prompt must be token ids like '1 2 3' since"),
        ("1 2048", "--prompt must be token ids from 0 to 2047, got '1 2048'"),
        ("", "--prompt must be token ids from 0 to 2047, got ''"),
    ):
        assert main(["run", str(folder), "--prompt", prompt]) == 2
        assert sentence in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("x")
    assert main(["run", str(folder), "--perplexity", str(text)]) == 2
    assert "has no tokenizer.json, which --perplexity needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--perplexity", "absent.txt"], "no such file or directory: absent.txt"),
        (["--perplexity", "x", "--no-perplexity"], "give --perplexity or --no-perplexity, not both"),
        (["--context", "100000"], "context must be from 2 to the model's 512 positions, got 100000"),
        (["--max-new-tokens", "1000"], "prompt and new tokens must fit the model's 512 positions"),
    ],
)
def test_bad_options(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "--prompt", "Now is the winter of our discontent. " * 200, "--max-new-tokens", "1"]) == 2
    )
    captured = capsys.readouterr()
    assert "prompt and new tokens must fit the model's 512 positions" in captured.err
    assert "winter" not in captured.out


def test_a_perplexity_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"ab\xff")
    assert main(["run", "--perplexity", str(path)]) == 2
    assert f"{path} is not UTF-8 text: invalid start byte at byte 2" in capsys.readouterr().err


def test_weights_are_measured_for_the_mode_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for weights in ("packed", "dequantized"):
        options = ["--no-perplexity", "--max-new-tokens", "1", "--weights", weights, "--dtype", "fp32"]
        assert main(["run", *options]) == 0
        out = capsys.readouterr().out
        for mode in ("packed", "dequantized"):
            found = re.search(rf"^{mode} +([\d.]+) MiB +([\d.]+) MiB +(measured|computed)", out, re.MULTILINE)
            assert found
            assert (found[3] == "measured") == (mode == weights)
            sizes[weights, mode] = (float(found[1]), float(found[2]))
    # What is computed for the mode that is not in use is what that mode then holds.
    for mode in ("packed", "dequantized"):
        held, told = sizes[mode, mode], sizes["dequantized" if mode == "packed" else "packed", mode]
        assert told == pytest.approx(held, rel=0.02, abs=0.1)
    assert sizes["dequantized", "dequantized"][0] == pytest.approx(
        4 * 16 * 3 * 256 * 128 * 4 / 2**20, abs=0.05
    )
    assert torch.get_num_threads() >= 1
