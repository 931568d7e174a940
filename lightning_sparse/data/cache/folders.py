"""Folders of the cache on this node: for the user only, and on a disk of the node itself.

::

    <cache_dir>/v1-<hash of the source>/     0700   one for each source and version of the layout
        cache.json                                   which source, for `lightning-sparse cache info`
        <split>.manifest.npz                         the list of samples
        <split>.lmdb/                                their bytes

A cache of another version lies in another folder, so it is never misread, and is left for `cache clear`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.data.config import CacheConfig, DataError

VERSION = 1
NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "glusterfs", "9p", "afs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"),
)


def source_name(source: str) -> str:
    return source.rstrip("/") if "://" in source else os.path.abspath(source)


def file_name(split: str) -> str:
    """The name of a split, as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", split)


def cache_folder(config: CacheConfig) -> Path:
    """The folder of this source's cache, made if it is not there.

    Raises:
        DataError: when the folder cannot be made, belongs to somebody else, or is on a network file system.
    """
    root = Path(os.path.abspath(config.cache_dir))
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cache_dir={root} cannot be made ({error.strerror}). Give one on a disk of the node that you may write to."
        ) from error
    kind = file_system(root)
    if kind in NETWORK_FILE_SYSTEMS:
        raise DataError(
            f"cache_dir={root} is on a network file system ({kind}), where locks and memory maps cannot be relied on. "
            "Give a folder on a disk of the node itself."
        )
    name = source_name(config.source)
    folder = root / f"v{VERSION}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    private_folder(folder)
    about = folder / "cache.json"
    if not about.exists():
        write_private(about, json.dumps({"source": name, "version": VERSION}).encode())
    return folder


def private_folder(folder: Path) -> None:
    """Make `folder` for this user alone, or check that it is.

    Raises:
        DataError: when it belongs to another user or others may write to it: what is in it cannot be trusted.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise DataError(f"{folder} is not a folder of this user: remove it, or give another place.")
    if about.st_mode & 0o077:
        folder.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file or none: a temporary name, then a rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path` against all processes of this node; a process that dies lets go."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def file_system(folder: Path) -> str:
    """The type of the file system that `folder` is on, "" where that cannot be told."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        real = os.path.realpath(folder)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            fields = line.split()
            place = fields[1].replace("\\040", " ")
            if (real == place or real.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
                best, kind = place, fields[2]
    return kind
