"""Times loading a layer's experts from a checkpoint of each format, beside copies of as many bytes.

    python benchmarks/loading.py [--experts 32] [--hidden 2048] [--intermediate 768] [--group-size 128] [--threads N]

The files are written to a temporary folder (TMPDIR) and are in the page cache when they are loaded. Speeds are the checkpoint's bytes
per second of the shortest of interleaved calls. Loaded weights lie in memory that is new to the process, which alone takes time, so
they compare with a copy to such memory: packed ones with one of the checkpoint's bytes, dequantised ones with one of their own size.
`prepack` to the CPU's tile layout compares with `copy_` of its result.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from int4_emu import Checkpoint, Format, Layout, ops
from int4_emu.cli._arguments import positive
from int4_emu.cli._bench_timing import time_interleaved
from int4_emu.cli._console import console, table
from int4_emu.cli._problems import stored
from int4_emu.formats import tensor_names

_CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts_per_tok": 8}


def quantization_of(fmt: Format, bits: int, group_size: int, act_order: bool) -> dict[str, Any]:
    """What config.json of a checkpoint in this format says."""
    if fmt is Format.compressed_tensors:
        weights = {
            "num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": False,
            "dynamic": False, "actorder": "group" if act_order else None,
        }  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    if fmt is Format.awq:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
        }
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": False,
        "desc_act": act_order,
    }


def write(
    folder: Path, fmt: Format, bits: int, act_order: bool, args: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """A checkpoint of one layer; returns its tensors. All experts hold the same numbers, each in its own place."""
    rng = torch.Generator().manual_seed(0)
    names = tensor_names(fmt)
    suffixes = (names.qweight, names.scales, names.qzeros, names.g_idx)
    shapes = {
        "gate_proj": (args.intermediate, args.hidden),
        "up_proj": (args.intermediate, args.hidden),
        "down_proj": (args.hidden, args.intermediate),
    }
    tensors: dict[str, torch.Tensor] = {}
    for leaf, (rows, columns) in shapes.items():
        parts = stored(fmt, bits, 1, rows, columns, args.group_size, rng, act_order=act_order)
        for expert in range(args.experts):
            module = f"model.layers.0.mlp.experts.{expert}.{leaf}"
            for suffix, part in zip(suffixes, parts, strict=True):
                if part is not None and suffix:
                    # gate and up share their order of columns, as GPTQ leaves it.
                    shared = suffix == names.g_idx and leaf == "up_proj"
                    tensors[f"{module}.{suffix}"] = (
                        tensors[f"{module.replace('up_proj', 'gate_proj')}.{suffix}"].clone()
                        if shared
                        else part[0].clone()
                    )
    config = _CONFIG | {
        "num_experts": args.experts, "hidden_size": args.hidden, "moe_intermediate_size": args.intermediate,
        "num_hidden_layers": 1, "quantization_config": quantization_of(fmt, bits, args.group_size, act_order),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def measure(fmt: Format, bits: int, act_order: bool, args: argparse.Namespace) -> list[str]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as name:
        size = sum(t.nbytes for t in write(Path(name), fmt, bits, act_order, args).values())
        checkpoint = Checkpoint(name)
        checkpoint.describe()
        mapped = [checkpoint.get_tensor(n) for n in checkpoint.tensor_names]
        kept = [t.clone() for t in mapped]
        dense = 2 * args.experts * args.hidden * args.intermediate * 3
        source = torch.ones(dense, dtype=torch.uint8)

        def copy_to(places: list[torch.Tensor]) -> None:
            for to, tensor in zip(places, mapped, strict=True):
                to.copy_(tensor)

        def load(weights: str) -> Any:
            return checkpoint.load_experts(0, weights=weights)

        packed = load("packed")
        codes = packed.state_dict()["w13_qweight"].view(args.experts, 2 * args.intermediate, -1)
        layout = torch.empty_like(codes)
        candidates: dict[str, Callable[[Any], Any]] = {
            "copy": lambda _: copy_to(kept),
            "copy to new memory": lambda _: torch.empty(size, dtype=torch.uint8).copy_(source[:size]),
            "packed": lambda _: load("packed"),
            "dense copy": lambda _: torch.empty(dense, dtype=torch.uint8).copy_(source),
            "dequantized": lambda _: load("dequantized"),
            "prepack": lambda _: ops.prepack(codes, layout=Layout.cpu_n16, bits=bits),
            "prepack copy": lambda _: torch.empty_like(layout).copy_(codes),
        }
        times, _ = time_interleaved(candidates, [None], args.seconds)
        least = {n: t.min for n, t in times.items()}

    def rate(name: str, amount: int = size) -> str:
        return f"{amount / least[name] / 1e9:.2f}"

    def share(name: str, copy: str) -> str:
        return f"{least[copy] / least[name]:.0%}"

    return [
        f"{fmt.name} int{bits}" + act_order * " act-order", f"{size / 1e6:.0f}", rate("copy"), rate("copy to new memory"),
        rate("packed"), share("packed", "copy to new memory"), rate("dequantized"), share("dequantized", "dense copy"),
        rate("prepack", codes.numel()), share("prepack", "prepack copy"),
    ]  # fmt: skip


def main() -> None:
    """Prints a row per format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=positive, default=32)
    parser.add_argument("--hidden", type=positive, default=2048)
    parser.add_argument("--intermediate", type=positive, default=768)
    parser.add_argument("--group-size", type=positive, default=128)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--seconds", type=float, default=4.0, help="per format")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    kinds = [(f, b, False) for f in (Format.compressed_tensors, Format.gptq_v1) for b in (4, 8)]
    kinds += [(Format.awq, 4, False), (Format.compressed_tensors, 4, True), (Format.gptq_v1, 4, True)]
    rows = [measure(*kind, args) for kind in kinds]
    columns = (
        "format", "MB", "copy GB/s", "to new memory", "packed GB/s", "of copy", "dequantized GB/s", "of dense copy", "prepack GB/s",
        " of copy",
    )  # fmt: skip
    console().print(table(columns, rows, right=columns[1:]))


if __name__ == "__main__":
    main()
