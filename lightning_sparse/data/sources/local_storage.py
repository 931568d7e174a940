"""Reads and lists files on a mount."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from errno import EIO
from typing import Any

from lightning_sparse.data.sources.storage_base import (
    FILTERS,
    PROGRESS_S,
    Listing,
    UnreadableFileError,
    is_visible,
    whole_part,
)


class LocalStorage:
    """A folder, perhaps on a mount. Paths are relative to it."""

    turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # threads may use it at the same time

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str, first: int = 0, last: int | None = None) -> tuple[bytes, int, int]:
        """Return (contents, size, mtime in ns) of a file, or of its bytes first to last - 1."""
        # non-blocking: open() of a named pipe would wait for a writer
        # follows links, as torchvision's ImageFolder does
        file = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise UnreadableFileError("it is not a regular file")
            parts, end, at = [], sys.maxsize if last is None else last, first
            most = min(about.st_size + 1, 1 << 24)  # a read allocates its whole length
            while at < end and (part := os.pread(file, min(end - at, most), at)):
                parts.append(part)
                at += len(part)
        finally:
            os.close(file)
        if at < min(end, about.st_size):
            raise OSError(EIO, f"a read ended at byte {at:,} of {about.st_size:,}", path)
        data = b"".join(parts)
        return data if last is None else whole_part(data, first, last), len(data), about.st_mtime_ns

    def opened(self, path: str) -> Any:
        return open(os.path.join(self.root, path), "rb")

    def modified(self, path: str) -> int:
        return os.stat(os.path.join(self.root, path)).st_mtime_ns

    def stamp(self, path: str) -> int:
        return _stamp(os.stat(os.path.join(self.root, path)), _volatile_devices())

    def listing(self, path: str, kind: str, progress: Callable[[], None]) -> Listing:
        """List a folder. `progress` is called every `PROGRESS_S` seconds, if entries are read."""
        listing: Listing = ([], [], [])
        add, clock = tuple(entries.append for entries in listing), time.monotonic  # looked up once, not for each entry
        next_report = clock() + PROGRESS_S
        for place, entry in self._walk(path, kind, (), _volatile_devices()):
            add[place](entry)
            if clock() >= next_report:
                progress()
                next_report = clock() + PROGRESS_S
        return listing

    def _walk(
        self, folder: str, kind: str, parents: tuple[tuple[int, int], ...], volatile: frozenset[int]
    ) -> Iterator[tuple[int, Any]]:
        about = os.stat(os.path.join(self.root, folder))  # before it is listed: later changes have a later time
        # links could form a loop
        own = (about.st_dev, about.st_ino)
        if own in parents:
            return
        yield 1, (folder, _stamp(about, volatile))
        wanted, above = FILTERS[kind], f"{folder}/" if folder else ""
        with os.scandir(os.path.join(self.root, folder)) as entries:
            for entry in entries:
                name = above + entry.name
                if entry.is_dir():
                    if is_visible(entry.name) and kind == "here":
                        yield 1, (name, _stamp(entry.stat(), volatile))
                    elif is_visible(entry.name):
                        yield from self._walk(name, kind, (*parents, own), volatile)
                elif wanted(entry.name):
                    try:
                        file = entry.stat()
                    except FileNotFoundError:  # a dangling link; listed, so that the read error names it
                        yield 0, (name, 0, 0, 0)
                        continue
                    tag = 0 if file.st_dev in volatile else hash((file.st_ino, file.st_ctime_ns))
                    yield 0, (name, file.st_size, file.st_mtime_ns, tag)
                elif is_visible(entry.name):
                    yield 2, name

    def alive(self) -> bool:
        with os.scandir(self.root) as entries:
            # an unmounted folder is empty
            return next(entries, None) is not None


def _volatile_devices() -> frozenset[int]:
    """Return the devices of FUSE mounts. Many of them change the inode number of a file over time."""
    devices = set()
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            own, _, other = line.partition(" - ")
            if other.startswith("fuse"):
                devices.add(os.makedev(*map(int, own.split()[2].split(":"))))
    return frozenset(devices)


def _stamp(about: os.stat_result, volatile: frozenset[int]) -> int:
    # users cannot set the status-change time
    own = () if about.st_dev in volatile else (about.st_ino, about.st_ctime_ns)
    return hash((about.st_mtime_ns, *own))
