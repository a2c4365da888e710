"""Registers what tracing and every device without a compiled kernel need: fake kernels, the reference as fallback, and the rules for
autograd and autocast.

Op names, argument order and results are those of `schemas.inc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _checks as checks
from . import _checks_formats, _checks_moe, _library, reference
from ._autocast import autocast_input, without_autocast

# Kept for the life of the process: a Library that is collected takes its registrations along.
_registrations: list[torch.library.Library] = []


# --- shapes: each checks its arguments and returns empty results ------------------------------------------------------------------


def _unpack(qweight: Tensor, *, format: int = 0, bits: int = 4, in_features: int = -1) -> Tensor:
    m = _checks_formats.check_codes(qweight, format, bits, in_features)
    return qweight.new_empty([*m.batch, m.out_features, m.in_features], dtype=torch.uint8)


def _unpack_zeros(qzeros: Tensor, *, format: int = 0, bits: int = 4, out_features: int = -1) -> Tensor:
    return qzeros.new_empty(
        _checks_formats.check_unpack_zeros(qzeros, format, bits, out_features), dtype=torch.uint8
    )


def _dequantize(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    format: int = 0,
    bits: int = 4,
    in_features: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    m = _checks_formats.check_dequantize(
        qweight,
        scales,
        qzeros,
        g_idx,
        group_size=group_size,
        format=format,
        bits=bits,
        in_features=in_features,
        dtype=dtype,
    )
    return qweight.new_empty([*m.batch, m.out_features, m.in_features], dtype=dtype or scales.dtype)


def _dequantize_out(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    format: int = 0,
    bits: int = 4,
    in_features: int = -1,
    out: Tensor,
) -> None:
    m = _checks_formats.check_dequantize(
        qweight,
        scales,
        qzeros,
        g_idx,
        group_size=group_size,
        format=format,
        bits=bits,
        in_features=in_features,
        dtype=None,
    )
    checks.check_device(qweight, "qweight", out=out)
    checks.check_dtype(out, "out", checks.FLOATS)
    checks.check_out(out, [*m.batch, m.out_features, m.in_features], "[..., O, I]", m.context)


def _repack(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    format: int,
    bits: int = 4,
    in_features: int = -1,
    in_perm: Tensor | None = None,
    out_perm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    m = _checks_formats.check_repack(
        qweight,
        scales,
        qzeros,
        format=format,
        bits=bits,
        in_features=in_features,
        in_perm=in_perm,
        out_perm=out_perm,
    )
    groups = [*m.batch, m.out_features, m.groups]
    return (
        qweight.new_empty(
            [*m.batch, m.out_features, checks.row_bytes(m.in_features, bits)], dtype=torch.uint8
        ),
        scales.new_empty(groups),
        scales.new_empty([0] if qzeros is None else groups, dtype=torch.uint8),
    )


def _repack_out(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    format: int,
    bits: int = 4,
    in_features: int = -1,
    in_perm: Tensor | None = None,
    out_perm: Tensor | None = None,
    out_qweight: Tensor,
    out_scales: Tensor,
    out_qzeros: Tensor | None = None,
) -> None:
    m = _checks_formats.check_repack(
        qweight,
        scales,
        qzeros,
        format=format,
        bits=bits,
        in_features=in_features,
        in_perm=in_perm,
        out_perm=out_perm,
    )
    checks.check_device(
        qweight, "qweight", out_qweight=out_qweight, out_scales=out_scales, out_qzeros=out_qzeros
    )
    _checks_formats.check_repack_out(m, scales, qzeros, out_qweight, out_scales, out_qzeros)


def _prepack(qweight: Tensor, *, layout: int, bits: int = 4) -> Tensor:
    _checks_formats.check_prepack(qweight, layout, bits)
    return qweight.new_empty(qweight.shape)


def _moe_align(
    topk_ids: Tensor, num_experts: int, block_size: int = 1, *, expert_map: Tensor | None = None
) -> tuple[Tensor, ...]:
    _checks_moe.check_moe_align(topk_ids, num_experts, block_size, expert_map)
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    blocks = (slots + num_experts * (block_size - 1) + block_size - 1) // block_size
    return tuple(
        topk_ids.new_empty([n], dtype=torch.int32) for n in (blocks * block_size, blocks, num_experts + 1, 1)
    )


def _grouped_gemm(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    scales: Tensor | None = None,
    qzeros: Tensor | None = None,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    group_size: int = 0,
    bits: int = 4,
    layout: int = 0,
) -> Tensor:
    _checks_moe.check_grouped_gemm(
        x,
        weight,
        expert_offsets,
        scales=scales,
        qzeros=qzeros,
        perm=perm,
        bias=bias,
        group_size=group_size,
        bits=bits,
        layout=layout,
    )
    return x.new_empty([x.shape[0], weight.shape[1]])


def _grouped_gemm_out(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, *, out: Tensor, **options: Any
) -> None:
    want = _grouped_gemm(x, weight, expert_offsets, **options)
    checks.check_device(x, "x", out=out)
    checks.check_dtype(out, "out", (x.dtype,))
    checks.check_out(out, list(want.shape), "[R, N]", f"x {list(x.shape)}, weight {list(weight.shape)}")


def _moe(*args: Any, **options: Any) -> Tensor:
    _checks_moe.check_fused_moe(*args, **options)
    return args[0].new_empty(args[0].shape)


def _moe_out(*args: Any, out: Tensor, **options: Any) -> None:
    _checks_moe.check_fused_moe(*args, **options)
    _checks_moe.check_moe_out(out, args[0])


FAKES: dict[str, Callable[..., Any]] = {
    "unpack": _unpack,
    "unpack_zeros": _unpack_zeros,
    "dequantize": _dequantize,
    "dequantize_out": _dequantize_out,
    "repack": _repack,
    "repack_out": _repack_out,
    "prepack": _prepack,
    "unprepack": _prepack,
    "moe_align": _moe_align,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_out": _grouped_gemm_out,
    "fused_moe": _moe,
    "fused_moe_out": _moe_out,
    "fused_moe_packed": _moe,
    "fused_moe_packed_out": _moe_out,
}


# --- the reference as the kernel of every device that has no compiled one ---------------------------------------------------------


def _reference_kernel(op: str) -> Callable[..., Any]:
    run = getattr(reference, op.removesuffix("_out"))
    check = FAKES[op]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        if op == "moe_align":
            _checks_moe.check_known_ids(args[0], args[1], kwargs.get("expert_map"))
        elif op.startswith("fused_moe"):
            _checks_moe.check_known_ids(args[4], args[1].shape[0], kwargs.get("expert_map"))
        if not op.endswith("_out"):
            with without_autocast(args[0].device):
                return run(*args, **kwargs)
        outs = [
            kwargs.pop(name) for name in ("out", "out_qweight", "out_scales", "out_qzeros") if name in kwargs
        ]
        if op in ("dequantize_out", "fused_moe_out", "fused_moe_packed_out"):
            kwargs["dtype"] = outs[0].dtype
        with without_autocast(args[0].device):
            results = run(*args, **kwargs)
        for out, value in zip(outs, results if isinstance(results, tuple) else (results,), strict=False):
            if out is not None:
                out.copy_(value)
        return None

    return kernel


# --- autograd: inference only -----------------------------------------------------------------------------------------------------

# Functional ops with a floating-point result: forward works on inputs that require grad, backward says why it cannot.
FLOAT_RESULT = ("dequantize", "repack", "grouped_gemm", "fused_moe", "fused_moe_packed")


def _sentence(op: str) -> str:
    return (
        f"int4_emu::{op} is inference only and has no backward: call the model under "
        "torch.no_grad() or torch.inference_mode(), or detach its output"
    )


def refuse_tangents(op: str, tensors: Iterable[Any]) -> None:
    """Forward-mode derivatives (jvp, dual tensors), which would otherwise be dropped without a word."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"int4_emu::{op} is inference only and has no forward-mode derivative: detach its inputs"
            )


def _raise_no_backward(grad: Tensor, shape: list[int], op: int) -> Tensor:
    raise NotImplementedError(_sentence(FLOAT_RESULT[op]))


class _InferenceOnly(torch.autograd.Function):
    """Runs an op below autograd; its backward is an op too, so that tracing a joint graph works and only running it raises."""

    @staticmethod
    def forward(ctx: Any, op: int, run: Callable[[tuple[Tensor, ...]], Any], *tensors: Tensor) -> Any:
        ctx.op, ctx.shapes = op, [list(t.shape) for t in tensors]
        with torch._C._AutoDispatchBelowAutograd():
            return run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = next(g for g in grads if g is not None)
        refuse = torch.ops.int4_emu._no_backward
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(refuse(grad, s, ctx.op) if n else None for s, n in zip(ctx.shapes, needed, strict=True)),
        )


def _autograd_kernel(op: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.int4_emu, op).default
    number = FLOAT_RESULT.index(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        slots: list[Any] = [*args, *kwargs.values()]
        where = [i for i, v in enumerate(slots) if isinstance(v, Tensor)]
        refuse_tangents(op, slots)
        if not (torch.is_grad_enabled() and any(slots[i].requires_grad for i in where)):
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*args, **kwargs)
        if (
            torch._C._are_functorch_transforms_active()
        ):  # grad, vjp, jacrev: no place for a node that refuses later
            raise NotImplementedError(_sentence(op))

        def run(tensors: tuple[Tensor, ...]) -> Any:
            for i, t in zip(where, tensors, strict=True):
                slots[i] = t
            return overload(*slots[: len(args)], **dict(zip(kwargs, slots[len(args) :], strict=True)))

        return _InferenceOnly.apply(number, run, *(slots[i] for i in where))

    return kernel


# --- autocast ---------------------------------------------------------------------------------------------------------------------

LAYERS = ("grouped_gemm", "fused_moe", "fused_moe_packed")
AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")


def _autocast_kernel(op: str, key: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.int4_emu, op).default
    itself = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        x, dtype = autocast_input(x, weight)
        with torch._C._ExcludeDispatchKeyGuard(itself):
            return overload(x, weight, *args, **kwargs).to(dtype)

    return kernel


def register() -> None:
    """Loads the library and completes the registrations; called once by `int4_emu.ops`."""
    _library.is_compiled()  # loads the compiled ops, where there are some
    _library.gpu_architectures()  # registers the GPU kernels, where they were built
    absent = _library.undefined_ops()
    # A library of another version may have defined some of the ops: what it lacks is added.
    library = torch.library.Library(
        "int4_emu", "DEF" if len(absent) == len(_library.schemas()) else "FRAGMENT"
    )
    _registrations.append(library)
    for schema in _library.schemas():
        if schema.partition("(")[0] in absent:
            library.define(schema)
    library.define("_no_backward(Tensor grad, SymInt[] shape, int op) -> Tensor")
    library.impl("_no_backward", _raise_no_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "int4_emu::_no_backward", lambda grad, shape, op: grad.new_empty(shape), lib=library
    )
    for op, fake in FAKES.items():
        library.impl(op, _reference_kernel(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"int4_emu::{op}", fake, lib=library)
        library.impl(
            op, _autograd_kernel(op) if op in FLOAT_RESULT else torch.library.fallthrough_kernel, "Autograd"
        )
    for op in LAYERS:
        for key in AUTOCAST_KEYS:
            library.impl(op, _autocast_kernel(op, key), key)
