"""The kernels of an AMD code object, for comparison with those that the shim compiles and runs.

python tests/native/simt/kernels.py gfx942 OBJECT...     exit status 1 where the sets differ
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

STT_FUNC, SHT_SYMTAB, SHT_DYNSYM = 2, 2, 11


def symbols(path: Path) -> list[tuple[str, int]]:
    """Names and types of a 64-bit little-endian ELF file's symbols.

    Raises:
        ValueError: it is another kind of file.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, start, length, link, _, _, entry in sections:
        if kind not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        names = sections[link][4]
        for at in range(start, start + length, entry):
            name, info = struct.unpack_from("<IB", data, at)
            end = data.index(b"\0", names + name)
            found.append((data[names + name : end].decode(), info & 15))
    return found


def demangled(names: Iterable[str]) -> set[str]:
    """Readable names, as binutils' c++filt spells them."""
    ordered = sorted(set(names))
    done = subprocess.run(["c++filt"], input="\n".join(ordered), capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")) - {""}


def of_code_objects(paths: Iterable[Path]) -> set[str]:
    """Kernels of linked AMD code objects: each has a descriptor, a symbol that ends in .kd."""
    return demangled(name[:-3] for path in paths for name, _ in symbols(path) if name.endswith(".kd"))


def of_program(path: Path) -> set[str]:
    """Kernels that a shim program compiled: functions named so, without launchers, lambdas, and parts that the compiler split off."""
    functions = demangled(name for name, kind in symbols(path) if kind == STT_FUNC and "_kernel" in name)
    whole = {
        name
        for name in functions
        if "int4_emu::gpu::" in name and "{lambda" not in name and "[clone" not in name
    }
    return {n for n in whole if base_name(n).endswith("_kernel") and not base_name(n).startswith("launch_")}


def base_name(name: str) -> str:
    """`void a::(anonymous namespace)::b_kernel<c<1>, d>(e, f)` -> `b_kernel`."""
    text = name.replace("(anonymous namespace)", "{anonymous}")
    head = text.split("(")[0].split("<")[0]
    return head.split("::")[-1].split(" ")[-1]


def difference(ours: set[str], theirs: set[str], where: str) -> list[str]:
    """Lines that say which kernels only one side has; `where` names theirs."""
    return [
        *(f"only {where}: {name}" for name in sorted(theirs - ours)),
        *(f"not {where}: {name}" for name in sorted(ours - theirs)),
    ]


def main() -> int:
    from build import Builder

    arch, *objects = sys.argv[1:]
    ours, theirs = of_program(Builder().program(arch)), of_code_objects(map(Path, objects))
    print(
        "\n".join(
            [
                *difference(ours, theirs, "in the code objects"),
                f"{arch}: {len(ours)} kernels in the shim, {len(theirs)} in the code objects",
            ]
        )
    )
    return int(ours != theirs)


if __name__ == "__main__":
    sys.exit(main())
