"""Optional packages of the benchmarks."""

from __future__ import annotations

import importlib
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


def figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """Create a figure and its axes, side by side, without a display."""
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure

    empty = Figure(figsize=(width, height), layout="tight")
    return empty, list(empty.subplots(1, columns, squeeze=False)[0])


def save(drawn: Any, path: Path) -> None:
    """Save in the format of the file's suffix. SVG output is deterministic.

    Raises:
        ValueError: if matplotlib does not support the suffix.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lightning_sparse"}):
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
