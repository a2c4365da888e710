"""Every CPU instruction set in a process of its own, chosen by environment; those the machine lacks refuse
clearly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = {
    "portable": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw"},
    "amx": {"amx_tile", "amx_bf16"},
}

# Judges one layer a dtype, both modes, canonical and prepacked, and the bit-exact ops, against the oracle.
PROGRAM = """
import numpy as np, torch, oracle
from int4_emu import ops
from layers import make_layer, to_numpy, NAMES
from stored import FORMAT_BITS_LIST, expect, stored
for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
    for bits in ((4, 4), (8, 8)):
        for tokens in (1, 5, 70):
            rng = np.random.default_rng(seed)
            layer = make_layer(
                rng, dtype=dtype, bits=bits, tokens=tokens, hidden=96, intermediate=48,
                group_sizes=(32, 24), bias=True,
            )
            for packed in (False, True):
                got = (layer.run_packed if packed else layer.run_dense)(ops)
                oracle.check(to_numpy(got), layer.want(packed=packed))
            _, w13, w2, *rest = layer.packed_args()
            tiles = [ops.prepack(w, layout=1, bits=b) for w, b in zip((w13, w2), bits)]
            got = ops.fused_moe_packed(layer.x, *tiles, *rest, layout=1, **layer.packed_options())
            oracle.check(to_numpy(got), layer.want(packed=True))
    rng = np.random.default_rng(7)
    layer = make_layer(rng, dtype=dtype, hidden=90, intermediate=34, group_sizes=(30, 34))
    oracle.check(to_numpy(layer.run_packed(ops)), layer.want(packed=True))
for name, bits in FORMAT_BITS_LIST:
    group = 72 if "channel" in name else 24
    args, exact, _, _ = stored(name, bits, np.random.default_rng(3), 40, 72, group, torch.float16)
    for out in NAMES:
        got = ops.dequantize(*args, group_size=group, format=oracle.FORMAT_IDS[name], bits=bits, dtype=out)
        assert torch.equal(got, expect(exact, torch.float16, out)), (name, out)
print("judged")
"""


def cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return {f for line in lines if line.startswith("flags") for f in line.split(":")[1].split()}
    except OSError:
        return set()


def start(isa: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "INT4_EMU_CPU_ISA": isa,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of them at once: most of their time is importing torch."""
    started = {isa: start(isa) for isa in (*FLAGS, "sse9")}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


Processes = dict[str, "subprocess.Popen[str]"]


@pytest.mark.parametrize("isa", FLAGS)
def test_every_instruction_set(compiled: ModuleType, processes: Processes, isa: str) -> None:
    out, err = processes[isa].communicate(timeout=300)
    code = processes[isa].returncode
    if FLAGS[isa] <= cpu_flags():
        assert code == 0 and "judged" in out, err[-3000:]
    else:
        assert code > 0, f"neither a crash by signal nor a silent fallback, got {code}"
        last = err.strip().splitlines()[-1]
        assert isa in last and "INT4_EMU_CPU_ISA" in last, err[-2000:]


def test_unknown_instruction_set_lists_the_known(compiled: ModuleType, processes: Processes) -> None:
    _, err = processes["sse9"].communicate(timeout=300)
    assert processes["sse9"].returncode > 0
    last = err.strip().splitlines()[-1]
    assert all(name in last for name in ("sse9", *FLAGS)), err[-2000:]
