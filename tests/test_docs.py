"""The documents are true: schemas, names, variables, links, targets and commands are compared with the sources."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

import int4_emu
from int4_emu._library import schemas
from int4_emu.cli import COMMANDS, main
from int4_emu.cli.report import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "csrc/gpu/README.md"]
REQUIRED_LIST = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/design.md",
    "docs/api.md",
]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="runs in a source checkout")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_fences(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """A document without fenced blocks and code spans, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", without_fences(text))


@pytest.mark.parametrize("name", REQUIRED_LIST)
def test_the_document_is_there(name: str) -> None:
    assert len(read(name)) > 500
    assert (ROOT / "LICENSE").is_file()


# The API reference.


@pytest.mark.parametrize("schema", schemas(), ids=lambda s: s.partition("(")[0])
def test_api_holds_every_schema(schema: str) -> None:
    lines = read("docs/api.md").splitlines()
    assert lines.count(schema) == 1, f"docs/api.md must hold this line once:\n{schema}"


def test_api_holds_no_other_schema() -> None:
    shown = [line for line in read("docs/api.md").splitlines() if re.match(r"\w+\(Tensor .* -> ", line)]
    assert sorted(shown) == sorted(schemas())


def test_api_names_every_public_name() -> None:
    prose = without_fences(read("docs/api.md"))
    spans = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    missing = set(int4_emu.__all__) - spans
    assert not missing


@pytest.mark.parametrize(
    "kind",
    [int4_emu.Format, int4_emu.Activation, int4_emu.Layout, int4_emu.W13Order],
    ids=lambda k: k.__name__,
)
def test_api_names_every_member_with_its_number(kind: type[IntEnum]) -> None:
    section = read("docs/api.md").partition(f"**`{kind.__name__}`**")[2].partition("**`")[0]
    for member in kind:
        number = rf"`{member.name}`( =|\s*\|) {member.value}\b"
        assert re.search(number, section), f"{kind.__name__}.{member.name} = {member.value}"


def test_formats_page_names_every_format() -> None:
    rows = "\n".join(line for line in read("docs/formats.md").splitlines() if line.startswith("| `"))
    assert not [f.name for f in int4_emu.Format if f"`{f.name}`" not in rows]


# Environment variables.


def variables_of_package() -> set[str]:
    """INT4_EMU_* in quotes in Python, C++ and the build; a name that C++ uses bare is a macro and no variable."""
    quoted, bare = set(), set()
    for path in [ROOT / "setup.py", ROOT / "build_tools.py", *(ROOT / "python").rglob("*.py")]:
        quoted |= set(re.findall(r"""["'](INT4_EMU_[A-Z0-9_]+)["']""", path.read_text(encoding="utf-8")))
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".hpp", ".cpp", ".cu", ".cuh"):
            code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
            quoted |= set(re.findall(r'getenv\(\s*"(\w+)"', code))
            bare |= set(re.findall(r"\bINT4_EMU_[A-Z0-9_]+", re.sub(r'"[^"\n]*"', "", code)))
    return {name for name in quoted if name.startswith("INT4_EMU_")} - bare


def variables_of_tests() -> set[str]:
    """Those that the tests read; what they only set for others does not count."""
    reading = re.compile(r"""environ(?:\.get\(|\[)["'](INT4_EMU_[A-Z0-9_]+)["']""")
    return {
        n
        for path in (ROOT / "tests").rglob("*.py")
        for n in reading.findall(path.read_text(encoding="utf-8"))
    }


def table_variables() -> list[str]:
    section = read("README.md").partition("## Environment variables")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)


def test_readme_lists_the_variables_that_are_read() -> None:
    ours = [name for name in table_variables() if name.startswith("INT4_EMU_")]
    assert len(ours) == len(set(ours))
    assert set(ours) == variables_of_package() | variables_of_tests()
    assert len(ours) <= 10


def test_the_report_knows_the_variables_of_the_package() -> None:
    assert set(ENVIRONMENT) == variables_of_package()


# Links, targets, commands.


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = without_fences(path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = path if not name else (path.parent / name).resolve()
        assert linked.exists(), f"{path.name} links to {target}"
        assert linked.is_relative_to(ROOT), f"{path.name} links to {target}, outside the repository"
        if anchor:
            assert anchor in anchors(linked), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_in_code_spans_exist(path: Path) -> None:
    """A path with a folder of this repository in front names a file."""
    text = without_fences(path.read_text(encoding="utf-8"))
    for name in re.findall(r"`((?:csrc|python|tests|docs|cmake|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_make_targets_exist() -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), flags=re.MULTILINE))
    first_screen = read("README.md").partition("\n## ")[0]
    assert {"run", "test", "lint", "bench"} <= set(
        re.findall(r"^make ([\w-]+)", first_screen, flags=re.MULTILINE)
    )
    for path in DOCUMENTS:
        code = "\n".join(
            re.findall(r"```.*?```|`[^`\n]+`", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        )
        named = set(re.findall(r"(?<![\w-])make ([a-z][\w-]*)", code))
        assert named <= known, f"{path.name} names {named - known}"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_help(command: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([command, "--help"]) == 0
    assert f"int4-emu {command}" in out.getvalue()
    assert f"`{command}`" in read("README.md")


def test_options_in_documents_exist() -> None:
    """Every --option on a line that calls int4-emu belongs to that command."""
    for path in DOCUMENTS:
        for command, rest in re.findall(r"int4-emu (\w+)([^\n`#]*)", path.read_text(encoding="utf-8")):
            options = re.findall(r"--[a-z][\w-]*", rest)
            if not options:
                continue
            assert command in COMMANDS, f"{path.name}: int4-emu {command}{rest}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                main([command, "--help"])
            missing = [o for o in options if o not in out.getvalue()]
            assert not missing, f"{path.name}: int4-emu {command} has no {', '.join(missing)}"


def test_changelog_has_the_version() -> None:
    version = re.search(r'^version = "([^"]+)"', read("pyproject.toml"), flags=re.MULTILINE)
    assert version
    assert re.search(rf"^## {re.escape(version[1])}\b", read("CHANGELOG.md"), flags=re.MULTILINE)


# Size.


def test_committed_data_stay_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "tests/data", "python/int4_emu/data"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    if not names:
        pytest.skip("not a git checkout with these files")
    assert any("bard" in name for name in names), "the embedded model is committed"
    assert sum((ROOT / name).stat().st_size for name in names) < 12_000_000
