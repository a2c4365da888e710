"""The safetensors files of a checkpoint folder, opened strictly: names checked before any open, claims
checked against headers.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ._stacks import Slice, slices_of_stacks
from .errors import CheckpointError

logger = logging.getLogger("int4_emu.checkpoint")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a file's header describes it; `dtype` is None for types that torch may lack (fp8, ...).

    `is_part` says that it is one expert's part of a stored tensor.
    """

    name: str
    shard: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stored_dtype: str
    is_part: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of data, for the types that torch has."""
        return self.numel * (self.dtype.itemsize if self.dtype is not None else 1)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object.

    Raises:
        CheckpointError: missing, unreadable, not JSON, not an object, or a key that occurs twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path.name} holds the key {twice!r} twice")
        return result

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} cannot be read: {error}") from None
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path.name} in {path.parent} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path.name} in {path.parent} is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} in {path.parent} must hold a JSON object, got {type(value).__name__}"
        )
    return value


def check_inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder, where its real path stays inside the folder or its hub cache's blob
    folder.

    A hub cache keeps `models--x/snapshots/<revision>/file` as a link to `models--x/blobs/<hash>`.

    Raises:
        CheckpointError: the link leaves both.
    """
    path = folder / name
    real = Path(os.path.realpath(path))
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(a) for a in allowed):
        raise CheckpointError(f"{name} points to {real}, outside the model folder {root}")
    return path


def _check_shard_name(name: Any) -> str:
    """An index value: a plain base name ending in .safetensors."""
    rule = "must be a plain file name ending in .safetensors inside the model folder"
    if not isinstance(name, str):
        raise CheckpointError(f"weight_map of {INDEX_FILE}: each value {rule}, got {name!r}")
    plain = name == os.path.basename(name) and not set(name) & set("/\\\0:") and not name.startswith(".")
    if not plain or not name.endswith(".safetensors"):
        raise CheckpointError(f"weight_map of {INDEX_FILE}: each value {rule}, got {name!r}")
    return name


def _shard_names(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files to open, and the index's claim (tensor to file) where there is an index."""
    single, index = (folder / SINGLE_FILE), (folder / INDEX_FILE)
    if not os.path.lexists(index):
        if os.path.lexists(single):
            return [SINGLE_FILE], None
        here = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        pickles = [n for n in here if n.endswith(_PICKLE_SUFFIXES)]
        if pickles:
            raise CheckpointError(
                f"{folder} holds {', '.join(pickles[:4])}: pickle files can run code and are never read; "
                f"convert the checkpoint to safetensors"
            )
        raise CheckpointError(f"neither {SINGLE_FILE} nor {INDEX_FILE} is in {folder}")
    check_inside(folder, INDEX_FILE)
    claims = read_json_object(index).get("weight_map")
    if not isinstance(claims, dict) or not claims:
        raise CheckpointError(
            f"{INDEX_FILE} must hold weight_map, an object of tensor names to file names, got {claims!r}"
        )
    names = sorted({_check_shard_name(v) for v in claims.values()})
    if os.path.lexists(single) and SINGLE_FILE not in names:
        raise CheckpointError(
            f"{folder} holds both {SINGLE_FILE} and an {INDEX_FILE} that does not name it: which is meant?"
        )
    missing = [n for n in names if not os.path.exists(folder / n) and not os.path.islink(folder / n)]
    if missing:
        raise CheckpointError(
            f"{INDEX_FILE} names {len(names)} files, of which {', '.join(missing)} missing in {folder}"
        )
    return names, claims


class TensorFiles:
    """All tensors of a checkpoint folder, memory-mapped; nothing is read until it is asked for.

    Args:
        folder: the model folder.
        strict: tensors in a file that the index does not name raise; otherwise they are ignored with a
            warning.
    """

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        self.folder = folder
        names, claims = _shard_names(folder)
        for name in names:
            check_inside(folder, name)
        self._files = {name: _open(folder, name) for name in names}
        self.infos: dict[str, TensorInfo] = {}
        stray: list[str] = []
        twice: list[str] = []
        for shard, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self.infos:
                    twice.append(f"{name} (in {self.infos[name].shard} and {shard})")
                elif claims is not None and name not in claims:
                    stray.append(name)
                else:
                    piece = file.get_slice(name)
                    kind = piece.get_dtype()
                    self.infos[name] = TensorInfo(
                        name, shard, _DTYPES.get(kind), tuple(piece.get_shape()), kind
                    )
        if twice:
            raise CheckpointError(f"duplicate tensors: {listed(twice)}")
        self._check_claims(claims or {})
        self._slices = self._tell_experts_apart()
        if stray:
            message = f"{len(stray)} tensors are in the files but not in {INDEX_FILE}: {listed(stray)}"
            if strict:
                raise CheckpointError(message)
            logger.warning("%s; ignored", message)

    def _check_claims(self, claims: dict[str, str]) -> None:
        wrong = [
            f"{name} (said to be in {shard})"
            for name, shard in claims.items()
            if name not in self.infos or self.infos[name].shard != shard
        ]
        if wrong:
            raise CheckpointError(
                f"{INDEX_FILE} names {len(wrong)} tensors that the files do not hold there: {listed(wrong)}"
            )

    def _tell_experts_apart(self) -> dict[str, Slice]:
        """Replaces stacks of quantised experts in `infos` by their parts, and returns where these lie."""
        stacks = slices_of_stacks((info.name, info.shape) for info in self.infos.values())
        parts = {name: own for found in stacks.values() for name, own in found}
        if twice := sorted(set(parts) & set(self.infos)):
            raise CheckpointError(f"stored by themselves and in one tensor of all experts: {listed(twice)}")
        for stack, found in stacks.items():
            info = self.infos.pop(stack)
            self.infos |= {
                name: replace(info, name=name, shape=own.shape, is_part=True) for name, own in found
            }
        return parts

    @property
    def shards(self) -> tuple[str, ...]:
        """The file names, sorted."""
        return tuple(self._files)

    def get(self, name: str) -> torch.Tensor:
        """A tensor as a view of the mapped file; never write to it."""
        return self._read(name, None)

    def get_slice(self, name: str, cuts: tuple[slice, ...]) -> torch.Tensor:
        """Part of a tensor; only the pages of that part are read."""
        return self._read(name, cuts)

    def _read(self, name: str, cuts: tuple[slice, ...] | None) -> torch.Tensor:
        if name not in self.infos:
            raise CheckpointError(f"tensor {name} is not in {self.folder}")
        file = self._files[self.infos[name].shard]
        own = self._slices.get(name)
        stored, index = (name, cuts) if own is None else (own.stack, (own.index, *(cuts or ())))
        try:
            if index is None:
                tensor: torch.Tensor = file.get_tensor(name)
            else:
                with torch.device(
                    "cpu"
                ):  # a host that builds its model on the meta device would get a part of that
                    tensor = file.get_slice(stored)[index]
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(
                f"tensor {name} in {self.infos[name].shard} cannot be read: {error}"
            ) from None
        return tensor


def _open(folder: Path, name: str) -> Any:
    try:
        return safe_open(str(folder / name), framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing in {folder}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{name} in {folder} is truncated or not a safetensors file: {error}") from None


def listed(items: Iterable[str], limit: int = 8) -> str:
    """The first few items, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
