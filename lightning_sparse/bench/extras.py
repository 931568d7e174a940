"""Tables and plots of the benchmarks, and their optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def need(package: str, use: str, *, module: str | None = None) -> Any:
    """Import an optional module.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ValueError(f"{use} needs {package}, which cannot be imported ({error}): pip install {package}") from None


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as columns: the first left-aligned, the others right-aligned. None is an empty cell.

    >>> print(format_table(["", "ms"], [["sum", 1.5], ["select", None]]))
              ms
    sum     1.50
    select
    """
    lines = [head, *([_cell(each) for each in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in lines
    )


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """Create a figure and its axes, side by side, without a display."""
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure

    empty = Figure(figsize=(width, height), layout="tight")
    return empty, list(empty.subplots(1, columns, squeeze=False)[0])


def bars(file: Path, values: Mapping[str, float], colours: Sequence[str], fmt: str, **labels: str) -> None:
    """Plot labelled horizontal bars, the first at the top. `labels` are those of the axes.

    Raises ValueError if matplotlib is not installed, or does not support the file's suffix.
    """
    drawn, (axes,) = figure(7.5, 0.36 * len(values) + 1.2)
    axes.bar_label(axes.barh(list(values), list(values.values()), color=colours), fmt=fmt, padding=3)
    axes.invert_yaxis()
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    save(drawn, file)


def save(drawn: Any, path: Path) -> None:
    """Save in the format of the file's suffix. SVG output is deterministic.

    Raises:
        ValueError: if matplotlib does not support the suffix.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lightning_sparse"}):
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
