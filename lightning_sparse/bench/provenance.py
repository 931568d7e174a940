"""The provenance of a measurement: hardware, date, versions, commit and command."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

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
