"""Every program in examples/ runs by the command that its docstring gives, and says what it should."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What each must print; a new example has a line here.
SAYS = {
    "experts_from_checkpoint.py": r"layer 3: \S+ on \S+ by .*output \[3, 256\] torch\.bfloat16",
    "plain_ops.py": r"16 experts in 0\.89 MiB; relative error .*: \d\.\de-03",
    "transformers_generate.py": r"To be, or not to be[\s\S]*4 MoE layers, \d of them packed",
    "compile_export.py": r"packed: [\d.]+ MiB, the bits of eager mode",
    "vllm_serve.py": r"CAMILLO\.\n[\s\S]*vLLM 0\.32\S*: 64 tokens",
    "expert_parallel.py": r"rank 0 of 2 on \S+: experts .* as in one process",
}
# Run by tests/test_export.py, which goes on with its output: it takes long.
ELSEWHERE = {"compile_export.py"}
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}

pytestmark = pytest.mark.skipif(not EXAMPLES, reason="runs in a source checkout")


def command(path: Path) -> list[str]:
    """The docstring's `Run:` line, by this Python."""
    said = re.search(r"^Run: (.+)$", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
    assert said, f"{path.name} needs a docstring with a line `Run: python examples/{path.name}`"
    program, *arguments = shlex.split(said[1])
    assert program in PROGRAMS and f"examples/{path.name}" in arguments, said[1]
    return PROGRAMS[program] + arguments


def missing(path: Path) -> list[str]:
    """Packages that the example imports, anywhere in it, and that are not installed."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names if find_spec(name) is None)


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_the_example_runs(path: Path) -> None:
    if absent := missing(path):
        pytest.skip(f"not installed: {', '.join(absent)}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command(path), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(SAYS[path.name], done.stdout), done.stdout[-3000:]
