"""`convert`: what stock transformers then loads is what int4_emu computes, and OUT is whole or not there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoints import BARD as BARD_NAME
from checkpoints import CHECKPOINT_NAMES, dequantized_references, require_checkpoint
from int4_emu import Checkpoint, CheckpointError, _output_folder, convert
from int4_emu._tensor_writer import OutputTensor, split_into_shards, write_tensors
from int4_emu.cli import main

BARD = Path(__file__).parents[1] / "python" / "int4_emu" / "data" / "bard"
SOME = [
    "autoround-qwen3moe-sym-g128-autogptq",
    "ct-mixtral-mixed-int4asym-gateup-int8-down",
    "ct-mixtral-w4a16-asym-g32-actorder-group-gidx",
    "ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored",
    "gptq-mixtral-asym-g32-v1",
    "quark-mixtral-int4-sym-channel-reorder",
]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in CHECKPOINT_NAMES]
)
def test_stock_transformers_loads_it_and_computes_the_same(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import int4_emu

    source, out = require_checkpoint(name), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--dtype", "fp32"]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}
    assert not any("int4_emu" in type(m).__module__ for m in model.modules())
    assert getattr(model.config, "quantization_config", None) is None
    mine = int4_emu.from_pretrained(source, weights="dequantized", dtype=torch.float32, progress=False)
    ids = torch.arange(24).unsqueeze(0)
    with torch.inference_mode():
        got, want = model(ids).logits, mine(ids).logits
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_weights_are_the_tools_own(name: str, tmp_path: Path) -> None:
    """Bit-equal to the tool's dequantised weights, in the tool's type and the original order of the columns."""
    source = require_checkpoint(name)
    wanted = dequantized_references(source)
    if not wanted:
        pytest.skip("this copy has no reference tensors")
    # bard's reference holds bf16 values as fp32.
    dtype = torch.bfloat16 if name == BARD_NAME else next(iter(wanted.values())).dtype
    checkpoint = Checkpoint(source)
    convert.convert_checkpoint(checkpoint, tmp_path / "out", dtype=dtype)
    written = tensors_of(tmp_path / "out")
    mixtral = checkpoint.config["model_type"] == "mixtral"
    leaves = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for (layer, expert, projection), want in wanted.items():
        block = "block_sparse_moe" if mixtral else "mlp"
        leaf = leaves.get(projection, projection) if mixtral else projection
        got = written[f"model.layers.{layer}.{block}.experts.{expert}.{leaf}.weight"]
        if name == "autoround-qwen3moe-asym-g32-autogptq":
            # The tool's figure is fp32 of scales that the file rounds to fp16.
            assert float((got - want).abs().max()) <= 1.3e-4
        else:
            assert got.dtype == dtype
            assert torch.equal(got.to(want.dtype), want)


def test_what_is_written_beside_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(BARD, source)
    (source / "LICENSE").write_text("as is")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "quantize_config.json").write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "out"), "--max-shard-size", "4MB"]) == 0
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.pop("torch_dtype") == config["dtype"] == "bfloat16"
    assert {k: v for k, v in original.items() if k != "quantization_config"} == config
    names = {p.name for p in out.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"} <= names
    assert not names & {"pytorch_model.bin", "quantize_config.json", "reference", "README.md"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) == 4
    assert sorted(set(index["weight_map"].values())) == shards
    for shard in shards:
        assert (out / shard).stat().st_size < 4_000_000 + 100_000
        with safe_open(out / shard, "pt") as file:
            assert {n for n, s in index["weight_map"].items() if s == shard} == set(file.keys())
            assert file.metadata() == {"format": "pt"}
    written = tensors_of(out)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in written.values())
    # Tensors that were floats are the same bits.
    before = load_file(source / "model.safetensors")
    for name in set(before) & set(written):
        assert torch.equal(before[name], written[name]), name
    # Nobody else's business is left: the lock and the working folder are gone.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    # The new checkpoint is read by this package, too.
    assert Checkpoint(out).describe()[0].projections[0].format == "bfloat16"


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert main(["convert", str(BARD), str(out)]) == 0  # an empty folder is as good as none
    (out / "mine.txt").write_text("x")
    capsys.readouterr()
    assert main(["convert", str(BARD), str(out)]) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert (out / "mine.txt").exists()
    assert main(["convert", str(BARD), str(out), "--force"]) == 0
    assert not (out / "mine.txt").exists()
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    assert main(["convert", str(BARD), str(other), "--force"]) == 2
    assert "is not a model folder (it has no config.json)" in capsys.readouterr().err
    assert (other / "letter.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "out"]


@pytest.mark.parametrize("place", ["in", "in/out", "."])
def test_out_must_lie_apart_from_dir(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(BARD, tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / place), "--force"]) == 2
    assert "must lie apart from the checkpoint" in capsys.readouterr().err
    assert Checkpoint(tmp_path / "in").describe()


def test_no_space_is_told_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(_output_folder.shutil, "disk_usage", lambda p: usage._replace(free=5_000_000))
    assert main(["convert", str(BARD), str(tmp_path / "out")]) == 1
    assert "0.005 GB are free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_finished_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write that the system refuses half-way: here by the file-size limit, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
    try:
        status = main(["convert", str(BARD), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert status == 1
    assert "too low to write" in error
    assert "model.safetensors" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


class _Stop(Exception):
    pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), _Stop()])
def test_any_failure_while_writing_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    dequantize = Checkpoint.dequantize_linear

    def fail(self: Checkpoint, module: str, dtype: torch.dtype) -> torch.Tensor:
        calls.append(module)
        if len(calls) == 50:
            raise error
        return dequantize(self, module, dtype)

    monkeypatch.setattr(Checkpoint, "dequantize_linear", fail)
    with pytest.raises(type(error)):
        convert.convert_checkpoint(Checkpoint(BARD), tmp_path / "out", max_shard_bytes=1_000_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    try:
        assert main(["convert", str(BARD), str(tmp_path / "out")]) == 1
        assert "no permission" in capsys.readouterr().err
    finally:
        tmp_path.chmod(0o700)


_KILLED = """
import sys, time
from int4_emu import Checkpoint, convert
def progress(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(100)
convert.convert_checkpoint(Checkpoint(sys.argv[1]), sys.argv[2], max_shard_bytes=2_000_000, progress=progress)
"""


def test_kill_in_mid_write(tmp_path: Path) -> None:
    """SIGKILL leaves no OUT; while the writer lives nobody else may write; afterwards its leftovers are cleared."""
    out = tmp_path / "out"
    writer = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(BARD), str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        assert not out.exists()
        with pytest.raises(FileExistsError, match="another process is writing"):
            convert.convert_checkpoint(Checkpoint(BARD), out)
        assert (tmp_path / ".out.partial").is_dir()  # and its work was left alone
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
    assert not out.exists()
    assert (tmp_path / ".out.partial").is_dir()
    convert.convert_checkpoint(Checkpoint(BARD), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert Checkpoint(out).describe()


def test_sigterm_cleans_up(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        convert.convert_checkpoint(Checkpoint(BARD), tmp_path / "out", progress=progress)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


def test_memory_stays_at_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is dropped before the next is made."""
    import weakref

    alive: list[Any] = []
    dequantize = Checkpoint.dequantize_linear

    def watched(self: Checkpoint, module: str, dtype: torch.dtype) -> torch.Tensor:
        assert not [r for r in alive[:-1] if r() is not None]
        tensor = dequantize(self, module, dtype)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "dequantize_linear", watched)
    convert.convert_checkpoint(Checkpoint(BARD), tmp_path / "out")
    assert len(alive) == 208


def test_refusals_before_anything_is_written(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    convert.convert_checkpoint(Checkpoint(BARD), plain)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="there is nothing to convert"):
        convert.convert_checkpoint(Checkpoint(plain), out)
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16 or float32, got int8"):
        convert.convert_checkpoint(Checkpoint(BARD), out, dtype=torch.int8)
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        convert.convert_checkpoint(Checkpoint(BARD), out, max_shard_bytes=0)
    with pytest.raises(FileNotFoundError):
        convert.convert_checkpoint(Checkpoint(BARD), tmp_path / "no" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain"]


def test_writer_agrees_with_the_official_reader(tmp_path: Path) -> None:
    """Odd sizes, every dtype, empty tensors and scalars, in one file: each comes back bit for bit."""
    rng = torch.Generator().manual_seed(0)
    values = {
        "bool": torch.tensor([True, False, True]),
        "u8": torch.randint(0, 256, (5, 1), generator=rng).to(torch.uint8),
        "bf16": torch.randn(3, 7, generator=rng).bfloat16(),
        "i64": torch.tensor([[2**40, -1]]),
        "f16": torch.randn(1, generator=rng).half(),
        "f32": torch.randn(4, 3, generator=rng).t(),  # not contiguous
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        'quote " and ü': torch.ones(2, dtype=torch.int8),
    }
    tensors = [OutputTensor(n, v.dtype, tuple(v.shape), lambda v=v: v) for n, v in values.items()]
    assert sum(write_tensors(tmp_path / "x.safetensors", tensors)) == sum(t.nbytes for t in tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert set(back) == set(values)
    for name, value in values.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)
    wrong = OutputTensor("w", torch.float32, (2,), lambda: torch.ones(3))
    with pytest.raises(CheckpointError, match=r"w must be torch.float32 \[2\], got torch.float32 \[3\]"):
        list(write_tensors(tmp_path / "y.safetensors", [wrong]))


def test_shards_hold_whole_tensors_and_none_is_empty() -> None:
    def tensor(n: int) -> OutputTensor:
        return OutputTensor(str(n), torch.uint8, (n,), lambda: torch.empty(0))

    sizes = [
        [t.nbytes for t in shard] for shard in split_into_shards([tensor(n) for n in (4, 6, 1, 30, 2, 3)], 10)
    ]
    assert sizes == [[4, 6], [1], [30], [2, 3]]
    assert split_into_shards([], 10) == [[]]
