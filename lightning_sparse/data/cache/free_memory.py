"""Memory that a new segment may take."""

import contextlib
import os
from pathlib import Path


def available_memory(folder: Path) -> int:
    """Return the available bytes: the least of free memory, what the control groups allow and free space in `folder`.

    Space that existing segments in `folder` may still allocate is subtracted.
    """
    about = os.statvfs(folder)
    amounts = [about.f_bavail * about.f_frsize]
    promised = 0
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            segment = path.stat()
            promised += max(0, segment.st_size - segment.st_blocks * 512)
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts.append(int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024)
    amounts += _left_to_control_groups()
    return max(0, min(amounts) - promised)


def _left_to_control_groups(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each control group of this process may still use, from the innermost to the outermost.

    Groups are nested: SLURM limits the memory of a job, and within it that of a step. What a group uses includes file
    pages, of which the kernel drops the inactive ones before it refuses memory.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":  # version 2
                root, limit, used = mounted, "memory.max", "memory.current"
                if not (root / "cgroup.controllers").exists():
                    root = mounted / "unified"
            elif "memory" in kinds.split(","):
                root, limit, used = mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            inner = root / path.lstrip("/")
            for group in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    found.append(int((group / limit).read_text()) - int((group / used).read_text()) + _inactive(group))
                if group == root:
                    break
    return found


def _inactive(group: Path) -> int:
    """Return the bytes of inactive file pages of a control group."""
    with contextlib.suppress(OSError, ValueError):
        numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))
    return 0
