"""Bytes from network storage, with patience: waits while storage is away, says so, and gives up after a timeout.

Reading happens in another process (`reader.py` says why). A request that storage did not answer, because the link is
down or a server restarts, stays open or is asked again until it is answered or `timeout` seconds passed without any
answer. What is the file's own fault (missing, no permission, a link that leads out of the source) is answered at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from lightning_sparse.data.cache.storage_reader import ANSWER, REQUEST
from lightning_sparse.data.config import DataError
from lightning_sparse.messages import log

SAY_S = 5.0  # a pause that is worth a line
RETRY_S = 1.0
RESTART_S = 30.0  # a silent reader is replaced, then after twice as long, ...: its connection may never come back
_READER = Path(__file__).with_name("storage_reader.py")


class StorageTimeoutError(DataError):
    """Network storage did not answer for `storage_timeout` seconds."""


class MissingFolderError(DataError):
    """The source is there, the folder is not."""


class Fetched(NamedTuple):
    """A file as it is on storage now."""

    data: bytes
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Refusal:
    """A file that cannot be had, whoever asks and however often."""

    reason: str


@dataclass
class _Asked:
    """A request on its way. `future` holds (status, payload, size, mtime_ns)."""

    message: bytes
    future: Future[tuple[str, bytes, int, int]]


class Source:
    """The files below one folder of network storage. Used by many threads; the reader starts with the first request.

    Args:
        source: a folder or an fsspec URL.
        timeout: seconds without an answer after which reading ends with StorageTimeoutError.
        readers: files read at the same time.
        quiet: say nothing about pauses; for all but one process of a node.
    """

    def __init__(self, source: str, *, timeout: float = 300.0, readers: int = 8, quiet: bool = False) -> None:
        self.source = source if "://" in source else os.path.abspath(source)
        self.timeout, self._readers, self._quiet = timeout, readers, quiet
        self._lock = threading.RLock()
        self._asked: dict[int, _Asked] = {}
        self._ask_again: list[int] = []  # what a reader could not get
        self._next = 0
        self._closed = False
        self._reader: _Reader | None = None
        self._waiting = 0  # callers that wait for an answer
        self._since = 0.0  # when storage last answered, or was first asked after a pause
        self._patience = self._restart_at = 0.0
        self._said_at: float | None = None
        self._trouble = ""

    def read(self, paths: Sequence[str]) -> Iterator[Fetched | Refusal]:
        """Contents of files, in order; all are asked for at once, so take them as they come."""
        asked = [self._ask("r", path) for path in paths]
        for each in asked:
            status, payload, size, mtime_ns = self._await(each)
            yield Fetched(payload, size, mtime_ns) if status == "k" else Refusal(payload.decode("utf-8", "replace"))

    def listing(self, folders: Sequence[str]) -> Iterator[list[tuple[str, int, int]]]:
        """(path, size, mtime in ns) of all pictures below each folder; of "folder/" the names of folders in it.

        Raises:
            MissingFolderError: when a folder cannot be listed.
        """
        asked = [self._ask("l", folder) for folder in folders]
        for folder, each in zip(folders, asked, strict=True):
            status, payload, _, _ = self._await(each)
            if status != "k":
                reason = payload.decode("utf-8", "replace")
                raise MissingFolderError(
                    f"source={self.source} has no folder {folder.rstrip('/')}/ to read ({reason}). Expected "
                    f"train/<class>/<picture> and val/... in it: is the path right, and mounted?"
                )
            yield [(name, size, mtime) for name, size, mtime in json.loads(payload)]

    def close(self) -> None:
        """End the reader; who still waits for an answer gets a DataError."""
        with self._lock:
            self._closed = True
            self._abandon()

    def _abandon(self) -> None:
        if self._reader is not None:
            self._reader.abandon()
        self._reader = None

    # ------------------------------------------------------------------------------------------------ asking

    def _ask(self, what: str, path: str) -> _Asked:
        with self._lock:
            self._check_open()
            self._next += 1
            message = REQUEST.pack(self._next, ord(what)) + path.encode("utf-8", "surrogateescape")
            asked = self._asked[self._next] = _Asked(message, Future())
            if self._reader is None:
                self._restart()  # sends what is open, this one included
            else:
                self._reader.send(message)
            return asked

    def _restart(self) -> None:
        """A new reader, asked all that is still open."""
        self._abandon()
        self._patience *= 2
        self._restart_at = time.monotonic() + self._patience
        self._reader = _Reader(self.source, self._readers, self)
        self._ask_again.clear()
        for asked in list(self._asked.values()):
            self._reader.send(asked.message)

    def _answered(self, message: bytes) -> None:
        """Called by the thread that listens to a reader."""
        number, status, size, mtime_ns = ANSWER.unpack_from(message)
        payload = message[ANSWER.size :]
        with self._lock:
            if chr(status) == "t":  # storage did not answer now
                self._trouble = payload.decode("utf-8", "replace")
                self._ask_again.append(number)
                return
            asked = self._asked.pop(number, None)  # None: a reader that was replaced answered it before
            self._be_patient()
            self._say_back()
        if asked is not None:
            asked.future.set_result((chr(status), payload, size, mtime_ns))

    # ------------------------------------------------------------------------------------------------ waiting

    def _await(self, asked: _Asked) -> tuple[str, bytes, int, int]:
        with self._lock:
            if self._waiting == 0 and not asked.future.done():
                self._be_patient()
            self._waiting += 1
        try:
            while True:
                try:
                    return asked.future.result(timeout=RETRY_S)
                except FutureTimeoutError:
                    self._lose_patience()
        finally:
            with self._lock:
                self._waiting -= 1

    def _be_patient(self) -> None:
        """Storage answered, or is asked for the first time after a pause."""
        self._since, self._patience = time.monotonic(), RESTART_S
        self._restart_at = self._since + RESTART_S

    def _lose_patience(self) -> None:
        with self._lock:
            self._check_open()
            now = time.monotonic()
            silent = now - self._since
            if silent >= self.timeout:
                self._abandon()
                raise StorageTimeoutError(
                    f"storage {self.source} has not answered for {silent:.0f} s{self._why()}. Is it mounted, and its "
                    f"server reachable? storage_timeout={self.timeout:g} says how long to wait."
                )
            if silent >= min(SAY_S, self.timeout / 2) and self._said_at is None:
                self._said_at = self._since
                self._say(
                    f"storage {self.source} does not answer{self._why()}: waiting up to {self.timeout:g} s for it"
                )
            reader = self._reader
            if reader is None or not reader.alive or now >= self._restart_at:
                return self._restart()
            for asked in [self._asked[number] for number in self._ask_again if number in self._asked]:
                reader.send(asked.message)
            return self._ask_again.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise DataError(f"storage {self.source} was closed while a file was read from it.")

    def _say_back(self) -> None:
        if self._said_at is not None:
            self._say(f"storage {self.source} answers again, after {time.monotonic() - self._said_at:.0f} s")
            self._said_at, self._trouble = None, ""

    def _say(self, text: str) -> None:
        log.log(logging.DEBUG if self._quiet else logging.WARNING, text)

    def _why(self) -> str:
        return f" ({self._trouble})" if self._trouble else ""


class _Reader:
    """The process that reads, and the thread that listens to it."""

    def __init__(self, source: str, readers: int, owner: Source) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, str(_READER), str(theirs.fileno()), str(readers), source]
        # a session of its own: Ctrl-C is for the trainer, and the reader ends when the trainer's end of the socket does
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/", start_new_session=True
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._owner = weakref.ref(owner)  # the listener must not keep a forgotten Source alive
        self.alive = True
        self._stop = weakref.finalize(owner, _abandon, self._process, self._connection, os.getpid())
        threading.Thread(target=self._listen, name="storage reader", daemon=True).start()

    def send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(message)
        except OSError:
            self.alive = False  # whoever waits restarts it

    def abandon(self) -> None:
        """Forget the process. It may hang in the kernel, so nobody waits for its end."""
        self.alive = False
        self._stop()

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            owner = self._owner()
            if owner is None:
                break
            owner._answered(message)
            del owner
        self.alive = False


def _abandon(process: subprocess.Popen[bytes], connection: Connection, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked copy of the owner: the process is not its own
    process.kill()
    with contextlib.suppress(OSError):
        connection.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.returncode = -9  # it is in the hands of the kernel; do not warn that it was not waited for
