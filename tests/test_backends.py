"""The choice of a backend with its reasons, and what compiled backends promise: independence and a small
workspace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import int4_emu
import oracle
from implementations import IMPLEMENTATIONS
from int4_emu import BackendError, Experts, MoEConfig, QuantConfig, select_backend
from int4_emu.backends import CpuBackend
from layers import make_layer, to_numpy
from stored import FORMAT_BITS_LIST, expect, stored


def config(**changes: Any) -> MoEConfig:
    base = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_experts": 4,
        "top_k": 2,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "quant": QuantConfig.int4_w4a16(group_size=32),
    }
    return MoEConfig(**(base | changes))


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INT4_EMU_BACKEND", raising=False)


# Selection.


@pytest.mark.parametrize("quant", [
    None, QuantConfig.int4_w4a16(32), QuantConfig.int4_w4a16(32, symmetric=False), QuantConfig.int4_w4a16(-1),
    QuantConfig.int8_w8a16(), QuantConfig.int4_w4a16(32, act_order=True),
], ids=str)  # fmt: skip
def test_the_compiled_backend_comes_first(compiled: ModuleType, quant: QuantConfig | None) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        selection = select_backend(config(quant=quant, dtype=dtype))
        assert selection.backend == "cpu" and selection.rejections == []
        assert selection.weights == ("dequantized" if quant is None else "packed")
        assert "cpu" in str(selection)


def test_the_reference_serves_what_the_compiled_ones_refuse(compiled: ModuleType) -> None:
    """Another device type: the refusal is kept as (candidate, reason) and completes "not used since ..."."""
    selection = select_backend(config(device="meta"))
    assert selection.backend == "reference"
    (name, reason), *_ = selection.rejections
    assert name == "cpu" and "meta" in reason
    assert f"not used since {reason}" in str(selection)


def test_a_name_insists(compiled: ModuleType) -> None:
    assert select_backend(config(), backend="reference").backend == "reference"
    assert select_backend(config(), backend="cpu").backend == "cpu"
    with pytest.raises(BackendError, match=r"(?s)(?=.*cpu)(?=.*meta)(?=.*not used since)"):
        select_backend(config(device="meta"), backend="cpu")


def test_the_environment_insists(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT4_EMU_BACKEND", "reference")
    assert select_backend(config()).backend == "reference"
    assert select_backend(config(), backend="cpu").backend == "cpu", "an argument beats the environment"
    monkeypatch.setenv("INT4_EMU_BACKEND", "cpu")
    with pytest.raises(BackendError, match=r"(?s)(?=.*cpu)(?=.*meta)"):
        select_backend(config(device="meta"))
    monkeypatch.setenv("INT4_EMU_BACKEND", "nonesuch")
    with pytest.raises(ValueError, match=r"(?s)(?=.*INT4_EMU_BACKEND)(?=.*nonesuch)(?=.*cpu)(?=.*reference)"):
        select_backend(config())


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"(?s)(?=.*nonesuch)(?=.*cpu)(?=.*reference)"):
        select_backend(config(), backend="nonesuch")
    with pytest.raises(ValueError, match=r"(?s)(?=.*packed)(?=.*dequantized)(?=.*int3)"):
        select_backend(config(), weights="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed"):
        select_backend(config(quant=None), weights="packed")


def test_case_17_the_reference_is_not_picked_while_capturing() -> None:
    """It may read data on the host, which freezes one routing into a graph."""
    with pytest.raises(BackendError, match=r"(?s)(?=.*reference)(?=.*captur)"):
        select_backend(config(device="cuda", capturing=True), backend="reference")
    if "gpu" in IMPLEMENTATIONS:
        assert select_backend(config(device="cuda", capturing=True)).backend == "gpu"
    else:
        with pytest.raises(BackendError, match="captur"):
            select_backend(config(device="cuda", capturing=True))


@pytest.mark.parametrize(
    ("make", "error", "fragments"),
    [
        (lambda: QuantConfig.int4_w4a16(group_size=0), ValueError, ("group_size", "0")),
        (lambda: QuantConfig.int4_w4a16(group_size=-2), ValueError, ("group_size", "-2")),
        (lambda: config(activation="swish"), ValueError, ("swish", "silu", "swigluoai")),
        (lambda: config(activation="swigluoai"), ValueError, ("swigluoai", "alpha")),
        (
            lambda: config(
                activation="swigluoai", quant=QuantConfig.int4_w4a16(32, gemm1_alpha=1.7, gemm1_beta=1.0)
            ),
            ValueError,
            ("limit",),
        ),
        (
            lambda: config(
                activation="swigluoai",
                quant=QuantConfig.int4_w4a16(32, gemm1_alpha=1.7, gemm1_clamp_limit=7.0),
            ),
            ValueError,
            ("beta",),
        ),
        (
            lambda: config(activation="gelu", quant=QuantConfig.int4_w4a16(32, gemm1_clamp_limit=7.0)),
            ValueError,
            ("limit", "gelu"),
        ),
        (lambda: config(dtype=torch.float64), TypeError, ("float64",)),
        (lambda: config(hidden_size=0), ValueError, ("hidden_size", "0")),
        (lambda: config(top_k=0), ValueError, ("top_k", "0")),
        (lambda: config(quant=QuantConfig.int4_w4a16(128)), ValueError, ("128", "64")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else getattr(v, "__name__", str(v)).strip("<>"),
)
def test_contradicting_configurations(make: Any, error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(f in str(caught.value) for f in fragments), str(caught.value)


def test_activation_parameters_come_from_the_quant_config() -> None:
    quant = QuantConfig.int4_w4a16(32, gemm1_clamp_limit=7.0, gemm1_alpha=1.702, gemm1_beta=1.0)
    layer = config(activation="swigluoai", quant=quant, has_bias=True, expert_parallel=True)
    assert (layer.limit, layer.alpha, layer.beta) == (7.0, 1.702, 1.0)
    assert select_backend(layer).backend in ("cpu", "reference")


def test_odd_shapes_are_supported_or_refused_with_a_reason() -> None:
    """What selection accepts must run: an answer of yes is tried."""
    for hidden, inter, group in ((90, 34, 2), (80, 48, 32), (2, 2, 1), (2880 // 32, 90, 90)):
        layer = config(
            hidden_size=hidden,
            intermediate_size=inter,
            quant=QuantConfig.int4_w4a16(min(group, inter)),
            dtype=torch.float32,
        )
        refusals = CpuBackend().is_supported(layer, "packed")
        if refusals:
            assert {str(hidden), str(inter)} & set(re.findall(r"\d+", " ".join(refusals))), refusals
            with pytest.raises(BackendError):
                select_backend(layer, backend="cpu")
            continue
        assert select_backend(layer, backend="cpu").backend == "cpu"
        data = make_layer(
            np.random.default_rng(0),
            hidden=hidden,
            intermediate=inter,
            symmetric=True,
            group_sizes=(min(group, inter),) * 2,
        )
        oracle.check(to_numpy(data.run_packed(int4_emu.ops)), data.want(packed=True))


# Promises of the compiled backends.


def test_compiled_ops_do_not_lean_on_the_reference(
    compiled: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function of the reference raises; every compiled op and an Experts module still run and are
    right."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the compiled path called the reference")

    for name, value in list(vars(int4_emu.reference).items()):
        if callable(value) and getattr(value, "__module__", "") == "int4_emu.reference":
            monkeypatch.setattr(int4_emu.reference, name, refuse)
    with pytest.raises(AssertionError):
        int4_emu.reference.unpack(torch.zeros(1, 1, dtype=torch.uint8))
    rng = np.random.default_rng(0)
    for name, bits in FORMAT_BITS_LIST:
        group = 32 if "channel" in name else 8
        (q, s, z), exact, codes, zeros = stored(name, bits, rng, 16, 32, group, torch.float16)
        number = oracle.FORMAT_IDS[name]
        assert torch.equal(
            compiled.dequantize(q, s, z, group_size=group, format=number, bits=bits),
            expect(exact, torch.float16, torch.float16),
        )
        assert np.array_equal(compiled.unpack(q, format=number, bits=bits).numpy(), codes)
        assert np.array_equal(
            compiled.unpack_zeros(z, format=number, bits=bits, out_features=16).numpy(), zeros
        )
        canonical, _, _ = compiled.repack(q, s, z, format=number, bits=bits)
        assert np.array_equal(
            compiled.unprepack(compiled.prepack(canonical, layout=1, bits=bits), layout=1, bits=bits).numpy(),
            canonical.numpy(),
        )
    layer = make_layer(rng)
    compiled.moe_align(layer.topk_ids, 5, 4)
    for packed in (False, True):
        got = (layer.run_packed if packed else layer.run_dense)(compiled)
        oracle.check(to_numpy(got), layer.want(packed=packed))
    a, b = layer.w13, layer.w2
    experts = Experts(
        a.qweight.clone(),
        b.qweight.clone(),
        w13_scales=a.scales,
        w2_scales=b.scales,
        w13_qzeros=a.qzeros,
        w2_qzeros=b.qzeros,
        w13_group_size=32,
        w2_group_size=16,
        dtype=torch.float32,
    )
    assert experts.selection.backend == "cpu"
    oracle.check(to_numpy(experts(layer.x, layer.topk_weights, layer.topk_ids)), layer.want(packed=True))


# Peak resident memory of one packed forward in a process that returns large blocks when they are freed.
WORKSPACE = """
import sys, torch
from int4_emu import ops
def peak():
    with open("/proc/self/status") as lines:
        return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM"))
hidden, inter = 1024, 1024
def run(experts, layout, measure):
    w13 = torch.full((experts, 2 * inter, hidden // 2), 0x99, dtype=torch.uint8)
    w2 = torch.full((experts, hidden, inter // 2), 0x99, dtype=torch.uint8)
    s13, s2 = torch.full((experts, 2 * inter, 8), 0.01), torch.full((experts, hidden, 8), 0.01)
    x, weights = torch.ones(4, hidden, dtype=torch.bfloat16), torch.ones(4, 2)
    ids = torch.arange(8).view(4, 2) * (experts // 8) % experts
    if measure:
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
    out = ops.fused_moe_packed(x, w13, w2, weights, ids, s13, s2, 128, 128, layout=layout)
    assert out.isfinite().all()
    return peak() - before if measure else 0
run(1, 0, False)
for layout in (0, 1):
    print(run(8, layout, True), run(64, layout, True))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_workspace_of_packed_forward(compiled: ModuleType) -> None:
    """It does not grow with E and holds less than one expert's dequantised weights (6 MiB in bf16 here)."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", WORKSPACE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    one_expert = 3 * 1024 * 1024 * 2 // 1024  # KiB
    lines = result.stdout.splitlines()
    assert len(lines) == 2, "canonical and prepacked codes"
    for line in lines:
        few, many = (int(v) for v in line.split())
        assert max(few, many) < one_expert, f"{few} and {many} KiB"
        assert many - few < 512, f"{few} KiB with 8 experts, {many} KiB with 64"
