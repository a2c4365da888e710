"""Peak memory while loading, sampled as anonymous plus shared pages in a process of its own; the choice of
weights by memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import compressed_tensors_config, gptq_config, random_gptq_layers, write_checkpoint
from int4_emu import BackendError, Checkpoint, _memory, weights_choice
from int4_emu._memory import available_bytes, cgroup_available

MIB = 2**20
_PROBE = """
import json, sys, threading, time
import torch
from int4_emu import Checkpoint
from int4_emu._memory import anonymous_bytes

path, weights = sys.argv[1:]
checkpoint = Checkpoint(path)
checkpoint.describe()
peak, done = 0, threading.Event()

def sample():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous_bytes())
        time.sleep(0.0005)

before = anonymous_bytes()
thread = threading.Thread(target=sample)
thread.start()
loaded = list(checkpoint.load_layers(weights=weights, progress=False))
peak = max(peak, anonymous_bytes())
done.set()
thread.join()
size = sum(p.numel() * p.element_size() for _, e in loaded for p in e.parameters())
print(json.dumps({"peak": peak - before, "final": size, "experts": loaded[0][1].num_experts * len(loaded)}))
"""


def write_large(
    folder: Path, *, layers: int, experts: int, hidden: int, intermediate: int, shards: int
) -> int:
    """A compressed-tensors checkpoint, asymmetric g32, in shards; returns its bytes. Random codes, ordinary
    scales.
    """
    config = compressed_tensors_config(group_size=32, symmetric=False)
    write_checkpoint(folder, {}, config, num_experts=experts, hidden_size=hidden)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    total = 0
    modules = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}", shape)
        for layer in range(layers)
        for expert in range(experts)
        for name, shape in {
            "gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate)
        }.items()
    ]  # fmt: skip
    # Random words are slow to make: all modules hold the same ones.
    words = torch.empty(hidden * intermediate // 8, dtype=torch.int32).random_(-(2**31), 2**31 - 1)
    scale = torch.rand(hidden * intermediate // 32).to(torch.bfloat16)
    for shard in range(shards):
        tensors: dict[str, torch.Tensor] = {}
        for module, (rows, columns) in modules[shard::shards]:
            tensors[f"{module}.weight_packed"] = words.view(rows, columns // 8).clone()
            tensors[f"{module}.weight_zero_point"] = (
                words[: rows * columns // 256].view(rows // 8, columns // 32).clone()
            )
            tensors[f"{module}.weight_scale"] = scale.view(rows, columns // 32).clone()
        file = f"model-{shard:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def check_peak(folder: Path, weights: str) -> None:
    """Final size, two experts and 100 MB: nothing is held twice."""
    out = subprocess.run(
        [sys.executable, "-c", _PROBE, str(folder), weights], capture_output=True, text=True, check=True
    )
    seen = json.loads(out.stdout.splitlines()[-1])
    bound = seen["final"] + 2 * seen["final"] // seen["experts"] + 100 * MIB
    assert seen["peak"] <= bound, f"final {seen['final'] / MIB:.0f} MiB, peak {seen['peak'] / MIB:.0f} MiB"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 experts, 142 MiB packed: well above the slack of 100 MB, so that a loader that holds a layer twice fails."""
    folder = tmp_path_factory.mktemp("large")
    write_large(folder, layers=1, experts=40, hidden=2048, intermediate=1024, shards=2)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux counters")
@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_peak_memory(weights: str, large: Path) -> None:
    check_peak(large, weights)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_peak_memory_of_two_gigabytes(weights: str, tmp_path: Path) -> None:
    size = write_large(tmp_path, layers=2, experts=128, hidden=2048, intermediate=2432, shards=4)
    assert size >= 2e9
    check_peak(tmp_path, weights)


def layer_checkpoint(tmp_path: Path) -> Checkpoint:
    tensors, _ = random_gptq_layers(0)
    return Checkpoint(
        write_checkpoint(tmp_path, tensors, gptq_config(group_size=16, sym=False), num_experts=4)
    )


def test_auto_stays_packed_where_a_compiled_backend_serves_it(tmp_path: Path, compiled: Any) -> None:
    assert layer_checkpoint(tmp_path).load_experts(0).is_packed


def test_auto_dequantises_where_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="int4_emu.checkpoint")
    monkeypatch.setenv("INT4_EMU_BACKEND", "reference")
    assert not layer_checkpoint(tmp_path).load_experts(0).is_packed
    assert (
        "layer 0: dequantized weights, because packed is not possible since no compiled backend serves it"
        in caplog.text
    )


def test_auto_raises_with_both_sizes_where_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INT4_EMU_BACKEND", "reference")
    monkeypatch.setattr(weights_choice, "available_bytes", lambda device: 40000)
    # 4 experts, H = 64, I = 32: 3 * 64 * 32 weights each. bf16: 48 KiB. Packed: 12 KiB of codes, and for each
    # of the 1536 groups a scale of two bytes and a zero point of one: 4.5 KiB.
    message = r"packed needs 0\.0 MiB .* dequantised needs 0\.0 MiB and 0\.0 MiB are available"
    with pytest.raises(BackendError, match=message):
        layer_checkpoint(tmp_path).load_experts(0)
    plan = layer_checkpoint(tmp_path).plan(0)
    assert plan.dense_bytes(torch.bfloat16) == 4 * 3 * 64 * 32 * 2
    assert plan.packed_bytes() == 4 * 3 * 64 * 32 // 2 + 4 * 3 * 64 * 32 // 16 * 3


def test_cgroup_limits_count(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    nowhere = tmp_path / "nowhere"
    assert cgroup_available(tmp_path, nowhere) == 350000
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_available(tmp_path, nowhere) is None
    old = tmp_path / "v1"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("5000")
    (old / "memory.usage_in_bytes").write_text("6000")
    assert cgroup_available(nowhere, old) == 0
    (old / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert cgroup_available(nowhere, old) is None


def test_available_memory_of_the_host() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 0
    assert available_bytes(torch.device("meta")) is None


def test_huge_pages_are_asked_for_within_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside it on the first and the last page is another's."""
    page, calls = 2 * MIB, []
    monkeypatch.setattr(_memory, "_madvise", lambda: lambda *args: calls.append(args))
    tensor = _memory.empty((3 * page + 100,), torch.uint8, torch.device("cpu"))
    begin, size, _ = calls.pop()
    assert begin % page == 0
    assert size in (2 * page, 3 * page)
    assert tensor.data_ptr() <= begin < tensor.data_ptr() + page
    assert begin + size <= tensor.data_ptr() + tensor.numel()
    _memory.empty((100, 100), torch.bfloat16, torch.device("cpu"))
    assert not calls
