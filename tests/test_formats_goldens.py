"""Sixteen weights of each format, worked out by hand: literal words and literal values, no packing code of
ours.

The two words are nearly always 0x76543210 (nibbles 0..7 from the lowest) and 0xFEDCBA98 (nibbles 8..15).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import (
    auto_round_config,
    awq_config,
    compressed_tensors_config,
    gptq_config,
    int32,
    quark_config,
    write_checkpoint,
)
from int4_emu import Checkpoint
from int4_emu import reference as reference_ops

LOW, HIGH = 0x76543210, 0xFEDCBA98
MODULE = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Golden:
    """A Linear's tensors by suffix, its configuration, and its weight [O, I]."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    weight: list[list[float]]


def half(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float16)


def bf16(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


# (q - 8) * s with q = 0..7, s = 0.5 in row 0 and q = 8..15, s = 2 in row 1.
SYMMETRIC = [[-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5], [0, 2, 4, 6, 8, 10, 12, 14]]
# Zero points 3 and 10: (0 - 3) * 0.5 = -1.5 ..., (8 - 10) * 2 = -4 ...
ZEROS_3_10 = [[-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2], [-4, -2, 0, 2, 4, 6, 8, 10]]
# Zero points 0 and 10: row 0 is 0 * 0.5, 1 * 0.5, ...
ZEROS_0_10 = [[0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5], [-4, -2, 0, 2, 4, 6, 8, 10]]
# Zero points 0 and 9.
ZEROS_0_9 = [[0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5], [-2, 0, 2, 4, 6, 8, 10, 12]]
# AWQ: row i of qweight is one word, in which output column j sits in slot 0,4,1,5,2,6,3,7.
# Column j therefore has codes (0, 8), (4, 12), (1, 9), (5, 13), (2, 10), (6, 14), (3, 11), (7, 15).
# The zero word 0x20 has a 2 in slot 1, which is column 2: (1 - 2, 9 - 2) = (-1, 7). Column 7 has s = 0.5:
# (3.5, 7.5).
AWQ_WEIGHT = [[0, 8], [4, 12], [-1, 7], [5, 13], [2, 10], [6, 14], [3, 11], [3.5, 7.5]]
AWQ_TENSORS = {
    "qweight": int32([LOW], [HIGH]),
    "qzeros": int32([0x20]),
    "scales": half([1, 1, 1, 1, 1, 1, 1, 0.5]),
}
# Stored = true - 0x11111111 as one word: 0xA0 - 0x11111111 = 0xEEEEEF8F (the zero point 0 borrows from the 10
# above it).
V1_ZEROS_0_10 = 0xEEEEEF8F
TWO_COLUMNS = {"qweight": int32([LOW, HIGH]), "scales": half([0.5, 2])}

GOLDENS = {
    "compressed_tensors_symmetric": Golden(
        compressed_tensors_config(group_size=8),
        {
            "weight_packed": int32([LOW], [HIGH]),
            "weight_scale": bf16([[0.5], [2]]),
            "weight_shape": torch.tensor([2, 8]),
        },
        SYMMETRIC,
    ),
    "compressed_tensors_asymmetric": Golden(
        # Zero points run along the output rows: nibble 0 is row 0's 3, nibble 1 is row 1's 10.
        compressed_tensors_config(group_size=8, symmetric=False),
        {
            "weight_packed": int32([LOW], [HIGH]),
            "weight_scale": bf16([[0.5], [2]]),
            "weight_zero_point": int32([0xA3]),
            "weight_shape": torch.tensor([2, 8]),
        },
        ZEROS_3_10,
    ),
    "compressed_tensors_int8": Golden(
        # Lowest byte first, stored + 128: 0x80, 0x81, 0x7F, 0xFF = 0, 1, -1, 127; 0x00, 0x40, 0xC0, 0x82 =
        # -128, -64, 64, 2.
        compressed_tensors_config(bits=8, group_size=4),
        {
            "weight_packed": int32([0xFF7F8180, 0x82C04000], [0x82C04000, 0xFF7F8180]),
            "weight_scale": bf16([[1, 0.5], [2, 0.25]]),
        },
        [[0, 1, -1, 127, -64, -32, 32, 1], [-256, -128, 128, 4, 0, 0.25, -0.25, 31.75]],
    ),
    "gptq_v1_symmetric": Golden(gptq_config(), dict(TWO_COLUMNS, qzeros=int32([0x77777777])), SYMMETRIC),
    "gptq_v1_asymmetric": Golden(
        gptq_config(sym=False), dict(TWO_COLUMNS, qzeros=int32([V1_ZEROS_0_10])), ZEROS_0_10
    ),
    "gptq_v2_symmetric": Golden(
        gptq_config(checkpoint_format="gptq_v2"), dict(TWO_COLUMNS, qzeros=int32([0x88888888])), SYMMETRIC
    ),
    "gptq_v2_asymmetric": Golden(
        gptq_config(sym=False, checkpoint_format="gptq_v2"),
        dict(TWO_COLUMNS, qzeros=int32([0xA3])),
        ZEROS_3_10,
    ),
    "gptq_v1_act_order": Golden(
        # Columns 0, 2, 4, 6 are of group 1 (s = 1 and 4), columns 1, 3, 5, 7 of group 0 (s = 0.5 and 2).
        # Row 0: -8 * 1, -7 * 0.5, -6 * 1, -5 * 0.5, ...; row 1: 0 * 4, 1 * 2, 2 * 4, 3 * 2, ...
        gptq_config(group_size=4, desc_act=True),
        {
            "qweight": int32([LOW, HIGH]),
            "scales": half([0.5, 2], [1, 4]),
            "qzeros": int32([0x77777777], [0x77777777]),
            "g_idx": torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32),
        },
        [[-8, -3.5, -6, -2.5, -4, -1.5, -2, -0.5], [0, 2, 8, 6, 16, 10, 24, 14]],
    ),
    "gptq_int8": Golden(
        # qweight [I / 4, O], stored + 128. v1 zeros: 0x7F7F7F7F + 0x01010101 = 128 in each byte.
        gptq_config(bits=8),
        {
            "qweight": int32([0xFF7F8180, 0x82C04000], [0x82C04000, 0xFF7F8180]),
            "scales": half([1, 0.5]),
            "qzeros": int32([0x7F7F7F7F]),
        },
        [[0, 1, -1, 127, -128, -64, 64, 2], [-64, -32, 32, 1, 0, 0.5, -0.5, 63.5]],
    ),
    "awq": Golden(awq_config(), AWQ_TENSORS, AWQ_WEIGHT),
    "auto_round_gptq": Golden(
        auto_round_config("auto_round:auto_gptq", sym=False),
        dict(TWO_COLUMNS, qzeros=int32([V1_ZEROS_0_10])),
        ZEROS_0_10,
    ),
    "auto_round_awq": Golden(auto_round_config("auto_round:auto_awq", sym=False), AWQ_TENSORS, AWQ_WEIGHT),
    "quark_int4_order": Golden(
        # weight [I, O / 8] in plain order, two's complement: input 0 has 0..7, input 1 has -8..-1, all times
        # 0.5.
        quark_config("int4", "order", group_size=2),
        {"weight": int32([LOW], [HIGH]), "weight_scale": bf16([[0.5] * 8]), "weight_zero_point": int32([0])},
        [[0, -4], [0.5, -3.5], [1, -3], [1.5, -2.5], [2, -2], [2.5, -1.5], [3, -1], [3.5, -0.5]],
    ),
    "quark_int4_reorder": Golden(
        # As above with AWQ's slots: column j has the codes of slot 0,4,1,5,2,6,3,7.
        quark_config("int4", "reorder", group_size=2),
        {"weight": int32([LOW], [HIGH]), "weight_scale": bf16([[0.5] * 8]), "weight_zero_point": int32([0])},
        [[0, -4], [2, -2], [0.5, -3.5], [2.5, -1.5], [1, -3], [3, -1], [1.5, -2.5], [3.5, -0.5]],
    ),
    "quark_uint4_order": Golden(
        # Unsigned: input 0 has 0..7, input 1 has 8..15; the zero word 0x30 is a 3 for output 1: (1 - 3, 9 -
        # 3).
        quark_config("uint4", "order", group_size=2, symmetric=False),
        {
            "weight": int32([LOW], [HIGH]),
            "weight_scale": bf16([[1.0] * 8]),
            "weight_zero_point": int32([0x30]),
        },
        [[0, 8], [-2, 6], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    ),
    "quark_uint4_reorder": Golden(
        # The same words by AWQ's slots; the 3 of the zero word is in slot 1, which is output 2: (1 - 3, 9 -
        # 3).
        quark_config("uint4", "reorder", group_size=2, symmetric=False),
        {
            "weight": int32([LOW], [HIGH]),
            "weight_scale": bf16([[1.0] * 8]),
            "weight_zero_point": int32([0x30]),
        },
        [[0, 8], [4, 12], [-2, 6], [5, 13], [2, 10], [6, 14], [3, 11], [7, 15]],
    ),
    "quark_int4_channel_order": Golden(
        # weight [O, I / 8], not transposed: row 0 is 0..7 times 0.5, row 1 is -8..-1 times 2.
        quark_config("int4", "order"),
        {"weight": int32([LOW], [HIGH]), "weight_scale": bf16([0.5, 2]), "weight_zero_point": int32([0])[0]},
        [[0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5], [-16, -14, -12, -10, -8, -6, -4, -2]],
    ),
    "quark_int4_channel_reorder": Golden(
        # Row 0: 0,4,1,5,2,6,3,7 times 0.5. Row 1: 8,12,9,13,10,14,11,15 are -8,-4,-7,-3,-6,-2,-5,-1; times 2.
        quark_config("int4", "reorder"),
        {"weight": int32([LOW], [HIGH]), "weight_scale": bf16([0.5, 2]), "weight_zero_point": int32([0])[0]},
        [[0, 2, 0.5, 2.5, 1, 3, 1.5, 3.5], [-16, -8, -14, -6, -12, -4, -10, -2]],
    ),
    "quark_int8": Golden(
        # Plain int8 [I, O], one group of two inputs: output o has column o of the table times its scale.
        quark_config("int8", "reorder", group_size=2),
        {
            "weight": torch.tensor(
                [[0, 1, -1, 127, -128, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]], dtype=torch.int8
            ),
            "weight_scale": bf16([[1, 1, 1, 1, 1, 1, 1, 0.5]]),
            "weight_zero_point": torch.zeros(1, 8, dtype=torch.int8),
        },
        [[0, 8], [1, 9], [-1, 10], [127, 11], [-128, 12], [5, 13], [6, 14], [3.5, 7.5]],
    ),
    "quark_int8_channel": Golden(
        quark_config("int8", "order"),
        {
            "weight": torch.tensor(
                [[0, 1, -1, 127, -128, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]], dtype=torch.int8
            ),
            "weight_scale": bf16([1, 0.5]),
            "weight_zero_point": torch.zeros(2, dtype=torch.int8),
        },
        [[0, 1, -1, 127, -128, 5, 6, 7], [4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5]],
    ),
}


def load(tmp_path: Path, golden: Golden, **options: Any) -> torch.Tensor:
    """The golden's weight float32 [O, I] by way of a file and the canonical layout."""
    tensors = {f"{MODULE}.{suffix}": tensor for suffix, tensor in golden.tensors.items()}
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tensors, golden.config), **options)
    assert list(checkpoint.quantized_linears()) == [MODULE]
    weight = checkpoint.load_linear(MODULE)
    dense = reference_ops.dequantize(
        weight.qweight, weight.scales, weight.qzeros, group_size=weight.group_size, bits=weight.bits,
        in_features=weight.in_features, dtype=torch.float32,
    )  # fmt: skip
    if weight.perm is not None:
        stored = torch.empty_like(dense)
        stored[:, weight.perm.long()] = dense
        dense = stored
    assert checkpoint.unconsumed() == []
    return dense


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    assert load(tmp_path, golden).tolist() == golden.weight


def test_the_zero_point_convention_is_an_argument(tmp_path: Path) -> None:
    """Case 1: the flag acts. Weight code 8, scale 0.5: v1 of 0x77777777 and v2 of 0x88888888 are both 0."""
    tensors = {"qweight": int32([0x88888888] * 8), "scales": half([0.5] * 8)}
    v1 = Golden(gptq_config(sym=False), dict(tensors, qzeros=int32([0x77777777])), [])
    v2 = Golden(gptq_config(sym=False), dict(tensors, qzeros=int32([0x88888888])), [])
    assert load(tmp_path / "a", v1).unique().tolist() == [0]
    assert load(tmp_path / "b", v2, zero_point_format="gptq_v2").unique().tolist() == [0]
    assert load(tmp_path / "c", v1, zero_point_format="gptq_v2").unique().tolist() == [0.5]
    assert load(tmp_path / "d", v2).unique().tolist() == [-0.5]


def test_the_per_nibble_reading_is_an_option(tmp_path: Path) -> None:
    """0xEEEEEF8F as words is zero points 0 and 10, nibble by nibble F + 1 = 0 and 8 + 1 = 9."""
    golden = GOLDENS["gptq_v1_asymmetric"]
    assert load(tmp_path, golden, zero_point_format="gptq_v1_nibble").tolist() == ZEROS_0_9
