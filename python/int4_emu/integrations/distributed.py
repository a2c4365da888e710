"""Expert parallelism on torch.distributed: each rank holds some experts of a layer and its own tokens.

Slot = one (token, j) pair of topk_ids. Three ways to bring tokens and experts together, with the same result up to rounding:

- `all_to_all`: the ranks exchange sizes (the only wait for the device), each token goes once to every rank that holds one of its
  experts, and each slot's float32 output comes back to the token's owner, who sums in slot order.
- `padded`: the same sums, bit for bit, at fixed sizes: every rank sees every token, and every slot has its place in the answer. No wait
  for the device, so that a CUDA graph can capture it; meant for decoding.
- `all_gather`: every rank sees every token, and float32 partial sums are reduced and scattered; their order is the library's.

The slots' outputs do not depend on where an expert lives, so `all_to_all` and `padded` give the same bits for any number of ranks, as
long as the kernels see the same experts' batches.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..expert_map import make_expert_map
from ..experts import Experts
from ._wire import Sizes, agreed_maps, gathering_is_cheaper, pack, padded_to, slot_sums, unpack

Mode = Literal["auto", "all_to_all", "all_gather", "padded"]
_MODES = ("auto", "all_to_all", "all_gather", "padded")


class ExpertParallel(nn.Module):
    """The routed experts of one layer, spread over the ranks of a process group.

    Called like `Experts`, by every rank of the group together, each with its own tokens (any number, none included):

        experts = checkpoint.load_experts(layer, expert_ids=mine)
        layer = ExpertParallel(experts, group)
        y = layer(hidden_states, topk_weights, topk_ids)

    A peer that dies or stalls ends in the process group's own timeout (`timeout=` of `init_process_group` or `new_group`), raised as a
    RuntimeError with the step that failed. An argument that one rank refuses is an error on every rank, except in `padded` mode.
    """

    expert_map: Tensor  # int32 [global E]: slot of this rank, or -1
    # int32 [global E + 1], by global id; the last entry is that of an unrouted slot, whose id is -1 or global E.
    owner: Tensor
    local: Tensor
    every: Tensor  # int32 [R, 1, 1]: the ranks

    def __init__(
        self,
        experts: Experts,
        group: dist.ProcessGroup | None = None,
        *,
        expert_map: Tensor | None = None,
        mode: Mode = "auto",
        capacity: int | None = None,
    ) -> None:
        """Compares the ranks' layers; a collective call.

        Args:
            experts: this rank's experts; may hold none.
            group: the process group, None = the default one. Its backend must suit the device of `experts`.
            expert_map: int32 [global E], global id to this rank's slot, -1 = elsewhere. None = the map of `experts`, or else runs of ids
                in rank order, as long as each rank's number of experts.
            mode: `all_to_all`, `all_gather`, `padded`, or `auto`: whichever of the first two has the busiest rank send fewer bytes,
                worked out from the exchanged sizes by every rank alike; a tie goes to all_to_all.
            capacity: `padded` mode: tokens per rank, the same everywhere; a smaller batch is padded.

        Raises:
            ValueError: the ranks disagree on the checkpoint, the layer, a size, the activation or an option, or do not hold each expert
                exactly once, or one of them gave an argument that is none; the same sentence on every rank.
        """
        super().__init__()
        self.experts, self.group, self.mode, self.capacity = experts, group, mode, capacity
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group")
        given = expert_map if expert_map is not None else experts.expert_map
        facts = {
            "checkpoint": experts.source,
            "hidden_size": experts.hidden_size,
            "intermediate_size": experts.intermediate_size,
            "dtype": str(experts.dtype),
            "activation": experts.activation.name,
            "limit, alpha and beta": (experts.limit, experts.alpha, experts.beta),
            "mode": mode,
            "capacity": capacity,
            "has a map": given is not None,
            "num_experts": experts.num_experts,
            "map": None if given is None else given.tolist(),
            "refused": _refusal(mode, capacity, given),
        }
        everyone: list[Any] = [None] * self.ranks
        self._collective("comparing the layers", dist.all_gather_object, everyone, facts)
        maps = agreed_maps(everyone)
        mine = maps[self.rank]
        owner = [next(r for r, m in enumerate(maps) if m[e] >= 0) for e in range(len(mine))]
        # The answer of an unrouted slot is a row of zeros: any rank's in padded mode, and elsewhere it has no rank.
        tables = {
            "expert_map": mine,
            "owner": [*owner, 0 if mode == "padded" else self.ranks],
            "local": [*mine, -1],
            "every": [[[r]] for r in range(self.ranks)],
        }
        for name, values in tables.items():
            table = torch.tensor(values, dtype=torch.int32, device=experts.device)
            self.register_buffer(name, table, persistent=False)
        # One rank that holds the experts in their order needs no look-up.
        self._is_plain = self.ranks == 1 and mine == list(range(experts.num_experts))

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        apply_router_weight_on_input: bool = False,
    ) -> Tensor:
        """Runs the layer on this rank's tokens; every rank of the group calls it.

        Args:
            hidden_states: [..., H] in the dtype of `experts`.
            topk_weights: [M, k] floating point, M = the product of the leading dimensions.
            topk_ids: [M, k] int32 or int64, global expert ids; outside [0, global E) = unrouted. k is the same on every rank.
            apply_router_weight_on_input: k = 1 only.

        Returns:
            [..., H], dtype of hidden_states.
        """
        error = self._error(hidden_states, topk_weights, topk_ids, apply_router_weight_on_input)
        if error is not None:
            if self.ranks > 1 and self.mode != "padded":  # the others must not wait for this rank
                self._sizes(self._exchange(torch.full((self._counts,), -1, device=self.owner.device)), error)
            raise error
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            x, weights = (x.float() * weights).to(x.dtype), torch.ones_like(weights)
        y = self._alone(x, weights, topk_ids) if self.ranks == 1 else self._together(x, weights, topk_ids)
        return y.to(x.dtype).view(hidden_states.shape)

    # --- the three ways ----------------------------------------------------------------------------------------------------------

    def _alone(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """One rank: the same sums, and nothing to send."""
        expert_map = None if self._is_plain else self.expert_map
        if self.mode == "all_gather":
            return self.experts.partial_sums(x, weights, ids, expert_map=expert_map)
        y = self._slot_outputs(x, weights, ids, expert_map)
        return slot_sums(y, torch.arange(ids.numel(), device=ids.device).view(ids.shape))

    def _together(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tokens, k = ids.shape
        ids = ids.clamp(-1, self.expert_map.numel())
        if self.mode == "padded":
            return self._padded(pack(x, ids.int(), weights), ids)
        size = torch.full((1,), _one_number(tokens, k), device=x.device)
        if self.mode == "all_gather":
            everyone = self._exchange(size)
            packed = pack(x, ids.int(), weights)  # while the sizes are on their way
            return self._all_gather(packed, tokens, k, self._sizes(everyone))
        to_rank = self.owner[ids] == self.every  # [R, M, k]
        needed = to_rank.any(2)  # [R, M]
        everyone = self._exchange(torch.cat([needed.sum(1), to_rank.sum((1, 2)), size]))
        # Work for the host and the device while the sizes are on their way.
        packed = pack(x, ids.int(), weights)
        # Where each slot's answer will lie: by rank, then by slot, from 1 on; 0 serves unrouted slots.
        at = to_rank.flatten().cumsum(0).view(to_rank.shape).mul_(to_rank).sum(0)
        sizes = self._sizes(everyone)
        if self.mode == "auto" and gathering_is_cheaper(sizes, packed.shape[1] * 4, x.shape[1]):
            return self._all_gather(packed, tokens, k, sizes)
        return self._all_to_all(packed, at, needed, sizes)

    def _all_to_all(self, packed: Tensor, at: Tensor, needed: Tensor, sizes: Sizes) -> Tensor:
        me, k = self.rank, at.shape[1]
        rows_out, slots_out = sizes.rows[me], sizes.slots[me]
        rows_in, slots_in = [r[me] for r in sizes.rows], [s[me] for s in sizes.slots]
        # Rows: by rank, then by token.
        token = needed.nonzero_static(size=sum(rows_out))[:, 1]
        received = packed.new_empty((sum(rows_in), packed.shape[1]))
        self._swap("dispatch", received, packed.index_select(0, token), rows_in, rows_out)
        x, ids, weights = unpack(received, self.experts.dtype, self.experts.hidden_size, k)
        # Slots of this rank's experts: by source, by row, by j. They have local ids rather than global ones with a map: kernels are
        # chosen by the rows that each expert may expect.
        ids = self.local[ids]
        row, j = (ids >= 0).nonzero_static(size=sum(slots_in)).unbind(1)
        y = self.experts.partial_sums(
            x.index_select(0, row), weights[row, j].unsqueeze(1), ids[row, j].unsqueeze(1)
        )
        back = y.new_empty((sum(slots_out) + 1, y.shape[1]))
        back[0].zero_()
        self._swap("combine", back[1:], y, slots_out, slots_in)
        return slot_sums(back, at)

    def _padded(self, packed: Tensor, ids: Tensor) -> Tensor:
        assert self.capacity is not None
        (tokens, k), room = ids.shape, self.capacity
        everyone = self._gather("dispatch", padded_to(packed, room))
        x, ids_in, weights = unpack(everyone, self.experts.dtype, self.experts.hidden_size, k)
        y = self._slot_outputs(x, weights, ids_in, self.expert_map)
        back, even = torch.empty_like(y), [room * k] * self.ranks
        self._swap("combine", back, y, even, even)
        slot = torch.arange(tokens * k, device=ids.device).view(tokens, k)
        return slot_sums(back, torch.add(slot, self.owner[ids], alpha=room * k))

    def _all_gather(self, packed: Tensor, tokens: int, k: int, sizes: Sizes) -> Tensor:
        room = max(sizes.tokens)
        everyone = self._gather("dispatch", padded_to(packed, room))
        x, ids, weights = unpack(everyone, self.experts.dtype, self.experts.hidden_size, k)
        partial = self.experts.partial_sums(x, weights, ids, expert_map=self.expert_map)
        out = partial.new_empty((room, partial.shape[1]))
        if room > 0:
            self._collective("combine", dist.reduce_scatter_tensor, out, partial)
        return out[:tokens]

    def _slot_outputs(self, x: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None) -> Tensor:
        """The weighted output of each slot, float32 [M * k, H]: each is a row of its own, unrouted ones are zero."""
        rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1).reshape(-1, x.shape[1])
        return self.experts.partial_sums(
            rows, weights.reshape(-1, 1), ids.reshape(-1, 1), expert_map=expert_map
        )

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def _error(self, x: Tensor, weights: Tensor, ids: Tensor, on_input: bool) -> Exception | None:
        if x.dim() == 0 or x.shape[-1] != self.experts.hidden_size:
            return ValueError(
                f"hidden_states must be [..., H] with H = {self.experts.hidden_size}, got {list(x.shape)}"
            )
        tokens = x.numel() // x.shape[-1]
        if ids.dim() != 2 or ids.shape[0] != tokens or ids.shape[1] < 1 or weights.shape != ids.shape:
            shapes = f"got {list(ids.shape)} and {list(weights.shape)}"
            return ValueError(
                f"topk_ids and topk_weights must be [M, k] with M = {tokens} and k >= 1, {shapes}"
            )
        if ids.dtype not in (torch.int32, torch.int64) or not weights.dtype.is_floating_point:
            return TypeError(
                f"topk_ids must be int32 or int64 and topk_weights floating point, got {ids.dtype} and {weights.dtype}"
            )
        if x.dtype != self.experts.dtype:  # the same on every rank, as compared at construction
            return TypeError(f"hidden_states must be {self.experts.dtype} like the experts, got {x.dtype}")
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return NotImplementedError(
                "ExpertParallel is inference only and has no backward: call the model under torch.no_grad()"
            )
        for name, t in (("hidden_states", x), ("topk_weights", weights), ("topk_ids", ids)):
            if t.device != self.owner.device:
                return TypeError(f"{name} must be on {self.owner.device} like the experts, got {t.device}")
        if on_input and ids.shape[1] != 1:
            return ValueError(f"apply_router_weight_on_input needs k = 1, got k = {ids.shape[1]}")
        if self.capacity is not None and tokens > self.capacity:
            return ValueError(
                f"hidden_states must have at most capacity = {self.capacity} tokens, got {tokens}"
            )
        return None

    @property
    def _counts(self) -> int:
        """How many numbers a rank tells the others: rows and slots for each rank, and its sizes."""
        return 1 if self.mode == "all_gather" else 2 * self.ranks + 1

    def _exchange(self, counts: Tensor) -> Tensor:
        return self._gather("exchanging sizes", counts.unsqueeze(0))

    def _sizes(self, gathered: Tensor, error: Exception | None = None) -> Sizes:
        """Every rank's counts, on the host. With an error of this rank, and with one of another's, all ranks raise."""
        everyone = gathered.tolist()
        if error is not None:
            raise error
        refused = [r for r, counts in enumerate(everyone) if counts[-1] < 0]
        if refused:
            raise RuntimeError(
                f"{self._name}: rank {refused[0]} refused its arguments; its own error says why"
            )
        sizes = [_two_numbers(counts[-1]) for counts in everyone]
        widths = {k for _, k in sizes}
        if len(widths) > 1:
            raise ValueError(f"{self._name}: k must be the same on every rank, got {sorted(widths)}")
        n = self.ranks
        return Sizes([c[:n] for c in everyone], [c[n : 2 * n] for c in everyone], [m for m, _ in sizes])

    def _gather(self, step: str, t: Tensor) -> Tensor:
        """[N, ...] of every rank to [R * N, ...]."""
        out = t.new_empty((self.ranks * t.shape[0], *t.shape[1:]))
        if out.numel() > 0:
            self._collective(step, dist.all_gather_into_tensor, out, t)
        return out

    def _swap(self, step: str, out: Tensor, t: Tensor, splits_in: list[int], splits_out: list[int]) -> None:
        """Sends splits_out[d] rows of t to each rank d and receives splits_in[s] of each rank s in out."""
        self._collective(step, dist.all_to_all_single, out, t, splits_in, splits_out)

    def _collective(self, step: str, run: Any, *args: Any) -> None:
        try:
            run(*args, group=self.group)
        except RuntimeError as error:  # DistBackendError and DistNetworkError are
            raise RuntimeError(
                f"{self._name}: {step} failed; a peer may have died or stalled for longer than the process group's timeout: {error}"
            ) from error

    @property
    def _name(self) -> str:
        return f"ExpertParallel on rank {self.rank} of {self.ranks}"

    def extra_repr(self) -> str:
        return f"rank={self.rank} of {self.ranks}, mode={self.mode}, global E={self.expert_map.numel()}"


def _refusal(mode: str, capacity: int | None, expert_map: Tensor | None) -> str | None:
    """What is wrong with one rank's arguments; told to all of them, which wait for this rank."""
    if mode not in _MODES:
        return f"mode must be one of {', '.join(_MODES)}, got {mode!r}"
    if (mode == "padded") != (capacity is not None) or (capacity is not None and capacity < 1):
        return f"capacity must be a number of tokens >= 1 in padded mode and None in others, got {capacity} with {mode}"
    if expert_map is not None and (
        expert_map.dim() != 1 or expert_map.dtype not in (torch.int32, torch.int64)
    ):
        return f"expert_map must be int32 [global E], got {expert_map.dtype} {list(expert_map.shape)}"
    return None


def _one_number(tokens: int, k: int) -> int:
    """Both sizes of a batch as one, which is one launch on a GPU."""
    return tokens << 16 | k


def _two_numbers(number: int) -> tuple[int, int]:
    return number >> 16, number & 0xFFFF


def local_expert_ids(num_experts: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ids of this rank's experts in the default placement: runs in rank order, the first ones longer by one.

    For `Checkpoint.load_experts(layer, expert_ids=...)`, which then reads no other expert.
    """
    mapped = make_expert_map(num_experts, dist.get_world_size(group), dist.get_rank(group))
    return (mapped >= 0).nonzero().flatten().tolist()
