"""Reads network storage in a separate process. A script that `storage.py` runs.

A read from a dead mount cannot be interrupted, and its process cannot be killed until the mount responds. So the
training process never reads network storage: it starts this process, and abandons it if it hangs.

The process receives lists of requests on a socket (the file descriptor in argv), answers them in any order, and ends
when the socket closes. Messages are pickled. To start fast, it imports only the standard library, files of this folder
that need no more, and fsspec for a URL.

=========  ====================================  =======================================================
request    number, kind, arguments               "read": a file, or first and last byte of a part of it.
                                                 A first byte below 0 means a sparse member, see `tar_members.Member`
                                                 "list": contents of a folder, see `storage_base.FILTERS`
                                                 "stamp": a number that changes with a folder
                                                 "members": of a tar file
                                                 "groups": the row groups of a Parquet file; its column
                                                 "rows": of a row group; its number and column
answer     number, status, result, size, mtime   OK: the result
                                                 UNREADABLE: why the file cannot be read
                                                 RETRY: error of the network, may pass
                                                 UNUSABLE: why the source cannot be used
                                                 PROGRESS: listing goes on; an answer follows
                                                 READY: fsspec is imported; the number is 0
=========  ====================================  =======================================================
"""

import os
import sys

if __name__ == "__main__":
    # Not the folder of this file, whose modules could shadow others, but the folder of the package.
    sys.path.pop(0)
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO, EPERM
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from lightning_sparse.data.sources.local_storage import LocalStorage
from lightning_sparse.data.sources.parquet_rows import row_groups, rows
from lightning_sparse.data.sources.storage_base import UnreadableFileError
from lightning_sparse.data.sources.tar_members import members, sparse_member
from lightning_sparse.data.sources.url_storage import FsspecStorage, import_file_system

OK, UNREADABLE, RETRY, UNUSABLE, PROGRESS, READY = "ok", "unreadable", "retry", "unusable", "progress", "ready"
# Errors of the file. All others (EIO, ENOTCONN, ESTALE, ETIMEDOUT, ...) are errors of the network and may pass.
_FILE_ERRORS = (ENOENT, EACCES, EPERM, EISDIR, ENOTDIR, ELOOP, ENAMETOOLONG, ENXIO)
# Errors of a program or of its options, which do not pass.
_PROGRAM_ERRORS = (AttributeError, ImportError, NotImplementedError, TypeError)
SEND_BYTES, SEND_S = 1 << 16, 0.02  # answers wait for others up to these


class Source:
    """The storage, opened by the first request that succeeds, because its server may not answer the first ones."""

    def __init__(self, source: str, options: "dict[str, Any]") -> None:
        self._source, self._options, self._lock = source, options, threading.Lock()
        self._storage: LocalStorage | FsspecStorage | None = None

    def opened(self) -> "LocalStorage | FsspecStorage":
        with self._lock:
            if self._storage is None:
                protocol, mark, path = self._source.partition("://")
                if not mark:
                    self._storage = LocalStorage(self._source)
                elif protocol in ("file", "local") and not self._options:
                    self._storage = LocalStorage(os.path.abspath(os.path.expanduser(path)))
                else:
                    self._storage = FsspecStorage(self._source, self._options)
            return self._storage


Answer = tuple[int, str, Any, int, int]


def answer(
    source: Source, kind: str, arguments: "tuple[Any, ...]", progress: "Callable[[], None]", again: bool = True
) -> tuple[Any, ...]:
    """Return (status, result, size, mtime). If `again`, read a missing file twice."""
    try:
        storage = source.opened()
    except Exception as error:
        never = isinstance(error, (*_PROGRAM_ERRORS, ValueError)) or getattr(error, "errno", 0) in _FILE_ERRORS
        return UNUSABLE if never else RETRY, _described(error), 0, 0
    try:
        with storage.turn:
            if kind == "read" and arguments[1:] and arguments[1] < 0:
                data = sparse_member(storage.opened(arguments[0]), -1 - arguments[1])
                return OK, data, len(data), storage.modified(arguments[0])
            if kind == "read":
                return OK, *storage.read(*arguments)
            path, *others = arguments
            if kind == "list":
                return OK, storage.listing(path, arguments[1], progress), 0, 0
            if kind == "stamp":
                return OK, storage.stamp(path), 0, 0
            result = _PARSERS[kind](storage.opened(path), *others, progress)
            return OK, result, 0, storage.modified(path) if kind == "rows" else 0
    except UnreadableFileError as error:
        return UNREADABLE, str(error), 0, 0
    except Exception as error:
        refused = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
        if isinstance(error, _PROGRAM_ERRORS) or (kind != "read" and refused):
            return UNUSABLE, _described(error), 0, 0
        missing = isinstance(error, FileNotFoundError)
        final = missing or isinstance(error, PermissionError)  # object stores set no errno
        final = final or (isinstance(error, OSError) and error.errno in _FILE_ERRORS)
        # pyarrow's errors for damaged files, and errors of their JSON
        final = final or (kind in _PARSERS and isinstance(error, (ValueError, RecursionError)))
        if missing and kind == "read":
            try:
                with storage.turn:
                    final = storage.alive()
            except Exception as root_error:
                return RETRY, _described(root_error), 0, 0
            if final and again:  # the storage may have been mounted after the read
                return answer(source, kind, arguments, progress, again=False)
        return UNREADABLE if final else RETRY, _described(error), 0, 0


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Answers:
    """Sends answers, together with those that are made at the same time. `requests` are not answered yet."""

    def __init__(self, connection: Any, requests: SimpleQueue[Any]) -> None:
        self._connection, self._requests, self._lock = connection, requests, threading.Lock()
        self._made: list[Answer] = []
        self._size, self._sent = 0, 0.0

    def add(self, number: int, status: str, result: Any = None, size: int = 0, mtime: int = 0) -> None:
        with self._lock:
            self._made.append((number, status, result, size, mtime))
            self._size += size
            # one message for several answers: for small files, a message costs more than its contents
            late = time.monotonic() - self._sent >= SEND_S
            if not (late or self._size >= SEND_BYTES or self._requests.empty() or status in (PROGRESS, READY)):
                return
            try:
                self._connection.send_bytes(pickle.dumps(self._made))
            except OSError:
                exit_now()  # the socket is closed
            self._made, self._size, self._sent = [], 0, time.monotonic()


def exit_now() -> NoReturn:
    """End this process without waiting for other threads."""
    # A thread that hangs in the kernel keeps the files of this process open. Close the program's output: a shell may
    # wait for it.
    for output in range(3):
        with contextlib.suppress(OSError):
            os.close(output)
    os._exit(0)


_PARSERS: "dict[str, Callable[..., Any]]" = {"members": members, "groups": row_groups, "rows": rows}


def main(file: int, threads: int, source: str) -> None:
    connection = Connection(file)
    requests: SimpleQueue[tuple[int, str, tuple[Any, ...]]] = SimpleQueue()
    answers = Answers(connection, requests)
    try:
        # the options for fsspec come in the first message, because other users can read argv
        storage = Source(source, pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        exit_now()

    def send_ready() -> None:
        if "://" in source:
            import_file_system(source)
        answers.add(0, READY)

    def serve() -> None:
        while True:
            number, kind, arguments = requests.get()
            answers.add(number, *answer(storage, kind, arguments, partial(answers.add, number, PROGRESS)))

    for work in (send_ready, *[serve] * threads):  # receive requests during the import, so their sender never waits
        threading.Thread(target=work, daemon=True).start()
    while True:
        try:
            for request in pickle.loads(connection.recv_bytes()):
                requests.put(request)
        except (EOFError, OSError):
            exit_now()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
