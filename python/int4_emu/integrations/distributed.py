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

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..expert_map import make_expert_map
from ..experts import Experts

Mode = Literal["auto", "all_to_all", "all_gather", "padded"]
_MODES = ("auto", "all_to_all", "all_gather", "padded")


class _Sizes(NamedTuple):
    """What the ranks are about to send: row [r][d] and slot [r][d] counts from rank r to rank d, and each rank's tokens."""

    rows: list[list[int]]
    slots: list[list[int]]
    tokens: list[int]


class ExpertParallel(nn.Module):
    """The routed experts of one layer, spread over the ranks of a process group.

    Called like `Experts`, by every rank of the group together, each with its own tokens (any number, none included):

        experts = checkpoint.load_experts(layer, expert_ids=mine)
        layer = ExpertParallel(experts, group)
        y = layer(hidden_states, topk_weights, topk_ids)

    A peer that dies or stalls ends in the process group's own timeout (`timeout=` of `init_process_group` or `new_group`), raised as a
    RuntimeError with the step that failed. An argument that one rank refuses is an error on every rank, except in `padded` mode.
    """

    expert_map: Tensor
    owner: Tensor

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
            ValueError: the ranks disagree, or do not hold each expert exactly once; the same on every rank.
        """
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        if (mode == "padded") != (capacity is not None) or (capacity is not None and capacity < 1):
            raise ValueError(
                f"capacity must be a number of tokens >= 1 in padded mode and None in others, got {capacity} with {mode}"
            )
        self.experts, self.group, self.mode, self.capacity = experts, group, mode, capacity
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group")
        given = expert_map if expert_map is not None else experts.expert_map
        facts = {
            "hidden_size": experts.hidden_size,
            "dtype": str(experts.dtype),
            "mode": mode,
            "capacity": capacity,
            "has a map": given is not None,
            "num_experts": experts.num_experts,
            "map": None if given is None else given.tolist(),
        }
        everyone: list[Any] = [None] * self.ranks
        self._collective("comparing the layers", dist.all_gather_object, everyone, facts)
        maps = _agreed_maps(everyone)
        owner = [next(r for r, m in enumerate(maps) if m[e] >= 0) for e in range(len(maps[0]))]
        device = experts.device
        self.register_buffer(
            "expert_map", torch.tensor(maps[self.rank], dtype=torch.int32, device=device), persistent=False
        )
        self.register_buffer("owner", torch.tensor(owner, dtype=torch.int64, device=device), persistent=False)

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
        if error is not None and self.mode == "padded":
            raise error
        if error is not None:  # the others must not wait for this rank
            self._exchange(
                torch.full((2 * self.ranks + 2,), -1, dtype=torch.int64, device=self.owner.device), error
            )
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = topk_weights.float(), topk_ids.long()
        if apply_router_weight_on_input:
            x, weights = (x.float() * weights).to(x.dtype), torch.ones_like(weights)
        known = (ids >= 0) & (ids < self.owner.numel())
        # [M, k]: the rank of each slot, `ranks` where it is unrouted.
        owner = torch.where(known, self.owner[ids.clamp(0, self.owner.numel() - 1)], self.ranks)
        ids = torch.where(known, ids, -1)
        if self.mode == "padded":
            return self._padded(x, weights, ids, owner).view(hidden_states.shape)
        every = torch.arange(self.ranks, device=x.device)
        to_rank = owner.unsqueeze(0) == every.view(-1, 1, 1)  # [R, M, k]
        needed = to_rank.any(2)  # [R, M]
        mine = torch.tensor([x.shape[0], ids.shape[1]], device=x.device)
        sizes = self._exchange(torch.cat([needed.sum(1), to_rank.sum((1, 2)), mine]), None)
        gathers = self.mode == "all_gather" or (
            self.mode == "auto" and self._gathering_is_cheaper(sizes, x, ids.shape[1])
        )
        y = (
            self._all_gather(x, weights, ids, sizes)
            if gathers
            else self._all_to_all(x, weights, ids, owner, to_rank, needed, sizes)
        )
        return y.view(hidden_states.shape)

    # --- the three ways ----------------------------------------------------------------------------------------------------------

    def _all_to_all(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        owner: Tensor,
        to_rank: Tensor,
        needed: Tensor,
        sizes: _Sizes,
    ) -> Tensor:
        me, (tokens, k) = self.rank, ids.shape
        rows_out, slots_out = sizes.rows[me], sizes.slots[me]
        rows_in, slots_in = [r[me] for r in sizes.rows], [s[me] for s in sizes.slots]
        # Rows: by rank, then by token.
        at = _positions(needed)
        token = _scattered(torch.arange(tokens, device=x.device).expand_as(needed), needed, at, sum(rows_out))
        rank = _scattered(
            torch.arange(self.ranks, device=x.device).unsqueeze(1).expand_as(needed),
            needed,
            at,
            sum(rows_out),
        )
        for_rank = torch.where(owner[token] == rank.unsqueeze(1), ids[token], -1)
        sent = _pack(x[token], for_rank.int())
        received = self._swap("dispatch", sent, rows_in, rows_out)
        x_in, (ids_in,) = _unpack(received, x.dtype, x.shape[1], [(torch.int32, k)])
        # Slots of this rank's experts: by source, by row, by j.
        here = ids_in >= 0
        slot = _scattered(
            torch.arange(here.numel(), device=x.device).view(here.shape),
            here,
            _positions(here),
            sum(slots_in),
        )
        # Slots of its own, not global ids with a map: kernels are chosen by the rows that each expert may expect.
        y = self._slot_outputs(x_in[slot // k], self.expert_map[ids_in.flatten()[slot].long()], None)
        # The last row serves unrouted slots.
        back = x.new_zeros((sum(slots_out) + 1, x.shape[1]), dtype=torch.float32)
        back[:-1] = self._swap("combine", y, slots_out, slots_in)
        at = _positions(to_rank).gather(0, owner.clamp(max=self.ranks - 1).unsqueeze(0)).squeeze(0)
        return _weighted_sum(
            back, torch.where(owner < self.ranks, at, back.shape[0] - 1), weights, owner < self.ranks, x.dtype
        )

    def _padded(self, x: Tensor, weights: Tensor, ids: Tensor, owner: Tensor) -> Tensor:
        assert self.capacity is not None
        (tokens, k), room = ids.shape, self.capacity
        sent = _pack(_padded_to(x, room, 0), _padded_to(ids.int(), room, -1))
        everyone = self._gather("dispatch", sent)
        x_in, (ids_in,) = _unpack(everyone, x.dtype, x.shape[1], [(torch.int32, k)])
        rows = x_in.repeat_interleave(k, 0, output_size=x_in.shape[0] * k)
        y = self._slot_outputs(rows, ids_in.flatten(), self.expert_map)
        back = x.new_zeros((self.ranks * room * k + 1, x.shape[1]), dtype=torch.float32)
        even = [room * k] * self.ranks
        back[:-1] = self._swap("combine", y, even, even)
        slot = torch.arange(tokens * k, device=x.device).view(tokens, k)
        at = torch.where(owner < self.ranks, owner * (room * k) + slot, back.shape[0] - 1)
        return _weighted_sum(back, at, weights, owner < self.ranks, x.dtype)

    def _all_gather(self, x: Tensor, weights: Tensor, ids: Tensor, sizes: _Sizes) -> Tensor:
        room, k = max(sizes.tokens), ids.shape[1]
        sent = _pack(_padded_to(x, room, 0), _padded_to(ids.int(), room, -1), _padded_to(weights, room, 0))
        everyone = self._gather("dispatch", sent)
        x_in, (ids_in, weights_in) = _unpack(
            everyone, x.dtype, x.shape[1], [(torch.int32, k), (torch.float32, k)]
        )
        partial = self.experts.partial_sums(x_in, weights_in, ids_in, expert_map=self.expert_map)
        out = partial.new_empty((room, x.shape[1]))
        if self.ranks == 1:
            out = partial
        elif room > 0:
            self._collective("combine", dist.reduce_scatter_tensor, out, partial, group=self.group)
        return out[: x.shape[0]].to(x.dtype)

    def _slot_outputs(self, x: Tensor, ids: Tensor, expert_map: Tensor | None) -> Tensor:
        """[S, H] and ids [S] to the experts' float32 outputs [S, H], not weighted."""
        ones = torch.ones((ids.numel(), 1), dtype=torch.float32, device=x.device)
        return self.experts.partial_sums(x, ones, ids.unsqueeze(1), expert_map=expert_map)

    def _gathering_is_cheaper(self, sizes: _Sizes, x: Tensor, k: int) -> bool:
        """Bytes that the busiest rank sends: for rows and slot outputs in one way, for everyone's tokens and partial sums in the other."""
        row, hidden = x.shape[1] * x.element_size() + 4 * k, x.shape[1]
        dispatched = [sum(r) - r[i] for i, r in enumerate(sizes.rows)]
        returned = [sum(s[i] for s in sizes.slots) - sizes.slots[i][i] for i in range(self.ranks)]
        swapping = max(row * d + 4 * hidden * b for d, b in zip(dispatched, returned, strict=True))
        return (self.ranks - 1) * max(sizes.tokens) * (row + 4 * k + 4 * hidden) < swapping

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

    def _exchange(self, counts: Tensor, error: Exception | None) -> _Sizes:
        """Every rank's counts, on the host. With an error of this rank, and with one of another's, all ranks raise."""
        everyone = self._gather("exchanging sizes", counts.unsqueeze(0)).tolist()
        if error is not None:
            raise error
        refused = [r for r, counts in enumerate(everyone) if counts[-1] < 0]
        if refused:
            raise RuntimeError(
                f"{self._name}: rank {refused[0]} refused its arguments; its own error says why"
            )
        widths = {counts[-1] for counts in everyone}
        if len(widths) > 1:
            raise ValueError(f"{self._name}: k must be the same on every rank, got {sorted(widths)}")
        n = self.ranks
        return _Sizes([c[:n] for c in everyone], [c[n : 2 * n] for c in everyone], [c[-2] for c in everyone])

    def _gather(self, step: str, t: Tensor) -> Tensor:
        """[N, ...] of every rank to [R * N, ...]."""
        if self.ranks == 1 or t.numel() == 0:
            return t if self.ranks == 1 else t.new_empty((0, *t.shape[1:]))
        out = t.new_empty((self.ranks * t.shape[0], *t.shape[1:]))
        self._collective(step, dist.all_gather_into_tensor, out, t.contiguous(), group=self.group)
        return out

    def _swap(self, step: str, t: Tensor, splits_in: list[int], splits_out: list[int]) -> Tensor:
        """Sends splits_out[d] rows to each rank d and receives splits_in[s] of each rank s."""
        if self.ranks == 1:
            return t
        out = t.new_empty((sum(splits_in), *t.shape[1:]))
        self._collective(
            step, dist.all_to_all_single, out, t.contiguous(), splits_in, splits_out, group=self.group
        )
        return out

    def _collective(self, step: str, run: Any, *args: Any, **options: Any) -> None:
        try:
            run(*args, **({"group": self.group} | options))
        except RuntimeError as error:  # DistBackendError and DistNetworkError are
            raise RuntimeError(
                f"{self._name}: {step} failed; a peer may have died or stalled for longer than the process group's timeout: {error}"
            ) from error

    @property
    def _name(self) -> str:
        return f"ExpertParallel on rank {self.rank} of {self.ranks}"

    def extra_repr(self) -> str:
        return f"rank={self.rank} of {self.ranks}, mode={self.mode}, global E={self.owner.numel()}"


def _agreed_maps(everyone: list[dict[str, Any]]) -> list[list[int]]:
    """The ranks' expert maps, checked: one answer for everyone."""
    for fact in ("hidden_size", "dtype", "mode", "capacity", "has a map"):
        values = [rank[fact] for rank in everyone]
        if len(set(values)) > 1:
            raise ValueError(f"the ranks must agree on {fact}, got {values} in rank order")
    counts = [rank["num_experts"] for rank in everyone]
    if everyone[0]["map"] is None:
        total = sum(counts)
        starts = [sum(counts[:r]) for r in range(len(counts))]
        maps = [
            [e - s if s <= e < s + n else -1 for e in range(total)]
            for s, n in zip(starts, counts, strict=True)
        ]
    else:
        maps = [rank["map"] for rank in everyone]
    sizes = {len(m) for m in maps}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"expert_map must have the same global E >= 1 entries on every rank, got {[len(m) for m in maps]} in rank order"
        )
    for e in range(len(maps[0])):
        holders = [r for r, m in enumerate(maps) if m[e] >= 0]
        if len(holders) != 1:
            raise ValueError(f"expert {e} must be held by exactly one rank, got {holders or 'none'}")
    for r, (m, n) in enumerate(zip(maps, counts, strict=True)):
        held = sorted(v for v in m if v >= 0)
        if held != list(range(len(held))) or len(held) > n:
            raise ValueError(f"expert_map of rank {r} must lead to slots 0..{n - 1}, each once, got {held}")
    return maps


def _positions(mask: Tensor) -> Tensor:
    """Where each true entry of a mask comes, in reading order."""
    return (mask.flatten().cumsum(0) - 1).view(mask.shape)


def _scattered(values: Tensor, mask: Tensor, at: Tensor, count: int) -> Tensor:
    """values[mask] in reading order, `count` of them, without asking the device how many there are."""
    out = torch.empty(count + 1, dtype=values.dtype, device=values.device)
    out.scatter_(0, torch.where(mask, at, count).flatten(), values.flatten())
    return out[:count]


def _padded_to(t: Tensor, rows: int, value: int) -> Tensor:
    return nn.functional.pad(t, (0, 0, 0, rows - t.shape[0]), value=value)


def _pack(x: Tensor, *extras: Tensor) -> Tensor:
    """Rows of several tensors as one tensor of bytes, for one collective."""
    return torch.cat([t.contiguous().view(torch.uint8) for t in (x, *extras)], 1)


def _unpack(
    rows: Tensor, dtype: torch.dtype, hidden: int, extras: list[tuple[torch.dtype, int]]
) -> tuple[Tensor, list[Tensor]]:
    parts = [(dtype, hidden), *extras]
    split = rows.split([n * d.itemsize for d, n in parts], 1)
    x, *rest = (s.contiguous().view(d) for s, (d, _) in zip(split, parts, strict=True))
    return x, rest


def _weighted_sum(rows: Tensor, at: Tensor, weights: Tensor, routed: Tensor, dtype: torch.dtype) -> Tensor:
    """sum over j of weights[t, j] * rows[at[t, j]] in slot order, in float32, rounded once.

    Product and sum are separate operations: a fused one may round differently in a vector's tail, whose place depends on M.
    """
    weights = torch.where(routed, weights, 0.0)
    out = rows.new_zeros((at.shape[0], rows.shape[1]))
    for j in range(at.shape[1]):
        out += rows.index_select(0, at[:, j]).mul_(weights[:, j : j + 1])
    return out.to(dtype)


def local_expert_ids(num_experts: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ids of this rank's experts in the default placement: runs in rank order, the first ones longer by one.

    For `Checkpoint.load_experts(layer, expert_ids=...)`, which then reads no other expert.
    """
    mapped = make_expert_map(num_experts, dist.get_world_size(group), dist.get_rank(group))
    return (mapped >= 0).nonzero().flatten().tolist()
