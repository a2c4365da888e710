"""tinygrad's emulator of AMD instructions, from a checkout's path, and what must be mended of it before it runs compilers' code."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Where a block's local memory lies for generic pointers: its upper word is all that they hold of it.
LOCAL_BASE = 0x5000 << 32
LOCAL_BYTES = 160 << 10
# The emulator reads local memory for the lanes that are switched off too, at whatever address their registers hold.
REACH = (1 << 32) + (1 << 17)
SHARED_BASE = 235  # the operand that names that word
MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x4000, 0x100000


def load_emulator(path: Path) -> Callable[..., int]:
    """Its run_asm, after some corrections: a 16-bit load at an odd address reads both bytes there, as a GPU does; a matrix product may
    start from the constant 0; an atomic returns the old value where RDNA3's bit for that has another name; and local memory has an
    address.
    """
    sys.path.insert(0, str(path))
    emulator, pseudocode = (importlib.import_module(f"test.mockgpu.amd.{name}") for name in ("emu", "pcode"))
    dtypes, load = pseudocode.dtypes, pseudocode.Parser._handle_mem_load

    def unaligned(self: Any, address: Any, dtype: Any) -> Any:
        if dtype not in (dtypes.uint16, dtypes.int16):
            return load(self, address, dtype)
        return (load(self, address, dtypes.uint32) & 0xFFFF).cast(dtype)

    pseudocode.Parser._handle_mem_load = unaligned
    wmma = emulator._compile_wmma
    emulator._compile_wmma = lambda inst, context: wmma(inst, _ZeroSums(context, type(inst).src2))
    attribute = emulator._iattr
    emulator._iattr = lambda inst, name, *default: (
        _returns(inst) if name == "glc" else attribute(inst, name, *default)
    )
    return _with_local_address(emulator)


def _returns(inst: Any) -> int:
    """Whether an atomic returns what was there: glc on RDNA3, sc0 on CDNA, the lowest bit of th on RDNA4."""
    bits = [getattr(inst, name, None) or 0 for name in ("glc", "sc0", "th")]
    return int(bool(bits[0] or bits[1] or bits[2] & 1))


class _ZeroSums:
    """A compiler's context in which a WMMA's third operand may be the constant 0, for which the emulator reads register 128."""

    def __init__(self, context: Any, field: Any) -> None:
        self._context, self._field, self._operand = context, field, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def inst_field(self, field: Any) -> Any:
        value = self._context.inst_field(field)
        if field is self._field:
            self._operand = value
        return value

    def rvgpr_dyn(self, register: Any, lane: Any, *rest: Any) -> Any:
        value = self._context.rvgpr_dyn(register, lane, *rest)
        if self._operand is None or self._operand not in register.toposort():
            return value
        return (self._operand >= 256).where(value, value ^ value)


def _with_local_address(emulator: Any) -> Callable[..., int]:
    """run_asm with local memory at LOCAL_BASE, and every wave told so."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
    wanted = (
        ctypes.c_void_p(LOCAL_BASE),
        ctypes.c_size_t(REACH),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags,
        -1,
    )
    if libc.mmap(*wanted, ctypes.c_long(0)) != LOCAL_BASE:
        raise OSError(ctypes.get_errno(), f"no memory at {LOCAL_BASE:#x}")
    buffer, start, run_asm = emulator.Buffer, emulator._init_wave, emulator.run_asm

    def start_wave(*arguments: Any) -> Any:
        wave = start(*arguments)
        wave._write_sgpr(SHARED_BASE, LOCAL_BASE >> 32)
        return wave

    def run(*arguments: Any) -> int:
        def first_is_local(device: str, size: int, dtype: Any, options: Any = None) -> Any:
            if options is not None:
                return buffer(device, size, dtype, options=options)
            emulator.Buffer = buffer
            return buffer(device, size, dtype, options=emulator.BufferSpec(external_ptr=LOCAL_BASE))

        ctypes.memset(LOCAL_BASE, 0, LOCAL_BYTES)
        emulator.Buffer = first_is_local
        result: int = run_asm(*arguments)
        return result

    emulator._init_wave = start_wave
    return run
