"""Reads what hipcc put into a library: the code objects of every architecture, and the kernels in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED = b"CCOB"
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11


def _sections(elf: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """(name, type, contents, index of the linked section) of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    strings = elf[headers[names][4] :]
    for name, kind, _, _, offset, length, link, *_ in headers:
        text = strings[name : strings.index(b"\0", name)].decode()
        yield text, kind, elf[offset : offset + length] if kind != 8 else b"", link


def code_objects(library: bytes) -> Iterator[tuple[str, bytes]]:
    """(architecture, code object) of each bundle in a library: one bundle for every file that has kernels.

    Raises:
        ValueError: no bundle, or a compressed one.
    """
    fat = b"".join(data for name, _, data, _ in _sections(library) if name == ".hip_fatbin")
    if fat[:4] == _COMPRESSED:
        raise ValueError("the code objects are compressed")
    start = fat.find(_MAGIC)
    if start < 0:
        raise ValueError("no code object")
    while start >= 0:
        (count,) = struct.unpack_from("<Q", fat, start + len(_MAGIC))
        place = start + len(_MAGIC) + 8
        for _ in range(count):
            offset, length, letters = struct.unpack_from("<QQQ", fat, place)
            target = fat[place + 24 : place + 24 + letters].decode()
            place += 24 + letters
            if not target.startswith("host"):
                yield target.rpartition("--")[2], fat[start + offset : start + offset + length]
        start = fat.find(_MAGIC, start + len(_MAGIC))


def kernels(code_object: bytes) -> set[str]:
    """Mangled names of the kernels: each has a descriptor, a symbol that ends in .kd."""
    sections = list(_sections(code_object))
    found = set()
    for _, kind, data, link in sections:
        if kind in (_SHT_SYMTAB, _SHT_DYNSYM):
            strings = sections[link][2]
            for (name,) in struct.iter_unpack("<I20x", data):
                text = strings[name : strings.index(b"\0", name)].decode()
                if text.endswith(".kd"):
                    found.add(text.removesuffix(".kd"))
    return found
