"""What reports of measurements have alike: tables, optional packages, and where a number comes from."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()


def processor() -> str:
    """Model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Commit of the source tree that tracks this file; "unknown" for an installed copy."""
    if not _git("ls-files", HERE.name):
        return "unknown"
    changed = _git("status", "--porcelain", "-uno")
    return _git("rev-parse", "--short", "HEAD") + (" with local changes" if changed else "")


def surroundings(command: str) -> dict[str, str]:
    """Provenance except the commit, which some benchmarks record for each run."""
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores{gpu}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def _git(*words: str) -> str:
    """Output of a git command in this file's folder; empty if git fails."""
    try:
        return subprocess.run(["git", "-C", str(HERE.parent), *words], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


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
