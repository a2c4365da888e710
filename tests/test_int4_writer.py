"""The test-only writer of int4 experts, against literal words and against the files of other projects' tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

import oracle
from checkpoints import dequantized_references, require_checkpoint
from int4_writer import FORMATS, PUBLISHED, round_to_int4

# (format, checkpoint written by a tool), asymmetric and symmetric, with columns in order and not.
FILES = [
    ("compressed_tensors", "ct-qwen3moe-w4a16-asym-g32"),
    ("compressed_tensors", "ct-qwen3moe-w4a16-asym-channel"),
    ("gptq_v1", "gptq-mixtral-asym-g32-v1"),
    ("gptq_v1", "gptq-qwen3moe-sym-g32-descact-v1"),
    ("awq", "awq-autoawq-qwen3moe-gemm-g128"),
]


def words(tensor: NDArray) -> list[int]:
    return [int(word) & 0xFFFFFFFF for word in tensor.reshape(-1)]


def test_literal_words() -> None:
    """One row of columns 0..7 (AWQ: one column of rows 0..7), and zero points 1..8."""
    codes, ones = np.arange(8)[None], np.ones((1, 1))
    packed, _, _ = oracle.store("compressed_tensors", codes, ones, np.array([[3]]))
    assert words(packed) == [0x76543210]
    tall = np.repeat(np.arange(8)[:, None], 8, axis=1)  # row o holds o in all its columns
    zeros, scales = np.arange(1, 9)[:, None], np.ones((8, 1))
    packed, _, stored = oracle.store("compressed_tensors", tall, scales, zeros)
    assert words(packed) == [0x11111111 * row for row in range(8)]
    assert words(stored) == [0x87654321]
    packed, _, stored = oracle.store("gptq_v1", tall, scales, zeros)
    assert words(packed) == [0x11111111 * row for row in range(8)]
    assert words(stored) == [0x76543210]  # minus one
    packed, _, stored = oracle.store("awq", tall, scales, zeros)
    assert words(packed) == [0x75316420] * 8  # slots hold columns 0, 2, 4, 6, 1, 3, 5, 7
    assert words(stored) == [0x86427531]


def zeros_of(format: str, stored: NDArray, rows: int) -> NDArray:
    """Zero points [O, C] of a file, nibble by nibble."""
    unsigned = stored.astype(np.int64) & 0xFFFFFFFF
    if format == "gptq_v1":
        unsigned = (unsigned + 0x11111111) & 0xFFFFFFFF
    nibbles = np.stack([(unsigned >> (4 * i)) & 15 for i in range(8)])
    if format == "compressed_tensors":  # [O / 8, C]
        return nibbles.transpose(1, 0, 2).reshape(-1, stored.shape[1])[:rows]
    if format == "awq":
        nibbles = nibbles[[0, 4, 1, 5, 2, 6, 3, 7]]
    return nibbles.transpose(2, 0, 1).reshape(-1, stored.shape[0])[:rows]  # [C, O / 8]


@pytest.mark.parametrize(("format", "name"), FILES)
def test_writes_the_words_of_the_tools(format: str, name: str) -> None:
    """The codes come from the tool's own dequantised weights, so that nothing here unpacks them."""
    path = require_checkpoint(name)
    if not (references := dequantized_references(path)):
        pytest.skip(f"the reference of {name} is in the full set of checkpoints only")
    suffixes, _ = FORMATS[format]
    for (layer, expert, leaf), weight in references.items():
        stored = tensors_of(path, layer, expert, leaf)
        scales = stored[suffixes[1]].double().numpy()
        scales = scales if format == "compressed_tensors" else scales.T
        rows, columns = weight.shape
        zeros = zeros_of(format, stored[suffixes[2]].numpy(), rows)
        g_idx = stored.get("g_idx")
        order = np.arange(columns) // (columns // scales.shape[1]) if g_idx is None else g_idx.numpy()
        codes = np.rint(weight.double().numpy() / scales[:, order]) + zeros[:, order]
        packed, stored_scales, stored_zeros = oracle.store(format, codes.astype(np.int64), scales, zeros)
        assert np.array_equal(packed, stored[suffixes[0]].numpy())
        assert np.array_equal(stored_scales, stored[suffixes[1]].double().numpy())
        assert np.array_equal(stored_zeros, stored[suffixes[2]].numpy())


def tensors_of(path: Path, layer: int, expert: int, leaf: str) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", "pt") as file:
        part = f"layers.{layer}."
        found = {
            name.rpartition(".")[2]: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
            if part in name
            and f".experts.{expert}." in name
            and PUBLISHED[name.split(".")[-2]] == PUBLISHED[leaf]
        }
    assert found, f"{path.name} has no {leaf} of expert {expert} in layer {layer}"
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("act_order", [False, True])
def test_rounding_is_to_nearest(format: str, act_order: bool) -> None:
    torch.manual_seed(3)
    weight = torch.randn(24, 48)
    g_idx = np.random.default_rng(0).permutation(np.arange(48) // 16) if act_order else None
    rounded = round_to_int4(weight, format, 16, g_idx)
    _, scales_dtype = FORMATS[format]
    groups = np.arange(48) // 16 if g_idx is None else g_idx
    for group in range(3):
        part, exact = weight[:, groups == group], rounded.exact[:, groups == group]
        span = part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)
        # Half a step, half another for the rounded zero point at the ends, and the rounding of the scale.
        step = span / 15 * (1 + 2.0 ** (-8 if scales_dtype == "bfloat16" else -11))
        assert ((part - exact).abs().amax(1) <= 1.1 * step).all()
