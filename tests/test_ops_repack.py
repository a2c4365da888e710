"""repack to canonical, and prepack / unprepack between canonical and the kernels' tile orders."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

import oracle
from stored import FORMAT_BITS_LIST, stored

pytestmark = pytest.mark.usefixtures("poison")

ID = oracle.FORMAT_IDS
CPU_N16 = 1
EVERY_FORMAT = pytest.mark.parametrize(("name", "bits"), FORMAT_BITS_LIST)


@pytest.mark.parametrize("experts", [0, 2], ids=["matrix", "stack"])
@EVERY_FORMAT
def test_every_format_becomes_canonical(
    ops: ModuleType, name: str, bits: int, experts: int, rng: np.random.Generator
) -> None:
    group = -1 if oracle.LAYOUTS[name].channel_only else 8
    (qweight, scales, qzeros), _, codes, zeros = stored(
        name, bits, rng, 16, 24, group, torch.float16, experts
    )
    got_q, got_s, got_z = ops.repack(qweight, scales, qzeros, format=ID[name], bits=bits)
    assert got_q.dtype == torch.uint8 and np.array_equal(got_q.numpy(), oracle.pack_bytes(codes, bits))
    assert got_z.dtype == torch.uint8 and np.array_equal(got_z.numpy(), zeros)
    output_first = name in ("canonical", "compressed_tensors")
    canonical_scales = (
        scales if output_first else scales.unsqueeze(-1) if group == -1 else scales.transpose(-1, -2)
    )
    assert got_s.dtype == scales.dtype and torch.equal(got_s, canonical_scales)
    assert all(t.is_contiguous() for t in (got_q, got_s, got_z))


def test_golden_awq_word_becomes_canonical_bytes(ops: ModuleType) -> None:
    """Two words of eight output rows, I=2: row j of the result is column j of each word, low nibble first."""
    qweight = torch.tensor([[0x76543210], [0x01234567]], dtype=torch.int32)
    got, _, none = ops.repack(qweight, torch.ones(1, 8, dtype=torch.float16), format=ID["awq"])
    first, second = [0, 4, 1, 5, 2, 6, 3, 7], [7, 3, 6, 2, 5, 1, 4, 0]
    assert got.tolist() == [[a | b << 4] for a, b in zip(first, second, strict=True)]
    assert none is None or none.numel() == 0


# Less than one tile of 32 by 32; whole ones and parts of them in several blocks of rows; whole rows of tiles alone.
@pytest.mark.parametrize("shape", [(16, 24), (296, 360), (96, 344)], ids=["small", "blocks", "tiles"])
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("gptq_v1", 4),
        ("gptq_v1", 8),
        ("awq", 4),
        ("compressed_tensors", 4),
        ("compressed_tensors", 8),
        ("canonical", 4),
    ],
)
def test_permutations(
    ops: ModuleType, name: str, bits: int, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    """Canonical column j is source column in_perm[j]; rows, scales and zeros follow out_perm alike."""
    (qweight, scales, qzeros), _, codes, zeros = stored(name, bits, rng, *shape, 8, torch.bfloat16)
    rows, columns = (rng.permutation(n) for n in shape)
    got_q, got_s, got_z = ops.repack(
        qweight, scales, qzeros, format=ID[name], bits=bits,
        in_perm=torch.from_numpy(columns.astype(np.int32)), out_perm=torch.from_numpy(rows.astype(np.int32)),
    )  # fmt: skip
    assert np.array_equal(got_q.numpy(), oracle.pack_bytes(codes[rows][:, columns], bits))
    assert np.array_equal(got_z.numpy(), zeros[rows])
    by_row = scales if name in ("canonical", "compressed_tensors") else scales.t()
    assert torch.equal(got_s, by_row[torch.from_numpy(rows)])


@pytest.mark.parametrize("in_features", [89, 90])
def test_permuted_columns_leave_padding_out(
    ops: ModuleType, in_features: int, rng: np.random.Generator
) -> None:
    """The unused half of an odd row's last byte is zero, whatever the file holds after the last column."""
    tensors, _, codes, _ = stored("compressed_tensors", 4, rng, 70, in_features, 32, torch.bfloat16)
    columns = rng.permutation(in_features)
    perm = torch.from_numpy(columns.astype(np.int32))
    got, _, _ = ops.repack(*tensors, format=ID["compressed_tensors"], in_features=in_features, in_perm=perm)
    wanted = oracle.pack_bytes(codes[:, columns])
    if in_features % 2:
        wanted[:, -1] &= 0x0F
    assert np.array_equal(got.numpy(), wanted)


def test_padding_is_dropped(ops: ModuleType, rng: np.random.Generator) -> None:
    (qweight, scales, qzeros), _, codes, zeros = stored(
        "compressed_tensors", 4, rng, 10, 90, 32, torch.bfloat16
    )
    got_q, got_s, got_z = ops.repack(qweight, scales, qzeros, format=ID["compressed_tensors"], in_features=90)
    assert got_q.shape == (10, 45) and np.array_equal(got_q.numpy(), oracle.pack_bytes(codes))
    assert torch.equal(got_s, scales) and np.array_equal(got_z.numpy(), zeros)


def test_repack_out_fills_rows_of_a_larger_stack(compiled: ModuleType, rng: np.random.Generator) -> None:
    """The loader's way: gate and up of one expert go straight into their halves of w13, neighbours unharmed."""
    (qweight, scales, qzeros), _, codes, zeros = stored("gptq_v1", 4, rng, 8, 32, 8, torch.float16)
    stack_q = torch.full((3, 16, 16), 0xAA, dtype=torch.uint8)
    stack_s = torch.full((3, 16, 4), float("nan"), dtype=torch.float16)
    stack_z = torch.full((3, 16, 4), 0xAA, dtype=torch.uint8)
    compiled.repack_out(
        qweight, scales, qzeros, format=ID["gptq_v1"],
        out_qweight=stack_q[1, 8:], out_scales=stack_s[1, 8:], out_qzeros=stack_z[1, 8:],
    )  # fmt: skip
    assert np.array_equal(stack_q[1, 8:].numpy(), oracle.pack_bytes(codes))
    assert torch.equal(stack_s[1, 8:], scales.t()) and np.array_equal(stack_z[1, 8:].numpy(), zeros)
    stack_q[1, 8:], stack_s[1, 8:], stack_z[1, 8:] = 0xAA, float("nan"), 0xAA
    assert (stack_q == 0xAA).all() and stack_s.isnan().all() and (stack_z == 0xAA).all()


# Prepack.


def oracle_cpu_n16(codes: np.ndarray, bits: int) -> np.ndarray:
    """[N/16][K/kw][16] words; word r of a block holds row r's kw codes: k0,k2,k4,k6,k1,k3,k5,k7 or plain
    bytes."""
    *lead, rows, columns = codes.shape
    words = oracle.pack_words(codes, -1, bits, (0, 2, 4, 6, 1, 3, 5, 7))
    blocks = words.reshape(*lead, rows // 16, 16, words.shape[-1])
    return (
        np.ascontiguousarray(np.swapaxes(blocks, -1, -2))
        .view(np.uint8)
        .reshape(*lead, rows, columns * bits // 8)
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 8), (48, 24), (3, 32, 40), (0, 16, 8)])
def test_prepack_is_the_written_layout_and_a_bijection(
    ops: ModuleType, bits: int, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    codes = rng.integers(0, 1 << bits, shape)
    packed = torch.from_numpy(oracle.pack_bytes(codes, bits))
    tiles = ops.prepack(packed, layout=CPU_N16, bits=bits)
    assert tiles.shape == packed.shape and np.array_equal(tiles.numpy(), oracle_cpu_n16(codes, bits))
    back = ops.unprepack(tiles, layout=CPU_N16, bits=bits)
    assert torch.equal(back, packed)
    assert back.data_ptr() != packed.data_ptr() or packed.numel() == 0


def test_prepack_to_canonical_is_a_copy(ops: ModuleType) -> None:
    """The branch with nothing to do must not hand its input back: functional ops never alias."""
    packed = torch.arange(64, dtype=torch.uint8).view(8, 8)
    for op in (ops.prepack, ops.unprepack):
        result = op(packed, layout=0)
        assert torch.equal(result, packed) and result.data_ptr() != packed.data_ptr()


@pytest.mark.parametrize(("shape", "bits"), [((8, 8), 4), ((24, 8), 4), ((16, 6), 4), ((16, 6), 8)])
def test_prepack_refuses_what_does_not_tile(compiled: ModuleType, shape: tuple[int, int], bits: int) -> None:
    with pytest.raises(ValueError, match=str(shape[0]) if shape[0] % 16 else str(shape[1] * 8 // bits)):
        compiled.prepack(torch.zeros(shape, dtype=torch.uint8), layout=CPU_N16, bits=bits)


@pytest.mark.parametrize("op", ["prepack", "unprepack"])
def test_unknown_layout_is_refused(compiled: ModuleType, op: str) -> None:
    with pytest.raises(ValueError, match="99"):
        getattr(compiled, op)(torch.zeros(16, 16, dtype=torch.uint8), layout=99)
