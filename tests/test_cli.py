"""The command line as a whole, the environment report and `inspect`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import int4_emu
from checkpoints import BARD, CHECKPOINT_NAMES, require_checkpoint
from int4_emu.cli import COMMANDS, main
from int4_emu.cli._console import ranges, size, whole_file
from int4_emu.cli._errors import explain
from int4_emu.cli.report import ENVIRONMENT

PACKAGE = Path(int4_emu.__file__).parent


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A real process of the command."""
    command = [sys.executable, "-m", "int4_emu", *args]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, check=False, timeout=120
    )


def test_report_says_what_is_there_and_why_not_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INT4_EMU_BACKEND", "reference")
    monkeypatch.setenv("INT4_EMU_NO_SUCH_THING", "1")
    assert main([]) == 0
    out = capsys.readouterr().out
    assert int4_emu.__version__ in out
    assert str(int4_emu.build_info() or int4_emu.load_error()) in " ".join(out.split())
    assert re.search(r"INT4_EMU_BACKEND +'reference'", out)
    assert re.search(r"INT4_EMU_NO_SUCH_THING +set, but nothing reads it", out)
    for backend in ("cpu", "reference"):
        assert re.search(rf"^cpu +packed +{backend}", out, re.MULTILINE)


def test_report_knows_every_variable_that_the_sources_read() -> None:
    root = PACKAGE.parents[1]
    sources = [
        *PACKAGE.rglob("*.py"),
        root / "setup.py",
        root / "build_tools.py",
        *(root / "tests/amd").glob("*.py"),
    ]
    sources += [p for p in (root / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")]
    read = set()
    for path in sources:
        if path.is_file() and path.name != "report.py":
            text = path.read_text()
            read |= set(re.findall(r"getenv\(\"(INT4_EMU_\w+)\"", text))
            read |= set(re.findall(r"env(?:iron)?(?:\.get\(|\[)\"(INT4_EMU_\w+)\"", text))
            read |= set(re.findall(r"^ENVIRONMENT = \"(INT4_EMU_\w+)\"", text, re.MULTILINE))
    assert read
    assert read == set(ENVIRONMENT)
    assert len(ENVIRONMENT) <= 10


def test_report_of_a_broken_library(tmp_path: Path) -> None:
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    done = python(INT4_EMU_LIBRARY=str(broken), COLUMNS="400")
    assert done.returncode == 0, done.stderr
    assert "the compiled library did not load" in done.stdout
    assert re.search(r"chosen +reference", done.stdout)


def test_selftest_fails_without_the_compiled_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("int4_emu._library.is_compiled", lambda: False)
    monkeypatch.setattr("int4_emu._library.load_error", lambda: "it was built for another machine")
    assert main(["selftest", "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "skip  cpu on cpu: it was built for another machine" in out
    assert "FAILED: nothing was tested" in out
    monkeypatch.setattr("int4_emu.cli.selftest.check_backend", lambda *a, **k: iter(()))
    assert main(["selftest"]) == 1
    assert "FAIL  the ops are not tested since it was built for another machine" in capsys.readouterr().out


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help_of_every_command(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: int4-emu")
    if command:
        assert "--" in out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["inspect"], "the following arguments are required: DIR"),
        (["no-such-command"], "invalid choice"),
        (["inspect", "DIR", "--dtype", "int4"], "must be one of bf16"),
        (["bench", "--tokens", "1,0"], "must be a whole number above 0, got '0'"),
        (["convert", "A", "B", "--max-shard-size", "4 bananas"], "must be a size like 4GB"),
        (["run", "--max-new-tokens", "-3"], "must be a whole number above 0"),
    ],
)
def test_usage_errors(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["inspect", "{tmp}/absent"], "{tmp}/absent is not a folder"),
        (["inspect", "{tmp}"], "config.json is missing in {tmp}"),
        (["run", "{tmp}"], "config.json is missing in {tmp}"),
        (["convert", "{tmp}", "{tmp}/out"], "config.json is missing in {tmp}"),
        (["bench", "--model", "gpt-2"], "--model must be one of qwen3-30b-a3b"),
        (["bench", "--experts", "2"], "--experts must be at least top-k = 8 of qwen3-30b-a3b, got 2"),
        (["bench", "--json", "{tmp}/no/folder.json"], "no such folder: {tmp}/no"),
        (["bench", "--plot", "{tmp}/x.exe"], "--plot must name a file ending in"),
        (["selftest", "--backend", "abacus"], "--backend must be one of cpu, gpu, reference, got abacus"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(tmp=tmp_path) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("int4-emu: ")
    assert captured.err.count("\n") == 1
    assert sentence.format(tmp=tmp_path) in captured.err
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [["--traceback", "inspect", "absent"], ["inspect", "absent", "--traceback"]])
def test_traceback_is_shown_when_asked_for(argv: list[str]) -> None:
    with pytest.raises(int4_emu.CheckpointError, match="absent is not a folder"):
        main(argv)


@pytest.mark.parametrize(
    ("error", "sentence", "status"),
    [
        (OSError(28, "No space left on device", "/x/y"), "no space left to write /x/y", 1),
        (PermissionError(13, "Permission denied", "/x"), "no permission: /x", 1),
        (FileNotFoundError(2, "No such file or directory", "/x"), "no such file or directory: /x", 2),
        (int4_emu.BackendError("cpu not used since it rains"), "cpu not used since it rains", 1),
        (int4_emu.CheckpointError("two\nlines"), "two lines", 2),
        (MemoryError("the layer needs 5 GiB"), "out of memory: the layer needs 5 GiB", 1),
        (KeyError("k"), "unexpected KeyError: 'k' (--traceback shows where)", 1),
    ],
)
def test_errors_become_sentences(error: Exception, sentence: str, status: int) -> None:
    assert explain(error) == (sentence, status)


def test_version_and_console_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"int4_emu {int4_emu.__version__}\n"
    scripts = {e.name: e for e in entry_points(group="console_scripts")}
    if "int4-emu" not in scripts:
        pytest.skip("the package is not installed")
    assert scripts["int4-emu"].load() is main


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`python -m int4_emu ... | head -1`: no traceback, and nothing waits for the rest."""
    command = f"{sys.executable} -m int4_emu selftest --backend reference -v 2>{tmp_path}/err | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "err").read_text() == ""


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of sh in which `$CLI` is the command."""
    environment = {**os.environ, "CLI": f"{sys.executable} -m int4_emu"}
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=environment, check=False, timeout=120
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_stdout_that_cannot_take_the_output() -> None:
    full = shell("$CLI > /dev/full")
    assert (full.returncode, full.stderr) == (1, "int4-emu: No space left on device\n")
    closed = shell("$CLI >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    # Without stderr the error must not land in the output.
    wrong = shell("$CLI inspect /no/such/folder 2>&-")
    assert (wrong.returncode, wrong.stdout) == (2, "")


@pytest.mark.parametrize("columns", ["20", "60"])
def test_narrow_and_ascii_terminals(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["inspect", str(require_checkpoint(BARD))]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= int(columns)
    assert "\x1b" not in out
    assert "asymmetric" not in out.split("layer", 1)[0]


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_inspect_every_checkpoint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = require_checkpoint(name)
    assert main(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    # The tool's name in the folder name, and the facts of its manifest, against what inspect finds.
    layers = document["layers"]
    assert document["moe_layers"] == len(layers) == (4 if "bard" in name else 2)
    stored = [p for layer in layers for p in layer["projections"] if p["group_size"] is not None]
    prefix = {"awq": "awq", "gptq": "gptq_v2" if name.endswith("v2") else "gptq_v1", "autoround": "gptq_v1"}
    wanted = prefix.get(name.split("-")[0], "quark" if name.startswith("quark") else "compressed_tensors")
    assert {p["format"].startswith(wanted) for p in stored} == {True}
    if "mixed" not in name:
        assert {p["bits"] for p in stored} == {8 if "8" in name.replace("g128", "") else 4}
        # AutoAWQ files carry zero points of their own.
        assert {p["symmetric"] for p in stored} == {"asym" not in name and "autoawq" not in name}
        group = re.search(r"-g(\d+)", name)
        if group or "channel" in name:
            assert {p["group_size"] for p in stored} == {int(group[1]) if group else -1}
    assert any(p["act_order"] for p in stored) == ("descact" in name or "gidx" in name)
    for layer in layers:
        sixteen_bit = 3 * layer["num_experts"] * layer["hidden_size"] * layer["intermediate_size"] * 2
        assert layer["dequantized_bytes"] == sixteen_bit
        assert layer["packed_bytes"] <= sixteen_bit
        assert layer["activation"] == "silu"
        for mode in ("packed", "dequantized"):
            served = layer["backends"][mode]
            assert (served["selection"] is None) != (served["refusal"] is None)
    # Attention is quantised in all but two.
    assert bool(document["other_linears"]) == ("mixed-int4asym" not in name)
    assert "backend" in text


def test_inspect_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from int4_emu._shards import TensorFiles

    read: list[str] = []
    get = TensorFiles.get
    monkeypatch.setattr(TensorFiles, "get", lambda self, name: (read.append(name), get(self, name))[1])
    assert main(["inspect", str(require_checkpoint("ct-mixtral-w4a16-asym-g32-actorder-group-gidx"))]) == 0
    assert read
    assert {name.rpartition(".")[2] for name in read} <= {"weight_shape", "weight_g_idx"}


def test_inspect_gives_the_reason_against_packed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = require_checkpoint("ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored")
    assert main(["inspect", str(checkpoint)]) == 0
    assert "packed, layer 0: no: layer 0 is in floating point" in capsys.readouterr().out


def test_sizes_and_ranges() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 5000 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "5000.0 GiB",
    ]
    assert ranges([3, 1, 2, 7, 9, 8]) == "1-3, 7-9"
    assert ranges([]) == ""


def test_whole_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with whole_file(target) as file:
        file.write("first")
        assert not target.exists()
    with pytest.raises(TypeError), whole_file(target) as file:
        file.write("half" + str(file.write(None)))  # type: ignore[arg-type]
    assert target.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
