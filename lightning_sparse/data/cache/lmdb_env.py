"""Open LMDB environments of this process.

LMDB's locks belong to a process and a file, so a process must not open the same environment twice: closing one would
release the locks of the other. Two users in one process (a second DataModule, a test) therefore share one, and the
only module-level state of this folder lies here. A forked child must not use what its parent opened; it opens its own.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sparse.data.cache.folders import private_folder
from lightning_sparse.data.config import DataError

if TYPE_CHECKING:
    import lmdb

MAP_BYTES = 1 << 42  # address space, not disk: large enough that it never has to grow while others have it open
_open: dict[str, _Shared] = {}
_lock = threading.Lock()


@dataclass
class _Shared:
    environment: lmdb.Environment
    pid: int
    users: int


def acquire(folder: Path, format: bytes) -> lmdb.Environment:
    """Open the environment in `folder`, or join those who have it open. `format` marks whose it is.

    Raises:
        DataError: when the folder holds something else, or files that are damaged.
    """
    name = os.path.realpath(folder)
    with _lock:
        shared = _open.get(name)
        if shared is not None and shared.pid != os.getpid():
            shared.environment.close()  # the parent's; closing it here leaves the parent's locks alone
            shared = None
        if shared is None:
            shared = _open[name] = _Shared(_opened(folder, format), os.getpid(), 0)
        shared.users += 1
        return shared.environment


def release(folder: Path) -> None:
    """Undo one `acquire` of this process."""
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

    private_folder(folder)
    way_out = f"Remove {folder}, or run `lightning-sparse cache clear`; it will be filled again."
    try:
        environment = lmdb.open(
            str(folder),
            map_size=MAP_BYTES,
            mode=0o600,
            max_readers=1024,  # slots for reading threads of all processes of the node; 64 bytes each
            max_spare_txns=4,  # keeps slots of threads that read often
            metasync=False,  # one fsync a batch: after a power cut the last batch may be missing, never half there
            sync=True,  # without it a power cut could leave a tree that points nowhere
            writemap=False,  # writes through a map of a sparse file on a full disk would be a fatal SIGBUS
            meminit=False,  # pages are written whole; they hold nothing of this process to hide
            readahead=False,  # values are read in random order, each a few dozen pages in one piece
        )
    except lmdb.Error as error:
        raise DataError(f"{folder} cannot be opened as a disk cache: {error}. {way_out}") from error
    try:
        environment.reader_check()  # frees the slots of processes that were killed
        about = environment.info()
        needed = (about["last_pgno"] + 1) * environment.stat()["psize"]
        if about["last_txnid"] and (folder / "data.mdb").stat().st_size < needed:
            raise DataError(f"{folder} was cut short: {needed:,} bytes are expected. {way_out}")
        with environment.begin(write=not environment.stat()["entries"]) as transaction:
            found = transaction.get(b"format")
            if found is None and not environment.stat()["entries"]:
                transaction.put(b"format", format)
                found = format
        if found != format:
            raise DataError(f"{folder} was written by another version ({found!r}, this is {format!r}). {way_out}")
    except lmdb.Error as error:
        environment.close()
        raise DataError(f"{folder} cannot be read as a disk cache: {error}. {way_out}") from error
    except DataError:
        environment.close()
        raise
    return environment


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
