"""Reads network storage in a process of its own. A script that `storage.py` runs.

A read from a dead mount cannot be interrupted, and its process cannot be killed until the mount responds. So the
training process never reads network storage itself: this process does, and is abandoned if it hangs.

It receives requests on a socket (the file descriptor in argv), answers them in any order, and ends when the socket
closes. It imports only the standard library, and fsspec if the source is a URL, so that it starts fast.

=========  ============================================  ============================================
request    number u64, kind u8, path                     "r": read a file
                                                         "l": list the images below a folder
                                                         "n": list its subfolders, "m": when it changed
answer     number u64, status u8, size u64, mtime i64,   status "k": contents of the file, or JSON
           payload                                       status "s": why the file cannot be read
                                                         status "t": error of the network, may pass
=========  ============================================  ============================================
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file: its modules must not shadow others

import json
import os
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO, EPERM
from multiprocessing.connection import Connection
from typing import Any

REQUEST, ANSWER = struct.Struct("<QB"), struct.Struct("<QBQq")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
# Errors of the file. All others (EIO, ENOTCONN, ESTALE, ETIMEDOUT, ...) are errors of the network and may pass.
_FILE_ERRORS = (ENOENT, EACCES, EPERM, EISDIR, ENOTDIR, ELOOP, ENAMETOOLONG, ENXIO)


class UnreadableFileError(Exception):
    """The file cannot be read, now or later."""


class LocalStorage:
    """A mounted folder."""

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str) -> tuple[bytes, int, int]:
        """Return (contents, size, mtime in ns) of a file. Links are followed, as torchvision's ImageFolder does."""
        # non-blocking: open() of a named pipe would wait for a writer
        file = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb", buffering=0) as stream:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise UnreadableFileError("it is not a regular file")
            parts = []
            while part := stream.read(1 << 24):
                parts.append(part)
        return b"".join(parts), about.st_size, about.st_mtime_ns

    def names(self, path: str) -> "list[tuple[str, int]]":
        """Return (name, mtime in ns) of the subfolders."""
        with os.scandir(os.path.join(self.root, path)) as entries:
            return [(entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_dir()]

    def mtime(self, path: str) -> int:
        return os.stat(os.path.join(self.root, path)).st_mtime_ns

    def listing(self, path: str) -> "tuple[list[tuple[str, int, int]], list[tuple[str, int]]]":
        """Return (path relative to the root, size, mtime) of each image below `path`, (path, mtime) of each folder."""
        found: list[tuple[str, int, int]] = []
        folders: list[tuple[str, int]] = []
        self._list(path, (), found, folders)
        return found, folders

    def _list(
        self,
        folder: str,
        parents: "tuple[tuple[int, int], ...]",
        found: "list[tuple[str, int, int]]",
        folders: "list[tuple[str, int]]",
    ) -> None:
        """parents: device and inode of the folders above, because links could form a loop."""
        about = os.stat(os.path.join(self.root, folder))  # before it is listed: later changes have a later time
        own = (about.st_dev, about.st_ino)
        if own in parents:
            return
        folders.append((folder, about.st_mtime_ns))
        with os.scandir(os.path.join(self.root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}"
                if entry.is_dir():
                    self._list(name, (*parents, own), found, folders)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    image = _stat(entry)
                    found.append((name, image.st_size, image.st_mtime_ns) if image else (name, 0, 0))

    def alive(self) -> bool:
        """Whether the storage is mounted: an unmounted folder is empty."""
        with os.scandir(self.root) as entries:
            return next(entries, None) is not None


class FsspecStorage:
    """A URL that fsspec opens."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs, root = url_to_fs(url)
        self._root = root.rstrip("/")

    def read(self, path: str) -> tuple[bytes, int, int]:
        where = self._at(path)
        data = self._fs.cat_file(where)
        return data, len(data), _mtime(self._fs.info(where))

    def names(self, path: str) -> "list[tuple[str, int]]":
        entries = self._fs.ls(self._at(path), detail=True)
        return [(e["name"].rstrip("/").rpartition("/")[2], _mtime(e)) for e in entries if e["type"] == "directory"]

    def mtime(self, path: str) -> int:
        """0 if storage keeps no times of folders."""
        return _mtime(self._fs.info(self._at(path)))

    def listing(self, path: str) -> "tuple[list[tuple[str, int, int]], list[tuple[str, int]]]":
        skip = len(self._root) + 1 if self._root else 0
        found, folders = [], []
        for name, about in self._fs.find(self._at(path), detail=True, withdirs=True).items():
            if about["type"] == "directory":
                folders.append((name.rstrip("/")[skip:], _mtime(about)))
            elif name.lower().endswith(IMAGE_SUFFIXES):
                found.append((name[skip:], about.get("size") or 0, _mtime(about)))
        return found, folders

    def alive(self) -> bool:
        return bool(self._fs.ls(self._root or "", detail=False))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if self._root else path


def _stat(entry: "os.DirEntry[str]") -> "os.stat_result | None":
    try:
        return entry.stat()
    except FileNotFoundError:  # a dangling link; listed, so that the read error names it
        return None


def _mtime(about: "dict[str, Any]") -> int:
    """Modification time in ns, or a number that changes with the content if storage has no time."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created", "date_time"):
        value = about.get(name)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    tag = str(about.get("ETag") or about.get("etag") or about.get("CRC") or "")
    return int.from_bytes(tag.encode()[-7:], "little")


def answer(storage: "LocalStorage | FsspecStorage", kind: int, path: str) -> "tuple[int, bytes, int, int]":
    """(status, payload, size, mtime)"""
    try:
        if kind == ord("r"):
            return (ord("k"), *storage.read(path))
        ask = {ord("l"): storage.listing, ord("n"): storage.names, ord("m"): storage.mtime}[kind]
        return ord("k"), json.dumps(ask(path)).encode("utf-8", "surrogatepass"), 0, 0
    except UnreadableFileError as error:
        return ord("s"), str(error).encode(), 0, 0
    except Exception as error:
        text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        missing = isinstance(error, FileNotFoundError)
        final = missing or (isinstance(error, OSError) and error.errno in _FILE_ERRORS)
        try:
            final = final and (kind != ord("r") or not missing or storage.alive())
        except Exception as root_error:
            final, text = False, f"{type(root_error).__name__}: {root_error}".encode("utf-8", "replace")
        return ord("s" if final else "t"), text, 0, 0


def main(file: int, threads: int, source: str) -> None:
    connection = Connection(file)
    lock = threading.Lock()
    storage = FsspecStorage(source) if "://" in source else LocalStorage(source)

    def serve(message: bytes) -> None:
        number, kind = REQUEST.unpack_from(message)
        path = message[REQUEST.size :].decode("utf-8", "surrogateescape")
        status, payload, size, mtime = answer(storage, kind, path)
        with lock:
            try:
                connection.send_bytes(ANSWER.pack(number, status, size, mtime) + payload)
            except OSError:
                os._exit(0)  # the socket is closed; another thread may hang, so do not wait for it

    with ThreadPoolExecutor(threads) as pool:
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            pool.submit(serve, message)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
