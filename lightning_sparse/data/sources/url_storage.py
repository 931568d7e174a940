"""Reads and lists files behind a URL, with fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import html
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote

from lightning_sparse.data.sources.storage_base import FILTERS, PROGRESS_S, Listing, is_visible, whole_part

MAX_LISTING_S = 1800.0  # of one request to a URL, whose progress is not known

_MASK = (1 << 63) - 1
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created", "date_time")
_TAGS = (
    *("ETag", "etag", "VersionId", "version_id", "versionId", "generation", "md5Hash", "content_md5", "checksum"),
    *("crc32c", "CRC", "chksum", "sha", "ino", "created", "timeCreated"),
)


class FsspecStorage:
    """A folder behind a URL. Paths are relative to it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        # While another thread imports fsspec, an import of fsspec.core would make each wait for the other's lock, and
        # Python would give one of them a partially imported module.
        import fsspec

        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/") or _root_of_archive(self._fs)
        self._is_web = type(self._fs).__name__ == "HTTPFileSystem"
        self.turn = contextlib.nullcontext() if _is_thread_safe(self._fs) else threading.RLock()

    def read(self, path: str, first: int = 0, last: int | None = None) -> tuple[bytes, int, int]:
        """Return (contents, size, 0): the modification time would take another request."""
        if last == first:  # some file systems would return the whole file
            return b"", 0, 0
        part = {} if last is None else {"start": first, "end": last}
        # some file systems return views, which cannot be pickled
        data = bytes(self._fs.cat_file(self._at(path), **part))
        return data if last is None else whole_part(data, first, last), len(data), 0

    def opened(self, path: str) -> Any:
        return self._fs.open(self._at(path), "rb", block_size=1 << 20)

    def modified(self, path: str) -> int:
        """Return the modification time in ns; 0 if storage keeps none."""
        self._fs.invalidate_cache()
        return _mtime(self._fs.info(self._at(path)))

    def stamp(self, path: str) -> int:
        """Return 0 if storage keeps neither times nor tags of folders."""
        return _mtime_or_tag(self._fs.info(self._at(path)))

    def listing(self, path: str, kind: str, progress: Callable[[], None]) -> Listing:
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

    def _entries(self, at: str, kind: str) -> dict[str, dict[str, Any]]:
        if self._is_web:
            return dict(self._linked(at, below=kind != "here"))
        if kind == "here":
            return {entry["name"]: entry for entry in self._fs.ls(at, detail=True)}
        entries: dict[str, dict[str, Any]] = self._fs.find(at, detail=True, withdirs=True)
        return entries

    def _linked(self, at: str, *, below: bool) -> Iterator[tuple[str, dict[str, Any]]]:
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


def import_file_system(url: str) -> None:
    # takes seconds; the first request reports an error
    with contextlib.suppress(Exception):
        import fsspec

        for part in url.split("::"):
            fsspec.get_filesystem_class(part.partition("://")[0])


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


def _mtime(about: dict[str, Any]) -> int:
    """Return the modification time in ns; 0 if unknown."""
    for name in _TIMES:
        value = about.get(name)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    return 0


def _tag_of_entry(about: dict[str, Any]) -> int:
    """Return a hash of the version fields that storage lists for a file; 0 if there are none."""
    versions = [str(about[name]) for name in _TAGS if about.get(name) is not None]
    return (
        int.from_bytes(hashlib.blake2b(repr(versions).encode(), digest_size=8).digest(), "little") & _MASK
        if versions
        else 0
    )


def _mtime_or_tag(about: dict[str, Any]) -> int:
    return (_mtime(about) * 31 + _tag_of_entry(about)) & _MASK
