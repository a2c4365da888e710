"""Writes the file lists of build.toml anew, after a source file has come, gone or changed its name: python tests/update_build_toml.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import build_tools  # noqa: E402


def found(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def lists() -> dict[str, list[str]]:
    """Section to its files."""
    atoms = build_tools.gpu_atoms()
    binding, core = found("csrc/torch/*.cpp"), found("csrc/core/*.cpp")
    own = [f"csrc/torch/{name}.cpp" for name in ("library", "device_cpu", "library_gpu", "device_gpu")]
    isa = {re.sub(".*tile_", "", f)[:-4]: f for f in found("csrc/cpu/tile_a*.cpp")}
    family: dict[str, list[str]] = {}
    for file in found("csrc/gpu/*.cu"):
        atom = build_tools.atom_of(Path(file), atoms)
        family.setdefault(atom.name if atom else "", []).append(file)
    everywhere = family[""] + family.get("fma", [])
    gpu = [*own[2:], *core, *sorted(everywhere)]
    headers = found("csrc/gpu/*.h", "csrc/gpu/*.cuh")
    sections = {
        "torch": [
            "python/int4_emu/schemas.inc", *found("csrc/torch/*.h", "csrc/torch/*.inc"),
            *(f for f in binding if f not in own), *found("csrc/core/*.h"),
        ],
        "kernel.cpu": [
            *own[:2], *core, *(f for f in found("csrc/cpu/*.cpp") if f not in isa.values()), *found("csrc/cpu/*.h"),
        ],
        "kernel.cuda": [*gpu, *(f for a in atoms if a.vendor == "cuda" for f in family.get(a.name, [])), *headers],
        "kernel.rocm": [*gpu, *headers],
    }  # fmt: skip
    sections |= {f"kernel.cpu_{name}": [file] for name, file in isa.items()}
    return sections | {f"kernel.rocm_{a.name}": family.get(a.name, []) for a in atoms if a.vendor == "hip"}


def updated(text: str) -> str:
    """The text of build.toml with its lists as the folders are."""
    for section, files in lists().items():
        block = "src = [\n" + "".join(f'  "{f}",\n' for f in files) + "]"
        text, count = re.subn(
            rf"(^\[{re.escape(section)}\]\n(?:(?!\[).*\n)*?)src = \[\n[^\]]*\]",
            lambda m, block=block: m[1] + block,
            text,
            flags=re.MULTILINE,
        )
        if count != 1:
            raise SystemExit(f"build.toml has no section [{section}] with a list `src`: write it by hand")
    return text


if __name__ == "__main__":
    path = ROOT / "build.toml"
    path.write_text(updated(path.read_text()))
