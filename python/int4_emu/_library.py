"""Loads the compiled op library, or defines the same ops over the PyTorch reference when it is missing or broken.

Importing this never raises and asks no device: `load_error()` says what is wrong, and `torch.ops.int4_emu.*` exist either way.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent
# As in csrc/core/types.h.
_DTYPE_NUMBER = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def schemas() -> list[str]:
    """The op schemas, one string each: the same text that the C++ library registers."""
    return re.findall(r'^OP\("(.*)"\)$', (_PACKAGE / "schemas.inc").read_text(), flags=re.MULTILINE)


def undefined_ops() -> list[str]:
    """Names of the schemas that no library has defined."""
    names = [schema.partition("(")[0] for schema in schemas()]
    return [name for name in names if not torch._C._jit_get_schemas_for_operator(f"int4_emu::{name}")]


def _find() -> Path:
    override = os.environ.get("INT4_EMU_LIBRARY")
    if override:
        return Path(override)
    found = sorted(p for p in _PACKAGE.glob("_C.*") if p.suffix in (".so", ".pyd", ".dylib"))
    if not found:
        raise OSError(
            f"no compiled library _C.*.so in {_PACKAGE} (built with `pip install --no-build-isolation .`?)"
        )
    return found[0]


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """(library, None) or (None, why not). Loading a second copy would crash the process, so this runs once."""
    try:
        path = _find()
        torch.ops.load_library(str(path))
        if absent := undefined_ops():
            raise OSError(
                f"{path} has no op {', '.join(absent)}: it is of another version, or another library"
            )
        return ctypes.CDLL(str(path)), None
    except (OSError, RuntimeError) as error:
        # torch names only the file; what the dynamic linker said is the cause.
        said = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        reason = f"the compiled library did not load under torch {torch.__version__}: {said}"
        if built := _built_for(locals().get("path")):
            reason += f" (built with {built})"
        log.warning("int4_emu: %s; the PyTorch reference backend serves instead", reason)
        return None, reason


@cache
def _load_gpu() -> tuple[ctypes.CDLL | None, str | None]:
    """The GPU kernels, which register themselves under the ops of the first library; needs no GPU to load."""
    if not is_compiled():
        return None, load_error()
    found = sorted(_PACKAGE.glob("_C_gpu.*so"))
    if not found:
        return None, "this build has no GPU kernels (building with INT4_EMU_GPU=1 says why)"
    try:
        torch.ops.load_library(str(found[0]))
        return ctypes.CDLL(str(found[0])), None
    except (OSError, RuntimeError) as error:
        said = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        log.warning("int4_emu: the GPU kernels did not load: %s", said)
        return None, f"the GPU kernels did not load: {said}"


def _built_for(path: Path | None) -> str | None:
    """The build line stored in a library that cannot be loaded, read from its bytes."""
    try:
        match = re.search(rb"torch [0-9][^\0]{1,120}, torch ABI [0-9.]+", path.read_bytes()) if path else None
    except OSError:
        return None
    return match.group().decode(errors="replace") if match else None


def is_compiled() -> bool:
    """Whether the compiled library is in use."""
    return _load()[0] is not None


def load_error() -> str | None:
    """Why the compiled library is not in use; None when it is."""
    return _load()[1]


def _text(name: str, *args: int) -> str | None:
    library = _load()[0]
    if library is None:
        return None
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    value = function(*args)
    return None if value is None else value.decode()


def build_info() -> str | None:
    """Torch, compiler and ABI that the library was built with."""
    return _text("int4_emu_build_info")


def cpu_isa() -> tuple[str | None, str]:
    """(instruction set in use or None, why not the better ones or why the override failed)."""
    if not is_compiled():
        return None, load_error() or ""
    return _text("int4_emu_cpu_isa"), _text("int4_emu_cpu_isa_reasons") or ""


def gpu_architectures() -> tuple[str | None, str | None]:
    """(what the GPU kernels were compiled for, None) or (None, why there are none)."""
    library, reason = _load_gpu()
    if library is None:
        return None, reason
    library.int4_emu_gpu_architectures.restype = ctypes.c_char_p
    return library.int4_emu_gpu_architectures().decode(), None


def gpu_atom(device: int, dtype: torch.dtype) -> tuple[str | None, str]:
    """(instruction family that serves an x of `dtype` on this GPU or None, why not the better ones or any)."""
    library, reason = _load_gpu()
    if library is None:
        return None, reason or ""
    why = ctypes.create_string_buffer(512)
    library.int4_emu_gpu_atom.restype = ctypes.c_char_p
    atom = library.int4_emu_gpu_atom(device, _DTYPE_NUMBER[dtype], why, len(why))
    return None if atom is None else atom.decode(), why.value.decode()


def packed_numerics(dtype: torch.dtype) -> str:
    """How the compiled packed kernels take weights: `exact` (they meet x in fp32) or `rounded` (once to x's dtype, in some
    layouts and numbers of rows)."""
    return _text("int4_emu_packed_numerics", _DTYPE_NUMBER[dtype]) or "exact"
