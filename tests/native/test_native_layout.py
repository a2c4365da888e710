"""The layout algebra of csrc/core, also beyond 2^31, and what each checkpoint format is said to be."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from int4_emu._enums import Format


@pytest.mark.parametrize(
    ("a", "b", "quotient", "multiple"),
    [(0, 8, 0, 0), (1, 8, 1, 8), (8, 8, 1, 8), (9, 8, 2, 16), (2**40 + 1, 2**20, 2**20 + 1, 2**40 + 2**20)],
)
def test_division_and_rounding(native: ModuleType, a: int, b: int, quotient: int, multiple: int) -> None:
    assert native.ceil_div(a, b) == quotient
    assert native.round_up(a, b) == multiple


@pytest.mark.parametrize(
    ("k", "bits", "size"),
    [(8, 4, 4), (7, 4, 4), (1, 4, 1), (7, 8, 7), (2**33 + 1, 4, 2**32 + 1), (2**33, 8, 2**33)],
)
def test_row_bytes(native: ModuleType, k: int, bits: int, size: int) -> None:
    assert native.row_bytes(k, bits) == size


@pytest.mark.parametrize(
    ("n", "k", "bits", "fits"),
    [
        (16, 8, 4, True),
        (16, 4, 8, True),
        (15, 8, 4, False),
        (16, 4, 4, False),
        (16, 6, 8, False),
        (0, 0, 4, True),
    ],
)
def test_cpu_n16_fits(native: ModuleType, n: int, k: int, bits: int, fits: bool) -> None:
    assert native.layout_fits(native.Layout.cpu_n16, n, k, bits) is fits
    assert native.layout_fits(native.Layout.canonical, n, k, bits)


def test_formats_agree_with_python(native: ModuleType) -> None:
    assert native.format_count() == len(Format)
    assert [native.format_name(int(f)) for f in Format] == [f.name.lower() for f in Format]


# What the writers of each format do, independently of the table in layout.cpp:
# (axis of packing is O, AWQ slot order, signed, zero rule).
FORMAT_FACTS = {
    "compressed_tensors": (False, False, False, 0),
    "gptq_v1": (False, False, False, 1),
    "gptq_v2": (False, False, False, 0),
    "gptq_v1_nibble": (False, False, False, 2),
    "awq": (True, True, False, 0),
    "quark_int_order": (True, False, True, 0),
    "quark_uint_reorder": (True, True, False, 0),
    "quark_int_channel_reorder": (False, True, True, 0),
}


@pytest.mark.parametrize("name", FORMAT_FACTS)
def test_format_traits(native: ModuleType, name: str) -> None:
    index = next(i for i in range(native.format_count()) if native.format_name(i) == name)
    traits = native.format_traits(index)
    assert (
        traits["packed_along_out"],
        traits["interleaved"],
        traits["is_signed"],
        traits["zeros"],
    ) == FORMAT_FACTS[name]
    assert traits["transposed"] == (name not in ("compressed_tensors", "quark_int_channel_reorder"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("experts", "n", "k"), [(1, 16, 8), (2, 32, 24), (3, 48, 136)])
def test_prepack_is_the_documented_bijection(
    native: ModuleType, bits: int, experts: int, n: int, k: int
) -> None:
    codes = np.random.default_rng(k).integers(0, 1 << bits, (experts, n, k), dtype=np.uint8)
    canonical = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    flat = np.ascontiguousarray(canonical).reshape(-1)
    packed = native.prepack(flat, n, k, bits, native.Layout.cpu_n16)
    # [E, N/16, 16, K/kw, kw] codes to [E, N/16, K/kw, 16] words.
    per_word = 32 // bits
    order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 1, 2, 3]
    blocks = codes.reshape(experts, n // 16, 16, k // per_word, per_word).astype(np.uint32)
    words = sum(blocks[..., source] << np.uint32(bits * slot) for slot, source in enumerate(order))
    np.testing.assert_array_equal(packed.view(np.uint32), np.asarray(words).transpose(0, 1, 3, 2).reshape(-1))
    np.testing.assert_array_equal(
        native.prepack(packed, n, k, bits, native.Layout.cpu_n16, inverse=True), flat
    )
