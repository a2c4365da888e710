"""Bytes that expert parallelism sends, counted while it runs and worked out on paper.

python benchmarks/wire.py; prints the tables of docs/expert-parallel.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

import torch.distributed as dist

from int4_emu.integrations.distributed import ExpertParallel


class Counting(ExpertParallel):
    """Counts the bytes that this rank sends to others."""

    sent = 0

    def _collective(self, step: str, run: Any, *args: Any) -> None:
        out, given = args[:2]
        if run is dist.all_gather_into_tensor:
            self.sent += (self.ranks - 1) * given.nbytes
        elif run is dist.reduce_scatter_tensor:
            self.sent += (self.ranks - 1) * out.nbytes
        elif run is dist.all_to_all_single:
            splits_out = args[3]
            to_others = sum(splits_out) - splits_out[self.rank]
            self.sent += to_others * given.shape[1] * given.element_size()
        super()._collective(step, run, *args)


@dataclass(frozen=True)
class Model:
    """Routed experts of a published model; `rest` counts its other parameters, which every card holds in bf16."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int  # those with experts
    rest: float
    groups: int = 1  # of experts; a token's experts come from `chosen_groups` of them
    chosen_groups: int = 1

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.intermediate


KIMI_K2 = Model("Kimi-K2", 7168, 2048, 384, 8, 60, 12e9)
DEEPSEEK_V3 = Model("DeepSeek-V3", 7168, 2048, 256, 8, 58, 17e9, 8, 4)


@dataclass(frozen=True)
class Machine:
    """One card and its links. Published peaks; `collective` and `share` are assumptions."""

    name: str
    memory: float = 4.8e12  # bytes/s
    compute: float = 400e12  # flop/s that a large grouped GEMM may reach
    link: float = 450e9  # bytes/s that a card sends
    collective: float = 30e-6  # s, for one that carries almost nothing


NODE = Machine("8 cards, each sending 450 GB/s")
CLUSTER = Machine("64 cards, each sending 50 GB/s", link=50e9)

PACKED, DEQUANTIZED = 0.5 + 2 / 32, 2.0  # bytes a weight: int4 with a bf16 scale for 32, and bf16


def row_bytes(model: Model) -> int:
    """A token on its way to its experts: bf16 x, ids and weights."""
    return 2 * model.hidden + 8 * model.top_k


def ranks_of_token(model: Model, ranks: int) -> float:
    """How many ranks a token's k experts lie on, expected for uniform routing; experts are placed in runs."""
    per_rank = model.experts // ranks
    if model.groups == 1:
        among, reachable = model.experts, ranks
    else:  # ranks split groups, or hold whole ones
        among = model.experts * model.chosen_groups // model.groups
        assert ranks % model.groups == 0, "a rank must lie within one group"
        reachable = ranks * model.chosen_groups // model.groups
    untouched = comb(among - per_rank, model.top_k) / comb(among, model.top_k)
    return reachable * (1 - untouched)


def bytes_per_token(model: Model, ranks: int) -> dict[str, float]:
    """What one layer puts on the wire for one token, by all ranks together, expected for uniform routing and equal batches."""
    others = (ranks - 1) / ranks
    row, answer = row_bytes(model), 4 * model.hidden
    return {
        "all_to_all": others * (ranks_of_token(model, ranks) * row + model.top_k * answer),
        "all_gather": (ranks - 1) * (row + answer),
        "padded": (ranks - 1) * (row + model.top_k * answer),
    }


def experts_read(model: Model, tokens: int) -> float:
    """Experts that a batch of all ranks together needs, expected for uniform routing."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


def seconds(
    model: Model, machine: Machine, ranks: int, tokens: int, stored: float = PACKED
) -> tuple[float, float]:
    """Time of the experts and time of the wire, a layer, for `tokens` of all ranks together."""
    read = experts_read(model, tokens) * model.weights * stored / ranks / machine.memory
    multiplied = 2 * tokens * model.top_k * model.weights / ranks / machine.compute
    sent = min(bytes_per_token(model, ranks)[mode] for mode in ("all_to_all", "all_gather"))
    return max(read, multiplied), 3 * machine.collective + tokens * sent / ranks / machine.link


def memory_per_card(model: Model, ranks: int, stored: float) -> float:
    """Bytes of weights: this rank's experts, and all of the rest."""
    return model.layers * model.experts * model.weights * stored / ranks + 2 * model.rest


def table() -> list[str]:
    """The lines of the tables in docs/expert-parallel.md."""
    lines = []
    for model in (KIMI_K2, DEEPSEEK_V3):
        for ranks, machine in ((8, NODE), (64, CLUSTER)):
            wire = bytes_per_token(model, ranks)
            memory = [memory_per_card(model, ranks, stored) / 1e9 for stored in (PACKED, DEQUANTIZED)]
            name = f"{model.name}, {ranks}"
            sent = [wire[mode] / 1000 for mode in ("all_to_all", "all_gather", "padded")]
            lines.append(
                f"| {name} | {ranks_of_token(model, ranks):.2f} | "
                + " | ".join(f"{s:.0f}" for s in sent)
                + f" | {memory[0]:.0f} | {memory[1]:.0f} |"
            )
            for tokens in (ranks, 16 * ranks, 128 * ranks, 4096 * ranks):
                experts, spent = seconds(model, machine, ranks, tokens)
                alone = experts_read(model, tokens)
                lines.append(
                    f"| {name} | {tokens // ranks} | {alone / ranks:.1f} | {experts * 1e6:.0f} | {spent * 1e6:.0f} | "
                    f"{spent / experts:.2f} |"
                )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
