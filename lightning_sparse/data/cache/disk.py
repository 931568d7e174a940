"""Network storage -> local disk: the files of one split as they are, in one LMDB, shared by all processes of a node.

LMDB, because one file saves inodes, any number of processes read without locks, and a killed writer loses the batch it
was writing and nothing else: writers take turns by LMDB's own lock, which the kernel releases when its holder dies.

A value is a header and the file. The header says which file it is, so that nothing is ever taken for something else:

====== ======== =====================================================================
bytes  field    why
====== ======== =====================================================================
4      magic    kind and version of the value
4      decoder  which decoder found the picture whole; another one looks again
8, 8   size,    of the file on storage when it was listed; another listing means that
       mtime    the file has changed since
4, 4   height,  of the upright picture; 0, 0: the file is damaged, and the rest says how
       width
8      checksum xxh3 over key, the fields above and the file: detects any flipped bit
====== ======== =====================================================================

Inserting ends when the limit is reached or the disk is full. Nothing is ever evicted: in shuffled epochs a cache that
replaces what it holds is replaced whole before it is used again, while one that is left alone keeps its hit rate.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_sparse.data.cache import lmdb_env
from lightning_sparse.data.cache.counts import Counter

if TYPE_CHECKING:
    import lmdb

FORMAT = b"lightning_sparse disk cache 1"
BATCH_BYTES, BATCH_S = 8 << 20, 2.0  # what a killed process may lose
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 0.05  # of the disk that is left to others
_MAGIC = b"LSd1"
_HEADER = struct.Struct("<4sIqqIIQ")
_UNCHECKED = _HEADER.size - 8


class Key(NamedTuple):
    """One file, as it was listed."""

    path: str
    size: int
    mtime_ns: int

    def digest(self) -> bytes:
        return hashlib.blake2b(os.fsencode(self.path), digest_size=16).digest()


class Stored(NamedTuple):
    """What is kept of a file. `decoder`: a number of the decoder that validated it, `decoder_number`."""

    data: bytes
    height: int
    width: int
    decoder: int

    @property
    def damage(self) -> str | None:
        """What is wrong with the file, None when nothing is."""
        return self.data.decode("utf-8", "replace") if self.height == 0 else None


def damaged(reason: str, decoder: int) -> Stored:
    return Stored(reason.encode(), 0, 0, decoder)


def decoder_number(name: str) -> int:
    return zlib.crc32(name.encode())


class DiskCache:
    """The store of one split. For the process that makes it: a forked or spawned one makes its own.

    Args:
        folder: of the LMDB; made for this user alone.
        limit_bytes: that the store may take; None takes all but a reserve of the disk.
        counter: gets what is found wrong.
        say: called with (topic, text) when inserting ends; says a topic once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None = None,
        counter: Counter | None = None,
        say: Callable[[str, str], None] = lambda topic, text: None,
    ) -> None:
        self.folder, self._limit, self._say = folder, limit_bytes, say
        self._counter = counter or Counter()
        self._lock = threading.RLock()
        self._pending: dict[bytes, tuple[Key, Stored]] = {}
        self._pending_bytes, self._pending_since = 0, 0.0
        self.full = False
        self._pid = os.getpid()
        self._environment: lmdb.Environment | None = lmdb_env.acquire(folder, FORMAT)

    def get(self, keys: Sequence[Key]) -> list[Stored | None]:
        """What is kept of these files; None for what is not there, has changed on storage, or was flipped on disk."""
        found: list[Stored | None] = []
        assert self._environment is not None, "the cache is closed"
        with self._environment.begin(buffers=True) as transaction:
            for key in keys:
                digest = key.digest()
                pending = self._pending.get(digest)
                if pending is not None:
                    found.append(pending[1] if pending[0] == key else None)
                    continue
                value = transaction.get(digest)
                found.append(None if value is None else self._checked(key, digest, value))
        return found

    def has(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each file is kept in the listed version, by header alone: for resuming a fill."""
        assert self._environment is not None, "the cache is closed"
        with self._environment.begin(buffers=True) as transaction:
            values = [transaction.get(key.digest()) for key in keys]
            return [value is not None and _is_of(key, value) for key, value in zip(keys, values, strict=True)]

    def put(self, key: Key, stored: Stored) -> None:
        """Keep a file, soon: files are written in batches. Does nothing once the cache is full."""
        with self._lock:
            if self.full:
                return
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending[key.digest()] = (key, stored)
            self._pending_bytes += len(stored.data)
            if self._pending_bytes >= BATCH_BYTES:
                self.flush()
        self.flush_old()

    def flush_old(self) -> None:
        """Write what has waited long enough."""
        if self._pending and time.monotonic() - self._pending_since >= BATCH_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits. A full disk ends inserting, not the run."""
        import lmdb

        with self._lock:
            if not self._pending or self._environment is None:
                return
            try:
                reason = self._write(self._environment, self._pending)
            except lmdb.Error as error:  # MapFullError, DiskError, ENOSPC, EIO, EDQUOT: the batch is undone as a whole
                reason = f"the disk takes no more ({error})"
            self._pending.clear()
            self._pending_bytes = 0
            if reason is not None:
                self.full = True
                self._say(
                    "disk full",
                    f"disk cache {self.folder} stops at {self.entries():,} files and {self.bytes() / 1e9:.2f} GB: "
                    f"{reason}. Training goes on; what is not kept is read from network storage when memory lacks it.",
                )

    def _write(self, environment: lmdb.Environment, batch: dict[bytes, tuple[Key, Stored]]) -> str | None:
        """Write a batch in one transaction, as far as it may go; returns why it could not go to the end."""
        room, reason = self._room()
        with environment.begin(write=True) as transaction:
            for digest, (key, stored) in batch.items():
                value = _packed(key, digest, stored)
                room -= len(value) + 4096  # LMDB rounds up to pages
                if room < 0:
                    return reason
                transaction.put(digest, value)
        return None

    def _room(self) -> tuple[int, str]:
        """(bytes that may still be written, what to say when they run out)"""
        about = os.statvfs(self.folder)
        reserve = min(RESERVE_BYTES, int(about.f_blocks * about.f_frsize * RESERVE_SHARE))
        free = about.f_bavail * about.f_frsize - reserve
        if self._limit is not None and self._limit - self.bytes() < free:
            return self._limit - self.bytes(), f"disk_gb={self._limit / 1e9:g} is reached"
        return free, f"only {about.f_bavail * about.f_frsize / 1e9:.2f} GB of the disk are free"

    def _checked(self, key: Key, digest: bytes, value: memoryview) -> Stored | None:
        if len(value) < _HEADER.size or _checksum(digest, value) != _HEADER.unpack_from(value)[-1]:
            self._counter.add(flipped_disk=1)
            return None
        magic, decoder, _, _, height, width, _ = _HEADER.unpack_from(value)
        if magic != _MAGIC or not _is_of(key, value):
            return None
        return Stored(bytes(value[_HEADER.size :]), height, width, decoder)

    def entries(self) -> int:
        """Files kept, the ones known to be damaged included."""
        assert self._environment is not None, "the cache is closed"
        return int(self._environment.stat()["entries"]) - 1

    def bytes(self) -> int:
        """Bytes on disk."""
        return (self.folder / "data.mdb").stat().st_size

    def close(self) -> None:
        """Write what waits, and let go of the files."""
        if os.getpid() != self._pid:
            return  # a forked copy; what waits is written by the original
        with self._lock:
            if self._environment is not None:
                self.flush()
                self._environment = None
                lmdb_env.release(self.folder)


def _packed(key: Key, digest: bytes, stored: Stored) -> bytes:
    fields = (_MAGIC, stored.decoder, key.size, key.mtime_ns, stored.height, stored.width)
    value = bytearray(_HEADER.pack(*fields, 0) + stored.data)
    struct.pack_into("<Q", value, _UNCHECKED, _checksum(digest, value))
    return bytes(value)


def _checksum(digest: bytes, value: memoryview | bytearray) -> int:
    import xxhash

    hashed = xxhash.xxh3_64(digest)
    view = memoryview(value)
    hashed.update(view[:_UNCHECKED])
    hashed.update(view[_HEADER.size :])
    return hashed.intdigest()


def _is_of(key: Key, value: memoryview) -> bool:
    _, _, size, mtime_ns, _, _, _ = _HEADER.unpack_from(value)
    return (size, mtime_ns) == (key.size, key.mtime_ns)
