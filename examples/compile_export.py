"""One MoE layer compiled, exported, and packed by AOTInductor for programs without Python.

Run: python examples/compile_export.py

With a folder as argument, moe_layer.pt2 stays there; cmake/example_export is a C++ program that runs it.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch

import int4_emu


def main() -> None:
    checkpoint = int4_emu.Checkpoint(str(files("int4_emu") / "data" / "bard"))
    experts = checkpoint.load_experts(checkpoint.moe_layers[0], weights="packed")
    top_k = checkpoint.model.top_k or 1

    def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(tokens, experts.hidden_size).bfloat16()
        weights, ids = torch.rand(tokens, experts.num_experts).topk(top_k)
        return x, weights, ids

    # One graph without breaks for any number of tokens.
    compiled = torch.compile(experts, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (3, 8):
            inputs = batch(tokens)
            assert torch.equal(compiled(*inputs), experts(*inputs))
    print("compiled: the bits of eager mode for 3 and 8 tokens")

    tokens_dim = {0: torch.export.Dim("tokens", min=1, max=65536)}
    exported = torch.export.export(experts, batch(4), dynamic_shapes=(tokens_dim, tokens_dim, tokens_dim))
    inputs = batch(9)
    assert torch.equal(exported.module()(*inputs), experts(*inputs))
    print("exported: the bits of eager mode for 9 tokens")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        facts = {"hidden_size": experts.hidden_size, "num_experts": experts.num_experts, "top_k": top_k}
        package = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(folder / "moe_layer.pt2"),
            # The wrapper only calls the op: nothing in it is worth optimising.
            inductor_configs={
                "aot_inductor.compile_wrapper_opt_level": "O0",
                "aot_inductor.metadata": {name: str(value) for name, value in facts.items()},
            },
        )
        loaded = torch._inductor.aoti_load_package(package)
        assert torch.equal(loaded(*inputs), experts(*inputs))
        print(f"packed: {Path(package).stat().st_size / 2**20:.1f} MiB, the bits of eager mode for 9 tokens")


if __name__ == "__main__":
    main()
