"""LMDB environments that this process has open, shared by its users.

LMDB's locks belong to a process and a file, so a process must not open an environment twice: closing one would release
the locks of the other. A forked child must not use the environments of its parent; it opens its own.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sparse.data.cache.folders import private_folder
from lightning_sparse.data.config import DataError, no_address_space

if TYPE_CHECKING:
    import lmdb

LOCK_BYTES = 1 << 17  # of the lock file, rounded up
MAP_BYTES = 1 << 42  # address space, not disk space: it never has to grow while other processes use it
_open: dict[str, _Shared] = {}
_lock = threading.Lock()


@dataclass
class _Shared:
    environment: lmdb.Environment
    pid: int
    users: int


def acquire(folder: Path, format: bytes) -> lmdb.Environment:
    """Open the environment in `folder`, or share the open one. `format` identifies the cache format.

    Raises:
        DataError: if the folder has another format, or its files are corrupt.
    """
    name = os.path.realpath(folder)
    with _lock:
        shared = _open.get(name)
        if shared is not None and shared.pid != os.getpid():
            shared.environment.close()  # belongs to the parent; closing it here does not release the parent's locks
            shared = None
        if shared is None:
            shared = _open[name] = _Shared(_opened(folder, format), os.getpid(), 0)
        shared.users += 1
        return shared.environment


def release(folder: Path) -> None:
    """Undo one `acquire`."""
    name = os.path.realpath(folder)
    with _lock:
        shared = _open.get(name)
        if shared is None or shared.pid != os.getpid():
            return
        shared.users -= 1
        if shared.users == 0:
            shared.environment.close()
            del _open[name]


def _opened(folder: Path, format: bytes) -> lmdb.Environment:
    import lmdb

    read_only = is_read_only(folder)
    try:
        if not read_only:
            private_folder(folder)
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
            _check(environment, folder, format, read_only)
        except BaseException:
            environment.close()
            raise
    except (lmdb.Error, OSError) as error:
        if os.strerror(errno.ENOMEM) in str(error):
            raise DataError(no_address_space(f"the disk cache {folder}", MAP_BYTES)) from error
        raise _unusable(folder, f"cannot be opened: {error}") from error
    return environment


def _check_room(folder: Path) -> None:
    """LMDB maps its lock file without allocating it: on a full disk, writing to it would end the process by SIGBUS."""
    about = os.statvfs(folder)
    if not (folder / "lock.mdb").exists() and about.f_bavail * about.f_frsize < LOCK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_read_only(folder: Path) -> bool:
    """Whether `folder` has an environment that this user can read but not write."""
    return (folder / "data.mdb").is_file() and not os.access(folder / "data.mdb", os.W_OK)


def _check(environment: lmdb.Environment, folder: Path, format: bytes, read_only: bool) -> None:
    """Raise DataError if the files are truncated or have another format; write the format of a new environment."""
    if not read_only:
        environment.reader_check()  # free the slots of killed processes
    info, stat = environment.info(), environment.stat()
    needed = (info["last_pgno"] + 1) * stat["psize"]
    if info["last_txnid"] and (folder / "data.mdb").stat().st_size < needed:
        raise _unusable(folder, f"is truncated: expected {needed:,} bytes")
    with environment.begin(write=not stat["entries"] and not read_only) as transaction:
        found = transaction.get(b"format")
        if found is None and not environment.stat()["entries"] and not read_only:
            transaction.put(b"format", format)
            found = format
    if found != format:
        raise _unusable(folder, f"was written by another version ({found!r}, expected {format!r})")


def _unusable(folder: Path, reason: str) -> DataError:
    return DataError(
        f"disk cache {folder} {reason}. Remove it, or run `lightning-sparse cache clear`; the next run fills it again."
    )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old one


os.register_at_fork(after_in_child=_after_fork)
