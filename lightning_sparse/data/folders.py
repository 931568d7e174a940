"""Folders and files of the cache on local disk.

::

    <cache_dir>/v2-<hash of the source>/     mode 0700, one for each source and version of the layout.
                                             Files that are not images (format="bytes") have their own folder.
        cache.json                           the source, for `lightning-sparse cache info`
        <split>.manifest                     list of the samples
        <split>.lmdb/                        the files

Another version of the layout ignores this folder and leaves it to `cache clear`.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.messages import log, log_later

VERSION = 2
WAIT_S = 5.0  # for a lock, before it is logged
NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "glusterfs", "9p", "virtiofs", "afs", "coda"),
    *("gpfs", "wekafs", "panfs", "pvfs2", "orangefs", "cvfs", "ocfs2", "gfs2", "daos"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
    *("fuse.juicefs", "fuse.JuiceFS", "fuse.daos", "fuse.dfuse", "fuse.mountpoint-s3", "fuse.blobfuse", "fuse.goofys"),
    *("fuse.blobfuse2", "fuse.seaweedfs", "fuse.weed", "fuse.alluxio-fuse", "fuse.cvmfs2", "fuse.s3ql", "fuse.hdfs"),
)


def source_name(source: str) -> str:
    """Return the source as an absolute path, or as a URL without a trailing slash."""
    return source.rstrip("/") if "://" in source else os.path.abspath(source)


def file_name(split: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", split)


def cache_path(config: CacheConfig) -> Path:
    name = source_name(config.source)
    hashed = name if config.format != "bytes" else f"{name} as bytes"
    folder = f"v{VERSION}-{hashlib.blake2b(hashed.encode(), digest_size=8).hexdigest()}"
    return Path(os.path.abspath(config.cache_dir), folder)


def cache_folder(config: CacheConfig) -> Path:
    """Return the cache folder of the source; create it if needed.

    Raises:
        DataError: if the folder cannot be created, belongs to another user, or is on a network file system. A filled
            cache that this user can only read is used without a check of its owner.
    """
    folder = cache_path(config)
    root = folder.parent
    with wrap_os_errors(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        kind = file_system(root)
        if kind in NETWORK_FILE_SYSTEMS:
            raise DataError(
                f"cache_dir={root} is on a network file system ({kind}), where locks and memory maps are not reliable. "
                "Give a folder on a local disk of the node."
            )
        if is_read_only(folder):
            return folder
        make_private_dir(folder)
        about = folder / "cache.json"
        if not about.exists() or not about.stat().st_size:
            write_private(about, json.dumps({"source": source_name(config.source), "version": VERSION}).encode())
    return folder


@contextlib.contextmanager
def wrap_os_errors(folder: Path) -> Iterator[None]:
    """Raise DataError, naming the folder, for errors of the file system in the block."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cache_dir={folder} cannot be used ({error.strerror or error}). Give a writable folder on a disk of the "
            "node, with enough free space."
        ) from error


def is_read_only(folder: Path) -> bool:
    """Whether `folder` is a filled cache that this user can read but not write."""
    return (folder / "cache.json").is_file() and not os.access(folder, os.W_OK)


def make_private_dir(folder: Path) -> None:
    """Create `folder`, accessible by this user only. If it exists, check its owner and restrict its mode."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    # another user's files cannot be trusted
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise DataError(f"{folder} is not a folder of this user: remove it, or give another cache_dir.")
    if about.st_mode & 0o077:
        folder.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    temporary = temporary_for(path)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
        # atomic
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_for(target: Path) -> Path:
    """Return the path of this process's unfinished `target`. Remove unfinished files of killed processes."""
    # the host, because only this host can tell whether the process that wrote a temporary file has ended
    start = f"{target.name}.{socket.gethostname()}."
    for left in target.parent.glob(f"{glob.escape(start)}*.tmp"):
        if not Path("/proc", left.name.split(".")[-2]).exists():
            left.unlink(missing_ok=True)
    return target.with_name(f"{start}{os.getpid()}.tmp")


@contextlib.contextmanager
def locked(path: Path, *, quiet: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file or an existing folder on this node.

    Unless `quiet`, it logs that it waits for another process. Without write access, it takes no lock.
    """
    if not path.is_dir() and not os.access(path.parent, os.W_OK):
        yield
        return
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    text = "waiting for another process of this node that uses %s; if it was suspended, resume or end it"
    try:
        try:
            # the kernel releases the lock if this process dies
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.nullcontext() if quiet else log_later(WAIT_S, log.info, text, path):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # otherwise, a process that another thread has forked would keep the lock
        os.close(file)


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of `folder`, or "". A plain "fuse" gets the name of its device."""
    longest, kind = "", ""
    with contextlib.suppress(OSError):
        real = os.path.realpath(folder)
        for line in mounts.read_text().splitlines():
            fields = line.split()
            mount = fields[1].replace("\\040", " ")
            if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(longest):
                longest, kind = mount, f"fuse.{fields[0]}" if fields[2] == "fuse" else fields[2]
    return kind
