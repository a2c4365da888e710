"""`out=` in the memory of an argument: refused by name, and the argument keeps its values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from test_bad_input import MOE_NAMES, PACKED_NAMES, assert_refused, base, call, gemm, gptq

pytestmark = pytest.mark.usefixtures("compiled")


def sharing(t: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`t` moved to new memory, and a tensor of the given shape and dtype whose last bytes are t's first."""
    wanted = torch.Size(shape).numel() * dtype.itemsize
    start = max(wanted - t.element_size(), 0) // 16 * 16
    memory = torch.zeros(start + max(t.nbytes, wanted), dtype=torch.uint8)
    moved = memory[start : start + t.nbytes].view(t.dtype).view(t.shape)
    moved.copy_(t)
    return moved, memory[:wanted].view(dtype).view(shape)


def check(op: Any, arguments: dict[str, Any], names: list[str], name: str, shape: tuple[int, ...]) -> None:
    dtype = torch.float32 if op.__name__ == "grouped_gemm" else torch.bfloat16
    moved, out = sharing(arguments[name], shape, dtype)
    before = moved.clone()
    assert_refused(
        call, ValueError, ("out", f"share memory with {name}"), op, arguments | {name: moved}, names, out=out
    )
    assert torch.equal(moved, before)


MOE = ["hidden_states", "topk_weights", "topk_ids", "w13", "w2", "w13_bias", "w2_bias", "expert_map"]
PACKED = [*MOE, "w13_scales", "w2_scales", "w13_qzeros", "w2_qzeros", "w13_perm"]


def with_options(packed: bool) -> dict[str, Any]:
    arguments = base(packed) | {"expert_map": torch.arange(3, dtype=torch.int32)}
    return arguments | ({"w13_perm": torch.arange(32, dtype=torch.int32).repeat(3, 1)} if packed else {})


@pytest.mark.parametrize("name", PACKED)
def test_fused_moe_packed(compiled: ModuleType, name: str) -> None:
    check(compiled.fused_moe_packed, with_options(packed=True), PACKED_NAMES, name, (4, 32))


@pytest.mark.parametrize("name", MOE)
def test_fused_moe(compiled: ModuleType, name: str) -> None:
    check(compiled.fused_moe, with_options(packed=False), MOE_NAMES, name, (4, 32))


@pytest.mark.parametrize("name", ["x", "weight", "expert_offsets", "scales", "qzeros", "perm", "bias"])
def test_grouped_gemm(compiled: ModuleType, name: str) -> None:
    options = {
        "qzeros": torch.full((2, 16, 2), 8, dtype=torch.uint8),
        "perm": torch.arange(32, dtype=torch.int32).repeat(2, 1),
        "bias": torch.zeros(2, 16),
    }
    check(compiled.grouped_gemm, gemm() | options, ["x", "weight", "expert_offsets"], name, (6, 16))


@pytest.mark.parametrize("name", ["qweight", "scales", "qzeros", "g_idx"])
def test_dequantize(compiled: ModuleType, name: str) -> None:
    check(compiled.dequantize, gptq(), ["qweight", "scales"], name, (16, 32))


def test_memory_beside_an_argument_is_no_overlap(compiled: ModuleType) -> None:
    arguments = base(packed=True)
    memory = torch.zeros(2 * 4 * 32, dtype=torch.bfloat16)
    x, out = memory[: 4 * 32].view(4, 32), memory[4 * 32 :].view(4, 32)
    x.copy_(arguments["hidden_states"])
    call(compiled.fused_moe_packed, arguments | {"hidden_states": x}, PACKED_NAMES, out=out)
    assert torch.equal(out, call(compiled.fused_moe_packed, arguments, PACKED_NAMES))
