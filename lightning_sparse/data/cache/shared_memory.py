"""Files in /dev/shm that belong to a run, and end with it however it ends.

A segment is one file, mapped by all processes of a run on one node. Each of them holds a shared lock (flock) on it for
as long as it lives; the kernel lets go of the lock when the process dies, by kill -9 too. So an exclusive lock that is
granted at once means that nobody is left, and the file may go: the last process to close removes it, and the next run
removes what a killed run left. The name holds the run's random identity, so two runs never meet.

==================  ======================================  =========================================
who                 does                                    why it is safe
==================  ======================================  =========================================
creator, joiner     open, lock shared, look whether it is   a cleaner may have unlinked it in between:
                    still linked, else begin again          then it has no name any more
cleaner, closer     lock exclusive without waiting, unlink  granted only if nobody holds it
==================  ======================================  =========================================
"""

from __future__ import annotations

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
    """This user's folder in shared memory; None where there is none."""
    if not shared_memory.is_dir() or not os.access(shared_memory, os.W_OK):
        return None
    folder = shared_memory / f"lightning_sparse-{os.geteuid()}"
    private_folder(folder)
    return folder


def attach(path: Path) -> int | None:
    """Open and hold a segment that exists; None if there is none."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if _hold(file):
            return file


def create(path: Path, size: int, prepare: Callable[[int], None]) -> int:
    """Make, hold and prepare a segment of `size` bytes, of which none is backed by memory yet.

    Raises:
        OSError: when there is no memory for what `prepare` needs.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _hold(file):
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
    """Unlink the segment if this process is the last that holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(file).st_ino:
            path.unlink()
    return True


def remove_leftovers(folders: Sequence[Path]) -> int:
    """Unlink the segments of runs of which no process is left; returns how many."""
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
        log.info("freed %.2f GB of memory that %d ended run(s) had left behind", freed / 1e9, removed)
    return removed


def available_memory(folder: Path) -> int:
    """Bytes that this node could give: free memory, the limit of the control group, and room in `folder`.

    What segments in `folder` may still grow to is taken off: a validation split, or a second run, gets of what is left.
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
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            amounts.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(amounts) - promised)


def _hold(file: int) -> bool:
    """Lock shared; False, and closed, if the segment lost its name meanwhile."""
    fcntl.flock(file, fcntl.LOCK_SH)
    if os.fstat(file).st_nlink:
        return True
    os.close(file)
    return False
