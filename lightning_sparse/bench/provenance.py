"""What a number is worth nothing without: hardware, date, versions, commit and command."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve()


def processor() -> str:
    """Its name, as the kernel has it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Of the source tree that this file lies in; "unknown" for an installed copy, whatever tree that lies in."""
    if not _git("ls-files", HERE.name):
        return "unknown"
    changed = _git("status", "--porcelain", "-uno")
    return _git("rev-parse", "--short", "HEAD") + (" with local changes" if changed else "")


def surroundings(command: str) -> dict[str, str]:
    """All but the commit, which some benchmarks keep with each run."""
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores{gpu}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def _git(*words: str) -> str:
    """What git says of the folder that this file lies in; nothing where it cannot say."""
    try:
        return subprocess.run(["git", "-C", str(HERE.parent), *words], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
