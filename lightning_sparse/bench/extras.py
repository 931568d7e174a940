"""Packages that only some benchmarks need, with a way out when they are missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def need(package: str, use: str, *, module: str | None = None) -> Any:
    """The imported module.

    Raises:
        ValueError: when it is not installed; it says how to get it.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ValueError(f"{use} needs {package}, which cannot be imported ({error}): pip install {package}") from None


def figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """An empty figure and its axes, side by side; drawn without a display."""
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure

    empty = Figure(figsize=(width, height), layout="tight")
    return empty, list(empty.subplots(1, columns, squeeze=False)[0])


def save(drawn: Any, path: Path) -> None:
    """As the ending of the name says; the same drawing gives the same SVG file.

    Raises:
        ValueError: when matplotlib knows no such ending.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lightning_sparse"}):
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
