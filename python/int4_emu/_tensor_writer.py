"""Writes safetensors files tensor by tensor: the official library wants a whole file in memory.

The format: 8 bytes little-endian header length, a JSON header with dtype, shape and byte range of each tensor, then the
bytes. Each finished file is opened with the official reader before it counts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .errors import CheckpointError

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
# Bytes handed to one write: a full disk shows within this much.
_PIECE = 64 << 20


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: `make` is called when its turn comes, and what it returns is dropped right after."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        count = self.dtype.itemsize
        for n in self.shape:
            count *= n
        return count


def split_into_shards(tensors: list[OutputTensor], max_bytes: int) -> list[list[OutputTensor]]:
    """Tensors in their order, in as many lists as the limit asks for; none is empty."""
    shards: list[list[OutputTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def write_tensors(path: Path, tensors: list[OutputTensor]) -> Iterator[int]:
    """Writes one file; yields the bytes of each tensor once it is written.

    Raises:
        OSError: the file cannot be written; `filename` is the path.
        CheckpointError: a tensor did not come out as announced.
    """
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian, and this machine is not")
    # Wide types first: every tensor then starts at a multiple of its item size, which the reader's views need.
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in ordered:
        header[t.name] = {
            "dtype": _NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [end, end + t.nbytes],
        }
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for t in ordered:
                value = t.make()
                if value.dtype != t.dtype or tuple(value.shape) != t.shape:
                    raise CheckpointError(
                        f"{t.name} must be {t.dtype} {list(t.shape)}, got {value.dtype} {list(value.shape)}"
                    )
                raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                for start in range(0, t.nbytes, _PIECE):
                    file.write(raw[start : start + _PIECE].data)
                yield t.nbytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    with safe_open(str(path), framework="pt") as written:
        if len(list(written.keys())) != len(tensors):
            raise CheckpointError(f"{path} does not hold the {len(tensors)} tensors that were written")
