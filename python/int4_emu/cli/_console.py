"""How the commands print: consoles, tables, sizes, files that appear only when they are whole."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

# A pipe or a file has no width; tables in it should not fold at 80 columns.
_PIPE_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """A console on stdout (or stderr) as it is now; colours only where a terminal shows them."""
    stream = sys.stderr if stderr else sys.stdout
    width = None
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) > 0 else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def say(out: Console, text: str = "", style: str | None = None) -> None:
    """Prints text as it stands: brackets in names and messages are no markup."""
    out.print(Text(text, style=style or ""))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    right: Iterable[str] = (),
) -> Table:
    """A table whose cells fold rather than vanish on a narrow terminal."""
    result = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    for name in columns:
        result.add_column(Text(name), overflow="fold", justify="right" if name in right else "left")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def print_pairs(out: Console, title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """A heading and lines of `name  value`."""
    say(out, title, "bold")
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(min_width=12, max_width=24, overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(f"  {name}"), Text(value))
    out.print(grid)


def size(nbytes: float) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@contextmanager
def whole_file(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[str]]:
    """A file that replaces `path` in one rename when the block ends, and leaves nothing behind when it fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(target.parent))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; give the permissions that a plain open() would have.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
