"""The experts of a checkpoint without transformers: what it holds, and one layer after another.

Run: python examples/experts_from_checkpoint.py

A folder may follow, for another checkpoint.
"""

from __future__ import annotations

import sys
from importlib.resources import files

import torch

import int4_emu


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(files("int4_emu") / "data" / "bard")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = int4_emu.Checkpoint(folder)  # opening reads no weights
    for layer in checkpoint.describe():
        ways = ", ".join(
            f"{'/'.join(p.roles)} {p.format} int{p.bits} g{p.group_size}" for p in layer.projections
        )
        print(
            f"layer {layer.layer}: {layer.num_experts} experts of {layer.hidden_size} x {layer.intermediate_size}, "
            f"{layer.activation}, {ways}: {layer.packed_bytes / 2**20:.2f} MiB"
        )

    generator = torch.Generator().manual_seed(0)
    for number, experts in checkpoint.load_layers(progress=False, weights="auto", device=device):
        x = torch.randn(3, experts.hidden_size, generator=generator).bfloat16().to(device)
        scores = torch.rand(3, experts.num_experts, generator=generator).to(device)
        weights, ids = scores.topk(experts.top_k or 2)
        with torch.inference_mode():
            y = experts(x, weights, ids)
        kind = "packed" if experts.is_packed else "dequantized"
        print(f"layer {number}: {kind} on {device} by {experts.selection}, output {list(y.shape)} {y.dtype}")


if __name__ == "__main__":
    main()
