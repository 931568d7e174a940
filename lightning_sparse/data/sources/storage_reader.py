"""Reads network storage in a separate process. A script that `storage.py` runs.

A read from a dead mount cannot be interrupted, and its process cannot be killed until the mount responds. So the
training process never reads network storage: it starts this process, and abandons it if it hangs.

The process receives lists of requests on a socket (the file descriptor in argv), answers them in any order, and ends
when the socket closes. Messages are pickled. To start fast, it imports only the standard library, and fsspec for a URL.

=========  ====================================  =======================================================
request    number, kind, arguments               "read": a file, or first and last byte of a part of it.
                                                 A first byte below 0 means a sparse member, see `Member`
                                                 "list": contents of a folder, see `FILTERS`
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

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file: its modules must not shadow others

import contextlib
import hashlib
import html
import json
import os
import pickle
import posixpath
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from errno import EACCES, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO, EPERM
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn
from urllib.parse import quote, unquote

OK, UNREADABLE, RETRY, UNUSABLE, PROGRESS, READY = "ok", "unreadable", "retry", "unusable", "progress", "ready"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Errors of the file. All others (EIO, ENOTCONN, ESTALE, ETIMEDOUT, ...) are errors of the network and may pass.
_FILE_ERRORS = (ENOENT, EACCES, EPERM, EISDIR, ENOTDIR, ELOOP, ENAMETOOLONG, ENXIO)
# Errors of a program or of its options, which do not pass.
_PROGRAM_ERRORS = (AttributeError, ImportError, NotImplementedError, TypeError)
PROGRESS_S = 1.0
MAX_LISTING_S = 1800.0  # of one request to a URL, whose progress is not known
MAX_LABEL_BYTES = 64  # of a member that is a label: `.cls`
MAX_LINKS = 40  # links that are followed from member to member; Linux follows as many between files
READ_BYTES = 4 << 20  # Parquet files are read in parts, so that slow storage is seen to answer
LFS_POINTER = b"version https://git-lfs"
SEND_BYTES, SEND_S = 1 << 16, 0.02  # answers wait for others up to these


class UnreadableFileError(Exception):
    """The file cannot be read, now or later."""


Listing = tuple[list[tuple[str, int, int, int]], list[tuple[str, int]], list[str]]
"""(Path relative to the root, size, mtime in ns, tag) of files; (path, stamp) of folders; paths of ignored
files. Unknown sizes are -1, and other unknown values are 0. Tag and stamp change when a path leads to another file or
folder, even of equal size and time."""


class LocalStorage:
    turn: "contextlib.AbstractContextManager[Any]" = contextlib.nullcontext()  # threads may use it at the same time

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str, first: int = 0, last: "int | None" = None) -> tuple[bytes, int, int]:
        """Return (contents, size, mtime in ns) of a file, or of its bytes first to last - 1."""
        # non-blocking: open() of a named pipe would wait for a writer
        # follows links, as torchvision's ImageFolder does
        file = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise UnreadableFileError("it is not a regular file")
            parts, end, at = [], sys.maxsize if last is None else last, first
            most = min(about.st_size + 1, 1 << 24)  # a read allocates its whole length
            while at < end and (part := os.pread(file, min(end - at, most), at)):
                parts.append(part)
                at += len(part)
        finally:
            os.close(file)
        if at < min(end, about.st_size):
            raise OSError(EIO, f"a read ended at byte {at:,} of {about.st_size:,}", path)
        data = b"".join(parts)
        return data if last is None else _whole_part(data, first, last), len(data), about.st_mtime_ns

    def opened(self, path: str) -> Any:
        return open(os.path.join(self.root, path), "rb")

    def modified(self, path: str) -> int:
        return os.stat(os.path.join(self.root, path)).st_mtime_ns

    def stamp(self, path: str) -> int:
        return _stamp(os.stat(os.path.join(self.root, path)), _volatile_devices())

    def listing(self, path: str, kind: str, progress: "Callable[[], None]") -> Listing:
        """List a folder. `progress` is called every `PROGRESS_S` seconds, if entries are read."""
        listing: Listing = ([], [], [])
        add, clock = tuple(entries.append for entries in listing), time.monotonic  # looked up once, not for each entry
        next_report = clock() + PROGRESS_S
        for place, entry in self._walk(path, kind, (), _volatile_devices()):
            add[place](entry)
            if clock() >= next_report:
                progress()
                next_report = clock() + PROGRESS_S
        return listing

    def _walk(
        self, folder: str, kind: str, parents: "tuple[tuple[int, int], ...]", volatile: "frozenset[int]"
    ) -> Iterator[tuple[int, Any]]:
        about = os.stat(os.path.join(self.root, folder))  # before it is listed: later changes have a later time
        # links could form a loop
        own = (about.st_dev, about.st_ino)
        if own in parents:
            return
        yield 1, (folder, _stamp(about, volatile))
        wanted, above = FILTERS[kind], f"{folder}/" if folder else ""
        with os.scandir(os.path.join(self.root, folder)) as entries:
            for entry in entries:
                name = above + entry.name
                if entry.is_dir():
                    if is_visible(entry.name) and kind == "here":
                        yield 1, (name, _stamp(entry.stat(), volatile))
                    elif is_visible(entry.name):
                        yield from self._walk(name, kind, (*parents, own), volatile)
                elif wanted(entry.name):
                    try:
                        file = entry.stat()
                    except FileNotFoundError:  # a dangling link; listed, so that the read error names it
                        yield 0, (name, 0, 0, 0)
                        continue
                    tag = 0 if file.st_dev in volatile else hash((file.st_ino, file.st_ctime_ns))
                    yield 0, (name, file.st_size, file.st_mtime_ns, tag)
                elif is_visible(entry.name):
                    yield 2, name

    def alive(self) -> bool:
        with os.scandir(self.root) as entries:
            # an unmounted folder is empty
            return next(entries, None) is not None


class FsspecStorage:
    def __init__(self, url: str, options: "dict[str, Any]") -> None:
        # While another thread imports fsspec, an import of fsspec.core would make each wait for the other's lock, and
        # Python would give one of them a partially imported module.
        import fsspec

        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/") or _root_of_archive(self._fs)
        self._is_web = type(self._fs).__name__ == "HTTPFileSystem"
        self.turn = contextlib.nullcontext() if _is_thread_safe(self._fs) else threading.RLock()

    def read(self, path: str, first: int = 0, last: "int | None" = None) -> tuple[bytes, int, int]:
        """Return (contents, size, 0): the modification time would take another request."""
        if last == first:  # some file systems would return the whole file
            return b"", 0, 0
        part = {} if last is None else {"start": first, "end": last}
        # some file systems return views, which cannot be pickled
        data = bytes(self._fs.cat_file(self._at(path), **part))
        return data if last is None else _whole_part(data, first, last), len(data), 0

    def opened(self, path: str) -> Any:
        return self._fs.open(self._at(path), "rb", block_size=1 << 20)

    def modified(self, path: str) -> int:
        """Return the modification time in ns; 0 if storage keeps none."""
        self._fs.invalidate_cache()
        return _mtime(self._fs.info(self._at(path)))

    def stamp(self, path: str) -> int:
        """Return 0 if storage keeps neither times nor tags of folders."""
        return _mtime_or_tag(self._fs.info(self._at(path)))

    def listing(self, path: str, kind: str, progress: "Callable[[], None]") -> Listing:
        ended, deadline = threading.Event(), time.monotonic() + MAX_LISTING_S

        def report() -> None:
            while not ended.wait(PROGRESS_S) and time.monotonic() < deadline:
                progress()

        threading.Thread(target=report, daemon=True).start()
        try:
            return self._listing(path, kind)
        finally:
            ended.set()

    def _listing(self, path: str, kind: str) -> Listing:
        at, skip = self._at(path), len(self._root) + 1 if self._root else 0
        listing: Listing = ([], [], [])
        for name, about in self._entries(at, kind).items():
            *folders, last = name[len(at) :].rstrip("/").split("/")
            if not all(map(is_visible, folders)):
                continue
            is_folder, own = about["type"] == "directory", self._name(name[skip:])
            if is_folder and is_visible(last):
                listing[1].append((own.rstrip("/"), _mtime_or_tag(about)))
            elif is_folder or name.endswith("/") or name == at:  # a placeholder of a folder, or its index page
                continue
            elif FILTERS[kind](self._name(last)):
                size = about.get("size")
                listing[0].append((own, -1 if size is None else size, _mtime(about), _tag_of_entry(about)))
            elif is_visible(last):
                listing[2].append(own)
        return listing

    def _entries(self, at: str, kind: str) -> "dict[str, dict[str, Any]]":
        if self._is_web:
            return dict(self._linked(at, below=kind != "here"))
        if kind == "here":
            return {entry["name"]: entry for entry in self._fs.ls(at, detail=True)}
        entries: dict[str, dict[str, Any]] = self._fs.find(at, detail=True, withdirs=True)
        return entries

    def _linked(self, at: str, *, below: bool) -> "Iterator[tuple[str, dict[str, Any]]]":
        for entry in self._fs.ls(f"{at}/", detail=True):
            inner = html.unescape(entry["name"][len(at) + 1 :])
            # an index page also has links that sort or leave the page
            if not inner.strip("/") or "/" in inner[:-1] or "?" in inner or "#" in inner or inner in ("./", "../"):
                continue
            yield f"{at}/{inner}", entry
            if below and entry["type"] == "directory" and is_visible(inner):
                yield from self._linked(f"{at}/{inner.rstrip('/')}", below=True)

    def _name(self, path: str) -> str:
        # as a mount would list it: web servers quote names
        return unquote(path, errors="surrogateescape") if self._is_web else path

    def alive(self) -> bool:
        return bool(self._fs.ls(self._root or "", detail=False))

    def _at(self, path: str) -> str:
        path = quote(path, errors="surrogateescape") if self._is_web else path
        return f"{self._root}/{path}" if self._root and path else self._root or path


def _is_thread_safe(fs: Any) -> bool:
    # Some file systems share one file or connection, so concurrent reads would mix up their bytes.
    wraps_another = any(hasattr(fs, name) for name in ("fo", "fs", "sync_fs", "target_protocol"))
    if wraps_another:
        return False
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    return bool(fs.async_impl or protocols & {"file", "memory"})


def _root_of_archive(fs: Any) -> str:
    """Return "." for a tar file whose members are named ./train/..., else ""."""
    if "tar" not in fs.protocol:
        return ""
    names = {name.partition("/")[0] for name in fs.ls("", detail=False)}
    if "." in names and len(names) > 1:
        other = min(names - {"."})
        raise ValueError(f"the names of some members begin with ./, but not all ({other}): write the file again.")
    return "." if "." in names else ""


def _whole_part(data: bytes, first: int, last: int) -> bytes:
    """Return the data. Raise UnreadableFileError if it does not have the length of the requested part."""
    if len(data) != last - first:
        raise UnreadableFileError(
            f"storage returned {len(data):,} bytes for bytes {first:,} to {last:,}. If the file has become shorter, "
            "run `lightning-sparse cache warm` to list the source again. Otherwise its server cannot send parts of "
            "files"
        )
    return data


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_label(name: str) -> bool:
    return name.lower().endswith(".cls")


def is_visible(name: str) -> bool:
    return not name.startswith(".")


FILTERS: "dict[str, Callable[[str], bool]]" = {
    "here": lambda name: True,  # all files in the folder; the others: below it
    "visible": is_visible,
    "images": lambda name: is_visible(name) and is_image(name),
}
"""Which files are listed, by their names. Hidden folders are not."""


def _volatile_devices() -> "frozenset[int]":
    """Return the devices of FUSE mounts. Many of them change the inode number of a file over time."""
    devices = set()
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            own, _, other = line.partition(" - ")
            if other.startswith("fuse"):
                devices.add(os.makedev(*map(int, own.split()[2].split(":"))))
    return frozenset(devices)


def _stamp(about: os.stat_result, volatile: "frozenset[int]") -> int:
    # users cannot set the status-change time
    own = () if about.st_dev in volatile else (about.st_ino, about.st_ctime_ns)
    return hash((about.st_mtime_ns, *own))


_MASK = (1 << 63) - 1
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created", "date_time")
_TAGS = (
    *("ETag", "etag", "VersionId", "version_id", "versionId", "generation", "md5Hash", "content_md5", "checksum"),
    *("crc32c", "CRC", "chksum", "sha", "ino", "created", "timeCreated"),
)


def _mtime(about: "dict[str, Any]") -> int:
    """Return the modification time in ns; 0 if unknown."""
    for name in _TIMES:
        value = about.get(name)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    return 0


def _tag_of_entry(about: "dict[str, Any]") -> int:
    """Return a hash of the version fields that storage lists for a file; 0 if there are none."""
    versions = [str(about[name]) for name in _TAGS if about.get(name) is not None]
    return (
        int.from_bytes(hashlib.blake2b(repr(versions).encode(), digest_size=8).digest(), "little") & _MASK
        if versions
        else 0
    )


def _mtime_or_tag(about: "dict[str, Any]") -> int:
    return (_mtime(about) * 31 + _tag_of_entry(about)) & _MASK


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


Member = tuple[str, int, int, str, int, int]
"""(Name, offset, size, contents of a ``.cls`` member, size and CRC-32 of its headers) of a file in a tar file. The
offset is that of the contents, which follow the headers. For a sparse member, whose contents are in pieces, the offset
is -1 minus that of the headers, and the size of the headers is 0."""


def members(file: Any, progress: "Callable[[], None]") -> tuple[list[Member], list[str]]:
    """Return the members of a tar file, from its headers, and the names of ignored members: hidden members and devices.

    A link stands for the member that it leads to. Raise UnreadableFileError if the file is incomplete or compressed.
    """
    import tarfile

    members: list[Member] = []
    links: list[tuple[int, str, str]] = []  # place in `members`, name, target
    ignored: list[str] = []
    last_report = time.monotonic()
    try:
        with file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                name = _member_name(member.name)
                if not all(map(is_visible, name.split("/"))):
                    ignored.append(name)
                elif member.islnk() or member.issym():
                    folder = "" if member.islnk() else posixpath.dirname(member.name)
                    target = posixpath.normpath(posixpath.join(folder, member.linkname))
                    links.append((len(members), name, target))
                    members.append((name, 0, 0, "", 0, 0))
                elif member.isreg():
                    is_short_label = is_label(name) and member.size <= MAX_LABEL_BYTES
                    stream = tar.extractfile(member) if is_short_label else None
                    label = stream.read().decode("ascii", "replace").strip() if stream else ""
                    file.seek(member.offset)  # tarfile finds the next header by itself
                    header = b"" if member.issparse() else file.read(member.offset_data - member.offset)
                    offset = -1 - member.offset if member.issparse() else member.offset_data
                    members.append((name, offset, member.size, label, len(header), zlib.crc32(header)))
                elif not member.isdir():
                    ignored.append(name)
                if time.monotonic() - last_report >= PROGRESS_S:
                    progress()
                    last_report = time.monotonic()
            check_end(file, tar.offset)
    except tarfile.TarError as error:
        raise UnreadableFileError(f"it is not an uncompressed tar file: {error}") from error
    _follow(members, links)
    return members, ignored


def _member_name(name: str) -> str:
    # `tar -C FOLDER .` puts ./ before each name
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return "" if name == "." else name


def sparse_member(file: Any, offset: int) -> bytes:
    """Return the contents of a sparse member of a tar file, whose header is at `offset`."""
    import tarfile

    with file, contextlib.suppress(tarfile.TarError):
        file.seek(offset)
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # closes nothing but the file
        member = tar.next()
        stream = None if member is None else tar.extractfile(member)
        if stream is not None:
            data: bytes = stream.read()
            return data
    raise UnreadableFileError(f"it has changed: there is no member at byte {offset:,}")


def _follow(found: list[Member], links: list[tuple[int, str, str]]) -> None:
    targets = {name: target for _, name, target in links}
    about = {member[0]: member[1:] for member in found if member[0] not in targets}
    for place, name, target in links:
        for _ in range(MAX_LINKS):  # a link may lead to another link
            target = targets.get(target, target)
        if target not in about:
            raise UnreadableFileError(f"its member {name} is a link to {target}, which is not a file in it")
        found[place] = (name, *about[target])


def check_end(file: Any, offset: int) -> None:
    """Raise UnreadableFileError unless only zeros follow the last member: tarfile ends at a damaged header."""
    file.seek(offset)
    while part := file.read(1 << 20):
        if any(part):
            raise UnreadableFileError(
                f"it has data after its end, at byte {offset:,}: either it is damaged there, or several files were "
                "joined. Write it again"
            )


def row_groups(file: Any, column: str, progress: "Callable[[], None]") -> dict[str, Any]:
    """Return (rows, bytes of the samples) of each row group of a Parquet file, its labels, and the names of classes.

    If it is unclear which column has the labels, the result names the candidates. `column` has the samples; "": the
    only column of bytes, or of a struct with a field `bytes`.
    """
    with _opened(file, progress) as parquet:
        schema = parquet.schema_arrow
        sample, label, unclear = _columns(schema, column)
        groups = []
        for number in range(parquet.metadata.num_row_groups):
            about = parquet.metadata.row_group(number)
            parts = (about.column(column_number) for column_number in range(about.num_columns))
            groups.append((about.num_rows, sum(p.total_uncompressed_size for p in parts if p.path_in_schema == sample)))
        labels = parquet.read(columns=[label]).column(0).to_pylist() if label else []
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))  # written by its data set library
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return {"groups": groups, "label": label or "", "labels": labels, "names": list(names or []), "unclear": unclear}


def rows(file: Any, column: str, group: int, progress: "Callable[[], None]") -> "list[bytes | None]":
    with _opened(file, progress) as parquet:
        sample, *_ = _columns(parquet.schema_arrow, column)
        if group >= parquet.metadata.num_row_groups:  # the file was replaced
            return []
        values = parquet.read_row_group(group, columns=[sample]).column(0).to_pylist()
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


class _Reporting:
    def __init__(self, file: Any, progress: "Callable[[], None]") -> None:
        self._file, self._progress, self.failed = file, progress, False

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except BaseException:
            self.failed = True
            raise
        self._progress()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _opened(file: Any, progress: "Callable[[], None]") -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    reported = _Reporting(file, progress)
    with file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UnreadableFileError("it is a pointer of Git LFS: run `git lfs pull` in the repository")
        file.seek(0)
        try:
            parquet = ParquetFile(pyarrow.PythonFile(reported, "r"), buffer_size=READ_BYTES)
        except pyarrow.ArrowInvalid as error:
            raise UnreadableFileError(f"it is not a Parquet file: {error}") from error
        try:
            yield parquet
        except OSError as error:  # of pyarrow too, which is no fault of the network that a later try may pass
            if reported.failed:
                raise
            raise UnreadableFileError(f"it is damaged: {' '.join(str(error).split())}") from error


def _columns(schema: Any, requested: str) -> tuple[str, str, list[str]]:
    """Return the path of the column of samples, the name of the column of labels ("" if unclear), and candidates."""
    from pyarrow import types

    kinds = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    samples, numbers = {}, []
    for field in schema:
        inner = {member.name for member in field.type} if types.is_struct(field.type) else set()
        if any(is_kind(field.type) for is_kind in kinds):
            samples[field.name] = field.name
        elif "bytes" in inner:
            samples[field.name] = f"{field.name}.bytes"
        elif types.is_integer(field.type):
            numbers.append(field.name)
    chosen = [requested] if requested in samples else list(samples)
    if len(chosen) != 1 or (requested and requested not in samples):
        raise UnreadableFileError(
            f"{len(samples)} of its columns {', '.join(schema.names)} contain bytes. Name the column of the sample, as "
            f"in member='image'"
        )
    labels = [name for name in ("label", "labels") if name in schema.names][:1] or numbers
    return (samples[chosen[0]], labels[0], []) if len(labels) == 1 else (samples[chosen[0]], "", labels)


_PARSERS: "dict[str, Callable[..., Any]]" = {"members": members, "groups": row_groups, "rows": rows}


def _import_file_system(url: str) -> None:
    # takes seconds; the first request reports an error
    with contextlib.suppress(Exception):
        import fsspec

        for part in url.split("::"):
            fsspec.get_filesystem_class(part.partition("://")[0])


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
            _import_file_system(source)
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
