"""MoE layers of other libraries on a CPU, over the weights of a `Problem`. Each maker raises ImportError or ValueError with its reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from int4_emu._library import cpu_isa
from int4_emu.cli._bench_layers import Batch, Problem, linear_loop

Run = Callable[[Batch], Tensor]


def _folder(package: str) -> Path:
    """Where a package lies; it is not imported: only its compiled library is wanted."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _pack_int4(problem: Problem) -> list[list[tuple[Tensor, Tensor]]]:
    """For w13 and w2, each expert's codes as torch's kernel wants them and scale and zero [C, O, 2]: (q - 8) * scale + zero."""
    sides: list[list[tuple[Tensor, Tensor]]] = []
    for q, s, z in zip(problem.codes, problem.scales, problem.zeros, strict=True):
        side = []
        for e in range(q.shape[0]):
            codes = torch.stack((q[e] & 15, q[e] >> 4), -1).flatten(1).int()
            zero = torch.zeros_like(s[e]) if z is None else (8 - z[e].float()) * s[e].float()
            both = torch.stack((s[e], zero.to(s.dtype)), -1).transpose(0, 1).contiguous()
            side.append((torch._convert_weight_to_int4pack_for_cpu(codes, 1), both.to(problem.dtype)))
        sides.append(side)
    return sides


def int4pack_loop(problem: Problem) -> Run:
    """torch's own int4 product, one expert that was hit after another."""
    (w13, w2), group = _pack_int4(problem), problem.shape.group_size

    def run(batch: Batch) -> Tensor:
        out = torch.zeros_like(batch.x)
        for e in batch.topk_ids.unique().tolist():
            token, slot = (batch.topk_ids == e).nonzero(as_tuple=True)
            gate, up = torch._weight_int4pack_mm_for_cpu(batch.x[token], w13[e][0], group, w13[e][1]).chunk(
                2, -1
            )
            y = torch._weight_int4pack_mm_for_cpu(F.silu(gate) * up, w2[e][0], group, w2[e][1])
            out.index_add_(0, token, y * batch.topk_weights[token, slot].unsqueeze(1).to(y.dtype))
        return out

    return run


def grouped_mm(problem: Problem) -> Run:
    """torch._grouped_mm twice over rows sorted by expert."""
    assert problem.w13 is not None
    assert problem.w2 is not None
    w13, w2 = problem.w13.transpose(1, 2), problem.w2.transpose(1, 2)
    experts = torch.arange(problem.shape.num_experts, dtype=torch.int32)
    top_k = problem.shape.top_k

    def run(batch: Batch) -> Tensor:
        owners, order = batch.topk_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(owners, experts, right=True).to(torch.int32)
        gate, up = torch._grouped_mm(batch.x[order // top_k], w13, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).view_as(batch.topk_ids)
        return (y[rows].float() * batch.topk_weights.unsqueeze(-1)).sum(1).to(y.dtype)

    return run


def _vllm_library() -> str:
    """Loads vLLM's kernels for this machine; returns the name it gives to its best ones."""
    isa = cpu_isa()[0]
    name = {"amx": "_C", "avx512": "_C_AVX512"}.get(str(isa), "_C_AVX2")
    if isa == "amx":
        torch.cpu._init_amx()
    torch.ops.load_library(str(_folder("vllm") / f"{name}.abi3.so"))
    return "amx" if isa == "amx" else "vec"


def vllm_bf16(problem: Problem) -> Run:
    """vLLM's fused layer over weights in the activations' type."""
    isa = _vllm_library()
    assert problem.w13 is not None
    assert problem.w2 is not None
    w13, w2 = torch.empty_like(problem.w13), torch.empty_like(problem.w2)
    torch.ops._C.prepack_moe_weight(problem.w13, w13, isa)
    torch.ops._C.prepack_moe_weight(problem.w2, w2, isa)
    problem.w13 = problem.w2 = None

    def run(batch: Batch) -> Tensor:
        out = torch.empty_like(batch.x)
        torch.ops._C.cpu_fused_moe(
            out, batch.x, w13, w2, None, None, batch.topk_weights, batch.topk_ids, False, "silu", isa
        )
        return out

    return run


def _words(q: Tensor) -> Tensor:
    """Canonical codes [E, O, I / 2] as GPTQ stores them, int32 [E, I / 8, O]."""
    return q.view(torch.int32).transpose(1, 2).contiguous()


def vllm_w4a8(problem: Problem) -> Run:
    """vLLM's and SGLang's int4 layer; activations are rounded to int8."""
    _vllm_library()
    if not hasattr(torch.ops._C, "fused_experts_cpu"):
        raise ValueError("vLLM has it for AMX alone")
    sides = []
    for q, s, z in zip(problem.codes, problem.scales, problem.zeros, strict=True):
        # GPTQ's old zero points are stored less one.
        true = torch.full_like(s, 8, dtype=torch.int32) if z is None else z.int()
        nibbles = (true - 1).transpose(1, 2).unflatten(2, (-1, 8)).contiguous()
        zeros = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1).to(torch.int32)
        sides.append(
            torch.ops._C.convert_weight_packed_scale_zp(_words(q), zeros, s.transpose(1, 2).contiguous(), 1)
        )
    (w13, z13, s13), (w2, z2, s2) = sides

    def run(batch: Batch) -> Tensor:
        out = torch.empty_like(batch.x)
        torch.ops._C.fused_experts_cpu(
            out, batch.x, w13, w2, batch.topk_weights, batch.topk_ids, 3, s13, s2, z13, z2,
            None, None, None, None, None, None, True,
        )  # fmt: skip
        return out

    return run


def _kt(problem: Problem, kind: dict[str, str], sides: list[list[int]], scales: list[list[int]]) -> Run:
    """A layer of kt-kernel over pointers to each expert's gate, up and down."""
    isa = str(cpu_isa()[0])
    variant = {"amx": "amx", "avx512": "avx512_bf16"}.get(isa, "avx2")
    found = sorted(_folder("kt_kernel").glob(f"_kt_kernel_ext_{variant}.*.so"))
    if not found:
        raise ImportError(f"kt_kernel has no library for {variant} and this Python")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", found[0])
    assert spec is not None
    assert spec.loader is not None
    library: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    pool = library.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map = 1, [0]
    pool.subpool_thread_count = [torch.get_num_threads()]
    infer = library.CPUInfer(pool)
    shape = problem.shape
    mask = torch.zeros(shape.num_experts, dtype=torch.bool)
    config = library.moe.MOEConfig(
        shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size, mask.data_ptr()
    )
    config.pool, config.max_len = infer.backend_, 1024
    config.gate_projs, config.up_projs, config.down_projs = ([side] for side in sides)
    config.gate_scales, config.up_scales, config.down_scales = ([side] for side in scales)
    if scales[0][0]:
        config.quant_config.bits, config.quant_config.zero_point = 4, False
        config.quant_config.group_size = shape.group_size
    moe = getattr(library.moe, kind.get(isa, kind["avx2"]))(config)
    order = torch.arange(shape.num_experts, dtype=torch.int64)
    infer.submit(moe.load_weights_task(order.data_ptr()))
    infer.sync()

    def run(batch: Batch, keep: Any = (mask, order, problem.codes, problem.scales)) -> Tensor:
        count, ids = torch.tensor([batch.x.shape[0]], dtype=torch.int32), batch.topk_ids.long()
        out = torch.empty_like(batch.x)
        infer.submit(
            moe.forward_task(
                count.data_ptr(), shape.top_k, ids.data_ptr(), batch.topk_weights.data_ptr(), batch.x.data_ptr(), out.data_ptr(),
                False,
            )
        )  # fmt: skip
        infer.sync()
        return out

    return run


def _halves(t: Tensor) -> list[list[int]]:
    """Pointers to each expert's gate and up rows."""
    half = t.shape[1] // 2
    return [[t[e].data_ptr() for e in range(t.shape[0])], [t[e, half:].data_ptr() for e in range(t.shape[0])]]


def _all(t: Tensor) -> list[int]:
    return [t[e].data_ptr() for e in range(t.shape[0])]


def kt_int4(problem: Problem) -> Run:
    """kt-kernel's layer over symmetric int4 groups as the checkpoint has them."""
    if problem.zeros[0] is not None:
        raise ValueError("kt-kernel reads symmetric weights alone")
    kind = {"amx": "AMXInt4_KGroup_MOE", "avx512": "AMXInt4_KGroup_MOE", "avx2": "AVX2RawInt4_MOE"}
    (q13, q2), (s13, s2) = problem.codes, problem.scales
    return _kt(problem, kind, [*_halves(q13), _all(q2)], [*_halves(s13), _all(s2)])


def kt_bf16(problem: Problem) -> Run:
    """kt-kernel's layer over bf16 weights."""
    assert problem.w13 is not None
    assert problem.w2 is not None
    kind = {"amx": "AMXBF16_MOE", "avx512": "AMXBF16_MOE", "avx2": "AVX2BF16_MOE"}
    none = [[0] * problem.shape.num_experts] * 3
    run = _kt(problem, kind, [*_halves(problem.w13), _all(problem.w2)], none)
    problem.w13 = problem.w2 = None
    return run


# Name -> (maker, whether it needs dequantised weights).
PEERS: dict[str, tuple[Callable[[Problem], Run], bool]] = {
    "torch int4pack loop": (int4pack_loop, False),
    "vLLM W4A8": (vllm_w4a8, False),
    "kt-kernel int4": (kt_int4, False),
    "torch linear loop": (linear_loop, True),
    "torch grouped_mm": (grouped_mm, True),
    "vLLM bf16": (vllm_bf16, True),
    "kt-kernel bf16": (kt_bf16, True),
}
