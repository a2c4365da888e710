"""Every checkpoint of other projects' tools: weights bit for bit, expert outputs, and what describe()
says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import BARD, CHECKPOINT_NAMES, dequantized_references, reference_tensors, require_checkpoint
from int4_emu import Checkpoint, Experts
from int4_emu import reference as reference_ops

MODES = ["packed", "dequantized"]
ROWS_OF = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def _reference_path(name: str) -> Path:
    path = require_checkpoint(name)
    if not (path / "reference" / "reference.safetensors").is_file():
        pytest.skip(f"the reference tensors of {name} are in the full set only")
    return path


def dense_weights(experts: Experts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I] of a layer in the order in which it holds them, by the reference's
    arithmetic.
    """
    if not experts.is_packed:
        return experts.w13.detach(), experts.w2.detach()
    state = experts.state_dict()  # canonical tensors, whatever layout is resident
    dense = [
        reference_ops.dequantize(
            state[f"{name}_qweight"],
            state[f"{name}_scales"],
            state.get(f"{name}_qzeros"),
            group_size=getattr(experts, f"{name}_group_size"),
            bits=getattr(experts, f"{name}_bits"),
            dtype=dtype,
        )
        for name in ("w13", "w2")
    ]
    return dense[0], dense[1]


def stored_order(experts: Experts, w13: torch.Tensor) -> torch.Tensor:
    """Undoes the act-order of w13's columns, where there is one."""
    perm = getattr(experts, "w13_perm", None)
    if perm is None:
        return w13
    index = perm.long().unsqueeze(1).expand_as(w13)
    return torch.zeros_like(w13).scatter_(-1, index, w13)


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_weights_are_the_tools_own(name: str, weights: str) -> None:
    path = _reference_path(name)
    checkpoint = Checkpoint(path)
    references = dequantized_references(path)
    assert references
    for (layer, expert, projection), want in references.items():
        # Bard's reference holds bf16 values in a float32 tensor; all others have the dtype of the tool's
        # output.
        dtype = torch.bfloat16 if name == BARD else want.dtype
        experts = checkpoint.load_experts(layer, weights=weights, dtype=dtype, expert_ids=[expert])
        w13, w2 = (w[0] for w in dense_weights(experts, dtype))
        w13 = stored_order(experts, w13.unsqueeze(0))[0]
        size = experts.intermediate_size
        got = w2 if projection in ("down_proj", "w2") else w13.split(size)[ROWS_OF[projection]]
        if weights == "packed" and ("actorder-group" in name or "descact" in name):
            # w2's columns, and with them w13's rows, are sorted by group: the same rows and columns in
            # another order.
            axis = 1 if projection in ("down_proj", "w2") else 0
            got, want = sort_slices(got.float(), axis), sort_slices(want.float(), axis)
        assert torch.equal(got.float(), want.float()), f"layer {layer} expert {expert} {projection}"


def sort_slices(matrix: torch.Tensor, axis: int) -> torch.Tensor:
    """Rows (axis 0) or columns (axis 1) in lexicographic order: equal for matrices that differ by a
    permutation.
    """
    rows = matrix if axis == 0 else matrix.T
    return torch.tensor(sorted(rows.tolist()))


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_expert_outputs(name: str, weights: str) -> None:
    """Within a bound that includes the rounding of the references' weights: 4e-3 for bf16 scales, 6e-4 for
    fp16.
    """
    path = _reference_path(name)
    checkpoint, reference = Checkpoint(path), reference_tensors(path)
    for info in checkpoint.describe():
        experts = checkpoint.load_experts(info.layer, weights=weights, dtype=torch.float32)
        moe = f"moe.{info.layer}"
        out = experts(
            reference[f"{moe}.experts_in"], reference[f"{moe}.top_k_weights"], reference[f"{moe}.top_k_index"]
        )
        want = reference[f"{moe}.experts_out"]
        scales = {p.scales_dtype for p in info.projections}
        bound = 6e-4 if scales == {"float16"} else 4e-3
        error = (out - want).norm() / want.norm()
        assert error < bound, f"layer {info.layer}: {error:.1e}"


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_expert_outputs_with_the_tools_rounded_weights(name: str) -> None:
    """The same outputs within 1e-6 when the weights are rounded once to the dtype that the reference used."""
    path = _reference_path(name)
    checkpoint, reference = Checkpoint(path), reference_tensors(path)
    for info in checkpoint.describe():
        scales = {p.scales_dtype for p in info.projections}
        # AutoRound's and Quark's references multiply in float32; floats are as they are.
        exact = name.startswith(("autoround", "quark")) or scales == {None}
        rounded = torch.float32 if exact else getattr(torch, scales.pop() or "float32")
        dense = checkpoint.load_experts(info.layer, weights="dequantized", dtype=rounded)
        experts = Experts(
            dense.w13.float(), dense.w2.float(), activation=info.activation, dtype=torch.float32
        )
        moe = f"moe.{info.layer}"
        out = experts(
            reference[f"{moe}.experts_in"], reference[f"{moe}.top_k_weights"], reference[f"{moe}.top_k_index"]
        )
        want = reference[f"{moe}.experts_out"]
        error = (out - want).norm() / want.norm()
        assert error < 1e-6, f"layer {info.layer}: {error:.1e}"


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_a_whole_model_leaves_no_tensor_over(name: str) -> None:
    checkpoint = Checkpoint(require_checkpoint(name))
    for layer, experts in checkpoint.load_layers(progress=False, weights="packed"):
        assert experts.num_experts == checkpoint.plan(layer).num_experts
    for module in checkpoint.quantized_linears():
        weight = checkpoint.load_linear(module)
        assert weight.qweight.shape == (weight.out_features, weight.in_features * weight.bits // 8)
    left = checkpoint.unconsumed()
    kinds = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight")
    unquantised = [n for n in left if n.endswith("_proj.weight")]
    assert [n for n in left if not n.endswith(kinds) and n not in unquantised] == []
    # Only these two leave attention Linears in floating point.
    assert bool(unquantised) == (
        name in ("ct-mixtral-mixed-int4asym-gateup-int8-down", "gptq-qwen3moe-dynamic-mixed-v1")
    )


def test_describe_of_a_mixed_model() -> None:
    checkpoint = Checkpoint(require_checkpoint("ct-qwen3moe-mixed-int4exp-int8attn-layer0ignored"))
    plain, packed = checkpoint.describe()
    assert (plain.layer, plain.name, plain.num_experts) == (0, "model.layers.0.mlp", 6)
    assert [(p.format, p.bits, p.group_size) for p in plain.projections] == [("bfloat16", 16, None)]
    assert plain.packed_refusal == "layer 0 is in floating point"
    assert plain.packed_bytes == plain.dequantized_bytes == 6 * 3 * 256 * 128 * 2
    (projection,) = packed.projections
    assert (projection.format, projection.bits, projection.group_size) == ("compressed_tensors", 4, 32)
    assert projection.symmetric is True
    # Codes, and a bf16 scale for every 32 of them.
    assert packed.packed_bytes == 6 * 3 * 256 * 128 // 2 + 6 * 3 * 256 * 128 // 32 * 2
    assert packed.packed_refusal is None


def test_describe_of_one_expert_with_two_widths() -> None:
    checkpoint = Checkpoint(require_checkpoint("ct-mixtral-mixed-int4asym-gateup-int8-down"))
    info = checkpoint.describe()[0]
    assert [(p.roles, p.bits, p.group_size, p.symmetric) for p in info.projections] == [
        (("gate", "up"), 4, 32, False),
        (("down",), 8, 128, True),
    ]
    assert (info.activation, info.top_k, info.hidden_size, info.intermediate_size) == ("silu", 2, 128, 256)
    config = checkpoint.moe_config(0)
    assert (config.quant.w13_bits, config.quant.w2_bits, config.quant.symmetric) == (4, 8, False)
