"""Shared-memory segments: files in /dev/shm that end with their run, however it ends.

All processes of a run on a node map the file, and each holds a shared lock (flock) on it. The kernel releases the lock
when the process dies, also by SIGKILL. If a process gets an exclusive lock without waiting, no other process uses the
file, and it may be removed: the last process to close a segment removes it, and each run removes the segments of killed
runs. A process that gets the shared lock checks that the file was not removed meanwhile. The name contains the random
identity of the run, so runs never share a segment.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sparse.data.cache.folders import private_folder
from lightning_sparse.messages import log

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"[0-9a-f]{16,}-n\d+-[^/]+")


def memory_folder(shared_memory: Path = SHARED_MEMORY) -> Path | None:
    """Return this user's folder in shared memory; None if there is no shared memory."""
    if not shared_memory.is_dir() or not os.access(shared_memory, os.W_OK):
        return None
    folder = shared_memory / f"lightning_sparse-{os.geteuid()}"
    private_folder(folder)
    return folder


def attach(path: Path) -> int | None:
    """Open and lock an existing segment; None if there is none."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if _lock(file):
            return file


def create(path: Path, size: int, prepare: Callable[[int], None]) -> int:
    """Create and lock a segment of `size` bytes, without allocating memory, and call `prepare` on its descriptor.

    Raises:
        OSError: if there is not enough memory for `prepare`.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(file):
            break
    try:
        os.ftruncate(file, size)
        prepare(file)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(file)
        raise
    return file


def remove_if_last(path: Path, file: int) -> bool:
    """Remove the segment if no other process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(file).st_ino:
            path.unlink()
    return True


def remove_stale(folders: Sequence[Path]) -> int:
    """Remove the segments of runs that have ended; return how many."""
    removed, freed = 0, 0
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                size = os.fstat(file).st_blocks * 512
                if remove_if_last(path, file):
                    removed, freed = removed + 1, freed + size
            finally:
                os.close(file)
    if removed:
        log.info("freed %.2f GB of memory: removed %d segment(s) of runs that have ended", freed / 1e9, removed)
    return removed


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


def _lock(file: int) -> bool:
    """Lock shared. If the file was removed meanwhile, close it and return False."""
    fcntl.flock(file, fcntl.LOCK_SH)
    if os.fstat(file).st_nlink:
        return True
    os.close(file)
    return False
