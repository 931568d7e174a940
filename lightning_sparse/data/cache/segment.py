"""Memory that processes of a node share.

A segment is a file in memory without a folder (`memfd_create`). The kernel frees it when no process has it or views of
it open. A process finds it by name among the open files of this user's processes (``/proc/<pid>/fd``).
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.data.config import DataError, no_address_space

_PREFIX = "lightning_sparse-"
_LINK = "/memfd:{} (deleted)"
_POLL_S = 0.0005
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # of a segment that is prepared: its size is final


class Segment:
    """A mapped segment, from its descriptor. It is also closed when it is collected."""

    def __init__(self, file: int) -> None:
        self.file, size = file, os.fstat(file).st_size
        self._close = weakref.finalize(self, os.close, file)
        try:
            self.map = mmap.mmap(file, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise DataError(no_address_space("the memory tier", size)) from error
        self._thread_lock = threading.Lock()

    @contextlib.contextmanager
    def locked(self, patience_s: float | None = None) -> Iterator[bool]:
        """Exclude other threads and processes; yield whether that succeeded within `patience_s`."""
        if not self._thread_lock.acquire(timeout=-1 if patience_s is None else patience_s):
            yield False
            return
        held = False
        try:
            held = self._lock(patience_s)
            yield held
        finally:
            if held:
                fcntl.flock(self.file, fcntl.LOCK_UN)
            self._thread_lock.release()

    def _lock(self, patience_s: float | None) -> bool:
        if patience_s is None:
            # the kernel releases the lock when its holder dies
            fcntl.flock(self.file, fcntl.LOCK_EX)
            return True
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the descriptor. Views of the map stay valid, and keep the memory."""
        self._close()


def find(name: str) -> Segment | None:
    """Open the segment `name` of a process of this user; None if there is none."""
    for path in _open_files(_PREFIX + name):
        with contextlib.suppress(OSError):  # the other process has closed it
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # it may be of another user, if this one is root; or its process has not prepared it yet
            if os.fstat(file).st_uid == os.geteuid() and fcntl.fcntl(file, fcntl.F_GET_SEALS) == _SEALS:
                return Segment(file)
            os.close(file)
    return None


def create(name: str, size: int, header: bytes) -> Segment:
    file = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        # takes no memory until pages are written
        os.ftruncate(file, size)
        os.pwrite(file, header, 0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return Segment(file)


def sizes(name: str = "") -> list[tuple[int, int]]:
    """Return (size, allocated bytes) of each segment `name` of this user; "": of all segments."""
    by_inode = {}
    for path in _open_files(_PREFIX + name if name else ""):
        with contextlib.suppress(OSError):
            about = os.stat(path)
            if about.st_uid == os.geteuid():
                by_inode[about.st_ino] = (about.st_size, about.st_blocks * 512)
    return list(by_inode.values())


def available_memory() -> int:
    """Return the bytes that new segments may take. Existing segments may grow to their sizes first."""
    return max(0, free_memory() - sum(max(0, size - allocated) for size, allocated in sizes()))


def free_memory() -> int:
    """Return the free memory of the system or of the control groups of this process, if that is less."""
    amounts = _left_to_control_groups()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts.append(int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024)
    return max(0, min(amounts, default=0))


def _open_files(name: str) -> Iterator[str]:
    wanted, prefix = _LINK.format(name), f"/memfd:{_PREFIX}"
    for process in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):  # of another user, or ended
            for file in os.listdir(folder):
                with contextlib.suppress(OSError):
                    link = os.readlink(f"{folder}/{file}")
                    if link == wanted or (not name and link.startswith(prefix)):
                        yield f"{folder}/{file}"


def _left_to_control_groups(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    amounts = []
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
            # Groups are nested: SLURM limits the memory of a job, and of its steps.
            for group in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    left = int((group / limit).read_text()) - int((group / used).read_text())
                    with contextlib.suppress(OSError, ValueError):  # inactive file pages, which the kernel would drop
                        lines = (group / "memory.stat").read_text().splitlines()
                        pages = dict(line.split() for line in lines)
                        left += int(pages.get("total_inactive_file", pages.get("inactive_file", 0)))
                    amounts.append(left)
                if group == root:
                    break
    return amounts
