"""The include and import rules of the design, read from the sources themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "python" / "int4_emu"
SOURCE_SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu", ".inc"}
ISA = re.compile(r"(avx2|avx512|amx)")

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="runs in a source checkout")


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (CSRC / folder).rglob("*") if p.suffix in SOURCE_SUFFIXES)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def code(path: Path) -> str:
    """The source without comments, so that a word in prose is no violation."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def is_isa_file(path: Path) -> bool:
    return bool(ISA.search(path.stem))


def local_includes(path: Path) -> Iterator[Path]:
    """Headers of this repository that a file includes, directly or through others."""
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        for name in includes(current):
            for base in (current.parent, CSRC):
                header = (base / name).resolve()
                if header.is_file() and header not in seen:
                    seen.add(header)
                    todo.append(header)
    return iter(sorted(seen))


TORCH = ("torch/", "ATen/", "c10/")
GPU = ("cuda", "hip/", "cub/", "rocprim/", "thrust/")
INTRINSICS = ("immintrin.h", "x86intrin.h", "emmintrin.h", "arm_neon.h", "amxintrin.h")


@pytest.mark.parametrize("path", sources("core"), ids=lambda p: p.name)
def test_core_knows_no_torch_python_gpu_or_intrinsic(path: Path) -> None:
    for name in includes(path):
        assert not name.startswith((*TORCH, *GPU, "pybind11/", "Python.h")), name
        assert name not in INTRINSICS, name
    for header in local_includes(path):
        assert header.is_relative_to(CSRC / "core"), f"{header} is outside core"


@pytest.mark.parametrize("path", sources("cpu"), ids=lambda p: p.name)
def test_cpu_knows_no_torch(path: Path) -> None:
    for name in includes(path):
        assert not name.startswith((*TORCH, *GPU, "pybind11/", "Python.h")), name
    for header in local_includes(path):
        assert header.relative_to(CSRC).parts[0] in ("core", "cpu"), f"{header} is outside core and cpu"


@pytest.mark.parametrize("path", [p for p in sources("cpu") if is_isa_file(p)], ids=lambda p: p.name)
def test_isa_files_include_no_standard_templates(path: Path) -> None:
    """A template compiled with wide instructions becomes a weak symbol that an older CPU may be given."""
    allowed = {*INTRINSICS, "cstdint", "cstddef", "stdint.h", "stddef.h"}
    for file in (path, *local_includes(path)):
        for name in includes(file):
            is_local = any((base / name).is_file() for base in (file.parent, CSRC))
            assert is_local or name in allowed, f"{file.name} includes <{name}>"
    assert "std::vector" not in code(path)
    assert "namespace" in code(path)


def test_intrinsics_only_in_isa_files() -> None:
    for path in sources("cpu"):
        if any(name in INTRINSICS for name in includes(path)):
            assert is_isa_file(path) or path.suffix == ".h", path.name
        if re.search(r"\b_mm(256|512)?_\w+\(", code(path)) and path.suffix == ".cpp":
            assert is_isa_file(path), path.name


@pytest.mark.parametrize("path", sources("gpu") or [None], ids=lambda p: p.name if p else "none yet")
def test_gpu_knows_no_torch_and_one_file_knows_the_vendor(path: Path | None) -> None:
    if path is None:
        pytest.skip("no GPU sources yet")
    for name in includes(path):
        assert not name.startswith(TORCH), name
        assert path.name == "compat.cuh" or not name.startswith(GPU), name
    for header in local_includes(path):
        assert header.relative_to(CSRC).parts[0] in ("core", "gpu"), header
    if path.name != "compat.cuh":
        assert not re.search(r"\b(cuda|hip)[A-Z]\w+", code(path)), "vendor names belong in compat.cuh"


@pytest.mark.parametrize("path", sources("torch"), ids=lambda p: p.name)
def test_torch_folder_uses_the_stable_api_only(path: Path) -> None:
    for name in includes(path):
        if name.startswith(TORCH):
            stable = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/", "torch/headeronly/")
            assert name.startswith(stable), f"{path.name} includes <{name}>"
    assert not re.search(r"__global__|<<<", code(path)), "device code belongs in csrc/gpu"


def test_only_the_torch_folder_includes_torch() -> None:
    for path in CSRC.rglob("*"):
        if path.suffix in SOURCE_SUFFIXES and path.relative_to(CSRC).parts[0] != "torch":
            assert not any(name.startswith(TORCH) for name in includes(path)), path


def test_no_32_bit_products_of_indices() -> None:
    """Rows and experts meet strides in 64 bits: no `int x = a * b`, no cast of a finished product."""
    for path in [*sources("core"), *sources("cpu")]:
        for line in code(path).splitlines():
            assert not re.search(r"static_cast<(std::)?u?int64_t>\(\s*\w+\s*\*\s*\w+\s*\)", line), (
                f"{path.name}: {line}"
            )
            assert not re.search(r"\b(int|unsigned|int32_t)\s+\w*(offset|stride)\w*\s*=", line), (
                f"{path.name}: {line}"
            )


# Python.

MODULES = sorted(p for p in PACKAGE.rglob("*.py"))


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names of the modules that a file imports; relative ones start with int4_emu."""
    package = ["int4_emu", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = ast.walk(tree)
    if top_level_only:
        nodes = (n for s in tree.body if not _is_type_checking(s) for n in _eager(s))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _eager(statement: ast.AST) -> Iterator[ast.AST]:
    """A statement and what runs with it at import: not the bodies of functions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        yield from _eager(child)


def test_torch_ops_namespace_has_two_homes() -> None:
    for path in MODULES:
        if path.name in ("ops.py", "_fake.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert not ast.unparse(node).startswith("torch.ops.int4_emu"), f"{path.name}:{node.lineno}"


def test_formats_import_no_backend() -> None:
    for path in (PACKAGE / "formats").rglob("*.py"):
        bad = {
            n
            for n in imported(path)
            if re.match(r"int4_emu\.(backends|oracle|experts|integrations|cli)\b", n)
        }
        assert not bad, f"{path.name} imports {bad}"


def test_integrations_import_their_hosts_lazily() -> None:
    """Outside integrations no module may import a host at all while it is itself imported."""
    hosts = re.compile(r"(transformers|vllm|accelerate|sglang)(\.|$)")
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] != "integrations":
            bad = {n for n in imported(path, top_level_only=True) if hosts.match(n)}
            assert not bad, f"{path.name} imports {bad} at its top level"
    for path in (PACKAGE / "__init__.py", PACKAGE / "integrations" / "__init__.py"):
        names = imported(path, top_level_only=True)
        assert not any(re.match(r"int4_emu\.integrations\.\w+", n) for n in names), path


def test_lower_layers_do_not_import_upper_ones() -> None:
    """experts -> oracle -> backends -> ops, without a way back."""
    order = ["ops", "backends", "oracle", "experts", "integrations", "cli"]

    def level(name: str) -> int:
        part = name.split(".")[1] if name.startswith("int4_emu.") else ""
        return order.index(part) if part in order else -1

    for path in MODULES:
        own = level("int4_emu." + path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        if own >= 0:
            above = {n for n in imported(path, top_level_only=True) if level(n) > own}
            assert not above, f"{path.name} imports {above}"


def test_no_import_cycles_at_import_time() -> None:
    graph: dict[str, set[str]] = {}
    names = {}
    for path in MODULES:
        parts = ["int4_emu", *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts).removesuffix(".__init__")] = path
    for name, path in names.items():
        graph[name] = {n for n in imported(path, top_level_only=True) if n in names and n != "int4_emu"} - {
            name
        }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_library_logs_and_does_not_print() -> None:
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0].startswith(("cli", "__main__")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            assert not is_print, f"{path.name}:{node.lineno}"


def test_no_pickle_path() -> None:
    """Checkpoints are read by the safetensors library; nothing here can load a pickle."""
    for path in MODULES:
        assert not {"pickle", "cloudpickle", "dill"} & imported(path), path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "pickle.load", "eval", "exec"), path.name


def test_files_stay_small() -> None:
    files = [
        p
        for base in (CSRC, PACKAGE, ROOT / "tests")
        for p in base.rglob("*")
        if p.suffix in SOURCE_SUFFIXES | {".py"}
    ]
    lengths = {p: len(p.read_text().splitlines()) for p in files}
    long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > 450}
    assert not long, long
    assert sorted(lengths.values())[len(lengths) // 2] < 200
