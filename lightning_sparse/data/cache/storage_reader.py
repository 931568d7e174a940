"""Reads network storage, in a process of its own. Run by `source.py`; a program, not a module to import.

A read of a dead mount cannot be interrupted: the thread sleeps in the kernel, and its process cannot even be killed
until the mount answers. So the trainer never reads network storage itself. This process does, with a few threads, and
when it hangs it is given up on while the trainer still decides.

It answers requests that come as messages on a socket (file descriptor in argv), in any order, and ends when the other
side is gone. Only the standard library is imported, and fsspec when the source is a URL, so it starts at once.

=========  ============================================  ============================================
request    number u64, what u8, path                     "r" reads a file, "l" lists a folder
answer     number u64, status u8, size u64, mtime i64,   status "k": the bytes of the file, or JSON
           payload                                       status "s": why this sample cannot be had
                                                         status "t": why storage did not answer now
=========  ============================================  ============================================
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose names must not hide other modules

import errno
import json
import os
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

REQUEST, ANSWER = struct.Struct("<QB"), struct.Struct("<QBQq")
PICTURES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
# The file's own fault. Everything else (EIO, ENOTCONN, ESTALE, ETIMEDOUT, ...) is the network's and may pass.
_OF_THE_FILE = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
)


class Refused(Exception):
    """This sample cannot be had, however often it is asked for."""


class Folder:
    """A folder that is mounted on this machine."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._real: str | None = None

    def read(self, path: str) -> tuple[bytes, int, int]:
        """(bytes, size, mtime in ns) of a file below the root, wherever symbolic links lead."""
        # a pipe in the place of a picture would make open() wait for a writer
        file = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb", buffering=0) as stream:
            self._check_inside(file, path)
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise Refused("it is no regular file")
            parts = []
            while part := stream.read(1 << 24):
                parts.append(part)
        return b"".join(parts), about.st_size, about.st_mtime_ns

    def listing(self, path: str) -> list[tuple[str, int, int]]:
        """(path relative to the root, size, mtime) of every picture below `path`; of "path/" the folders in it."""
        if path.endswith("/"):
            with os.scandir(os.path.join(self.root, path)) as entries:
                return [(entry.name, 0, 0) for entry in entries if entry.is_dir()]
        found, folders = [], [path]
        while folders:
            folder = folders.pop()
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}"
                    if entry.is_dir():
                        if not entry.is_symlink():  # a loop of links would be listed for ever
                            folders.append(name)
                    elif entry.name.lower().endswith(PICTURES):
                        about = _stat(entry)
                        found.append((name, about.st_size, about.st_mtime_ns) if about else (name, 0, 0))
        return found

    def alive(self) -> bool:
        """Whether the storage is there at all: an unmounted folder is empty, and every file is missing."""
        with os.scandir(self.root) as entries:
            return next(entries, None) is not None

    def _check_inside(self, file: int, path: str) -> None:
        if self._real is None:
            self._real = os.path.realpath(self.root)
        try:
            real = os.readlink(f"/proc/self/fd/{file}")  # costs no question to the storage, and cannot be raced
        except OSError:
            real = os.path.realpath(os.path.join(self.root, path))
        if not real.startswith(os.path.join(self._real, "")):
            raise Refused(f"it leads outside the source, to {real}")


class Remote:
    """Anything that fsspec opens."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs, root = url_to_fs(url)
        self._root = root.rstrip("/")

    def read(self, path: str) -> tuple[bytes, int, int]:
        where = self._at(path)
        data = self._fs.cat_file(where)
        return data, len(data), _mtime(self._fs.info(where))

    def listing(self, path: str) -> list[tuple[str, int, int]]:
        where, skip = self._at(path.rstrip("/")), len(self._root) + 1 if self._root else 0
        if path.endswith("/"):
            entries = self._fs.ls(where, detail=True)
            return [(e["name"].rstrip("/").rpartition("/")[2], 0, 0) for e in entries if e["type"] == "directory"]
        found = self._fs.find(where, detail=True)
        return [
            (name[skip:], about.get("size") or 0, _mtime(about))
            for name, about in found.items()
            if name.lower().endswith(PICTURES)
        ]

    def alive(self) -> bool:
        return bool(self._fs.ls(self._root or "", detail=False))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if self._root else path


def _stat(entry: "os.DirEntry[str]") -> "os.stat_result | None":
    try:
        return entry.stat()
    except FileNotFoundError:  # a link to nowhere: listed, so that reading it names it
        return None


def _mtime(about: "dict[str, Any]") -> int:
    """Nanoseconds, or a number that changes with the content where storage knows no time."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created", "date_time"):
        value = about.get(name)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    tag = str(about.get("ETag") or about.get("etag") or about.get("CRC") or "")
    return int.from_bytes(tag.encode()[-7:], "little")


def answer(place: "Folder | Remote", what: int, path: str) -> "tuple[int, bytes, int, int]":
    """(status, payload, size, mtime)"""
    try:
        if what == ord("l"):
            return ord("k"), json.dumps(place.listing(path)).encode("utf-8", "surrogatepass"), 0, 0
        return (ord("k"), *place.read(path))
    except Refused as error:
        return ord("s"), str(error).encode(), 0, 0
    except Exception as error:
        text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        missing = isinstance(error, FileNotFoundError)
        of_the_file = missing or (isinstance(error, OSError) and error.errno in _OF_THE_FILE)
        try:
            of_the_file = of_the_file and (what == ord("l") or not missing or place.alive())
        except Exception as worse:
            of_the_file, text = False, f"{type(worse).__name__}: {worse}".encode("utf-8", "replace")
        return ord("s" if of_the_file else "t"), text, 0, 0


def main(file: int, threads: int, source: str) -> None:
    connection = Connection(file)
    lock = threading.Lock()
    place = Remote(source) if "://" in source else Folder(source)

    def serve(message: bytes) -> None:
        number, what = REQUEST.unpack_from(message)
        path = message[REQUEST.size :].decode("utf-8", "surrogateescape")
        status, payload, size, mtime = answer(place, what, path)
        with lock:
            try:
                connection.send_bytes(ANSWER.pack(number, status, size, mtime) + payload)
            except OSError:
                os._exit(0)  # nobody listens any more, and another thread may hang: do not wait for it

    with ThreadPoolExecutor(threads) as pool:
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            pool.submit(serve, message)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
