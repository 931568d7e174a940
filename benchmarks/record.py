"""Common parts of the benchmarks: options, provenance of numbers, and files of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, Any]]


def processor() -> str:
    """Return the model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def parser_of(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser with OUT, and with --quick if `quick` describes it."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def add_clusters(parser: argparse.ArgumentParser, clusters: list[str], gbps: list[float]) -> None:
    """Add options for emulated clusters and the rates of their links; all combinations are measured."""
    parser.add_argument("--clusters", nargs="+", default=clusters, metavar="MxL", help="nodes x devices to emulate")
    parser.add_argument(
        "--gbps", type=float, nargs="+", default=gbps, metavar="R", help="rate of a link in Gbit/s, per direction"
    )


def command() -> str:
    """Return the command line, without paths of this machine."""
    spec = sys.modules["__main__"].__spec__
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python -m", spec.name if spec else Path(sys.argv[0]).stem, *words])


def commit() -> str:
    """Return the commit of the source; "unknown" outside a clone."""
    changed = _git("status", "--porcelain", "-uno")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + (" with local changes" if changed else "")


def _git(*words: str) -> str:
    """Return the output of a git command in this folder; empty if git fails."""
    try:
        return subprocess.run(
            ["git", "-C", Path(__file__).parent, *words], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""


def surroundings(*packages: str) -> dict[str, str]:
    """Return hardware, date, commit and command, with the versions of these packages if they are installed."""
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}", *map(_version, packages)]
    return {
        "command": command(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores{gpu}",
        "versions": ", ".join(filter(None, versions)),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def write(
    file: Path, record: dict[str, Any], text: str = "", plot: Callable[[dict[str, Any], Path], None] | None = None
) -> None:
    """Write `file`, a .json, `text` as .md, which is printed, and the plot if matplotlib is installed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    if text:
        file.with_suffix(".md").write_text(f"`{record['command']}`, {record['commit']}\n\n{text}\n")
        print(text)
    if plot is not None:
        try:
            plot(record, file.with_suffix(".svg"))
        except ValueError as error:
            print(f"no plot: {error}")
    print(f"\nwrote {file}", flush=True)
