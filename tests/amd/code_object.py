"""Loads an AMD code object into this process's memory, as a loader on a GPU would: segments, relocations, kernel descriptors."""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from amd import parse

R_AMDGPU_RELATIVE64 = 13
S_NOP = 0xBF800000
# Nothing here has caches: these would be all that an instruction-level emulator need not know.
CACHE = re.compile(
    r"(buffer_(inv\w*|wb\w*|gl[01]_inv)|global_(inv|wb|wbinv)|s_dcache_(inv|wb)\w*|s_icache_inv|s_gl1_inv|s_prefetch\w*)$"
)
INSTRUCTION = re.compile(
    r"^\t((?:buffer|global|s_[dip]|s_gl|flat|v_mfma|s_mov_b64)\w*)[^\n/]*// ([0-9A-F]+): ((?:[0-9A-F]{8} ?)+)", re.MULTILINE
)
# What the emulator reads of a FLAT instruction and the hardware does not: the scalar address. 0x7f says that there is none.
NO_ADDRESS = 0x7F << 16
# On RDNA4, the bit by which global instructions differ from flat ones, which it knows on other chips alone: to it, memory is one.
GLOBAL = 1 << 25
# "s_mov_b64 sN, src_shared_base", of which only the upper word says anything, without sN; and what makes it "s_mov_b32 sN+1, ...".
SHARED_BASE, UPPER = 0xBE8001EB, 1 << 16 ^ 1 << 8
# gfx90a's number of this operation, of which it knows gfx942's alone; operands and result lie alike.
MFMA_1K, MFMA = 0x67 << 16, 0x61 << 16


@dataclass(frozen=True)
class Descriptor:
    """The 64 bytes that describe a kernel to the hardware."""

    lds: int
    scratch: int
    kernarg: int
    entry: int  # address
    rsrc2: int
    properties: int

    def user_registers(self, kernarg: int) -> list[int]:
        """The scalar registers that a kernel starts with: the kernel's arguments, and zeros for what it may ask for besides."""
        registers: list[int] = []
        for bit, count in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if self.properties >> bit & 1:
                value = kernarg if bit == 3 else 0
                registers += [value & 0xFFFFFFFF, value >> 32][:count] if count <= 2 else [0] * count
        return registers


class CodeObject:
    """One loaded object; the memory lives as long as it does."""

    def __init__(self, path: Path, disassembly: str, notes: str) -> None:
        self.image = path.read_bytes()
        self.metadata = parse.metadata(notes)
        header = struct.unpack_from("<QQQ", self.image, 24)
        headers, count = header[1], struct.unpack_from("<H", self.image, 56)[0]
        segments = [struct.unpack_from("<IIQQQQQQ", self.image, headers + 56 * i) for i in range(count)]
        size = max(s[3] + s[6] for s in segments if s[0] == 1)
        self.memory = mmap.mmap(-1, size + 4096)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        for kind, _, offset, address, _, held, _, _ in segments:
            if kind == 1:
                self.memory[address : address + held] = self.image[offset : offset + held]
        dynamic = next(s for s in segments if s[0] == 2)
        self._relocate(dynamic)
        self.symbols = self._symbols(dynamic)
        self.silenced = self._silence(disassembly)

    def _entries(self, dynamic: tuple[int, ...]) -> dict[int, int]:
        pairs = struct.iter_unpack("<QQ", self.image[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16])
        return dict(pairs)

    def _relocate(self, dynamic: tuple[int, ...]) -> None:
        entries = self._entries(dynamic)
        for at in range(entries.get(7, 0), entries.get(7, 0) + entries.get(8, 0), 24):
            where, info, addend = struct.unpack_from("<QQq", self.memory, at)
            if info & 0xFFFFFFFF != R_AMDGPU_RELATIVE64:
                raise ValueError(f"relocation of type {info & 0xFFFFFFFF}")
            struct.pack_into("<Q", self.memory, where, self.base + addend)

    def _symbols(self, dynamic: tuple[int, ...]) -> dict[str, int]:
        entries = self._entries(dynamic)
        table, names, hashes = entries[6], entries[5], entries[4]
        found = {}
        for i in range(struct.unpack_from("<II", self.memory, hashes)[1]):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", self.memory, table + 24 * i)
            end = self.memory.find(b"\0", names + name)
            found[self.memory[names + name : end].decode()] = value
        return found

    def _silence(self, disassembly: str) -> int:
        """Cache instructions become no operations (how many is returned), and others say what the emulator wants to hear."""
        count, wave = 0, next(iter(self.metadata.values())).wave
        for name, address, words in INSTRUCTION.findall(disassembly):
            at = int(address, 16)
            if CACHE.match(name):
                for i in range(len(words.split())):
                    struct.pack_into("<I", self.memory, at + 4 * i, S_NOP)
                count += 1
            elif wave == 64 and name.startswith("flat_"):
                self._change(at + 4, lambda word: word | NO_ADDRESS)
            elif len(words.split()) == 3 and name.startswith("flat_"):  # three words: RDNA4
                self._change(at, lambda word: word | GLOBAL)
            elif name == "s_mov_b64" and int(words.split()[0], 16) & ~(0x7F << 16) == SHARED_BASE:
                self._change(at, lambda word: word ^ UPPER)  # N is even
            elif name == "v_mfma_f32_16x16x16bf16_1k":
                self._change(at, lambda word: word ^ MFMA_1K ^ MFMA)
        return count

    def _change(self, at: int, change: Callable[[int], int]) -> None:
        struct.pack_into("<I", self.memory, at, change(struct.unpack_from("<I", self.memory, at)[0]))

    def descriptor(self, kernel: str) -> Descriptor:
        """Of a kernel by its mangled name."""
        at = self.symbols[f"{kernel}.kd"]
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", self.memory, at)
        _, _, rsrc2, properties = struct.unpack_from("<IIIH", self.memory, at + 44)
        return Descriptor(lds, scratch, kernarg, self.base + at + entry, rsrc2, properties)
