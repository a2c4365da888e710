"""The picture of a benchmark: time over tokens, and the floors under it. matplotlib is imported when asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ._console import whole_file


def check_plot(path: str) -> None:
    """Refuses before anything is measured what could not be drawn after it.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a suffix that it cannot write.
        FileNotFoundError: the folder does not exist.
    """
    try:
        import matplotlib.backends.backend_agg as agg
    except ImportError:
        raise ImportError('--plot needs matplotlib: pip install "int4_emu[plot]"') from None
    known = sorted(agg.FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise ValueError(
            f"--plot must name a file ending in {', '.join('.' + k for k in known)}, got {path!r}"
        )
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(Path(path).parent))


def plot(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Draws one line per candidate, dotted lines for the floors; written to a temporary name and renamed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in document["results"]:
        by_name.setdefault(row["candidate"], []).append(row)
    for index, (name, rows) in enumerate(by_name.items()):
        tokens, colour = [r["tokens"] for r in rows], f"C{index}"
        axes.plot(tokens, [r["median_s"] * 1e3 for r in rows], "o-", color=colour, label=name)
        if name != "F.linear loop":
            axes.plot(tokens, [r["floor_s"] * 1e3 for r in rows], ":", color=colour, label=f"{name}: floor")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="ms per layer, median",
        title=f"{document['model']}: {document['shape']}",
    )
    axes.set_xticks(sorted({r["tokens"] for r in document["results"]}))
    axes.get_xaxis().set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure_format = Path(path).suffix.lstrip(".").lower()
    with whole_file(path, "wb") as file:
        figure.savefig(file, format=figure_format, dpi=150)
