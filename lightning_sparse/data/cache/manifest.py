"""The list of samples of one split: listed once on network storage, then kept in the cache.

An image folder is ``<source>/<split>/<class>/**/*.jpg``; classes are numbered in the order of their names, as
torchvision's ImageFolder does. Size and modification time of each file identify what was listed: a file that differs
from them later has changed on storage.

Listing a large data set over a network takes minutes, so a run takes the list from the cache, and only
`lightning-sparse cache warm` (or removing the cache) lists again.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.cache.folders import cache_folder, file_name, locked, source_name, write_private
from lightning_sparse.data.cache.storage import Source
from lightning_sparse.data.config import CacheConfig, DataError


class Paths(Sequence[str]):
    """Strings in one block of bytes. A million str objects in each of a node's processes would be gigabytes."""

    def __init__(self, joined: bytes, ends: npt.NDArray[np.int64]) -> None:
        """ends: where each path ends in `joined`."""
        self.joined, self.ends = joined, ends

    @classmethod
    def of(cls, paths: Sequence[str]) -> Paths:
        encoded = [os.fsencode(path) for path in paths]
        return cls(b"".join(encoded), np.cumsum([len(path) for path in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = int(self.ends[index])
        begin = int(self.ends[index - 1]) if index % len(self) else 0
        return os.fsdecode(self.joined[begin:end])

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for end in self.ends.tolist():
            yield os.fsdecode(self.joined[begin:end])
            begin = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and self.joined == other.joined and np.array_equal(self.ends, other.ends)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of one split.

    Args:
        split: its folder below the root, such as "train".
        root: the source.
        classes: names, in order.
        paths: of the files relative to the root, with forward slashes, sorted.
        labels: int64, class of each sample.
        sizes: int64, bytes of each file when it was listed.
        mtimes_ns: int64, modification time of each file when it was listed; 0 where storage knows none.

    Raises:
        DataError: for a path that could reach outside the source.
    """

    split: str
    root: str
    classes: tuple[str, ...]
    paths: Sequence[str]
    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        paths = self.paths if isinstance(self.paths, Paths) else Paths.of(self.paths)
        object.__setattr__(self, "paths", paths)
        for path in paths:
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise DataError(f"the manifest of {self.root} holds {path!r}, which could lead outside the source.")
        if not len(paths) == len(self.labels) == len(self.sizes) == len(self.mtimes_ns):
            raise ValueError("paths, labels, sizes and mtimes_ns of a manifest must be of equal length.")
        digest = hashlib.blake2b(repr((self.split, self.classes)).encode("utf-8", "surrogateescape"), digest_size=16)
        digest.update(paths.joined)
        for numbers in (paths.ends, self.labels, self.sizes, self.mtimes_ns):
            digest.update(np.ascontiguousarray(numbers, np.int64).tobytes())
        if self.fingerprint not in ("", digest.hexdigest()):
            raise DataError(f"the manifest of {self.root}, split {self.split}, was damaged: its fingerprint differs.")
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)

    def to_bytes(self) -> bytes:
        assert isinstance(self.paths, Paths)
        buffer = io.BytesIO()
        classes = Paths.of(self.classes)
        np.savez(
            buffer,
            allow_pickle=False,
            about=np.array([self.split, self.root, self.fingerprint]),
            class_bytes=np.frombuffer(classes.joined, np.uint8),
            class_ends=classes.ends,
            path_bytes=np.frombuffer(self.paths.joined, np.uint8),
            path_ends=self.paths.ends,
            labels=self.labels,
            sizes=self.sizes,
            mtimes_ns=self.mtimes_ns,
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises DataError when `data` is not what `to_bytes` gave."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                split, root, fingerprint = arrays["about"].tolist()
                classes = Paths(arrays["class_bytes"].tobytes(), arrays["class_ends"])
                paths = Paths(arrays["path_bytes"].tobytes(), arrays["path_ends"])
                labels, sizes, mtimes = (arrays[name] for name in ("labels", "sizes", "mtimes_ns"))
        except Exception as error:
            raise DataError(f"the kept list of samples cannot be read ({error}).") from error
        return cls(split, root, tuple(classes), paths, labels, sizes, mtimes, fingerprint)


def list_source(source: str, split: str, *, timeout: float = 300.0, readers: int = 16, quiet: bool = False) -> Manifest:
    """List an image folder on network storage, classes in parallel, with a progress bar.

    Raises:
        ValueError: for a split that could lead outside the source, or has no pictures.
        DataError: when storage cannot be listed.
    """
    if not split or split.startswith("/") or ".." in split.split("/"):
        raise ValueError(f"split={split!r}: give the name of a folder in {source}, such as 'train'.")
    storage = Source(source, timeout=timeout, readers=readers, quiet=quiet)
    try:
        classes = sorted(name for name, _, _ in next(storage.listing([f"{split}/"])))
        listed = storage.listing([f"{split}/{name}" for name in classes])
        bar = tqdm(listed, total=len(classes), desc=f"listing {split}", unit="class", disable=quiet or None)
        found = [(path, label, size, mtime) for label, files in enumerate(bar) for path, size, mtime in files]
    finally:
        storage.close()
    empty = sorted(set(range(len(classes))) - {label for _, label, _, _ in found})
    if empty:
        raise ValueError(
            f"source={source}: folder {split}/{classes[empty[0]]} holds no pictures, so classes would be numbered "
            "differently than in another split. Remove the folder or fill it."
        )
    if not found:
        raise ValueError(f"source={source}: {split}/ holds no folders of pictures. Expected {split}/<class>/<picture>.")
    found.sort()
    labels, sizes, mtimes = (np.array([row[column] for row in found], np.int64) for column in (1, 2, 3))
    paths = Paths.of([row[0] for row in found])
    return Manifest(split, source_name(source), tuple(classes), paths, labels, sizes, mtimes)


def load_or_list(config: CacheConfig, split: str, *, relist: bool = False, quiet: bool = False) -> Manifest:
    """The manifest kept in the cache, or the listing of the source, which is then kept. One process a node lists.

    Args:
        relist: look at the source even when a list is kept.

    Raises:
        ValueError, DataError: as `list_source`.
    """
    kept = _kept(config, split)
    with locked(kept.with_suffix(".lock")):
        if kept.exists() and not relist:
            try:
                return Manifest.from_bytes(kept.read_bytes())
            except DataError:
                kept.unlink()  # written half or flipped: list again
        manifest = list_source(config.source, split, timeout=config.storage_timeout, quiet=quiet)
        write_private(kept, manifest.to_bytes())
        return manifest


def class_names(config: CacheConfig, split: str) -> tuple[str, ...]:
    """Of the list in the cache; without one the folders of the source, whose files are not listed for this.

    Raises:
        DataError: when storage cannot be listed.
    """
    if _kept(config, split).exists():
        return load_or_list(config, split).classes
    storage = Source(config.source, timeout=config.storage_timeout, readers=1)
    try:
        return tuple(sorted(name for name, _, _ in next(storage.listing([f"{split}/"]))))
    finally:
        storage.close()


def _kept(config: CacheConfig, split: str) -> Path:
    return cache_folder(config) / f"{file_name(split)}.manifest.npz"
