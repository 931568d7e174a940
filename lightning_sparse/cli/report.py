"""Output that commands and benchmarks share: tables, the CPU's name, and missing packages."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def need(package: str, use: str) -> Any:
    """Import an optional package.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
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
