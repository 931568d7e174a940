"""Disk tier: the files of a split in one LMDB on local disk, shared by all processes of a node.

A value is a header followed by the file:

====== ======== ====================================================================
bytes  field    meaning
====== ======== ====================================================================
4      magic    kind and version of the value
4      decoder  the decoder that validated the file; another decoder validates again
8 each size,    of the file when it was listed; a different listing means that the
       mtime,   file has changed
       tag
4, 4   height,  of the upright image; 0, 0: the file is corrupt, and the data is the
       width    reason
8      checksum xxh3 of the key, the fields above and the file
====== ======== ====================================================================
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.config import DataError, no_address_space
from lightning_sparse.data.decode import DIGEST_BYTES, FileKey
from lightning_sparse.data.folders import make_private_dir

if TYPE_CHECKING:
    import lmdb

# Why LMDB: one file instead of many inodes, readers without locks, and a killed writer loses only its current batch.
_FORMAT = b"lightning_sparse disk cache 2"
BATCH_BYTES, BATCH_S = 8 << 20, 2.0  # at most this is lost when a process is killed
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 0.05  # of the disk; stays free
_MAGIC = b"LSd2"
_HEADER = struct.Struct("<4sIqqqIIQ")
_UNCHECKED = _HEADER.size - 8
_VERSION, _VERSION_AT = struct.Struct("<qqq"), 8  # size, mtime, tag


class CachedFile(NamedTuple):
    """A file in the cache. `decoder`: id of the decoder that validated it."""

    data: bytes
    height: int
    width: int
    decoder: int

    @property
    def error(self) -> str | None:
        return self.data.decode("utf-8", "replace") if self.height == 0 else None


def corrupt_file(reason: str, decoder: int) -> CachedFile:
    """Return the entry of a corrupt file, so that later runs do not read it again."""
    return CachedFile(reason.encode(), 0, 0, decoder)


class DiskCache:
    """The disk tier of a split. Forked and spawned processes must create their own.

    `limit_bytes`: None: all free space except a reserve. `counter` counts checksum failures, and warns when inserting
    stops.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None = None,
        counter: Counter | None = None,
    ) -> None:
        self.folder, self._limit = folder, limit_bytes
        self._counter = counter or Counter()
        self._lock = threading.RLock()
        self._pending: dict[bytes, tuple[FileKey, CachedFile]] = {}
        self._pending_bytes, self._pending_since = 0, 0.0
        self._removed = 0  # bytes of removed files whose space is not taken yet
        # Nothing is evicted when the limit is reached: each epoch reads every sample once in random order, so eviction
        # would remove samples before their next use.
        self.full = is_read_only(folder)
        self._pid = os.getpid()
        self._shared: _Shared | None = _opened(folder)

    @property
    def _environment(self) -> lmdb.Environment:
        assert self._shared is not None, "the cache is closed"
        return self._shared.environment

    def get(self, keys: Sequence[FileKey]) -> list[CachedFile | None]:
        """Return the cached files; None if a file is not cached, has changed on storage, or fails its checksum."""
        files: list[CachedFile | None] = []
        with self._environment.begin(buffers=True) as transaction:
            for key in keys:
                digest = key.digest()
                pending = self._pending.get(digest)
                if pending is not None:
                    files.append(pending[1] if pending[0] == key else None)
                    continue
                value = transaction.get(digest)
                files.append(None if value is None else self._checked(key, digest, value))
        return files

    def has(self, keys: Sequence[FileKey]) -> list[bool]:
        """Whether each file is cached in its listed version, from the header alone."""
        with self._environment.begin(buffers=True) as transaction:
            values = [transaction.get(key.digest()) for key in keys]
            return [value is not None and _matches(key, value) for key, value in zip(keys, values, strict=True)]

    def put(self, key: FileKey, stored: CachedFile) -> None:
        """Cache a file with the next batch. No effect once the cache is full."""
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
        if self._pending and time.monotonic() - self._pending_since >= BATCH_S:
            self.flush()

    def flush(self) -> None:
        import lmdb

        with self._lock:
            if not self._pending or self._shared is None:
                return
            try:
                reason = self._write(self._environment, self._pending)
            except lmdb.Error as error:  # MapFullError, DiskError, ENOSPC, EIO, EDQUOT; LMDB drops the whole batch
                # a full disk stops inserting, not the run
                reason = f"the write failed ({error})"
            self._pending.clear()
            self._pending_bytes = 0
            if reason is not None:
                self.full = True
                self._counter.warn_once(
                    "disk full",
                    f"disk cache {self.folder} stops at {self.entries():,} files and {self.bytes() / 1e9:.2f} GB: "
                    f"{reason}. Training continues; files that are not cached are read from network storage.",
                )

    def _write(self, environment: lmdb.Environment, batch: dict[bytes, tuple[FileKey, CachedFile]]) -> str | None:
        room, reason = self._room()
        with environment.begin(write=True) as transaction:
            for digest, (key, stored) in batch.items():
                value = _packed(key, digest, stored)
                former = transaction.get(digest)  # its pages are reused by later transactions
                grows = len(value) + 4096 if former is None else len(value) - len(former)  # LMDB rounds up to pages
                room -= grows
                if grows > 0 and room < 0:
                    return reason
                self._removed += len(former or b"")
                transaction.put(digest, value)
                self._removed = max(0, self._removed - len(value))
        return None

    def _room(self) -> tuple[int, str]:
        about = os.statvfs(self.folder)
        reserve = min(RESERVE_BYTES, int(about.f_blocks * about.f_frsize * RESERVE_SHARE))
        free = about.f_bavail * about.f_frsize - reserve
        if self._limit is not None and self._limit - self.bytes() < free:
            return self._limit - self.bytes() + self._removed, f"disk_gb={self._limit / 1e9:g} is reached"
        return free + self._removed, f"only {about.f_bavail * about.f_frsize / 1e9:.2f} GB of the disk are free"

    def prune(self, keys: Iterable[FileKey]) -> int:
        """Remove all files but these, in any version; return how many."""
        keep = {key.digest() for key in keys}
        with self._lock, self._environment.begin(write=True, buffers=True) as transaction:
            sizes = {bytes(name): len(value) for name, value in transaction.cursor()}
            gone = [name for name in sizes if len(name) == DIGEST_BYTES and name not in keep]
            for name in gone:
                transaction.delete(name)
            # LMDB's file does not shrink: later files of this process take their space
            self._removed += sum(sizes[name] for name in gone)
            self.full = self.full and not gone
        return len(gone)

    def _checked(self, key: FileKey, digest: bytes, value: memoryview) -> CachedFile | None:
        header, data = value[: _HEADER.size], value[_HEADER.size :]
        if len(header) < _HEADER.size or _checksum(digest, header, data) != _HEADER.unpack(header)[-1]:
            self._counter.add(checksum_errors_disk=1)
            return None
        magic, decoder, _, _, _, height, width, _ = _HEADER.unpack_from(value)
        if magic != _MAGIC or not _matches(key, value):
            return None
        return CachedFile(bytes(data), height, width, decoder)

    def entries(self) -> int:
        # includes corrupt files, but not the format
        return int(self._environment.stat()["entries"]) - 1

    def bytes(self) -> int:
        return (self.folder / "data.mdb").stat().st_size

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked copy; the parent writes its batch
        with self._lock:
            self.flush()
            self._shared = None


def _packed(key: FileKey, digest: bytes, stored: CachedFile) -> bytes:
    fields = (_MAGIC, stored.decoder, key.size, key.mtime_ns, key.tag, stored.height, stored.width)
    header = _HEADER.pack(*fields, 0)
    return _HEADER.pack(*fields, _checksum(digest, header, stored.data)) + stored.data


def _checksum(digest: bytes, header: bytes | memoryview, data: bytes | memoryview) -> int:
    import xxhash

    hashed = xxhash.xxh3_64(digest)
    hashed.update(header[:_UNCHECKED])
    hashed.update(data)
    return hashed.intdigest()


def _matches(key: FileKey, value: memoryview) -> bool:
    return _VERSION.unpack_from(value, _VERSION_AT) == key[1:]


LOCK_BYTES = 1 << 17  # of the lock file, rounded up
MAP_BYTES = 1 << 42  # address space, not disk space: it never has to grow while other processes use it
_open: WeakValueDictionary[str, _Shared] = WeakValueDictionary()  # by folder
_lock = threading.Lock()


class _Shared:
    def __init__(self, environment: lmdb.Environment) -> None:
        self.environment, self.pid = environment, os.getpid()
        # closes the environment when no cache uses it any more
        weakref.finalize(self, environment.close).atexit = False


def _opened(folder: Path) -> _Shared:
    # LMDB's locks belong to a process and a file: a process must not open an environment twice, because closing one
    # would release the locks of the other. A forked child must not use the environments of its parent.
    name = os.path.realpath(folder)
    with _lock:
        shared = _open.get(name)
        if shared is not None and shared.pid != os.getpid():
            shared.environment.close()  # belongs to the parent; closing it here does not release the parent's locks
            shared = None
        if shared is None:
            shared = _open[name] = _Shared(_new_environment(folder))
        return shared


def _new_environment(folder: Path) -> lmdb.Environment:
    import lmdb

    read_only = is_read_only(folder)
    try:
        if not read_only:
            make_private_dir(folder)
            _check_room(folder)
        environment = lmdb.open(
            str(folder),
            map_size=MAP_BYTES,
            mode=0o600,
            readonly=read_only,
            lock=not read_only,  # nobody writes; the lock file could not be opened
            max_readers=1024,  # reader slots of all threads of the node; 64 bytes each
            max_spare_txns=0,  # a forked child that closes its copy frees their slots, which others may hold by then
            metasync=False,  # one fsync per batch: a power failure may lose the last batch, never part of it
            sync=True,  # without it a power failure could corrupt the tree
            writemap=False,  # writing to a mapped file on a full disk raises SIGBUS
            meminit=False,  # pages are written whole
            readahead=False,  # values are read in random order
        )
        try:
            _check(environment, folder, read_only)
        except BaseException:
            environment.close()
            raise
    except (lmdb.Error, OSError) as error:
        if os.strerror(errno.ENOMEM) in str(error):
            raise DataError(no_address_space(f"the disk cache {folder}", MAP_BYTES)) from error
        raise _unusable(folder, f"cannot be opened: {error}") from error
    return environment


def _check_room(folder: Path) -> None:
    # LMDB maps its lock file without allocating it: on a full disk, writing to it would end the process by SIGBUS.
    about = os.statvfs(folder)
    if not (folder / "lock.mdb").exists() and about.f_bavail * about.f_frsize < LOCK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_read_only(folder: Path) -> bool:
    """Whether `folder` has an environment that this user can read but not write."""
    return (folder / "data.mdb").is_file() and not os.access(folder / "data.mdb", os.W_OK)


def _check(environment: lmdb.Environment, folder: Path, read_only: bool) -> None:
    if not read_only:
        environment.reader_check()  # free the slots of killed processes
    info, stat = environment.info(), environment.stat()
    needed = (info["last_pgno"] + 1) * stat["psize"]
    if info["last_txnid"] and (folder / "data.mdb").stat().st_size < needed:
        raise _unusable(folder, f"is truncated: expected {needed:,} bytes")
    with environment.begin(write=not stat["entries"] and not read_only) as transaction:
        format = transaction.get(b"format")
        if format is None and not environment.stat()["entries"] and not read_only:
            transaction.put(b"format", _FORMAT)
            format = _FORMAT
    if format != _FORMAT:
        raise _unusable(folder, f"was written by another version ({format!r}, expected {_FORMAT!r})")


def _unusable(folder: Path, reason: str) -> DataError:
    return DataError(
        f"disk cache {folder} {reason}. Remove it, or run `lightning-sparse cache clear`; the next run fills it again."
    )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old one


os.register_at_fork(after_in_child=_after_fork)
