"""What `selftest` checks: every op against the reference, every backend against double precision, exact probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops, reference
from .._enums import Activation, Format, Layout, W13Order
from ..experts import Experts
from . import _problems as problems
from ._problems import DTYPES, LIMITS, Batch, Layer, expected, random_batch, random_layer

# Sizes of the layers: no power of two but H, tiles of 16 rows in both projections.
_EXPERTS, _HIDDEN, _INTERMEDIATE = 3, 64, 48


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        subject: a backend, or `ops`.
        what: op and format: results that share subject and what become one line.
        case: the rest: activation, dtype, ...
        error: relative; infinite where it failed to run.
        limit: 0 wants bit equality.
        failure: an exception's text.
    """

    subject: str
    what: str
    case: str
    error: float
    limit: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it ran and the error is within the limit."""
        return self.failure is None and self.error <= self.limit


@dataclass(frozen=True)
class Check:
    """Compares results of one subject with what is wanted."""

    subject: str
    limits: dict[torch.dtype, float] | None = None  # None wants bit equality

    def __call__(
        self, what: str, case: str, want: Any, run: Callable[..., Any], *args: Any, **options: Any
    ) -> Result:
        """Runs `run(*args, **options)`; an exception is a failure, not the end."""
        limit = 0.0
        try:
            got = run(*args, **options)
            pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple) else [(got, want)]
            if self.limits is not None:
                limit = self.limits[pairs[0][0].dtype]
            error = max(_error(g, w, exactly=limit == 0) for g, w in pairs)
        except Exception as problem:
            return Result(
                self.subject, what, case, float("inf"), limit, f"{type(problem).__name__}: {problem}"
            )
        return Result(self.subject, what, case, error, limit)


def _error(got: Tensor | None, want: Tensor | None, *, exactly: bool) -> float:
    if got is None or want is None:
        return 0.0 if got is want or (want is not None and want.numel() == 0) else float("inf")
    if got.shape != want.shape:
        raise ValueError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if exactly and torch.equal(got.cpu(), want):
        return 0.0
    error = problems.relative_error(got, want.double())
    return max(error, 1e-12) if exactly else error


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _generator() -> torch.Generator:
    """The same problems on every machine and in every run."""
    return torch.Generator().manual_seed(20240)


# The ops


def _formats(quick: bool) -> list[tuple[Format, int]]:
    """Every format, or the one that all others become when they are loaded."""
    return [f for f in problems.formats() if not quick or f == (Format.canonical, 4)]


def check_ops(*, quick: bool = False) -> Iterator[Result]:
    """Every op of the compiled library in every format, on the CPU, bit for bit where it copies or rounds once."""
    rng = _generator()
    for fmt, bits in _formats(quick):
        yield from _check_format(fmt, bits, rng)
    yield from _check_layouts(rng)
    yield from _check_align(rng)
    yield from _check_grouped_gemm(rng)


def _check_format(fmt: Format, bits: int, rng: torch.Generator) -> Iterator[Result]:
    check, name = Check("ops"), f"{fmt.name} int{bits}"
    rows, columns = 48, 96
    kind: dict[str, Any] = {"format": fmt, "bits": bits}
    # Groups of 64 leave a short last group of 32.
    for group in (32, 64) if problems.group_size_of(fmt, 32) != -1 else (-1,):
        for scale_dtype in DTYPES:
            q, s, z, _ = problems.stored(fmt, bits, 2, rows, columns, group, rng, scale_dtype=scale_dtype)
            case = f"group {group}, {_short(scale_dtype)} scales"
            if scale_dtype is torch.bfloat16:
                high = kind | {"out_features": rows}
                yield check(f"unpack {name}", case, reference.unpack(q, **kind), ops.unpack, q, **kind)
                zeros = reference.unpack_zeros(z, **high)
                yield check(f"unpack_zeros {name}", case, zeros, ops.unpack_zeros, z, **high)
                repacked = reference.repack(q, s, z, **kind)
                yield check(f"repack {name}", case, repacked, ops.repack, q, s, z, **kind)
            for zero in (z, None):
                for dtype in DTYPES:
                    options = kind | {"group_size": columns if group == -1 else group, "dtype": dtype}
                    want = reference.dequantize(q, s, zero, **options)
                    told = f"{case}, {_short(dtype)}{'' if zero is not None else ', symmetric'}"
                    yield check(f"dequantize {name}", told, want, ops.dequantize, q, s, zero, **options)
    if fmt.name.startswith("gptq") or fmt in (Format.compressed_tensors, Format.canonical):
        args = problems.stored(fmt, bits, 2, rows, columns, 32, rng, act_order=True)
        want = reference.dequantize(*args, group_size=32, **kind)
        yield check(f"dequantize {name}", "g_idx", want, ops.dequantize, *args, group_size=32, **kind)


def _check_layouts(rng: torch.Generator) -> Iterator[Result]:
    check = Check("ops")
    for layout in Layout:
        for bits in (4, 8):
            q = torch.randint(0, 256, (3, 32, 64 * bits // 8), generator=rng, dtype=torch.int64).to(
                torch.uint8
            )
            packed = reference.prepack(q, layout=layout, bits=bits)
            kind: dict[str, Any] = {"layout": layout, "bits": bits}
            yield check(f"prepack {layout.name}", f"int{bits}", packed, ops.prepack, q, **kind)
            yield check(f"unprepack {layout.name}", f"int{bits}", q, ops.unprepack, packed, **kind)


def _check_align(rng: torch.Generator) -> Iterator[Result]:
    check = Check("ops")
    shards = torch.tensor([3, -1, 0, 2, -1, 1, -1, -1], dtype=torch.int32)
    for ids_dtype in (torch.int32, torch.int64):
        ids = torch.randint(-2, 9, (37, 3), generator=rng).to(ids_dtype)
        for block in (1, 16):
            for expert_map, count in ((None, 7), (shards, 4)):
                case = f"{ids_dtype}, block {block}{'' if expert_map is None else ', expert map'}"
                want = reference.moe_align(ids, count, block, expert_map=expert_map)
                yield check("moe_align", case, want, ops.moe_align, ids, count, block, expert_map=expert_map)


def _check_grouped_gemm(rng: torch.Generator) -> Iterator[Result]:
    check = Check("ops", LIMITS)
    offsets = torch.tensor([1, 1, 4, 20, 23], dtype=torch.int32)  # an empty group; rows outside every group
    for bits in (4, 8):
        q, s, z, g_idx = problems.stored(Format.canonical, bits, 4, 48, 128, 32, rng)
        weight = problems.exact((q, s, z, g_idx), Format.canonical, bits, 32)
        batches = [torch.randn(25, 128, generator=rng).to(dtype) for dtype in DTYPES]
        for x in batches if bits == 4 else []:
            dense = weight.to(x.dtype)
            want = _grouped(x, dense, offsets)
            yield check("grouped_gemm dense", _short(x.dtype), want, ops.grouped_gemm, x, dense, offsets)
        for x in batches:
            want = _grouped(x, weight, offsets)
            for layout in Layout:
                codes = reference.prepack(q, layout=layout, bits=bits)
                options: dict[str, Any] = {"scales": s, "qzeros": z, "group_size": 32, "bits": bits}
                yield check(
                    f"grouped_gemm int{bits}",
                    f"{_short(x.dtype)}, {layout.name}",
                    want,
                    ops.grouped_gemm,
                    x,
                    codes,
                    offsets,
                    layout=layout,
                    **options,
                )


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Ragged rows times their expert's weight, float64 [R, N]."""
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for e in range(weight.shape[0]):
        mine = slice(int(offsets[e]), int(offsets[e + 1]))
        out[mine] = x[mine].double() @ weight[e].double().t()
    return out


# The backends


def check_backend(
    backend: str, device: torch.device, *, all_dtypes: bool, quick: bool = False
) -> Iterator[Result]:
    """One backend: format x activation x weights against double precision, then options, then the exact probes.

    Args:
        all_dtypes: every activation in every dtype; False takes the dtypes in turn.
        quick: canonical int4 alone.
    """
    yield from _check_moe(backend, device, all_dtypes, _formats(quick))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the work is shared out the same way among two as among many
    try:
        yield from _check_options(backend, device)
        yield from _check_probe(backend, device)
    finally:
        torch.set_num_threads(threads)


def _check_moe(
    backend: str, device: torch.device, all_dtypes: bool, formats: list[tuple[Format, int]]
) -> Iterator[Result]:
    rng, check = _generator(), Check(backend, LIMITS)
    batches = [random_batch(5, _HIDDEN, _EXPERTS, 2, dtype, rng) for dtype in DTYPES]
    for fmt, bits in formats:
        act_order = fmt is Format.gptq_v1 and bits == 4
        layers = {
            gated: random_layer(
                fmt,
                bits,
                _EXPERTS,
                _HIDDEN,
                _INTERMEDIATE,
                gated=gated,
                rng=rng,
                # Only whole groups can be sorted: 48 columns are not whole groups of 32.
                group_size=16 if act_order else 32,
                act_order=act_order,
            )
            for gated in (True, False)
        }
        name = f"{fmt.name} int{bits}{' act-order' if act_order else ''}"
        for weights in ("packed", "dequantized"):
            for index, activation in enumerate(Activation):
                layer = layers[activation.is_gated]
                for batch in batches if all_dtypes else [batches[index % len(DTYPES)]]:
                    case = f"{activation.name}, {_short(batch.x.dtype)}"
                    want = expected(layer, batch, activation)
                    yield check(
                        f"{weights} {name}",
                        case,
                        want,
                        _run,
                        layer,
                        batch,
                        activation,
                        weights,
                        backend,
                        device,
                    )


def _run(
    layer: Layer,
    batch: Batch,
    activation: Activation,
    weights: str,
    backend: str,
    device: torch.device,
    *,
    on_input: bool = False,
    **options: Any,
) -> Tensor:
    dtype = batch.x.dtype
    options |= {name: bias.to(dtype) for name, bias in layer.biases.items()}
    arguments = problems.experts_options(layer, activation)
    # On the device before the backend is chosen: it may serve no other.
    arguments, options = _on(device, arguments), _on(device, options)
    experts = Experts.from_format(**arguments, weights=weights, dtype=dtype, backend=backend, **options)
    return _forward(experts, batch, device, on_input)


def _on(device: torch.device, value: Any) -> Any:
    """Tensors, those inside dicts too, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return {k: _on(device, v) for k, v in value.items()} if isinstance(value, dict) else value


def _forward(experts: Experts, batch: Batch, device: torch.device, on_input: bool = False) -> Tensor:
    x, weights, ids = (t.to(device) for t in (batch.x, batch.topk_weights, batch.topk_ids))
    result: Tensor = experts(x, weights, ids, apply_router_weight_on_input=on_input)
    return result


def _check_options(backend: str, device: torch.device) -> Iterator[Result]:
    """Biases, interleaved rows, the router weight on the input, int64 ids, an expert map, no token."""
    rng, check = _generator(), Check(backend, LIMITS)
    experts, hidden, intermediate = 4, 128, 96
    layer = random_layer(Format.canonical, 4, experts, hidden, intermediate, gated=True, rng=rng)
    layer.biases = {
        "w13_bias": torch.randn(experts, 2 * intermediate, generator=rng),
        "w2_bias": torch.randn(experts, hidden, generator=rng),
    }
    batch = random_batch(33, hidden, experts, 2, torch.float32, rng)
    single = random_batch(5, hidden, experts, 1, torch.float32, rng)
    wide = Batch(batch.x, batch.topk_weights, batch.topk_ids.long())
    empty = Batch(batch.x[:0], batch.topk_weights[:0], batch.topk_ids[:0])
    # Global expert 2 e + 1 is local slot e; the even ones are another rank's.
    shards = {
        "expert_map": torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3], dtype=torch.int32),
        "global_num_experts": 8,
    }
    spread = torch.where(batch.topk_ids < 0, batch.topk_ids, 2 * batch.topk_ids + 1)
    silu, oai = Activation.silu, Activation.swigluoai
    plain = expected(layer, batch, silu)
    cases: list[tuple[str, Tensor, Batch, Activation, dict[str, Any]]] = [
        ("biases", plain, batch, silu, {}),
        ("int64 ids", plain, wide, silu, {}),
        ("no token", empty.x.double(), empty, silu, {}),
        ("expert map", plain, Batch(batch.x, batch.topk_weights, spread), silu, shards),
        (
            "router weight on the input",
            expected(layer, single, silu, on_input=True),
            single,
            silu,
            {"on_input": True},
        ),
        (
            "interleaved rows",
            expected(layer, batch, oai, order=W13Order.interleaved),
            batch,
            oai,
            {"w13_order": "interleaved"},
        ),
    ]
    for weights in ("packed", "dequantized"):
        for case, want, given, activation, options in cases:
            args = (layer, given, activation, weights, backend, device)
            yield check(f"{weights} options", case, want, _run, *args, **options)


def _check_probe(backend: str, device: torch.device) -> Iterator[Result]:
    """Identity and permutation weights: integers go in, their squares come out at known places, without any rounding.

    w13 and w2 hold ones (code midpoint + 1, scale 1), so that y = P2 relu(P1 x)^2 is exact in every dtype. A lane, a tile
    or a nibble that goes astray shows as a whole number in the wrong place.
    """
    rng, check = _generator(), Check(backend)
    width, experts = 64, 3
    for kind in ("identity", "permutation"):
        order = torch.stack([torch.randperm(width, generator=rng) for _ in range(2 * experts)])
        if kind == "identity":
            order = torch.arange(width).expand_as(order)
        ones = torch.eye(width)[order].to(torch.uint8)  # [2E, O, I]: row o holds a one in column order[o]
        for tokens in (1, 6, 40):
            for dtype in DTYPES:
                x = torch.randint(-7, 8, (tokens, width), generator=rng).to(dtype)
                ids = torch.randint(0, experts, (tokens, 1), generator=rng).to(torch.int32)
                first, second = order[ids.flatten().long()], order[ids.flatten().long() + experts]
                want = x.gather(1, first).relu().square().gather(1, second)
                batch = Batch(x, torch.ones(tokens, 1), ids)
                for weights, bits in (("packed", 4), ("packed", 8), ("dequantized", 16)):
                    case = f"{weights} {bits} bits, {tokens} tokens, {_short(dtype)}"
                    yield check(f"{kind} probe", case, want, _probe, ones, bits, batch, backend, device)


def _probe(ones: Tensor, bits: int, batch: Batch, backend: str, device: torch.device) -> Tensor:
    count, width = ones.shape[0] // 2, ones.shape[1]
    options: dict[str, Any] = {
        "activation": Activation.relu2_no_mul,
        "dtype": batch.x.dtype,
        "backend": backend,
    }
    if bits == 16:
        dense = ones.to(device, batch.x.dtype)
        return _forward(Experts(dense[:count], dense[count:], **options), batch, device)
    packed = reference.pack_canonical(ones + (1 << (bits - 1)), bits).to(device)
    scales = torch.ones(count, width, 2, dtype=torch.bfloat16, device=device)
    options |= {
        "w13_scales": scales,
        "w2_scales": scales,
        "w13_group_size": width // 2,
        "w2_group_size": width // 2,
        "w13_bits": bits,
        "w2_bits": bits,
    }
    # Cloned: prepacking reorders the codes in place.
    return _forward(Experts(packed[:count].clone(), packed[count:].clone(), **options), batch, device)
