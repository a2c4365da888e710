"""A MoE block in plain PyTorch, its experts int4: the ops alone, on tensors as a checkpoint stores them.

Run: python examples/plain_ops.py
"""

from __future__ import annotations

from importlib.resources import files

import torch
from safetensors import safe_open
from torch import nn

from int4_emu import ops

GROUP = 32
EXPERTS, TOP_K = 16, 4
PREFIX = "model.layers.0.mlp"


class MoEBlock(nn.Module):
    """Router in floating point, experts as canonical codes, scales and zero points."""

    def __init__(
        self, router: torch.Tensor, w13: tuple[torch.Tensor, ...], w2: tuple[torch.Tensor, ...]
    ) -> None:
        super().__init__()
        self.register_buffer("router", router)
        for name, parts in (("w13", w13), ("w2", w2)):
            for kind, part in zip(("qweight", "scales", "qzeros"), parts, strict=True):
                self.register_buffer(f"{name}_{kind}", part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.softmax(x.float() @ self.router.float().T, dim=-1).topk(TOP_K)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return ops.fused_moe_packed(
            x, self.w13_qweight, self.w2_qweight, weights, ids, self.w13_scales, self.w2_scales, GROUP, GROUP,
            w13_qzeros=self.w13_qzeros, w2_qzeros=self.w2_qzeros, activation="silu",
        )  # fmt: skip


def canonical(tensors: dict[str, torch.Tensor], projections: list[str]) -> tuple[torch.Tensor, ...]:
    """All experts' projections, one below the other, as codes, scales and zero points [E, rows, ...]."""
    experts = []
    for expert in range(EXPERTS):
        rows = []
        for projection in projections:
            names = (
                f"{PREFIX}.experts.{expert}.{projection}.weight_{s}"
                for s in ("packed", "scale", "zero_point")
            )
            rows.append(ops.repack(*(tensors[name] for name in names), format="compressed_tensors"))
        experts.append([torch.cat(parts) for parts in zip(*rows, strict=True)])
    return tuple(torch.stack(parts) for parts in zip(*experts, strict=True))


def main() -> None:
    with safe_open(str(files("int4_emu") / "data" / "bard" / "model.safetensors"), "pt") as file:
        names = [name for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    w13, w2 = canonical(tensors, ["gate_proj", "up_proj"]), canonical(tensors, ["down_proj"])
    block = MoEBlock(tensors[f"{PREFIX}.gate.weight"], w13, w2)

    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = block(x)

    # The same by hand: dense weights, one expert after another.
    dense13, dense2 = (ops.dequantize(*w, group_size=GROUP, dtype=torch.float32) for w in (w13, w2))
    weights, ids = torch.softmax(x.float() @ block.router.float().T, dim=-1).topk(TOP_K)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    want = torch.zeros(5, 256)
    for token, slot in ((t, s) for t in range(5) for s in range(TOP_K)):
        gate, up = (dense13[ids[token, slot]] @ x[token].float()).chunk(2)
        want[token] += weights[token, slot] * (dense2[ids[token, slot]] @ (nn.functional.silu(gate) * up))
    error = ((y.float() - want).norm() / want.norm()).item()
    packed = sum(part.nbytes for part in (*w13, *w2)) / 2**20
    print(
        f"{EXPERTS} experts in {packed:.2f} MiB; relative error of bf16 against float32 by hand: {error:.1e}"
    )
    assert error < 2**-7


if __name__ == "__main__":
    main()
