"""What a number is worth nothing without: hardware, date, versions, commit and command."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch


def processor() -> str:
    """Its name, as the kernel has it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Of the source tree that this file lies in."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return (head or "unknown") + (" with local changes" if changed else "")


def surroundings(command: str) -> dict[str, str]:
    """All but the commit, which some benchmarks keep with each run."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
