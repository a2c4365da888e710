"""unpack, unpack_zeros and dequantize: hand goldens, every format against the oracle, one rounding, group
rules."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from layers import NAMES, to_torch
from stored import FORMAT_BITS_LIST, expect, stored

pytestmark = pytest.mark.usefixtures("poison")

ID = oracle.FORMAT_IDS
EVERY_FORMAT = pytest.mark.parametrize(("name", "bits"), FORMAT_BITS_LIST)


def words(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


# Goldens written by hand.


@pytest.mark.parametrize(("name", "columns"), [
    ("awq", [0, 4, 1, 5, 2, 6, 3, 7]),
    ("quark_uint_reorder", [0, 4, 1, 5, 2, 6, 3, 7]),
    ("quark_uint_order", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("quark_int_order", [8, 9, 10, 11, 12, 13, 14, 15]),
    ("quark_int_reorder", [8, 12, 9, 13, 10, 14, 11, 15]),
])  # fmt: skip
def test_golden_word_packed_along_output(ops: ModuleType, name: str, columns: list[int]) -> None:
    """One word [I=1, O/8=1]: its eight codes are eight output rows."""
    assert ops.unpack(words(0x76543210).view(1, 1), format=ID[name]).tolist() == [[c] for c in columns]


@pytest.mark.parametrize(("name", "columns"), [
    ("compressed_tensors", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("gptq_v1", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("gptq_v2", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("quark_uint_channel_order", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("quark_uint_channel_reorder", [0, 4, 1, 5, 2, 6, 3, 7]),
    ("quark_int_channel_order", [8, 9, 10, 11, 12, 13, 14, 15]),
])  # fmt: skip
def test_golden_word_packed_along_input(ops: ModuleType, name: str, columns: list[int]) -> None:
    assert ops.unpack(words(0x76543210).view(1, 1), format=ID[name]).tolist() == [columns]


def test_golden_sign_bit_does_not_smear(ops: ModuleType) -> None:
    """Slot 7 holds the int32's sign: an arithmetic shift without a mask would give ones."""
    got = ops.unpack(words(0x80000000, 0xF0000001).view(1, 2), format=ID["compressed_tensors"])
    assert got.tolist() == [[0, 0, 0, 0, 0, 0, 0, 8, 1, 0, 0, 0, 0, 0, 0, 15]]
    got = ops.unpack(words(0x80FF017F).view(1, 1), format=ID["compressed_tensors"], bits=8)
    assert got.tolist() == [[0x7F, 0x01, 0xFF, 0x80]]


def test_golden_canonical_low_nibble_first(ops: ModuleType) -> None:
    got = ops.unpack(torch.tensor([[0x10, 0xF8]], dtype=torch.uint8), format=ID["canonical"])
    assert got.dtype == torch.uint8 and got.tolist() == [[0, 1, 8, 15]]


@pytest.mark.parametrize(("name", "word", "zeros"), [
    ("gptq_v1", 0x77777777, [8, 8, 8, 8, 8, 8, 8, 8]),
    ("gptq_v2", 0x88888888, [8, 8, 8, 8, 8, 8, 8, 8]),
    # true zeros 0,1,2,..,7 as one word 0x76543210; minus 0x11111111 with borrow = 0x654320FF
    ("gptq_v1", 0x654320FF, [0, 1, 2, 3, 4, 5, 6, 7]),
    ("gptq_v1_nibble", 0x654320FF, [0, 0, 1, 3, 4, 5, 6, 7]),
    # all zeros are 0: the word wraps to 0xEEEEEEEF
    ("gptq_v1", 0xEEEEEEEF, [0, 0, 0, 0, 0, 0, 0, 0]),
    ("gptq_v1_nibble", 0xFFFFFFFF, [0, 0, 0, 0, 0, 0, 0, 0]),
    ("awq", 0x76543210, [0, 4, 1, 5, 2, 6, 3, 7]),
    ("quark_uint_order", 0x76543210, [0, 1, 2, 3, 4, 5, 6, 7]),
    ("quark_int_reorder", 0x00000000, [8, 8, 8, 8, 8, 8, 8, 8]),
])  # fmt: skip
def test_golden_zero_words(ops: ModuleType, name: str, word: int, zeros: list[int]) -> None:
    """qzeros [C=1, O/8=1] -> [O=8, C=1]; v1 is undone on whole words, with the borrow between nibbles."""
    assert ops.unpack_zeros(words(word).view(1, 1), format=ID[name]).tolist() == [[z] for z in zeros]


def test_golden_zero_words_of_compressed_tensors_lie_along_rows(ops: ModuleType) -> None:
    """[ceil(O/8)=2, C=2] with O=10: the second word's upper six nibbles are padding."""
    qzeros = words(0x76543210, 0xFEDCBA98, 0xFFFFFF98, 0xFFFFFF10).view(2, 2)
    got = ops.unpack_zeros(qzeros, format=ID["compressed_tensors"], out_features=10)
    assert got.tolist() == [[c, c + 8] for c in range(8)] + [[8, 0], [9, 1]]


def test_golden_int8_v1_zero_words(ops: ModuleType) -> None:
    got = ops.unpack_zeros(words(0x7F7F7F7F, 0x020100FF).view(1, 2), format=ID["gptq_v1"], bits=8)
    assert got.tolist() == [[128]] * 4 + [[0], [2], [2], [3]]  # 0x020100FF + 0x01010101 = 0x03020200


# Every format against the oracle.


@EVERY_FORMAT
def test_unpack_codes_and_zeros(ops: ModuleType, name: str, bits: int, rng: np.random.Generator) -> None:
    group = -1 if oracle.LAYOUTS[name].channel_only else 8
    (qweight, _, qzeros), _, codes, zeros = stored(name, bits, rng, 16, 24, group, torch.float16)
    got = ops.unpack(qweight, format=ID[name], bits=bits)
    assert got.dtype == torch.uint8 and np.array_equal(got.numpy(), codes)
    got = ops.unpack_zeros(qzeros, format=ID[name], bits=bits, out_features=16)
    assert got.dtype == torch.uint8 and np.array_equal(got.numpy(), zeros)


@pytest.mark.parametrize("experts", [0, 3], ids=["matrix", "stack"])
@EVERY_FORMAT
def test_dequantize_is_the_product_rounded_once(
    ops: ModuleType, name: str, bits: int, experts: int, rng: np.random.Generator
) -> None:
    """All nine pairs of scale and output type, bit for bit, with and without zero points."""
    layout = oracle.LAYOUTS[name]
    group = 48 if layout.channel_only else 16
    for scales_dtype in NAMES:
        for symmetric in (False, True):
            args, exact, _, _ = stored(name, bits, rng, 8, 48, group, scales_dtype, experts, symmetric)
            for out in NAMES:
                got = ops.dequantize(*args, group_size=group, format=ID[name], bits=bits, dtype=out)
                assert got.dtype == out and torch.equal(got, expect(exact, scales_dtype, out)), (
                    scales_dtype,
                    out,
                )
            default = ops.dequantize(*args, group_size=group, format=ID[name], bits=bits)
            assert torch.equal(default, expect(exact, scales_dtype, scales_dtype))


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (144, 528)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gptq_v1", "gptq_v2", "gptq_v1_nibble", "compressed_tensors", "canonical"])
@pytest.mark.parametrize(
    ("experts", "symmetric"), [(0, False), (2, False), (2, True)], ids=["matrix", "stack", "symmetric"]
)
def test_dequantize_with_permuted_g_idx(
    ops: ModuleType,
    name: str,
    bits: int,
    experts: int,
    symmetric: bool,
    rows: int,
    columns: int,
    rng: np.random.Generator,
) -> None:
    """act-order: any column may use any group, and not every group need occur."""
    group = columns // 4
    (qweight, scales, qzeros), _, codes, zeros = stored(
        name, bits, rng, rows, columns, group, torch.bfloat16, experts, symmetric
    )
    shape = (experts, columns) if experts else (columns,)
    g_idx = rng.integers(0, 3, shape)
    values = scales.double().numpy()
    values = values if name in ("canonical", "compressed_tensors") else np.swapaxes(values, -1, -2)
    exact = oracle.exact_weight(codes, values, zeros, group, bits, g_idx)
    index = torch.from_numpy(g_idx.astype(np.int32))
    for out in NAMES:
        got = ops.dequantize(
            qweight, scales, qzeros, index, group_size=group, format=ID[name], bits=bits, dtype=out
        )
        assert torch.equal(got, expect(exact, torch.bfloat16, out))


@pytest.mark.parametrize(("name", "bits"), [
    ("canonical", 8), ("compressed_tensors", 4), ("gptq_v1", 8), ("quark_int_order", 8), ("awq", 4),
])  # fmt: skip
def test_large_results_are_those_of_small_ones(
    compiled: ModuleType, name: str, bits: int, rng: np.random.Generator
) -> None:
    """From 8 MiB on, results are written past the caches; into an `out` that begins where no vector does, they are not."""
    rows, columns = 1024, 4096
    args, exact, _, _ = stored(name, bits, rng, rows, columns, 512, torch.float16)
    want = expect(exact, torch.float16, torch.bfloat16)
    for offset in (0, 1):
        out = torch.empty(rows * columns + offset, dtype=torch.bfloat16)[offset:].view(rows, columns)
        compiled.dequantize(*args, group_size=512, format=ID[name], bits=bits, out=out)
        assert torch.equal(out, want)


def test_trivial_g_idx_changes_nothing(ops: ModuleType, rng: np.random.Generator) -> None:
    args, _, _, _ = stored("gptq_v1", 4, rng, 8, 32, 8, torch.float16)
    trivial = torch.arange(32, dtype=torch.int32) // 8
    plain, ordered = (ops.dequantize(*args, g, group_size=8, format=ID["gptq_v1"]) for g in (None, trivial))
    assert torch.equal(plain, ordered)


def test_square_matrix_is_not_transposed(ops: ModuleType, rng: np.random.Generator) -> None:
    """[I/8, O] with I/8 == O is where a layout guessed from shapes goes wrong."""
    (qweight, scales, qzeros), exact, _, _ = stored("gptq_v2", 4, rng, 8, 64, 32, torch.float16)
    assert qweight.shape == (8, 8)
    got = ops.dequantize(qweight, scales, qzeros, group_size=32, format=ID["gptq_v2"])
    assert torch.equal(got, expect(exact, torch.float16, torch.float16))


@pytest.mark.parametrize("columns", [9, 90, 97])
def test_padding_of_the_last_word_is_dropped(ops: ModuleType, columns: int, rng: np.random.Generator) -> None:
    """compressed-tensors pads I to whole words; in_features says how many columns are real. O pads the zeros
    alike."""
    group = min(32, columns)
    args, exact, codes, _ = stored("compressed_tensors", 4, rng, 11, columns, group, torch.bfloat16)
    assert args[0].shape == (11, -(-columns // 8))
    got = ops.dequantize(*args, group_size=group, format=ID["compressed_tensors"], in_features=columns)
    assert torch.equal(got, expect(exact, torch.bfloat16, torch.bfloat16))
    assert np.array_equal(
        ops.unpack(args[0], format=ID["compressed_tensors"], in_features=columns).numpy(), codes
    )


@settings(max_examples=60, deadline=None)
@given(
    format_bits=st.sampled_from(FORMAT_BITS_LIST),
    row_words=st.integers(1, 3),
    column_words=st.integers(1, 9),
    group_size=st.integers(1, 80),
    experts=st.integers(0, 2),
    scales_dtype=st.sampled_from(list(NAMES)),
    out=st.sampled_from(list(NAMES)),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_group(
    format_bits: tuple[str, int], row_words: int, column_words: int, group_size: int, experts: int,
    scales_dtype: torch.dtype, out: torch.dtype, symmetric: bool, seed: int,
) -> None:  # fmt: skip
    """A group size that does not divide I leaves a short last group; one as large as I is a single group."""
    from implementations import IMPLEMENTATIONS

    name, bits = format_bits
    columns = 8 * column_words
    group = columns if oracle.LAYOUTS[name].channel_only else min(group_size, columns)
    rng = np.random.default_rng(seed)
    args, exact, _, _ = stored(
        name, bits, rng, 8 * row_words, columns, group, scales_dtype, experts, symmetric
    )
    for module in IMPLEMENTATIONS.values():
        got = module.dequantize(*args, group_size=group, format=ID[name], bits=bits, dtype=out)
        assert torch.equal(got, expect(exact, scales_dtype, out))


# Rounding at its edges.


def test_rounding_is_to_nearest_even_and_happens_once(ops: ModuleType) -> None:
    """fp32 scales next to ties of bf16 and fp16, where a second rounding on the way would go the other way."""
    ticks = np.array(
        [1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23, 1 / 3]
    )
    values = oracle.round_to(np.concatenate([ticks, -ticks]), "float32").reshape(-1, 1)
    scales = to_torch(values, torch.float32)
    qweight = torch.full(
        (12, 4), 0xD9, dtype=torch.uint8
    )  # codes 9 and 13: factors 1 and 5 after the midpoint
    exact = oracle.exact_weight(np.tile([9, 13], (12, 4)), values, None, 8)
    for out in NAMES:
        got = ops.dequantize(qweight, scales, group_size=8, dtype=out)
        assert torch.equal(got, expect(exact, torch.float32, out))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-126, 2.0**-133, 60000.0])
def test_zero_denormal_and_huge_scales(ops: ModuleType, value: float) -> None:
    """Scales are never inverted, so an expert that saw no data gives zeros or denormals, not inf or NaN."""
    codes = np.arange(16).reshape(1, 16)
    for scales_dtype in NAMES:
        scale = oracle.round_to(np.array([[value]]), NAMES[scales_dtype])
        qweight = torch.from_numpy(oracle.pack_bytes(codes))
        for out in NAMES:
            got = ops.dequantize(qweight, to_torch(scale, scales_dtype), group_size=16, dtype=out)
            want = oracle.rounded_weight(
                oracle.exact_weight(codes, scale, None, 16), NAMES[scales_dtype], NAMES[out]
            )
            assert not got.isnan().any() and np.array_equal(got.double().numpy(), want), (scales_dtype, out)


@EVERY_FORMAT
def test_subnormal_scales_in_every_format(ops: ModuleType, name: str, bits: int) -> None:
    """An instruction that rounds to bf16 may flush subnormal weights: one row's are enough to notice."""
    rows, columns = 16, 96
    group = columns if oracle.LAYOUTS[name].channel_only else 32
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1 << bits, (rows, columns))
    scales = np.full((rows, columns // group), 0.375)
    scales[3, -1], scales[9, -1], scales[12, 0] = 2.0**-133, -3 * 2.0**-128, 2.0**-126
    zeros = rng.integers(0, 1 << bits, scales.shape)
    qweight, stored_scales, qzeros = oracle.store(name, codes, scales, zeros, bits, 15)
    exact = oracle.exact_weight(codes, scales, zeros, group, bits)
    options = {"group_size": group, "format": ID[name], "bits": bits}
    for scales_dtype in (torch.bfloat16, torch.float32):
        tensors = torch.from_numpy(qweight), to_torch(stored_scales, scales_dtype), torch.from_numpy(qzeros)
        for out in NAMES:
            got = ops.dequantize(*tensors, dtype=out, **options)
            assert torch.equal(got, expect(exact, scales_dtype, out)), (scales_dtype, out)


# Strides.


def test_strided_and_misaligned_inputs(ops: ModuleType, rng: np.random.Generator) -> None:
    (qweight, scales, qzeros), exact, _, _ = stored("gptq_v2", 4, rng, 16, 64, 16, torch.bfloat16)
    want = expect(exact, torch.bfloat16, torch.bfloat16)
    options = {"group_size": 16, "format": ID["gptq_v2"]}
    transposed = [t.t().contiguous().t() for t in (qweight, scales, qzeros)]
    assert torch.equal(ops.dequantize(*transposed, **options), want)
    offset = [torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape) for t in (qweight, scales, qzeros)]
    assert offset[0].storage_offset() == 1
    assert torch.equal(ops.dequantize(*offset, **options), want)
    same = scales[:1].expand(4, -1)  # stride 0 along the groups
    assert torch.equal(
        ops.dequantize(qweight, same, qzeros, **options),
        ops.dequantize(qweight, same.contiguous(), qzeros, **options),
    )


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty_matrices(ops: ModuleType, shape: tuple[int, int]) -> None:
    rows, packed = shape
    qweight = torch.zeros(rows, packed, dtype=torch.uint8)
    scales = torch.ones(rows, 2 * packed // 8, dtype=torch.bfloat16)
    assert ops.dequantize(qweight, scales, group_size=8).shape == (rows, 2 * packed)


def test_dequantize_out_writes_into_the_given_tensor(compiled: ModuleType, rng: np.random.Generator) -> None:
    args, exact, _, _ = stored("awq", 4, rng, 16, 32, 8, torch.float16, experts=2)
    big = torch.full((4, 16, 32), float("nan"))
    out = big[1:3]
    assert compiled.dequantize(*args, group_size=8, format=ID["awq"], out=out) is out
    assert torch.equal(big[1:3], expect(exact, torch.float16, torch.float32))
    assert big[0].isnan().all() and big[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 1120])
@pytest.mark.parametrize(
    "name", ["gptq_v1", "gptq_v1_nibble", "awq", "quark_int_reorder", "quark_uint_order"]
)
def test_matrices_beyond_one_block(
    ops: ModuleType, name: str, group_size: int, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """Formats with the columns outermost go block by block; the larger stack also writes past the caches."""
    for experts, rows, columns in [(1, 8, 16), (2, 136, 1104), (2, 1416, 1488)]:
        size = min(group_size, columns)
        fmt, groups = ID[name], -(-columns // size)
        stored_codes = (columns // 8, rows) if "gptq" in name else (columns, rows // 8)
        codes, zeros = (
            torch.from_numpy(rng.integers(-(2**31), 2**31, (experts, *shape), np.int32))
            for shape in (stored_codes, (groups, rows // 8))
        )
        scales = torch.from_numpy(rng.standard_normal((experts, groups, rows), np.float32)).half()
        scales[0, 0, 0] = float("inf")
        got = ops.dequantize(codes, scales, zeros, group_size=size, format=fmt, dtype=dtype)
        true_zeros = ops.unpack_zeros(zeros, format=fmt).repeat_interleave(size, 2)[..., :columns]
        wide = scales.float().transpose(1, 2).repeat_interleave(size, 2)[..., :columns]
        expected = (ops.unpack(codes, format=fmt).float() - true_zeros) * wide
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
