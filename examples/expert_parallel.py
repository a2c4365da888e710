"""One MoE layer over two processes: each reads its own experts, and each has its own tokens.

Run: torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py
"""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.resources import files

import torch
import torch.distributed as dist

import int4_emu
from int4_emu.integrations.distributed import ExpertParallel, local_expert_ids

TOKENS_PER_RANK = 6


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    # A peer that dies or stalls is an error on the others after this time.
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    checkpoint = int4_emu.Checkpoint(str(files("int4_emu") / "data" / "bard"))
    layer = checkpoint.moe_layers[0]
    count = checkpoint.plan(layer).num_experts
    mine = local_expert_ids(count)
    experts = checkpoint.load_experts(layer, weights="packed", expert_ids=mine, device=device)
    parallel = ExpertParallel(experts)  # compares the ranks' layers and checkpoints

    # Everyone draws all tokens and takes a part, so that the result can be compared with one process.
    generator = torch.Generator().manual_seed(0)
    tokens = TOKENS_PER_RANK * ranks
    x = torch.randn(tokens, experts.hidden_size, generator=generator).bfloat16().to(device)
    weights, ids = (t.to(device) for t in torch.rand(tokens, count, generator=generator).topk(2))
    here = slice(rank * TOKENS_PER_RANK, (rank + 1) * TOKENS_PER_RANK)
    with torch.inference_mode():
        y = parallel(x[here], weights[here], ids[here])
        alone = checkpoint.load_experts(layer, weights="packed", device=device)(x, weights, ids)[here]
    torch.testing.assert_close(y, alone, rtol=2**-7, atol=2**-7 * alone.abs().max().item())
    print(
        f"rank {rank} of {ranks} on {device}: experts {mine}, its {y.shape[0]} tokens as in one process",
        flush=True,
    )

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
