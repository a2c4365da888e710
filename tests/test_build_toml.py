"""build.toml, the sources for Hugging Face's kernel-builder: known keys, and the files and flags that setup.py compiles."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import update_build_toml

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "build.toml").is_file():
    pytest.skip("runs in a source checkout", allow_module_level=True)
tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read TOML")

BUILD: dict[str, Any] = tomllib.loads((ROOT / "build.toml").read_text())
SECTIONS: dict[str, Any] = BUILD["kernel"]

# The keys of edition 5; it denies others.
GENERAL = {
    "name",
    "version",
    "edition",
    "license",
    "backends",
    "upstream",
    "source",
    "hub",
    "cuda",
    "python-depends",
}
TORCH = {"src", "include", "minver", "maxver", "pyext", "stable-abi", "cxx-flags"}
KERNEL = {"backend", "depends", "src", "include", "cxx-flags"}
OF_BACKEND = {
    "cpu": set(),
    "cuda": {"cuda-capabilities", "cuda-flags", "cuda-minver"},
    "rocm": {"rocm-archs", "hip-flags"},
}


def compiled(files: list[str]) -> list[str]:
    return [f for f in files if f.endswith((".cpp", ".cu"))]


def sections_of(backend: str) -> dict[str, Any]:
    return {name: section for name, section in SECTIONS.items() if section["backend"] == backend}


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """What setup.py defines and would hand to setuptools, for the CPU."""
    import setuptools

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **options: None)
        patch.setattr(sys, "argv", ["setup.py", "build_ext"])
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("INT4_EMU_GPU", "0")
        patch.delenv("INT4_EMU_NATIVE_TESTS", raising=False)
        patch.setenv("MAX_JOBS", os.environ.get("MAX_JOBS", "1"))
        return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture(scope="module")
def build_tools() -> Any:
    sys.path.insert(0, str(ROOT))
    import build_tools

    return build_tools


def test_the_lists_are_up_to_date() -> None:
    text = (ROOT / "build.toml").read_text()
    assert update_build_toml.updated(text) == text, "run python tests/update_build_toml.py"


def test_keys_and_names() -> None:
    assert set(BUILD) == {"general", "torch", "kernel"}
    assert set(BUILD["general"]) <= GENERAL and BUILD["general"]["edition"] == 5
    assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", BUILD["general"]["name"])
    assert set(BUILD["torch"]) <= TORCH and set(BUILD["torch"]["stable-abi"].values()) == {"2.10"}
    for name, section in SECTIONS.items():
        assert KERNEL | OF_BACKEND[section["backend"]] >= set(section) >= {"backend", "depends", "src"}, name
    assert {s["backend"] for s in SECTIONS.values()} == set(BUILD["general"]["backends"])
    # Python's side is stored in torch-ext/<name>.
    assert (ROOT / "torch-ext" / BUILD["general"]["name"].replace("-", "_") / "__init__.py").is_file()


def test_no_file_twice_in_a_variant_and_every_header_is_listed() -> None:
    for backend in OF_BACKEND:
        files = [*BUILD["torch"]["src"], *(f for s in sections_of(backend).values() for f in s["src"])]
        assert sorted(files) == sorted(set(files)), backend
        assert [f for f in files if not (ROOT / f).is_file()] == []
        for file in files:
            for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (ROOT / file).read_text(), re.MULTILINE):
                used = os.path.relpath((ROOT / file).parent / name, ROOT)
                assert used in files, f"{backend}: {file} includes {used}, which is not listed"


def test_the_cpu_variant_compiles_what_setup_compiles(setup: dict[str, Any]) -> None:
    (extension,) = setup["extensions"]
    want = {file: flags for _, files, flags in extension.groups for file in files}
    want |= dict.fromkeys(extension.sources, setup["CXX_FLAGS"])
    listed = compiled(BUILD["torch"]["src"]) + [
        f for s in sections_of("cpu").values() for f in compiled(s["src"])
    ]
    assert sorted(listed) == sorted(want)
    machine = re.compile(r"-m(?!acro)|-O|-fvis|-Wno")
    for section in sections_of("cpu").values():
        for file in compiled(section["src"]):
            given = {f for f in section["cxx-flags"] if machine.match(f)}
            assert given == {f for f in want[file] if machine.match(f)}, file


def test_the_gpu_variants_compile_what_setup_compiles(setup: dict[str, Any], build_tools: Any) -> None:
    atoms = build_tools.gpu_atoms()
    kernels = sorted(p.relative_to(ROOT) for p in (ROOT / "csrc/gpu").glob("*.cu"))
    binding = re.findall(r'"(csrc/torch/\w+_gpu\.cpp)"', (ROOT / "setup.py").read_text())
    assert len(binding) == 2
    for backend, key, flag_key in (
        ("cuda", "cuda-capabilities", "cuda-flags"),
        ("rocm", "rocm-archs", "hip-flags"),
    ):
        sections = sections_of(backend)
        listed = [f for s in sections.values() for f in compiled(s["src"])]
        names = sections[backend][key]
        if backend == "cuda":
            names = [f"sm_{n.replace('.', '')}" for n in names]
        groups = build_tools.gpu_groups(kernels, atoms, names)
        assert sorted(listed) == sorted(
            [*binding, *setup["sources"]("csrc/core"), *(str(f) for _, files in groups for f in files)]
        )
        for section in sections.values():
            defines = build_tools.gpu_defines(atoms, names)
            assert [f for f in section[flag_key] if f.startswith("-DINT4_EMU_")] == defines
        if backend == "rocm":  # each family for the architectures that have it
            for architectures, files in groups[1:]:
                (section,) = [s for s in sections.values() if str(files[0]) in s["src"]]
                assert section[key] == architectures and compiled(section["src"]) == [str(f) for f in files]


def test_the_default_architectures_are_those_of_the_other_builds(build_tools: Any) -> None:
    capabilities = SECTIONS["cuda"]["cuda-capabilities"]
    assert capabilities == [c.replace("+PTX", "") for c in build_tools.CUDA_DEFAULT.split(";")]
    rocm = re.search(r'ARG PYTORCH_ROCM_ARCH="([^"]+)"', (ROOT / "Dockerfile.rocm").read_text())
    assert rocm and SECTIONS["rocm"]["rocm-archs"] == rocm[1].split(";")
