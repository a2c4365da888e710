"""Checkpoints that must not load: each raises one sentence that names what is wrong, before anything is
converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import (
    awq_config,
    compressed_tensors_config,
    gptq_config,
    int32,
    pack_rows,
    random_gptq_layers,
    write_checkpoint,
)
from int4_emu import Checkpoint, CheckpointError

Tensors = dict[str, torch.Tensor]
CONFIG = gptq_config(group_size=16, sym=False)
EXPERT = "model.layers.0.mlp.experts"


def layers(**options: Any) -> Tensors:
    """One GPTQ layer: E = 4, H = 64, I = 32, group_size 16."""
    return random_gptq_layers(0, **options)[0]


def folder_with(
    tmp_path: Path, tensors: Tensors, quantization: dict[str, Any] | None = CONFIG, **config: Any
) -> Path:
    return write_checkpoint(
        tmp_path / "model", tensors, quantization, num_experts=4, hidden_size=64, **config
    )


def load(path: Path, **options: Any) -> None:
    checkpoint = Checkpoint(path, **options)
    for layer in checkpoint.moe_layers:
        checkpoint.load_experts(layer, weights="packed")


def test_the_base_checkpoint_is_good(tmp_path: Path) -> None:
    load(folder_with(tmp_path, layers()))


# --- tensors
# ---------------------------------------------------------------------------------------------------


def _remove(name: str) -> Callable[[Tensors], Any]:
    return lambda t: t.pop(name)


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda t: t.update({name: change(t[name])})


def _rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda t: t.update({new: t.pop(old)})


def _with_value(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        flat = t.clone().flatten()
        flat[index] = value
        return flat.view_as(t)

    return change


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing qweight": (_remove(f"{EXPERT}.3.down_proj.qweight"), "experts.3.down_proj.qweight is missing"),
    "missing scales": (_remove(f"{EXPERT}.2.up_proj.scales"), "experts.2.up_proj.scales is missing"),
    "missing qzeros": (
        _remove(f"{EXPERT}.0.gate_proj.qzeros"),
        "experts.0.gate_proj.qzeros is missing, and the quantization_config does not declare the weight symmetric",
    ),
    "empty qzeros [0]": (
        _set(f"{EXPERT}.0.gate_proj.qzeros", lambda t: t.new_empty(0)),
        r"experts.0.gate_proj.qzeros is empty \[0\], and the quantization_config does not declare",
    ),
    "empty qzeros [C, 0]": (
        _set(f"{EXPERT}.0.gate_proj.qzeros", lambda t: t.new_empty(4, 0)),
        r"experts.0.gate_proj.qzeros is empty \[4, 0\]",
    ),
    "a whole expert missing": (
        lambda t: [t.pop(n) for n in list(t) if ".experts.1." in n],
        r"layer 0: 3 problems: .*experts.1.gate_proj.qweight is missing, .*up_proj.qweight.*down_proj.qweight",
    ),
    "the last expert missing": (
        lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n],
        r"3 problems: .*experts.3.gate_proj.qweight is missing",
    ),
    "misnamed projection": (
        _rename(f"{EXPERT}.0.up_proj.qweight", f"{EXPERT}.0.upp_proj.qweight"),
        "experts.0.up_proj.qweight is missing",
    ),
    "misnamed tensor": (
        _rename(f"{EXPERT}.0.up_proj.scales", f"{EXPERT}.0.up_proj.scale"),
        "experts.0.up_proj.scales is missing",
    ),
    "unknown tensor": (
        lambda t: t.update({f"{EXPERT}.0.up_proj.secret": torch.zeros(1)}),
        r"unknown tensors under the experts: .*experts.0.up_proj.secret \(strict=False ignores them\)",
    ),
    "unknown projection": (
        lambda t: t.update({f"{EXPERT}.0.side_proj.weight": torch.zeros(1)}),
        "unknown tensors under the experts: .*experts.0.side_proj.weight",
    ),
    "fused experts": (
        lambda t: t.update({f"{EXPERT}.gate_up_proj": torch.zeros(4, 64, 64)}),
        r"1 tensors below `experts` do not belong to one numbered expert .*experts.gate_up_proj",
    ),
    "two names for one projection": (
        lambda t: t.update({f"{EXPERT}.0.w1.qweight": torch.zeros(8, 32, dtype=torch.int32)}),
        "expert 0 of layer 0 has two gate projections: .*gate_proj, .*w1",
    ),
    "more experts than configured": (
        lambda t: t.update(
            {
                n.replace("experts.0.", "experts.4."): v.clone()
                for n, v in list(t.items())
                if "experts.0." in n
            }
        ),
        r"layer 0 has experts \[4\], but the model configuration has 4 experts",
    ),
    "half-filled qweight": (
        _set(f"{EXPERT}.1.down_proj.qweight", lambda t: t[:2]),
        r"experts.1.down_proj.scales must be \[C, O\] = \[1, 64\], got \[2, 64\] \(O=64, I=16, group_size=16\)",
    ),
    "scales of another group size": (
        _set(f"{EXPERT}.1.gate_proj.scales", lambda t: t[:2]),
        r"experts.1.gate_proj.scales must be \[C, O\] = \[4, 32\], got \[2, 32\] \(O=32, I=64, group_size=16\)",
    ),
    "zeros of another size": (
        _set(f"{EXPERT}.1.gate_proj.qzeros", lambda t: t[:, :1]),
        r"experts.1.gate_proj.qzeros must be \[C, O/8\] = \[4, 4\], got \[4, 1\]",
    ),
    "transposed square weight is another size": (
        _set(f"{EXPERT}.1.gate_proj.qweight", lambda t: t.T),
        r"experts.1.gate_proj.*must be",
    ),
    "wrong qweight dtype": (
        _set(f"{EXPERT}.1.gate_proj.qweight", lambda t: t.long()),
        r"experts.1.gate_proj.qweight must be int32 \(gptq_v1, 4 bits\), got I64",
    ),
    "wrong scales dtype": (
        _set(f"{EXPERT}.1.gate_proj.scales", lambda t: t.double()),
        r"experts.1.gate_proj.scales must be float16, bfloat16 or float32, got F64",
    ),
    "wrong zeros dtype": (
        _set(f"{EXPERT}.1.gate_proj.qzeros", lambda t: t.to(torch.int16)),
        r"experts.1.gate_proj.qzeros must be int32, got I16",
    ),
    "wrong dimensions": (
        _set(f"{EXPERT}.1.gate_proj.scales", lambda t: t.flatten()),
        r"experts.1.gate_proj.scales must have 2 dimensions \[C, O\], got \[128\]",
    ),
    "NaN scale": (
        _set(f"{EXPERT}.1.gate_proj.scales", _with_value(5, float("nan"))),
        "experts.1.gate_proj: scales must be finite, got 1 NaN or infinite of 128",
    ),
    "infinite scale": (
        _set(f"{EXPERT}.3.down_proj.scales", _with_value(0, float("inf"))),
        "experts.3.down_proj: scales must be finite, got 1 NaN or infinite of 128",
    ),
    # Case 27.
    "g_idx above the groups": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", _with_value(7, 4)),
        r"gate_proj.g_idx must be in \[0, C\) = \[0, 4\), got 4",
    ),
    "negative g_idx": (_set(f"{EXPERT}.1.gate_proj.g_idx", _with_value(0, -1)), r"\[0, 4\), got -1"),
    "huge g_idx": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", _with_value(0, 2**31 - 1)),
        r"\[0, 4\), got 2147483647",
    ),
    "short g_idx": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", lambda t: t[:-1]),
        r"g_idx must be int32 \[I\] = \[64\], got I32 \[63\]",
    ),
    "long g_idx": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", lambda t: torch.cat([t, t[:1]])),
        r"g_idx must be int32 \[I\] = \[64\], got I32 \[65\]",
    ),
    "g_idx int64": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", lambda t: t.long()),
        r"g_idx must be int32 \[I\] = \[64\], got I64 \[64\]",
    ),
    "g_idx float": (
        _set(f"{EXPERT}.1.gate_proj.g_idx", lambda t: t.float()),
        r"g_idx must be int32 \[I\] = \[64\], got F32",
    ),
    # A layer partly quantised, of which the configuration says nothing.
    "one float expert": (
        lambda t: _make_float(t, f"{EXPERT}.2.up_proj"),
        "experts.2.up_proj is in floating point on disk, but the quantization_config declares it quantised",
    ),
}


def _make_float(tensors: Tensors, module: str) -> None:
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        tensors.pop(f"{module}.{suffix}")
    tensors[f"{module}.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_tensors(fault: str, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[fault]
    tensors = layers()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(folder_with(tmp_path, tensors))


def test_unknown_tensors_and_nan_scales_pass_when_not_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = layers()
    tensors[f"{EXPERT}.0.up_proj.secret"] = torch.zeros(1)
    tensors[f"{EXPERT}.1.gate_proj.scales"][0, 0] = float("nan")
    load(folder_with(tmp_path, tensors), strict=False)
    assert "experts.0.up_proj.secret; ignored" in caplog.text


def test_zero_and_denormal_scales_are_fine(tmp_path: Path) -> None:
    tensors = layers()
    tensors[f"{EXPERT}.0.up_proj.scales"][0] = 0
    tensors[f"{EXPERT}.0.up_proj.scales"][1] = 6e-8
    load(folder_with(tmp_path, tensors))


# --- configuration against disk
# ---------------------------------------------------------------------------------


def test_quantised_on_disk_but_ignored_by_the_configuration(tmp_path: Path) -> None:
    config = gptq_config(group_size=16, sym=False, dynamic={r"-:.*experts\.2\..*": {}})
    with pytest.raises(
        CheckpointError,
        match=r"experts.2.gate_proj is quantised on disk, but the quantization_config leaves it",
    ):
        load(folder_with(tmp_path, layers(), config))


def test_float_on_disk_but_declared_quantised(tmp_path: Path) -> None:
    tensors = layers()
    for name in list(tensors):
        if name.endswith("qweight"):
            _make_float(tensors, name.removesuffix(".qweight"))
    with pytest.raises(
        CheckpointError, match=r"gate_proj is in floating point on disk, but .* declares it quantised"
    ):
        load(folder_with(tmp_path, tensors))


def test_quantised_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is quantised on disk, but config.json has no quantization_config"
    ):
        load(folder_with(tmp_path, layers(), None))


def test_attention_in_floating_point_against_the_configuration(tmp_path: Path) -> None:
    tensors = layers()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj is in floating point on disk"):
        Checkpoint(folder_with(tmp_path, tensors)).quantized_linears()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "mish"}, "the experts' activation .* must be one of silu, .* got 'mish'"),
        ({"hidden_act": None}, "the experts' activation .* got None"),
        ({"num_local_experts": 8}, "contradicts itself: num_experts = 4, num_local_experts = 8"),
        ({"hidden_size": 128}, "rows of down must be hidden_size = 128, got 64"),
        ({"moe_intermediate_size": 64}, "columns of down must be moe_intermediate_size = 64, got 32"),
        (
            {"num_experts": "four"},
            "num_experts of the model configuration must be a positive whole number, got 'four'",
        ),
        ({"num_experts": 5}, "experts.4.gate_proj.qweight is missing"),
        ({"swiglu_alpha": 1.7}, "swiglu_alpha needs swiglu_limit"),
        ({"swiglu_limits": [7.0]}, "has swiglu_limits, which no known activation takes"),
        ({"hidden_act": "gelu", "swiglu_limit": 7.0}, "do not fit the activation gelu"),
    ],
)
def test_model_configurations(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    full = {"num_experts": 4, "hidden_size": 64} | config
    with pytest.raises(CheckpointError, match=message):
        load(write_checkpoint(tmp_path, layers(), CONFIG, **full))


def test_unknown_quant_method(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"quant_method must be one of compressed-tensors, gptq, awq, auto-round, quark"
    ):
        Checkpoint(folder_with(tmp_path, layers(), {"quant_method": "bitsandbytes"}))


# --- zero points against the label
# ------------------------------------------------------------------------------


def test_symmetric_file_with_contradicting_zeros(tmp_path: Path) -> None:
    path = folder_with(tmp_path, layers(v1=False, sym=True), gptq_config(group_size=16))
    message = r"qzeros contradicts the configuration: declared symmetric, .* must be 8, but read as gptq_v1 they are 9"
    with pytest.raises(CheckpointError, match=message):
        load(path)
    label = Checkpoint(path, contradicting_zeros="use_label").load_experts(0, weights="packed")
    values = Checkpoint(path, contradicting_zeros="use_values").load_experts(0, weights="packed")
    other = Checkpoint(path, zero_point_format="gptq_v2").load_experts(0, weights="packed")
    assert label.w13_qzeros is None
    assert other.w13_qzeros is None
    assert values.w13_qzeros.unique().tolist() == [9]


def test_contradicting_zeros_is_a_closed_set(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"contradicting_zeros must be raise, use_label or use_values, got 'ignore'"
    ):
        Checkpoint(folder_with(tmp_path, layers()), contradicting_zeros="ignore")


@pytest.mark.parametrize("shape", [None, (0,), (4, 0)], ids=["absent", "[0]", "[C, 0]"])
def test_absent_and_empty_zeros_of_symmetric_weights(shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Case 19: the midpoint, where the configuration says symmetric; and the three forms of a trivial
    g_idx.
    """
    tensors = layers(sym=True)
    whole = Checkpoint(folder_with(tmp_path / "a", tensors, gptq_config(group_size=16))).load_experts(
        0, weights="dequantized"
    )
    for name in list(tensors):
        if name.endswith((".qzeros", ".g_idx")):
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = torch.empty(shape if name.endswith("qzeros") else (0,), dtype=torch.int32)
    path = folder_with(tmp_path / "b", tensors, gptq_config(group_size=16))
    bare = Checkpoint(path).load_experts(0, weights="dequantized")
    assert torch.equal(whole.w13, bare.w13)
    assert torch.equal(whole.w2, bare.w2)


def test_awq_without_zero_point_ignores_what_the_buffer_holds(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.qweight": int32([0x76543210], [0xFEDCBA98]),
        "model.layers.0.self_attn.q_proj.qzeros": int32([0x12345678]),
        "model.layers.0.self_attn.q_proj.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    path = write_checkpoint(tmp_path, tensors, awq_config(zero_point=False))
    assert Checkpoint(path).load_linear("model.layers.0.self_attn.q_proj").qzeros is None


# --- weight_shape
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "columns"),
    [([2, 13], 13), ([2, 16], 16), ([2, 99], 16), ([7, 13], 16), ([13], 16), (None, 16)],
)
def test_weight_shape_drops_padding_and_nothing_else(
    shape: list[int] | None, columns: int, tmp_path: Path
) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.weight_packed": pack_rows(torch.arange(32).view(2, 16) % 16),
        f"{module}.weight_scale": torch.ones(2, 1, dtype=torch.bfloat16),
    }
    if shape is not None:
        tensors[f"{module}.weight_shape"] = torch.tensor(shape)
    weight = Checkpoint(write_checkpoint(tmp_path, tensors, compressed_tensors_config())).load_linear(module)
    assert weight.in_features == columns


def test_an_expert_whose_weight_shape_differs_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    """The other experts' tensors are no business of a rank; what it loads is checked."""
    tensors = {}
    for e in range(4):
        for role, rows, columns in (("gate_proj", 24, 64), ("up_proj", 24, 64), ("down_proj", 64, 24)):
            module = f"{EXPERT}.{e}.{role}"
            tensors[f"{module}.weight_packed"] = pack_rows(torch.zeros(rows, columns, dtype=torch.int64))
            tensors[f"{module}.weight_scale"] = torch.ones(rows, 1, dtype=torch.bfloat16)
            tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns - (e == 2)])
    checkpoint = Checkpoint(folder_with(tmp_path, tensors, compressed_tensors_config()))
    checkpoint.load_experts(0, expert_ids=[0, 1, 3])
    with pytest.raises(
        CheckpointError, match=r"2\.\w+\.weight_shape must say \d+ columns, as in the first expert, got \d+$"
    ):
        checkpoint.load_experts(0, expert_ids=[2])


# --- tensors that whole layers or single experts lack
# -----------------------------------------------------------------------------------------------


def test_a_layer_without_gates_beside_one_with_them(tmp_path: Path) -> None:
    """Without its gates the layer would pass for one whose activation takes none."""
    tensors = {k: v for k, v in layers(layers=2).items() if not ("layers.1." in k and "gate_proj" in k)}
    with pytest.raises(
        CheckpointError, match=r"^no expert of layers 1 has a gate projection, but .* layers 0 have"
    ):
        Checkpoint(folder_with(tmp_path, tensors))


@pytest.mark.parametrize(("role", "rows"), [("gate_proj", 32), ("down_proj", 64)])
def test_a_bias_that_some_experts_lack(role: str, rows: int, tmp_path: Path) -> None:
    biases = {f"{EXPERT}.{e}.{role}.bias": torch.ones(rows) for e in range(4)}
    tensors = layers()
    load(folder_with(tmp_path / "whole", tensors | biases))
    del biases[f"{EXPERT}.2.{role}.bias"]
    path = folder_with(tmp_path / "part", tensors | biases)
    with pytest.raises(
        CheckpointError, match=rf"3 of 4 experts have a \w+ bias; missing are .*2\.{role}\.bias$"
    ):
        Checkpoint(path).describe()
