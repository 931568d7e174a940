"""Shared-memory segments: files in /dev/shm that end with the last run that uses them, however it ends.

All processes that use a segment map the file, and each holds a shared lock (flock) on it. The kernel releases the lock
when the process dies, also by SIGKILL. If a process gets an exclusive lock without waiting, no other process uses the
file, and it may be removed: the last process to close a segment removes it, and each run removes what killed runs have
left. A process that gets the shared lock checks that the file was not removed meanwhile.

Segments are created, attached and cleaned up under a lock of their folder. So one that is left after `remove_stale` is
complete: a process that died while it prepared the segment does not hold it.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_sparse.data.config import DataError, no_address_space
from lightning_sparse.data.folders import private_folder
from lightning_sparse.messages import log

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"[0-9a-f]{16,}-[^/]+")
_POLL_S = 0.0005


class Segment:
    """A mapped segment. Belongs to the process that opened it.

    Args:
        path: path of the segment.
        file: its locked descriptor.

    Raises:
        DataError: if the process may not map as much.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file, self._pid = path, file, os.getpid()
        size = os.fstat(file).st_size
        try:
            self.map = mmap.mmap(file, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise DataError(no_address_space(f"the memory tier {path}", size)) from error
        self._thread_lock = threading.Lock()

    @contextlib.contextmanager
    def locked(self, patience_s: float | None = None) -> Iterator[bool]:
        """Exclude other threads and processes; yield whether that was possible within `patience_s`.

        An open file description lock: the kernel releases it when its holder dies, but unlike a POSIX lock not when
        another descriptor of the file is closed.
        """
        if not self._thread_lock.acquire(timeout=-1 if patience_s is None else patience_s):
            yield False
            return
        try:
            held = self._lock(patience_s)
            try:
                yield held
            finally:
                if held:
                    fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _first_byte(fcntl.F_UNLCK))
        finally:
            self._thread_lock.release()

    def _lock(self, patience_s: float | None) -> bool:
        if patience_s is None:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLKW, _first_byte(fcntl.F_WRLCK))
            return True
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _first_byte(fcntl.F_WRLCK))
                return True
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Release the segment; the last process that uses it removes it. Views of the map stay valid."""
        if self._pid == os.getpid() and self.file >= 0:
            _remove_if_last(self.path, self.file)
            # the map has a duplicate of the descriptor, and so has a forked process: they would go on to hold the lock
            fcntl.flock(self.file, fcntl.LOCK_UN)
            os.close(self.file)
            self.file = -1


def memory_folder(shared_memory: Path = SHARED_MEMORY) -> Path | None:
    """Return this user's folder in shared memory; None if there is no shared memory."""
    if not shared_memory.is_dir() or not os.access(shared_memory, os.W_OK):
        return None
    folder = shared_memory / f"lightning_sparse-{os.geteuid()}"
    private_folder(folder)
    return folder


def attach(path: Path) -> Segment | None:
    """Open an existing segment; None if there is none."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if not _lock(file):
            continue
        try:
            return Segment(path, file)
        except BaseException:
            os.close(file)
            raise


def create(path: Path, size: int, prepare: Callable[[int], None]) -> Segment:
    """Create a segment of `size` bytes, without allocating memory, and call `prepare` on its descriptor.

    Raises:
        OSError: if there is not enough memory for `prepare`.
        DataError: as `Segment`.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(file):
            break
    try:
        os.ftruncate(file, size)
        prepare(file)
        return Segment(path, file)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(file)
        raise


def _remove_if_last(path: Path, file: int) -> bool:
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
                if _remove_if_last(path, file):
                    removed, freed = removed + 1, freed + size
            finally:
                os.close(file)
    if removed:
        log.info("freed %.2f GB of memory: removed %d segment(s) of runs that have ended", freed / 1e9, removed)
    return removed


def _lock(file: int) -> bool:
    """Lock shared. If the file was removed meanwhile, close it and return False."""
    fcntl.flock(file, fcntl.LOCK_SH)
    if os.fstat(file).st_nlink:
        return True
    os.close(file)
    return False


def _first_byte(kind: int) -> bytes:
    return struct.pack("hhqqi", kind, os.SEEK_SET, 0, 1, 0)
