"""What emulate.py runs, and the same in NumPy float64. An error is the largest difference over the largest magnitude of a result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import oracle

Array = NDArray[Any]
F32, F16, BF16 = 0, 1, 2
AUTOMATIC, FMA = 0, 1
SILU, RELU2_NO_MUL = 0, 19
TYPES = {F32: "fp32", F16: "fp16", BF16: "bf16"}


def to_bf16(x: Array) -> Array:
    """Nearest even, as 16-bit patterns."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def stored(x: Array, dtype: int) -> Array:
    """Values as the ops take them."""
    return x.astype(np.float32) if dtype == F32 else x.astype(np.float16) if dtype == F16 else to_bf16(x)


def read(x: Array, dtype: int) -> Array:
    """Stored values in float64."""
    if dtype == BF16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


class PlainWeight(ctypes.Structure):
    """PlainWeight of tests/amd/recorder/plain.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("experts", "n", "k", "bits", "group_size")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "zeros", "bias")),
    ]


def pointer(x: Array | None) -> int | None:
    return None if x is None else x.ctypes.data


class WeightData:
    """Random weights [E, N, K]: dense, or codes with scales and zero points, and their values."""

    def __init__(
        self,
        seed: int,
        dtype: int,
        bits: int,
        experts: int,
        n: int,
        k: int,
        group_size: int,
        zeros: bool,
        bias: bool,
    ) -> None:
        random = np.random.default_rng(seed)
        self.bias = random.standard_normal((experts, n)).astype(np.float32) if bias else None
        self.scales = self.zeros = None
        if bits == 0:
            self.data = stored(random.standard_normal((experts, n, k)) / k**0.5, dtype)
            self.values = read(self.data, dtype)
        else:
            groups = -(-k // group_size)
            codes: Array = random.integers(0, 2**bits, (experts, n, k), dtype=np.uint8)
            self.scales = (random.uniform(0.5, 1.5, (experts, n, groups)) / 2 ** (bits - 1) / k**0.5).astype(
                np.float32
            )
            self.zeros = random.integers(0, 2**bits, (experts, n, groups), dtype=np.uint8) if zeros else None
            of = np.arange(k) // group_size
            zero = self.zeros[:, :, of].astype(np.float64) if self.zeros is not None else 2.0 ** (bits - 1)
            self.values = (codes - zero) * self.scales[:, :, of].astype(np.float64)
            if bits == 4:
                even = codes if k % 2 == 0 else np.pad(codes, ((0, 0), (0, 0), (0, 1)))
                codes = even[:, :, ::2] | even[:, :, 1::2] << 4
            self.data = aligned(codes)
        self.data = aligned(self.data)
        self.plain = PlainWeight(
            *(experts, n, k, bits, group_size), *map(pointer, (self.data, self.scales, self.zeros, self.bias))
        )


def aligned(x: Array) -> Array:
    """The same on a 64-byte boundary."""
    room = np.empty(x.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 64
    out = room[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


class Ops:
    """The ops of plain.cpp on one device of the recording runtime."""

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self.library = library
        library.plain_error.restype = ctypes.c_char_p
        self.call("plain_set_device", device)

    def call(self, name: str, *arguments: object) -> None:
        """Raises with the library's sentence."""
        converted = [ctypes.c_int64(a) if isinstance(a, int) and a >= 1 << 31 else a for a in arguments]
        if getattr(self.library, name)(*converted) != 0:
            raise RuntimeError(self.library.plain_error().decode())


def p(x: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def long(n: int) -> ctypes.c_int64:
    return ctypes.c_int64(n)


def difference(got: Array, wanted: Array) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


Case = Callable[[Ops, str], float]


def dequantize(dtype: int, bits: int, n: int, k: int, group_size: int) -> Case:
    def case(ops: Ops, arch: str) -> float:
        w = WeightData(1, dtype, bits, 2, n, k, group_size, True, False)
        out = stored(np.full((2, n, k), np.nan), dtype)
        ops.call("plain_dequantize", dtype, 0, F32, ctypes.byref(w.plain), None, p(out))
        return difference(read(out, dtype), w.values)

    return case


def random_stored(
    name: str, bits: int, n: int, k: int, group_size: int
) -> tuple[Array, Array, Array, PlainWeight]:
    """Codes, scales (fp16) and zero points [N, ...]; the same as a format stores them, and a view of that for plain.cpp."""
    random, groups = np.random.default_rng(8), -(-k // group_size)
    codes, zeros = random.integers(0, 2**bits, (n, k)), random.integers(0, 2**bits, (n, groups))
    scales = random.uniform(0.5, 1.5, (n, groups)).astype(np.float16)
    q, s, z = (aligned(t) for t in oracle.store(name, codes, scales, zeros, bits))  # type: ignore[arg-type]
    plain = PlainWeight(1, n, k, bits, group_size, *map(pointer, (q, s, z, None)))
    plain.held = q, s, z  # for as long as it points there
    return codes, scales, zeros, plain


def dequantize_stored(name: str, dtype: int, bits: int, act_order: bool) -> Case:
    n, k, group_size = 72, 320, 32

    def case(ops: Ops, arch: str) -> float:
        codes, scales, zeros, plain = random_stored(name, bits, n, k, group_size)
        order = np.arange(k) // group_size
        g_idx = aligned(np.random.default_rng(9).permutation(order).astype(np.int32)) if act_order else None
        out = aligned(stored(np.full((n, k), np.nan), dtype))
        ops.call(
            "plain_dequantize",
            dtype,
            oracle.FORMAT_IDS[name],
            F16,
            ctypes.byref(plain),
            pointer(g_idx),
            p(out),
        )
        wanted = oracle.exact_weight(
            codes, scales, zeros, group_size, bits, order if g_idx is None else g_idx
        )
        return difference(read(out, dtype), wanted)

    return case


def repack(name: str, bits: int) -> Case:
    n, k, group_size = 72, 320, 32

    def case(ops: Ops, arch: str) -> float:
        codes, scales, zeros, plain = random_stored(name, bits, n, k, group_size)
        columns = np.random.default_rng(10).permutation(k).astype(np.int32)
        wanted = oracle.pack_bytes(codes[:, columns], bits), scales, zeros.astype(np.uint8)
        got = [aligned(np.full_like(w, 77)) for w in wanted]
        ops.call("plain_repack", oracle.FORMAT_IDS[name], F16, ctypes.byref(plain), p(columns), *map(p, got))
        return 0.0 if all((g == w).all() for g, w in zip(got, wanted, strict=True)) else 1.0

    return case


def grouped(
    atom: int, dtype: int, bits: int, counts: list[int], n: int, k: int, group_size: int, zeros: bool
) -> Case:
    def case(ops: Ops, arch: str) -> float:
        experts, rows = len(counts), sum(counts)
        w = WeightData(2, dtype, bits, experts, n, k, group_size, zeros, True)
        x = aligned(stored(np.random.default_rng(3).standard_normal((rows, k)), dtype))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        out = aligned(stored(np.full((rows, n), np.nan), dtype))
        ops.call(
            "plain_grouped_gemm", atom, dtype, long(rows), p(x), ctypes.byref(w.plain), p(offsets), p(out)
        )
        wanted = np.empty((rows, n))
        for e in range(experts):
            part = slice(offsets[e], offsets[e + 1])
            wanted[part] = read(x, dtype)[part] @ w.values[e].T + w.bias[e]  # type: ignore[index]
        return difference(read(out, dtype), wanted)

    return case


def moe(atom: int, dtype: int, bits: int, tokens: int, group_size: int, gated: bool) -> Case:
    def case(ops: Ops, arch: str) -> float:
        experts, topk, hidden, intermediate = 4, 2, 256, 160
        random = np.random.default_rng(4)
        w13 = WeightData(
            5, dtype, bits, experts, intermediate * (2 if gated else 1), hidden, group_size, False, False
        )
        w2 = WeightData(6, dtype, bits, experts, hidden, intermediate, group_size, False, False)
        x = aligned(stored(random.standard_normal((tokens, hidden)), dtype))
        ids = np.stack([random.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int64)
        weights = random.uniform(0.1, 1, (tokens, topk)).astype(np.float32)
        out = aligned(stored(np.full((tokens, hidden), np.nan), dtype))
        both = (ctypes.byref(w13.plain), ctypes.byref(w2.plain))
        kind = SILU if gated else RELU2_NO_MUL
        ops.call(
            "plain_fused_moe",
            atom,
            dtype,
            long(tokens),
            long(topk),
            p(x),
            *both,
            p(weights),
            p(ids),
            kind,
            p(out),
        )
        wanted, values = np.zeros((tokens, hidden)), read(x, dtype)
        for t in range(tokens):
            for j in range(topk):
                h = w13.values[ids[t, j]] @ values[t]
                if gated:
                    gate, up = h[:intermediate], h[intermediate:]
                    h = gate / (1 + np.exp(-gate)) * up
                else:
                    h = np.maximum(h, 0) ** 2
                h = read(stored(h, dtype), dtype)
                wanted[t] += weights[t, j] * (w2.values[ids[t, j]] @ h)
        return difference(read(out, dtype), wanted)

    return case


def align(slots: int, experts: int, block: int) -> Case:
    def case(ops: Ops, arch: str) -> float:
        ids = np.random.default_rng(7).integers(-1, experts, slots).astype(np.int64)
        capacity = -(-(slots + experts * (block - 1)) // block) * block
        rows, blocks = np.full(capacity, -7, np.int32), np.full(capacity // block, -7, np.int32)
        offsets, total = np.full(experts + 1, -7, np.int32), np.full(1, -7, np.int32)
        ops.call(
            "plain_moe_align",
            long(slots),
            p(ids),
            long(experts),
            long(block),
            p(rows),
            p(blocks),
            p(offsets),
            p(total),
        )
        wanted, owners = [], []
        for e in range(experts):
            mine = np.flatnonzero(ids == e)
            padded = -(-len(mine) // block) * block
            wanted += [*mine, *[slots] * (padded - len(mine))]
            owners += [e] * (padded // block)
        right = (
            total[0] == len(wanted)
            and list(rows[: len(wanted)]) == wanted
            and list(blocks[: len(owners)]) == owners
        )
        return 0.0 if right and (blocks[len(owners) :] == -1).all() else 1.0

    return case


STORED = (("gptq_v1", (4, 8)), ("awq", (4,)), ("compressed_tensors", (4, 8)), ("quark_uint_order", (8,)))
MANY = 320  # experts of a row each: blocks of a grid that fills the chip
# Rounding of results: 16-bit outputs carry half a unit in the last place of the largest one.
ROUNDING = {F32: 2e-6, F16: 1e-3, BF16: 6e-3}


def cases() -> list[tuple[str, Case, float]]:
    """Every kernel family, dtype, kind and group size at sizes that end inside a tile."""
    out: list[tuple[str, Case, float]] = []
    for dtype, name in TYPES.items():
        out.append((f"dequantize int4 to {name}", dequantize(dtype, 4, 24, 320, 32), ROUNDING[dtype]))
    out.append(("dequantize int4 odd to fp32", dequantize(F32, 4, 5, 37, 12), 2e-6))
    out.append(("dequantize int8 to bf16", dequantize(BF16, 8, 5, 48, 16), ROUNDING[BF16]))
    for name, bits_list in STORED:
        for bits in bits_list:
            out.append((f"repack int{bits} {name}", repack(name, bits), 0.0))
            for dtype, in_dtype in TYPES.items():
                for act_order in (False, True) if name in ("gptq_v1", "compressed_tensors") else (False,):
                    label = f"dequantize int{bits} {name}{' act-order' if act_order else ''} to {in_dtype}"
                    out.append((label, dequantize_stored(name, dtype, bits, act_order), ROUNDING[dtype]))
    out.append(("moe_align 700 slots", align(700, 5, 16), 0.0))
    out.append(("moe_align 2500 slots", align(2500, 5, 16), 0.0))
    kinds = [
        (0, 1, False),
        *((4, g, z) for g in (128, 32) for z in (False, True)),
        (8, 128, True),
        (8, 32, False),
    ]
    for bits, group, zeros in kinds:
        kind = "dense" if bits == 0 else f"int{bits} g{group} {'asym' if zeros else 'sym'}"
        for dtype, name in TYPES.items():
            bound = ROUNDING[dtype]
            if group != 128 and zeros == (bits == 4):
                for counts in ([5, 0, 3], [100, 29]):
                    plain = grouped(FMA, dtype, bits, counts, 72, 640, group, zeros)
                    out.append((f"gemm fma {name} {kind} rows {sum(counts)}", plain, bound))
            for counts in ([5, 0, 3], [40, 7], [100, 29], [1] * MANY) if dtype != F32 else ():
                n, k = (24, 384) if len(counts) == MANY else (72, 640)
                own = grouped(AUTOMATIC, dtype, bits, list(counts), n, k, group, zeros)
                out.append((f"gemm own {name} {kind} rows {sum(counts)}", own, bound))
    for dtype in (BF16, F16):
        for gated in (True, False):
            name = f"fused_moe {TYPES[dtype]} int4 g32 {'gated' if gated else 'plain'}"
            out.append((name, moe(AUTOMATIC, dtype, 4, 9, 32, gated), 2 * ROUNDING[dtype]))
    return out


CASES = cases()
