"""Writes a quantised checkpoint as a plain floating-point one that other programs load by themselves.

Nothing of the size of the model is ever in memory: one tensor at a time is dequantised and appended to its file. Everything
is written into a folder beside the destination and renamed at the end, so that the destination is whole or not there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._output_folder import output_folder
from ._shards import INDEX_FILE, SINGLE_FILE, check_inside
from ._tensor_writer import OutputTensor, split_into_shards, write_tensors
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .formats import QuantScheme, tensor_names
from .projection import FLOAT_DTYPES

logger = logging.getLogger(__name__)

# Model types whose published checkpoints have block_sparse_moe and w1, w3, w2: what transformers (and others) look for,
# whatever names a quantiser has left.
_MIXTRAL_NAMES = ("mixtral", "minimax", "minimax_m2", "phimoe")
_MIXTRAL_LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Model types whose published checkpoints stack all experts in one tensor: transformers reads no others, and would
# leave experts of their own names at random.
_STACKED_MODELS = (
    "aria_text", "gemma4_text", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hy_v4", "hy_v4_vl_text", "inkling_text", "lara_mini", "llama4_text", "minimax_m3_vl_text", "mistral4",
    "openai_privacy_filter", "qwen3_vl_moe_text", "zaya",
)  # fmt: skip
# Describes the quantisation, or holds tensors that are written anew.
_NOT_COPIED = ("config.json", "quantize_config.json", "quantization_config.json", "recipe.yaml", INDEX_FILE)
_COPIED_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_COPIED_NAMES = ("LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Room for headers, the index and the copied files' last blocks.
_SLACK = 1 << 20


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        tensors, nbytes: of the new checkpoint.
        files: names of its safetensors files.
        dequantized: weights that were unpacked.
    """

    tensors: int
    nbytes: int
    files: tuple[str, ...]
    dequantized: int


def convert_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4_000_000_000,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Dequantises every weight and writes a folder that transformers loads without this package.

    Weights are (q - z) * s rounded once to `dtype`, in their original column order; tensors that were in floating point
    are copied as they are. Experts keep one tensor per projection, under the names that the model type is published with.

    Args:
        checkpoint: the opened source.
        out: folder to make; its parent must exist.
        dtype: of the dequantised weights, and the dtype that config.json names: bfloat16, float16 or float32.
        max_shard_bytes: files hold at most this many bytes of tensors (a larger single tensor has its own file).
        force: replaces a model folder that is already there.
        progress: called with (bytes written, bytes in all) after each tensor.

    Returns:
        Counts and sizes.

    Raises:
        CheckpointError: the source is incomplete, contradictory or not quantised, or its model type is published
            with all experts in one tensor.
        FileExistsError: `out` exists (see `force`), or another process is writing it.
        OSError: no space (checked before, and while writing), no permission; nothing is left behind.
        TypeError: a dtype that is not one of the three.
    """
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"dtype must be bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if checkpoint.quantization is None:
        raise CheckpointError(f"{checkpoint.path} has no quantization_config: there is nothing to convert")
    if (kind := checkpoint.model.model_type) in _STACKED_MODELS:
        raise CheckpointError(
            f"convert writes each expert by itself, and transformers reads {kind} with all experts in one tensor: "
            'save_pretrained of int4_emu.from_pretrained(DIR, weights="dequantized") writes that'
        )
    tensors, dequantized = plan_tensors(checkpoint, dtype)
    copies = _files_to_copy(checkpoint.path)
    shards = split_into_shards(tensors, max_shard_bytes)
    total = sum(t.nbytes for t in tensors)
    need = total + sum(path.stat().st_size for path in copies) + _SLACK
    with output_folder(out, source=checkpoint.path, need=need, force=force) as folder:
        files, done = [], 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            files.append(name)
            for nbytes in write_tensors(folder / name, shard):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        if len(shards) > 1:
            names = {t.name: name for name, shard in zip(files, shards, strict=True) for t in shard}
            _write_json(
                folder / INDEX_FILE,
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))},
            )
        for path in copies:
            shutil.copyfile(path, folder / path.name)
        # Last: a folder without config.json is not taken for a model by anybody.
        _write_json(folder / "config.json", plain_config(checkpoint.config, dtype))
    return Conversion(len(tensors), total, tuple(files), dequantized)


def plan_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[list[OutputTensor], int]:
    """(the tensors of the new checkpoint, how many are dequantised), in the order of the source.

    Raises:
        CheckpointError: a layer is incomplete, or two tensors would have one name.
    """
    for layer in checkpoint.moe_layers:
        checkpoint.plan(layer)  # the coverage table: a gap raises here, before anything is written
    schemes = dict(checkpoint.quantized_linears())
    blocks, dropped, joined = [], set[str](), set[str]()
    for layer in checkpoint.moe_layers:
        plan = checkpoint.plan(layer)
        blocks.append(plan.layer.block)
        dropped |= set(plan.unknown)  # only a lenient reader comes this far with any
        schemes |= {p.module: p.scheme for p in plan.projections.values() if p.scheme is not None}
        joined |= {module for (_, role), module in plan.layer.modules.items() if role == "gate_up"}
    renamed = _renamer(checkpoint.model.model_type, blocks)
    # A quantised module's tensors become one weight, where its codes were.
    leaders = {
        f"{module}.{tensor_names(scheme.format).qweight}": module for module, scheme in schemes.items()
    }
    parts = {f"{m}.{suffix}" for m, s in schemes.items() for suffix in tensor_names(s.format).all()}
    tensors: list[OutputTensor] = []
    for name in checkpoint.tensor_names:
        if name in leaders:
            module = leaders[name]
            shape = checkpoint.linear_shape(module)
            source = _Dequantize(checkpoint, module, schemes[module], dtype)
            tensors += _apart(OutputTensor(f"{module}.weight", dtype, shape, source), joined, renamed)
        elif name not in parts and name not in dropped:
            info = checkpoint.tensor_info(name)
            if info.dtype is None:
                raise CheckpointError(f"{name} is {info.stored_dtype}, a type that is not understood")
            whole = OutputTensor(name, info.dtype, info.shape, _Copy(checkpoint, name))
            tensors += _apart(whole, joined, renamed)
    twice = {t.name for t in tensors}
    if len(twice) != len(tensors):
        seen: set[str] = set()
        name = next(t.name for t in tensors if t.name in seen or seen.add(t.name))  # type: ignore[func-returns-value]
        raise CheckpointError(f"two tensors of the checkpoint would both be written as {name}")
    return tensors, len(leaders)


def _apart(
    tensor: OutputTensor, joined: Container[str], renamed: Callable[[str], str]
) -> Iterator[OutputTensor]:
    """The tensor under its published name; of a module that joins gate and up projection, the rows of each: no
    expert is published with both in one, and transformers would leave it at random.
    """
    module, _, suffix = tensor.name.rpartition(".")
    if module not in joined:
        yield replace(tensor, name=renamed(tensor.name))
        return
    experts, half = module.rpartition(".")[0], tensor.shape[0] // 2
    for leaf, rows in (("gate_proj", slice(half)), ("up_proj", slice(half, None))):
        yield replace(
            tensor,
            name=renamed(f"{experts}.{leaf}.{suffix}"),
            shape=(half, *tensor.shape[1:]),
            make=_Rows(tensor.make, rows),
        )


@dataclass(frozen=True)
class _Rows:
    make: Callable[[], Tensor]
    rows: slice

    def __call__(self) -> Tensor:
        return self.make()[self.rows].contiguous()


@dataclass(frozen=True)
class _Copy:
    checkpoint: Checkpoint
    name: str

    def __call__(self) -> Tensor:
        return self.checkpoint.get_tensor(self.name)


@dataclass(frozen=True)
class _Dequantize:
    checkpoint: Checkpoint
    module: str
    scheme: QuantScheme
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return self.checkpoint.dequantize_linear(self.module, self.dtype)


def _renamer(model_type: str, blocks: list[str]) -> Callable[[str], str]:
    """Tensor names as the model type is published; the same names for types without a rule of their own."""
    if model_type not in _MIXTRAL_NAMES:
        return lambda name: name

    def rename(name: str) -> str:
        for block in blocks:
            if name.startswith(f"{block}."):
                rest = name[len(block) + 1 :].split(".")
                if rest[0] == "experts" and len(rest) > 2:
                    rest[2] = _MIXTRAL_LEAVES.get(rest[2], rest[2])
                return ".".join([block.rpartition(".")[0], "block_sparse_moe", *rest])
        return name

    return rename


def plain_config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json without the quantisation, naming the new dtype."""
    named = str(dtype).removeprefix("torch.")
    result = {k: v for k, v in config.items() if k not in _QUANTIZATION_KEYS}
    for key, value in result.items():
        if isinstance(value, dict) and key.endswith("_config"):
            inner = {k: v for k, v in value.items() if k not in _QUANTIZATION_KEYS}
            if "dtype" in inner or "torch_dtype" in inner:
                inner = {k: v for k, v in inner.items() if k != "torch_dtype"} | {"dtype": named}
            result[key] = inner
    # transformers 5 writes `dtype` and still reads `torch_dtype`, which older releases need.
    return result | {"dtype": named, "torch_dtype": named}


def _files_to_copy(folder: Path) -> list[Path]:
    """Tokenizer, generation settings, licence: small files beside the weights."""
    found = []
    for path in sorted(folder.iterdir()):
        wanted = path.name in _COPIED_NAMES or path.suffix in _COPIED_SUFFIXES
        if wanted and path.name not in _NOT_COPIED and not path.name.startswith(".") and path.is_file():
            found.append(check_inside(folder, path.name))
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
