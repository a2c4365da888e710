"""Experts under torch.compile's modes and torch.export, and an AOTInductor package that a C++ program runs without Python."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import int4_emu
from int4_emu import Experts, _library
from layers import make_layer
from on_gpu import needs_gpu

ROOT = Path(__file__).resolve().parents[1]
CUDA = pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
Batch = tuple[Tensor, Tensor, Tensor]

pytestmark = pytest.mark.usefixtures("compiled")


def small_experts(packed: bool, device: str) -> Experts:
    layer = make_layer(np.random.default_rng(3), dtype=torch.bfloat16)
    a, b = layer.w13, layer.w2
    if not packed:
        return Experts(*layer.dense_weights()).to(device)
    return Experts(
        a.qweight, b.qweight, w13_scales=a.scales, w2_scales=b.scales, w13_qzeros=a.qzeros, w2_qzeros=b.qzeros,
        w13_group_size=a.group_size, w2_group_size=b.group_size,
    ).to(device)  # fmt: skip


def batch(tokens: int, device: str = "cpu") -> Batch:
    layer = make_layer(np.random.default_rng(tokens), tokens=tokens, dtype=torch.bfloat16)
    return layer.x.to(device), layer.topk_weights.to(device), layer.topk_ids.to(device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@BOTH
def test_one_graph_for_any_number_of_tokens(packed: bool, device: str) -> None:
    """One compilation of the module without breaks; the bits of eager mode."""
    experts = small_experts(packed, device)
    torch._dynamo.reset()
    count = torch._dynamo.utils.counters["stats"]
    before = count["unique_graphs"]
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 17, 64):
        assert torch.equal(compiled(*batch(tokens, device)), experts(*batch(tokens, device)))
    assert count["unique_graphs"] == before + 1


# Every mode of inductor costs a compilation; without a GPU the graphs of two are the default's.
MODES = [
    ("max-autotune", "cpu"),
    ("max-autotune", "cuda"),
    ("max-autotune-no-cudagraphs", "cuda"),
    ("reduce-overhead", "cuda"),
]


@pytest.mark.parametrize(
    ("mode", "device"),
    [pytest.param(m, d, marks=[needs_gpu, pytest.mark.gpu] if d == "cuda" else []) for m, d in MODES],
)
def test_modes_of_inductor(mode: str, device: str) -> None:
    """The layer between other work, in one graph: same bits, call after call, and recorded where the mode records."""
    packed, dense = small_experts(True, device), small_experts(False, device)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return dense(packed(x * 2, weights, ids) + x, weights, ids)

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    skips = counters["cudagraph_skips"]
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    with torch.no_grad():
        for step in range(4):
            x, weights, ids = batch(5, device)
            x, ids = x * (step + 1), (ids + step) % 6 - 1  # unrouted ones among them
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x, weights, ids).clone(), run(x, weights, ids)), step
    if device == "cuda":  # elsewhere inductor counts a graph that it could not have recorded
        assert counters["cudagraph_skips"] == skips, "inductor recorded no CUDA graph"


@BOTH
def test_export_with_any_number_of_tokens(packed: bool) -> None:
    """Exported at one size, saved, loaded and run at others; the graph holds the op, and no size of the example."""
    experts = small_experts(packed, "cpu")
    tokens = {0: torch.export.Dim("tokens", min=1, max=1 << 20)}
    exported = torch.export.export(experts, batch(4), dynamic_shapes=(tokens, tokens, tokens))
    calls = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert calls.count(f"int4_emu.fused_moe{'_packed' if packed else ''}.default") == 1
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (1, 4, 33):
        assert torch.equal(loaded(*batch(count)), experts(*batch(count)))


# AOTInductor.


PACKAGE_WITHOUT_US = """
import sys, torch
class Plain(torch.nn.Module):
    def forward(self, x):
        return x + 1
exported = torch.export.export(Plain(), (torch.zeros(4),))
package = torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
assert torch._inductor.aoti_load_package(package)(torch.zeros(4)).sum() == 4
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples/compile_export.py leaves in a folder that it is given; it compares with eager mode itself."""
    example = ROOT / "examples/compile_export.py"
    if not example.is_file():
        pytest.skip("runs in a source checkout")
    if shutil.which("c++") is None:
        pytest.skip("not installed: c++")
    folder = tmp_path_factory.mktemp("package")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    done = subprocess.run(
        [sys.executable, str(example), str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"compiled: .*\nexported: ", done.stdout), said
    if done.returncode != 0:
        # torch 2.11 overflows the stack in the std::regex of packages that some compilers make, whatever the model.
        probe = [sys.executable, "-c", PACKAGE_WITHOUT_US, str(folder / "probe.pt2")]
        if subprocess.run(probe, env=environment, capture_output=True, timeout=600, check=False).returncode != 0:
            pytest.skip("torch cannot load an AOTInductor package of x + 1 here")
    assert done.returncode == 0 and re.search(r"packed: \d", done.stdout), said
    return folder / "moe_layer.pt2"


def numbers(rows: int, columns: int, step: int, modulus: int) -> Tensor:
    """The C++ program's input."""
    return ((torch.arange(rows * columns) * step % modulus - modulus // 2) / 64).view(rows, columns)


def test_a_program_without_python_runs_the_package(package: Path, tmp_path: Path) -> None:
    """Built with CMake against the installed torch; its output is eager mode's, bit for bit, at a size that nobody traced."""
    if shutil.which("cmake") is None:
        pytest.skip("not installed: cmake")

    def run(*command: object, status: int = 0) -> str:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    build = tmp_path / "build"
    prefix = torch.utils.cmake_prefix_path
    run("cmake", "-S", ROOT / "cmake/example_export", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    program, library = build / "run_package", _library._find()
    assert "libpython" not in run("ldd", program)
    tokens, out = 5, tmp_path / "out"
    assert "[5, 256]" in run(program, package, library, tokens, out)

    checkpoint: Any = int4_emu.Checkpoint(str(files("int4_emu") / "data" / "bard"))
    experts = checkpoint.load_experts(checkpoint.moe_layers[0], weights="packed")
    k, count = checkpoint.model.top_k, torch.arange(tokens * checkpoint.model.top_k)
    ids = ((count * 3 + count // k) % experts.num_experts).view(tokens, k)
    x = numbers(tokens, experts.hidden_size, 37, 101).bfloat16()
    want = experts(x, numbers(tokens, k, 5, 7), ids)
    got = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32).view(tokens, -1)
    assert got.abs().sum() > 0 and torch.equal(got, want.float())

    assert "error: /nowhere.so" in run(program, package, "/nowhere.so", tokens, status=1)
