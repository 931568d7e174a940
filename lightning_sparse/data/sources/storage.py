"""Reads files from network storage. Waits while storage does not respond, and raises an error after a timeout.

A child process reads the files (see `storage_reader.py`). A request that fails because of the network is retried until
`timeout` seconds pass without any answer. A request that begins and then fails each time is retried for at most
`timeout` seconds. Errors of the file (missing, no permission) are returned at once.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sparse.data.child import END_S, Child
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources.storage_reader import OK, PROGRESS, READY, RETRY, UNUSABLE, Answer
from lightning_sparse.data.sources.tar_members import Member
from lightning_sparse.messages import log

WARN_S = 5.0  # silence before a warning
START_S = 60.0  # time for a reader to start and import, which does not count as silence of storage
RETRY_S = 1.0
CHECK_S = 10.0  # time to wait for an answer if the cache has a list
MIN_BREAKS = 5  # a request that breaks the reader this often counts as failed
RESTART_S = 30.0  # silence before the reader is restarted, doubling each time: its connection may never recover
# path; (path, first byte, last byte + 1); or with the size of a header before the first byte, which is read, too
Location = str | tuple[str, int, int] | tuple[str, int, int, int]


class StorageTimeoutError(DataError):
    """Network storage did not respond for `storage_timeout` seconds."""


class MissingFolderError(DataError):
    """The source has no such folder."""


class StoredFile(NamedTuple):
    data: bytes
    size: int
    mtime_ns: int
    header: bytes = b""  # if the location has one


Entry = tuple[str, int, int, int]  # path, size or -1, mtime in ns or 0, tag or 0


class Listed(NamedTuple):
    """Contents of a folder, as `storage_base.Listing`. ignored: paths of visible files that are not listed."""

    files: list[Entry]
    folders: list[tuple[str, int]]
    ignored: list[str]


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read, now or later."""

    reason: str


@dataclass
class _Request:
    """An open request. `future` receives (status, result, size, mtime_ns).

    in_progress: whether storage has begun to answer. breaks: how often it then failed. failing_since: the first time.
    """

    message: tuple[int, str, tuple[Any, ...]]
    future: Future[tuple[str, Any, int, int]]
    in_progress: bool = False
    breaks: int = 0
    failing_since: float = 0.0

    def fails_always(self, timeout: float) -> bool:
        """Count a failure. Return whether the request has failed for `timeout` seconds."""
        if self.in_progress and self.breaks == 0:
            self.failing_since = time.monotonic()
        self.breaks += self.in_progress
        self.in_progress = False
        # the timeout of the storage does not apply, because progress resets it
        return self.breaks >= MIN_BREAKS and time.monotonic() - self.failing_since >= timeout


def _arguments(location: Location) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of a "read" request, and the size of the header at the start of its result."""
    if isinstance(location, str):
        return (location,), 0
    path, first, last, header = (*location, 0)[:4]
    return (path, first - header, last), header


class Storage:
    """The files below a folder of network storage. Thread-safe. The reader process starts with the first request.

    Args:
        source: folder or fsspec URL. Default, as of the next two: that of the config.
        timeout: seconds without an answer before reads raise StorageTimeoutError.
        quiet: log interruptions at debug level; for all but one process of a node.
    """

    def __init__(
        self,
        config: CacheConfig,
        source: str | None = None,
        *,
        timeout: float | None = None,
        readers: int | None = None,
        quiet: bool = False,
    ) -> None:
        source = config.source if source is None else source
        self.source = source if "://" in source else os.path.abspath(source)
        self._options = (config.storage_options or {}) if "://" in source else {}
        self.timeout = config.storage_timeout if timeout is None else timeout
        self._readers, self._quiet = readers or config.storage_readers, quiet
        self._lock = threading.RLock()
        self._requests: dict[int, _Request] = {}
        self._to_retry: list[int] = []
        self._next = 0
        self._closed = False
        self._reader: ReaderProcess | None = None
        self._waiting = 0  # threads that wait for an answer
        self._silent_since = 0.0
        self._starting_since: float | None = None  # until the reader reports READY
        self._restart_after = self._restart_at = 0.0
        self._warned_since: float | None = None  # when the silence that was logged began
        self._last_error = ""

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, locations: Sequence[Location]) -> Iterator[StoredFile | Unreadable]:
        """Yield the contents of files, or of parts of files, in order. All are requested at once."""
        arguments, headers = zip(*map(_arguments, locations), strict=True) if locations else ((), ())
        for request, header in zip(self._requested("read", arguments), headers, strict=True):
            status, result, size, mtime_ns = self._wait_for(request)
            if status == OK:
                yield StoredFile(result[header:], size - header, mtime_ns, result[:header])
            else:
                yield Unreadable(result)

    def row_groups(self, paths: Sequence[str], column: str) -> Iterator[dict[str, Any]]:
        return self._ask("groups", paths, column)

    def rows(self, path: str, group: int, column: str) -> list[StoredFile | Unreadable]:
        ((rows, mtime_ns),) = self._answers("rows", [path], column, group)
        return [
            Unreadable("its row contains no bytes") if row is None else StoredFile(row, len(row), mtime_ns)
            for row in rows
        ]

    def members(self, paths: Sequence[str]) -> Iterator[tuple[list[Member], list[str]]]:
        return self._ask("members", paths)

    def listing(self, folders: Sequence[str], *, images: bool = True) -> Iterator[Listed]:
        """Yield the files and the folders below each folder: only images, or all visible files."""
        return (Listed(*answer) for answer in self._ask("list", folders, "images" if images else "visible"))

    def names(self, folder: str) -> dict[str, int]:
        """Return the stamps of the subfolders of a folder, by name; 0 if unknown."""
        ((_, folders, _),) = self._ask("list", [folder], "here")
        return {path.rpartition("/")[2]: time for path, time in folders if path != folder}

    def files(self, folder: str) -> list[Entry]:
        """Return the files in a folder, not below it, by their names."""
        ((files, _, _),) = self._ask("list", [folder], "here")
        return [(path.rpartition("/")[2], size, mtime, tag) for path, size, mtime, tag in files]

    def stamps(self, folders: Sequence[str]) -> list[int]:
        """Return the stamp of each folder, a number that changes with the folder; 0 if unknown."""
        return list(self._ask("stamp", folders))

    def _ask(self, kind: str, paths: Sequence[str], *more: Any) -> Iterator[Any]:
        return (result for result, _ in self._answers(kind, paths, *more))

    def _answers(self, kind: str, paths: Sequence[str], *more: Any) -> Iterator[tuple[Any, int]]:
        """Yield the result for each path, and its modification time in ns or 0. All are requested at once."""
        for path, request in zip(paths, self._requested(kind, [(name, *more) for name in paths]), strict=True):
            status, result, _, mtime_ns = self._wait_for(request)
            if status != OK and kind in ("list", "stamp"):
                raise MissingFolderError(
                    f"source={self.source} has no folder {path}/ to read ({result}{self._similar_names()}). "
                    "Expected train/<class>/<image>, train/<shard>.tar or train/<file>.parquet, and the same layout in "
                    "val/. Check the path, and that it is mounted."
                )
            if status != OK:
                what = f"the shard {path}" if kind == "members" else path
                raise ValueError(f"source={self.source}: {what} cannot be used: {result}.")
            yield result, mtime_ns

    def _similar_names(self) -> str:
        status, result, _, _ = self._wait_for(*self._requested("list", [("", "here")]))
        files, folders, _ = result if status == OK else ([], [], [])
        names = [*sorted(path for path, _ in folders if path), *sorted(path for path, *_ in files)]
        return f"; it has {', '.join(names[:10])}" if names else ""

    def close(self) -> None:
        """End the reader process. Threads that wait for an answer raise DataError."""
        with self._lock:
            self._closed = True
            self._abandon_reader()
            waiting, self._requests = list(self._requests.values()), {}
        for request in waiting:
            request.future.set_exception(self._was_closed())

    def _abandon_reader(self) -> None:
        if self._reader is not None:
            self._reader.abandon()
        self._reader = None

    def _requested(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[_Request]:
        with self._lock:
            self._check_open()
            requests = []
            for argument in arguments:
                self._next += 1
                requests.append(_Request((self._next, kind, argument), Future()))
                self._requests[self._next] = requests[-1]
            if self._reader is None:
                self._restart_reader()  # sends all open requests
            else:
                self._reader.send([request.message for request in requests])
            return requests

    def _restart_reader(self) -> None:
        self._abandon_reader()
        self._restart_after *= 2
        self._silent_since = time.monotonic() - self._silence()
        self._starting_since = time.monotonic()
        self._restart_at = self._starting_since + self._restart_after
        self._reader = ReaderProcess(self.source, self._readers, self)
        self._reader.send(self._options)
        self._to_retry.clear()
        self._reader.send([request.message for request in self._requests.values()])

    def on_answers(self, answers: Sequence[Answer]) -> None:
        """Handle answers, in the thread that listens to a reader."""
        answered = []
        with self._lock:
            for number, status, result, size, mtime_ns in answers:
                if status == READY:
                    self._silent_since, self._starting_since = time.monotonic() - self._silence(), None
                    self._restart_at = time.monotonic() + self._restart_after
                    continue
                request = self._requests.get(number)  # None if a former reader answered it
                if status == RETRY:  # an error of the network
                    self._last_error = result
                    if request is None or not request.fails_always(self.timeout):
                        self._to_retry.append(number)
                        continue
                    _, kind, (path, *_) = request.message
                    status = UNUSABLE
                    result = (
                        f"a request ({kind} {path}) began and failed {request.breaks} times: {result}. "
                        f"Check the network and the server, or wait longer than storage_timeout={self.timeout:g}."
                    )
                self._reset_timeout()
                if request is not None and status == PROGRESS:
                    request.in_progress = True
                elif request is not None:
                    del self._requests[number]
                    answered.append((request, (status, result, size, mtime_ns)))
            if answered and self._warned_since is not None:
                self._log(f"storage {self.source} responds again after {time.monotonic() - self._warned_since:.0f} s")
                self._warned_since, self._last_error = None, ""
        for request, answer in answered:
            request.future.set_result(answer)

    def _wait_for(self, request: _Request) -> tuple[str, Any, int, int]:
        with self._lock:
            if self._waiting == 0 and not request.future.done():
                self._reset_timeout()
            self._waiting += 1
        try:
            while True:
                try:
                    answer = request.future.result(timeout=RETRY_S)
                    if answer[0] == UNUSABLE:
                        raise DataError(f"source={self.source} cannot be used: {answer[1]}")
                    return answer
                except FutureTimeoutError:
                    self._check_timeout()
        finally:
            with self._lock:
                self._waiting -= 1

    def _reset_timeout(self) -> None:
        # storage answered, or receives the first request after a pause
        self._silent_since, self._restart_after = time.monotonic(), RESTART_S
        self._restart_at = self._silent_since + RESTART_S

    def _silence(self) -> float:
        now = time.monotonic()
        start = self._starting_since
        # the time that a reader takes to start is not silence of storage
        end = start if start is not None and now - start < START_S else now
        return max(0.0, end - self._silent_since)

    def _check_timeout(self) -> None:
        with self._lock:
            self._check_open()
            now = time.monotonic()
            silent = self._silence()
            trouble = f" ({self._last_error})" if self._last_error else ""
            if silent >= self.timeout:
                self._abandon_reader()
                raise StorageTimeoutError(
                    f"storage {self.source} has not responded for {silent:.0f} s{trouble}. Check that it is mounted "
                    f"and that its server is reachable, or wait longer than storage_timeout={self.timeout:g}."
                )
            if silent >= min(WARN_S, self.timeout / 2) and self._warned_since is None:
                self._warned_since = self._silent_since
                self._log(f"storage {self.source} does not respond{trouble}: waiting up to {self.timeout:g} s")
            reader = self._reader
            starts = self._starting_since is not None and now - self._starting_since < START_S
            if reader is None or not reader.alive or (now >= self._restart_at and not starts):
                return self._restart_reader()
            again = [self._requests[number].message for number in self._to_retry if number in self._requests]
            if again:
                reader.send(again)
            return self._to_retry.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise self._was_closed()

    def _was_closed(self) -> DataError:
        return DataError(f"storage {self.source} was closed during a read.")

    def _log(self, text: str) -> None:
        log.log(logging.DEBUG if self._quiet else logging.WARNING, text)


_READER = Path(__file__).with_name("storage_reader.py")


class ReaderProcess:
    def __init__(self, source: str, readers: int, owner: Storage) -> None:
        self._child = Child(_READER, str(readers), source)
        self._sending = threading.Lock()
        self._owner = weakref.ref(owner)  # the thread must not keep the Storage alive
        self.alive = True
        self._end = weakref.finalize(owner, self._child.end, END_S)
        threading.Thread(target=self._listen, name="storage reader", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send the options; after that, lists of requests."""
        try:
            with self._sending:
                self._child.connection.send_bytes(pickle.dumps(message))
        except OSError:
            self.alive = False  # a waiting thread restarts it

    def abandon(self) -> None:
        """Kill the process without waiting for its end: it may hang in the kernel."""
        self.alive = False
        self._end()

    def _listen(self) -> None:
        while True:
            try:
                message = self._child.connection.recv_bytes()
            except (EOFError, OSError):
                break
            owner = self._owner()
            if owner is None:
                break
            owner.on_answers(pickle.loads(message))
            del owner, message  # both may be large
        self._child.connection.close()
        self.alive = False
