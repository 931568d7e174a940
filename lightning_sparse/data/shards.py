"""Shards of tokens on network storage: read once, tokenised if they are text, and kept on the local disk.

::

    <cache_dir>/v2-<hash of the source>/     as of other sources, see `folders.py`
        tokens-<hash of the tokenizer>/      also of vocab_size
            <hash of a shard's path>.bin     its ids
            <hash of a shard's path>.json    their description, and the shard's path, size and time on storage
            shards.json                      the list of the shards, for when storage does not answer

Processes of one thread each (this module, run) make the shards, so that a script needs no ``if __name__ ==
"__main__"``. A shard is renamed when it is whole: a run that was killed goes on with the next one. This module does not
import torch, so that these processes start fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.folders import (
    NETWORK_FILE_SYSTEMS,
    cache_folder,
    file_system,
    is_read_only,
    locked,
    private_folder,
    usable,
    write_private,
)
from lightning_sparse.data.sources.storage import CHECK_S, MissingFolderError, Storage, Unreadable
from lightning_sparse.data.text import TEXT_SUFFIXES, TokenFile, Tokenizer, documents, tokenizer_of, within, write_ids
from lightning_sparse.messages import log

PART = 1 << 24  # bytes of a request
MAX_WORKERS = 16
ID_SUFFIXES = (".bin", ".npy")
Progress = Callable[[int], None]


class Shard(NamedTuple):
    """A file as it is on storage. size: 0 if unknown. beside: changes with its tag, and with the JSON beside ids."""

    path: str
    size: int
    mtime_ns: int
    beside: int = 0


class ShardFile(io.RawIOBase):
    """A file on storage, read in parts.

    Args:
        progress: called with the size of each part that was read.
    """

    def __init__(self, storage: Storage, shard: Shard, progress: Progress) -> None:
        self._storage, self._shard, self._progress = storage, shard, progress
        self._at = self._first = 0
        self._part = b""
        self._size = shard.size
        if not shard.size:  # of a server that does not list sizes
            self._fetch()
            self._size = len(self._part)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        if not self._first <= self._at < self._first + len(self._part):
            self._fetch()
        part = self._part[self._at - self._first :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _fetch(self) -> None:
        shard, first = self._shard, self._at
        last = min(first + PART, shard.size)
        (found,) = self._storage.read([(shard.path, first, last) if shard.size else shard.path])
        if isinstance(found, Unreadable):
            raise DataError(f"{self._storage.source}: {shard.path} cannot be read: {found.reason}.")
        if (shard.size and len(found.data) != last - first) or (found.mtime_ns and found.mtime_ns != shard.mtime_ns):
            raise DataError(f"{self._storage.source}: {shard.path} has changed while it was read. Start again.")
        self._first, self._part = first, found.data
        self._progress(len(found.data))


@dataclass(frozen=True)
class TokenSource:
    """The shards of a source.

    Args:
        config: where they are, and where the cache is.
        only: name of the only shard to use; "": all of the folder.
        tokenizer, vocab_size: as `TokenDataModule`.
    """

    config: CacheConfig
    only: str
    tokenizer: str
    vocab_size: int | None

    @classmethod
    def of(cls, path: str, cache_dir: str, tokenizer: str, vocab_size: int | None, **options: Any) -> TokenSource:
        """Return the source of a folder, or of a file in it. Raises: ValueError: as `CacheConfig` and `tokenizer_of`"""
        folder, _, name = (path if "://" in path else os.path.abspath(path)).rpartition("/")
        is_file = Path(name).suffix in (*ID_SUFFIXES, *TEXT_SUFFIXES)
        if not is_file and "://" not in path and Path(cache_dir).resolve().is_relative_to(Path(path).resolve()):
            raise ValueError(f"cache_dir={cache_dir!r} is in {path}, and would be taken for shards: give another.")
        config = CacheConfig(source=folder or "/" if is_file else path, cache_dir=cache_dir, format="bytes", **options)
        source = cls(config, name if is_file else "", tokenizer, vocab_size)
        source.encoder  # noqa: B018  an unknown one is refused now
        return source

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer. Raises: ValueError: as `tokenizer_of`."""
        return tokenizer_of(self.tokenizer)

    @cached_property
    def folder(self) -> Path:
        """Return the cache folder of the ids."""
        key = f"{self.encoder.identity} {self.encoder.end} {self.vocab_size}"
        root = cache_folder(self.config)
        folder = root / f"tokens-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        if not is_read_only(root):
            private_folder(folder)
        return folder

    def size_of_vocabulary(self, shards: Sequence[Shard]) -> int:
        """Return the given one, or that of the tokenizer, or of the file beside the first shard."""
        if self.vocab_size is not None:
            return self.vocab_size
        if Path(shards[0].path).suffix in TEXT_SUFFIXES:
            return self.encoder.vocab_size
        if shards[0].path.endswith(".npy"):
            raise ValueError(f"{self.config.source}/{shards[0].path} does not tell its vocabulary: give vocab_size.")
        if self.is_kept(shards[0]):
            return TokenFile.at(self.file(shards[0])).vocab_size
        with Storage(self.config, readers=1) as storage:
            return _described(storage, shards[0], None).vocab_size

    def file(self, shard: Shard) -> Path:
        """Return where the ids of a shard are kept."""
        return self.folder / f"{hashlib.blake2b(shard.path.encode(), digest_size=12).hexdigest()}.bin"

    def listed(self) -> list[Shard]:
        """List the shards. Without an answer from storage, return those that were listed last.

        Raises:
            ValueError: if there are none, or if they are not of one kind.
            DataError: if storage does not answer.
        """
        name = hashlib.blake2b(self.only.encode(), digest_size=4).hexdigest() if self.only else "shards"
        file = self.folder / f"{name}.json"
        kept: list[Shard] | None = None
        with contextlib.suppress(OSError, ValueError, TypeError):  # as a loss of power may leave it, it is made again
            kept = [Shard(*each) for each in json.loads(file.read_text())]
        timeout = self.config.storage_timeout if kept is None else min(CHECK_S, self.config.storage_timeout)
        try:
            with Storage(self.config, timeout=timeout, readers=1) as storage:
                found = self._found(storage)
        except DataError as error:
            if kept is None:
                raise
            log.warning("using the list of shards in the cache, because storage cannot be asked: %s", error)
            return kept
        for shard in set(found) - set(kept or found):
            known = any(each.path == shard.path for each in kept or ())
            log.info("%s: %s %s: reading it", self.config.source, shard.path, "has changed" if known else "is new")
        if found != kept and os.access(file.parent, os.W_OK):
            with usable(file.parent):
                write_private(file, json.dumps(found).encode())
        return found

    def _found(self, storage: Storage) -> list[Shard]:
        source = self.config.source
        try:
            files = storage.files("") if self.only else next(storage.listing([""], images=False)).files
        except MissingFolderError as error:
            raise ValueError(f"{source} cannot be listed: check the path, and that it is mounted.") from error
        jsons = {path: size + mtime + tag for path, size, mtime, tag in files if path.endswith(".json")}
        found = sorted(
            Shard(path, max(0, size), mtime, tag + jsons.get(f"{path.removesuffix('.bin')}.json", 0))
            for path, size, mtime, tag in files
            if self.only in ("", path)
        )
        text = [each for each in found if Path(each.path).suffix in TEXT_SUFFIXES]
        ids = [each for each in found if Path(each.path).suffix in ID_SUFFIXES]
        if text and ids:
            raise ValueError(
                f"{source} has ids ({ids[0].path}) and text ({text[0].path}): put them into folders of their own."
            )
        if not text and not ids:
            raise ValueError(
                f"{source}/{self.only} has no shards: there must be files of ids ({', '.join(ID_SUFFIXES)}) or of text "
                f"({', '.join(TEXT_SUFFIXES)})."
            )
        return text or ids

    def is_kept(self, shard: Shard) -> bool:
        """Whether the ids of the shard, as it is now, are in the cache."""
        try:
            about = json.loads(self.file(shard).with_suffix(".json").read_text())
            TokenFile.at(self.file(shard))  # it is whole
            return [about.get(name, 0) for name in Shard._fields] == [*shard]
        except (OSError, ValueError):
            return False

    def make(self, shard: Shard, storage: Storage, progress: Progress) -> int:
        """Write the ids of a shard to the cache, unless another process has; return the number of empty documents.

        Raises:
            ValueError: if the shard cannot be used.
            DataError: if storage or the cache folder cannot be used.
        """
        target = self.file(shard)
        with usable(target.parent), locked(target.with_suffix(".lock")):
            if self.is_kept(shard):
                return 0
            for left in target.parent.glob(f"{target.name}.*.tmp"):  # by a process that was killed
                left.unlink()
            empty = [0]
            with io.BufferedReader(ShardFile(storage, shard, progress), 1 << 16) as file:
                ids = self._ids(shard, storage, cast(BinaryIO, file), empty)
                checked = (within(each, ids.vocab_size, f"{self.config.source}/{shard.path}") for each in ids.parts)
                write_ids(target, checked, ids.vocab_size, ids.end, **shard._asdict())
            return empty[0]

    def _ids(self, shard: Shard, storage: Storage, file: BinaryIO, empty: list[int]) -> _Ids:
        name = f"{self.config.source}/{shard.path}"
        if shard.path.endswith(".bin"):
            about = _described(storage, shard, file.seek(0, io.SEEK_END))
            return _Ids(self.vocab_size or about.vocab_size, about.end, _of_bin(name, file, about))
        if shard.path.endswith(".npy"):
            return _Ids(self.size_of_vocabulary([shard]), None, _of_npy(name, file))
        encoder = self.encoder
        return _Ids(self.vocab_size or encoder.vocab_size, encoder.end, _encoded(encoder, name, file, empty))


class _Ids(NamedTuple):
    """The ids of a shard, in parts. end: id at the end of each document, None if unknown."""

    vocab_size: int
    end: int | None
    parts: Iterator[NDArray[np.int64]]


def _encoded(encoder: Tokenizer, name: str, file: BinaryIO, empty: list[int]) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of the documents of a text shard, each with its end. Counts those that are empty."""
    for text in documents(name, file):
        if not text:
            empty[0] += 1
            continue
        try:
            yield np.asarray(encoder.encode(text)).astype(np.int64)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 ({error}): convert it.") from error
        if encoder.end is not None:
            yield np.array([encoder.end])


def _described(storage: Storage, shard: Shard, size: int | None) -> TokenFile:
    """Return a ``.bin`` on storage, as the JSON beside it describes it."""

    def beside() -> bytes:
        (found,) = storage.read([f"{shard.path.removesuffix('.bin')}.json"])
        if isinstance(found, Unreadable):
            raise ValueError(found.reason)
        return found.data

    return TokenFile.of(f"{storage.source}/{shard.path}", beside, size)


def _of_bin(name: str, file: BinaryIO, about: TokenFile) -> Iterator[NDArray[np.int64]]:
    checksum = file.seek(0)
    while part := file.read(PART):
        checksum = zlib.crc32(part, checksum)
        yield np.frombuffer(part, about.dtype).astype(np.int64)
    if about.checksum not in (0, checksum):
        raise ValueError(f"{name} is damaged: its checksum is not that in its JSON. Write it again.")


def _of_npy(name: str, file: BinaryIO) -> Iterator[NDArray[np.int64]]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise ValueError(f"{name} is not a file of numpy ({error}).") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"{name} has {dtype} {shape}, but ids are whole numbers, an array [N]: write these.")
    left = int(shape[0])
    while left:
        part = np.frombuffer(file.read(min(left * dtype.itemsize, PART)), dtype)
        if not len(part):
            raise ValueError(f"{name} ends before the {shape[0]:,} ids that it has: write it again.")
        left -= len(part)
        yield part.astype(np.int64)


def is_mapped_in_place(path: str) -> bool:
    """Whether a path is a ``.bin``, or a folder of them, on a disk of this node."""
    here = Path(path)
    found = here.suffix == ".bin" if not here.is_dir() else any(here.glob("*.bin"))
    return found and "://" not in path and file_system(here) not in NETWORK_FILE_SYSTEMS


class Workers:
    """Processes that make the shards that are missing in the cache, started with the first call of `done`.

    Args:
        quiet: show no progress bar.
    """

    def __init__(self, source: TokenSource, shards: Sequence[Shard], *, quiet: bool = False) -> None:
        self._source, self._shards, self._quiet = source, shards, quiet
        self._running: dict[Connection, subprocess.Popen[bytes]] = {}
        self._bar: tqdm[None] | None = None
        self._empty = 0  # documents

    def done(self, patience_s: float) -> bool:
        """Return whether all shards are there, after waiting up to `patience_s`.

        Raises:
            ValueError, DataError: as `TokenSource.make` in one of the processes.
        """
        if self._bar is None:
            self._start()
        end = time.monotonic() + patience_s
        while self._running and (left := end - time.monotonic()) > 0:
            for connection in wait([*self._running], left):
                self._receive(cast(Connection, connection))
        return not self._running

    def _start(self) -> None:
        missing = sorted((each for each in self._shards if not self._source.is_kept(each)), key=lambda each: -each.size)
        total, name = sum(each.size for each in missing), f"tokens of {self._source.config.source}"
        hidden = self._quiet or not missing
        self._bar = tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=hidden)
        count = min(len(missing), len(os.sched_getaffinity(0)), MAX_WORKERS)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        own = replace(self._source)  # without the tokenizer, which starts threads
        for number in range(count):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
            connection = Connection(ours.detach())
            self._running[connection] = process
            connection.send((own, missing[number::count]))

    def _receive(self, connection: Connection) -> None:
        assert self._bar is not None
        try:
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenises {self._source.config.source} ended early, as if killed for memory: start "
                "again, with smaller files of text if they are .txt, which are read whole."
            ) from error
        if kind == "read":
            self._bar.update(value)
        elif kind == "error":
            raise value
        else:
            self._empty += value
            self._running.pop(connection).wait()
            connection.close()

    def close(self) -> None:
        """End the processes."""
        for connection, process in self._running.items():
            process.kill()
            process.wait()
            connection.close()
        self._running = {}
        if self._bar is not None:
            self._bar.close()
        if self._empty:
            log.info("%s: skipped %s empty document(s)", self._source.config.source, f"{self._empty:,}")


def main(file: int) -> None:
    """Make the shards that a message names, in a process of their own."""
    connection = Connection(file)
    source, shards = connection.recv()

    def leave_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()  # nothing comes
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        with Storage(source.config) as storage:
            empty = sum(source.make(each, storage, lambda size: connection.send(("read", size))) for each in shards)
        connection.send(("end", empty))
    except Exception as error:
        said = str(error) if isinstance(error, (ValueError, DataError)) else f"{type(error).__name__}: {error}"
        connection.send(("error", ValueError(said) if isinstance(error, ValueError) else DataError(said)))
    os._exit(0)  # the thread still reads


if __name__ == "__main__":
    main(int(sys.argv[1]))
