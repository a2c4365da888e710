"""Tile functions of every table that this machine can run, against float64."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from halves import UNIT_ROUNDOFF, Array, Floats, decode, encode

DTYPES = ["f32", "f16", "bf16"]


def random_bits(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> tuple[Array, Floats]:
    """Random numbers as stored, and as float64."""
    stored = encode(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)
    return stored, decode(stored, dtype)


def assert_products(got: Array, x: Floats, w: Floats) -> None:
    """got [m, n] is x [m, k] times w [n, k] transposed, up to fp32 accumulation in any order."""
    size = np.abs(x) @ np.abs(w).T
    error = np.abs(got - x @ w.T)
    assert np.all(error <= size * (8 + x.shape[1] / 8) * 2.0**-24), (
        f"error / allowed {(error / size).max() * 2**24:.1f} ulp"
    )


def computes(native: ModuleType, table: str) -> list[str]:
    return ["f32", "bf16"] if native.has_bf16(table) else ["f32"]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 8), (1, 33, 100), (3, 16, 31), (5, 19, 256), (16, 48, 64), (17, 47, 330), (37, 70, 96)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_product(native: ModuleType, table: str, dtype: str, m: int, n: int, k: int) -> None:
    for compute in computes(native, table):
        x_dtype = "bf16" if compute == "bf16" else dtype
        x_stored, x = random_bits((m, k + 3), x_dtype, seed=m)
        w_stored, w = random_bits((2, n, k), dtype, seed=n)
        weight = native.dense_weight(w_stored, getattr(native.DType, dtype), 2, n, k, n * k, k)
        got = native.product(
            table, getattr(native.DType, compute), x_stored, getattr(native.DType, x_dtype), weight, 1, 0, n
        )
        rounded = decode(encode(w[1], compute), compute)
        assert_products(got, x[:, :k], rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_weight_row_range_and_k_blocks(native: ModuleType, table: str, dtype: str) -> None:
    m, n, k = 9, 41, 3 * native.k_multiple(table) + 5
    for compute in computes(native, table):
        x_dtype = "bf16" if compute == "bf16" else dtype
        x_stored, x = random_bits((m, k), x_dtype, seed=1)
        w_stored, w = random_bits((k, n), dtype, seed=2)  # [K, N]: the view that from-linear layers hold
        weight = native.dense_weight(w_stored, getattr(native.DType, dtype), 1, n, k, 0, 1, k_stride=n)
        got = native.product(
            table,
            getattr(native.DType, compute),
            x_stored,
            getattr(native.DType, x_dtype),
            weight,
            0,
            7,
            30,
            k_block=2 * native.k_multiple(table),
        )
        assert_products(got, x, decode(encode(w.T[7:37], compute), compute))


def test_blocks_of_the_least_depth_read_no_other_row(native: ModuleType, table: str) -> None:
    least = native.k_multiple(table)
    x = np.ones((7, 2 * least), np.float32)
    x[3:] = np.inf
    w = np.full((1, 4, 2 * least), 0.5, np.float32)
    weight = native.dense_weight(w, native.DType.f32, 1, 4, 2 * least, 0, 2 * least)
    got = native.product(table, native.DType.f32, x, native.DType.f32, weight, 0, 0, 4, k_block=least)
    assert np.all(got[:3] == least)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [1, 5, 32, 128, 1000])
@pytest.mark.parametrize("layout", ["canonical", "cpu_n16"])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_packed_product(
    native: ModuleType, table: str, bits: int, group_size: int, layout: str, with_zeros: bool
) -> None:
    m, n, k = 6, 32, 264
    rng = np.random.default_rng(group_size)
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    groups = math.ceil(k / group_size)
    scale_dtype = DTYPES[group_size % 3]
    scales_stored, scales = random_bits((n, groups), scale_dtype, seed=3, scale=0.1)
    zeros = rng.integers(0, 1 << bits, (n, groups), dtype=np.uint8) if with_zeros else None
    packed = codes if bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)
    stored = np.ascontiguousarray(packed).reshape(-1)
    if layout == "cpu_n16":
        stored = native.prepack(stored, n, k, bits, native.Layout.cpu_n16)
    weight = native.packed_weight(
        stored,
        scales_stored,
        zeros,
        getattr(native.DType, scale_dtype),
        1,
        n,
        k,
        bits,
        group_size,
        layout=getattr(native.Layout, layout),
    )
    column = np.arange(k) // group_size
    z = np.full((n, k), float(1 << (bits - 1))) if zeros is None else zeros[:, column].astype(np.float64)
    exact = ((codes - z) * scales[:, column]).astype(np.float32)
    for compute in computes(native, table):
        x_stored, x = random_bits((m, k), "bf16", seed=4)
        got = native.product(
            table,
            getattr(native.DType, compute),
            x_stored,
            native.DType.bf16,
            weight,
            0,
            3,
            n - 3,
            k_block=128,
        )
        assert_products(got, x, decode(encode(exact[3:], compute), compute))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_permutation_and_row_scale(native: ModuleType, table: str, dtype: str) -> None:
    n, k = 20, 70
    rng = np.random.default_rng(0)
    rows, perm = [4, 0, 4, 2, 1], rng.permutation(k).tolist()
    row_scale = rng.standard_normal(len(rows)).astype(np.float32)
    for compute in computes(native, table):
        x_dtype = "bf16" if compute == "bf16" else dtype
        x_stored, x = random_bits((5, k), x_dtype, seed=1)
        w_stored, w = random_bits((n, k), "f32", seed=2)
        weight = native.dense_weight(w_stored, native.DType.f32, 1, n, k, 0, k)
        got = native.product(
            table,
            getattr(native.DType, compute),
            x_stored,
            getattr(native.DType, x_dtype),
            weight,
            0,
            0,
            n,
            rows=rows,
            row_scale=row_scale.tolist(),
            perm=perm,
        )
        scaled = decode(encode(x[rows].astype(np.float32) * row_scale[:, None], x_dtype), x_dtype)
        assert_products(got, scaled[:, perm], decode(encode(w, compute), compute))


def test_column_result_does_not_depend_on_the_cut(native: ModuleType, table: str) -> None:
    m, n, k = 21, 53, 160
    for compute in computes(native, table):
        x_stored, _ = random_bits((m, k), "bf16", seed=1)
        w_stored, _ = random_bits((n, k), "bf16", seed=2)
        weight = native.dense_weight(w_stored, native.DType.bf16, 1, n, k, 0, k)
        whole = native.product(
            table, getattr(native.DType, compute), x_stored, native.DType.bf16, weight, 0, 0, n
        )
        for step in (1, 5, 16, 20):
            pieces = [
                native.product(
                    table,
                    getattr(native.DType, compute),
                    x_stored,
                    native.DType.bf16,
                    weight,
                    0,
                    n0,
                    min(step, n - n0),
                )
                for n0 in range(0, n, step)
            ]
            np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def act_reference(name: str, g: Floats, u: Floats, limit: float | None, alpha: float, beta: float) -> Floats:
    """The formulas, in float64."""
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    erf = np.vectorize(math.erf)
    base = name.removesuffix("_no_mul")
    if base == "swigluoai":
        return g / (1 + np.exp(-alpha * g)) * (u + beta)
    value = {
        "silu": lambda: g / (1 + np.exp(-g)),
        "gelu": lambda: 0.5 * g * (1 + erf(g / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        "relu2": lambda: np.maximum(g, 0) ** 2,
    }[base]()
    return value if name.endswith("_no_mul") else value * u


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("silu", None),
        ("silu", 1.5),
        ("gelu", None),
        ("gelu_tanh", None),
        ("relu2", None),
        ("swigluoai", 2.0),
        ("silu_no_mul", None),
        ("gelu_no_mul", None),
        ("gelu_tanh_no_mul", None),
        ("relu2_no_mul", None),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(native: ModuleType, table: str, name: str, limit: float | None, dtype: str) -> None:
    gate = np.random.default_rng(5).standard_normal((3, 301)).astype(np.float32) * 3
    gate[0, :4] = [0, -80, 80, -0.0]
    up = np.random.default_rng(6).standard_normal((3, 301)).astype(np.float32) * 3
    gated = not name.endswith("_no_mul")
    got = decode(
        native.activate(
            table,
            getattr(native.Activation, name),
            gate,
            up if gated else None,
            limit,
            1.702,
            1.0,
            getattr(native.DType, dtype),
        ),
        dtype,
    )
    expected = act_reference(name, gate.astype(np.float64), up.astype(np.float64), limit, 1.702, 1.0)
    relative = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert relative <= (2e-7 if dtype == "f32" else UNIT_ROUNDOFF[dtype])
    assert np.all(np.abs(got - expected) <= np.abs(expected) * (2e-6 + UNIT_ROUNDOFF[dtype]) + 2e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
def test_activations_keep_nan(native: ModuleType, table: str, name: str) -> None:
    gate, up = np.full((1, 20), np.nan, np.float32), np.ones((1, 20), np.float32)
    limit = 7.0 if name == "swigluoai" else None
    for g, u in ((gate, up), (up, gate)):
        assert np.isnan(
            native.activate(table, getattr(native.Activation, name), g, u, limit, 1.0, 1.0, native.DType.f32)
        ).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40, 53])
def test_combine(native: ModuleType, table: str, dtype: str, n: int) -> None:
    y = np.random.default_rng(n).standard_normal((6, n)).astype(np.float32)
    rows, weight = [5, 0, 3], [0.25, -1.5, 0.125]
    got = decode(native.combine(table, y, rows, weight, getattr(native.DType, dtype)), dtype)
    terms = np.array(weight)[:, None] * y[rows].astype(np.float64)
    assert np.all(
        np.abs(got - terms.sum(0))
        <= np.abs(terms).sum(0) * 2.0**-22 + np.abs(terms.sum(0)) * UNIT_ROUNDOFF[dtype]
    )
    assert not native.combine(table, y, [], [], getattr(native.DType, dtype)).any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize(("k", "group_size"), [(1, 1), (33, 5), (256, 32), (331, 64), (200, 1000)])
def test_dequantize_row_is_exact_to_the_bit(
    native: ModuleType, table: str, bits: int, dtype: str, scale_dtype: str, k: int, group_size: int
) -> None:
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 1 << bits, k, dtype=np.uint8)
    groups = math.ceil(k / group_size)
    zeros = rng.integers(0, 1 << bits, groups, dtype=np.uint8)
    scales_stored, scales = random_bits((groups,), scale_dtype, seed=7)
    if groups > 4:  # overflow in fp16, subnormal results, not a number
        scales_stored = encode([3e4, 1e-7, np.inf, np.nan, *scales[4:]], scale_dtype)
        scales = decode(scales_stored, scale_dtype)
    even = np.append(codes, np.zeros(k % 2, np.uint8))
    stored = codes if bits == 8 else (even[0::2] | (even[1::2] << 4)).astype(np.uint8)
    got = native.dequantize_row(
        table,
        stored,
        bits,
        scales_stored,
        getattr(native.DType, scale_dtype),
        zeros,
        k,
        group_size,
        getattr(native.DType, dtype),
    )
    column = np.arange(k) // group_size
    with np.errstate(invalid="ignore"):
        product = (codes.astype(np.float32) - zeros[column].astype(np.float32)) * scales[column].astype(
            np.float32
        )
    np.testing.assert_array_equal(decode(got, dtype), decode(encode(product, dtype), dtype))
