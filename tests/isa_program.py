"""Judges the compiled ops against the oracle on one CPU instruction set after another; run by test_isa.py.

Usage: isa_program.py FOLDER ISA... One process imports torch and forks a child for each instruction set, since the
library chooses once, when it is first used. A child's output goes to FOLDER/ISA; stdout gets "ISA exit-status" lines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

import oracle
from layers import NAMES, make_layer, to_numpy
from stored import FORMAT_BITS_LIST, expect, stored


def judge_layers() -> None:
    """A layer a dtype and width, both modes, canonical and prepacked, and one that no tile divides."""
    from int4_emu import ops

    for seed, dtype in enumerate(NAMES):
        for bits in ((4, 4), (8, 8)):
            for tokens in (1, 5, 70):
                layer = make_layer(
                    np.random.default_rng(seed), dtype=dtype, bits=bits, tokens=tokens, hidden=96, intermediate=48,
                    group_sizes=(32, 24), bias=True,
                )  # fmt: skip
                for packed in (False, True):
                    got = (layer.run_packed if packed else layer.run_dense)(ops)
                    oracle.check(to_numpy(got), layer.want(packed=packed))
                _, w13, w2, *rest = layer.packed_args()
                tiles = [ops.prepack(w, layout=1, bits=b) for w, b in zip((w13, w2), bits, strict=True)]
                got = ops.fused_moe_packed(layer.x, *tiles, *rest, layout=1, **layer.packed_options())
                oracle.check(to_numpy(got), layer.want(packed=True))
        layer = make_layer(
            np.random.default_rng(7), dtype=dtype, hidden=90, intermediate=34, group_sizes=(30, 34)
        )
        oracle.check(to_numpy(layer.run_packed(ops)), layer.want(packed=True))


def judge_formats() -> None:
    """Bit-exact on every instruction set."""
    from int4_emu import ops

    for name, bits in FORMAT_BITS_LIST:
        group = 72 if "channel" in name else 24
        args, exact, _, _ = stored(name, bits, np.random.default_rng(3), 40, 72, group, torch.float16)
        for out in NAMES:
            got = ops.dequantize(
                *args, group_size=group, format=oracle.FORMAT_IDS[name], bits=bits, dtype=out
            )
            assert torch.equal(got, expect(exact, torch.float16, out)), (name, out)


def child(isa: str, log: Path) -> None:
    os.environ["INT4_EMU_CPU_ISA"] = isa
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    judge_layers()
    judge_formats()
    print("judged", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    for isa in sys.argv[2:]:
        pid = os.fork()
        if pid == 0:
            child(isa, folder / isa)
            return
        _, status = os.waitpid(pid, 0)
        print(isa, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
