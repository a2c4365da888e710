"""Inference only: forward works on inputs that require grad; backward raises and never yields a silent None."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from layers import make_layer

pytestmark = pytest.mark.usefixtures("poison")


def assert_backward_raises(result: torch.Tensor, leaf: torch.Tensor) -> None:
    assert result.requires_grad, "a result that forgets its gradient would train silently with None"
    with pytest.raises(RuntimeError, match=r"(?i)backward|inference|gradient|derivative"):
        result.float().sum().backward()
    assert leaf.grad is None


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("leaf", ["x", "topk_weights"])
def test_moe(compiled: ModuleType, packed: bool, leaf: str, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    run = layer.run_packed if packed else layer.run_dense
    want = run(compiled)
    tensor = getattr(layer, leaf).clone().requires_grad_()
    tracked = layer.with_(**{leaf: tensor})
    got = (tracked.run_packed if packed else tracked.run_dense)(compiled)
    assert torch.equal(got, want)
    assert_backward_raises(got, tensor)


def test_dense_weights_as_parameters(compiled: ModuleType, rng: np.random.Generator) -> None:
    """A host's nn.Parameters require grad by default, and models are called without no_grad."""
    layer = make_layer(rng)
    w13, w2 = (torch.nn.Parameter(w) for w in layer.dense_weights())
    got = compiled.fused_moe(layer.x, w13, w2, layer.topk_weights, layer.topk_ids, **layer.options)
    assert_backward_raises(got, w13)


def test_scales_require_grad(compiled: ModuleType, rng: np.random.Generator) -> None:
    w = make_layer(rng, dtype=torch.float32).w13
    scales = w.scales.clone().requires_grad_()
    got = compiled.dequantize(w.qweight, scales, w.qzeros, group_size=w.group_size)
    assert_backward_raises(got, scales)


def test_grouped_gemm(compiled: ModuleType, rng: np.random.Generator) -> None:
    layer = make_layer(rng, tokens=5)
    x = layer.x.clone().requires_grad_()
    w = layer.w13
    offsets = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    got = compiled.grouped_gemm(
        x, w.qweight, offsets, scales=w.scales, qzeros=w.qzeros, group_size=w.group_size
    )
    assert_backward_raises(got, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_grad_mode(compiled: ModuleType, mode: type, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    with mode():
        got = layer.with_(x=layer.x.clone().requires_grad_()).run_packed(compiled)
    assert not got.requires_grad and torch.equal(got, layer.run_packed(compiled))


def test_earlier_layers_see_the_error_not_none(compiled: ModuleType, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    before = torch.nn.Linear(64, 64)
    got = layer.with_(x=before(layer.x)).run_packed(compiled)
    with pytest.raises(RuntimeError):
        got.sum().backward()
    assert before.weight.grad is None
