"""List of the samples of a split: made once on network storage, then kept in the cache.

The source is ``<source>/<split>/<class>/**/*.jpg``. Classes are numbered by name, like torchvision's ImageFolder; other
splits use the numbers of train/ (`Manifest.numbered_as`). The size and the modification time of each file identify its
listed version: a file that differs has changed on storage.

Listing takes minutes over a network, so only `lightning-sparse cache warm` lists a source again.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.cache.disk import FileKey
from lightning_sparse.data.cache.folders import cache_folder, file_name, locked, source_name, write_private
from lightning_sparse.data.cache.storage import Storage
from lightning_sparse.data.config import CacheConfig, DataError

LIST_READERS = 16  # folders listed at the same time


class Paths:
    """Strings in one block of bytes. A million str objects per process would need gigabytes of memory per node."""

    def __init__(self, joined: bytes, ends: npt.NDArray[np.int64]) -> None:
        """ends: end of each path in `joined`."""
        self.joined, self.ends = joined, ends

    @classmethod
    def of(cls, paths: Sequence[str]) -> Paths:
        encoded = [os.fsencode(path) for path in paths]
        return cls(b"".join(encoded), np.cumsum([len(path) for path in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        end = int(self.ends[index])
        begin = int(self.ends[index - 1]) if index % len(self) else 0
        return os.fsdecode(self.joined[begin:end])

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for end in self.ends.tolist():
            yield os.fsdecode(self.joined[begin:end])
            begin = end


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of one split.

    Args:
        split: name of the folder in the source, such as "train".
        root: the source.
        classes: names, in order.
        paths: paths of the files relative to the root, with forward slashes, sorted.
        labels: int64, class of each sample.
        sizes: int64, size of each file when it was listed.
        mtimes_ns: int64, modification time of each file when it was listed; 0 if unknown.
        fingerprint: hash of all of these; computed if "".

    Raises:
        DataError: if a path could lead outside the source, or the fingerprint does not match.
    """

    split: str
    root: str
    classes: tuple[str, ...]
    paths: Sequence[str] | Paths
    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        paths = self.paths if isinstance(self.paths, Paths) else Paths.of(self.paths)
        object.__setattr__(self, "paths", paths)
        for path in paths:
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise DataError(f"the manifest of {self.root} contains {path!r}, which could lead outside the source.")
        if not len(paths) == len(self.labels) == len(self.sizes) == len(self.mtimes_ns):
            raise ValueError("paths, labels, sizes and mtimes_ns of a manifest must have equal lengths.")
        digest = hashlib.blake2b(repr((self.split, self.classes)).encode("utf-8", "surrogateescape"), digest_size=16)
        digest.update(paths.joined)
        for numbers in (paths.ends, self.labels, self.sizes, self.mtimes_ns):
            digest.update(np.ascontiguousarray(numbers, np.int64).tobytes())
        if self.fingerprint not in ("", digest.hexdigest()):
            raise DataError(
                f"the manifest of {self.root}, split {self.split}, is corrupt: its fingerprint does not match."
            )
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)

    def numbered_as(self, classes: tuple[str, ...]) -> Manifest:
        """Return this manifest with its classes numbered as those of train/.

        Args:
            classes: names of the classes of train/, in order. This split need not have all of them.

        Raises:
            ValueError: if this split has other classes, too.
        """
        if classes == self.classes:
            return self
        number = {name: label for label, name in enumerate(classes)}
        unknown = [name for name in self.classes if name not in number]
        if unknown:
            names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else "")
            raise ValueError(
                f"source={self.root}: {self.split}/ has {len(unknown):,} folder(s) that train/ does not have: {names}. "
                f"Their images would have no label. Put each image into {self.split}/<class>/, with the names of the "
                f"folders of train/, or remove {self.split}/ and set val_fraction=0.05."
            )
        numbers = np.array([number[name] for name in self.classes], np.int64)
        return replace(self, classes=classes, labels=numbers[self.labels], fingerprint="")

    def key(self, index: int) -> FileKey:
        """Return the file of a sample, as listed."""
        return FileKey(self.paths[index], int(self.sizes[index]), int(self.mtimes_ns[index]))

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
        """Inverse of `to_bytes`. Raises DataError if the data is corrupt."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                split, root, fingerprint = arrays["about"].tolist()
                classes = Paths(arrays["class_bytes"].tobytes(), arrays["class_ends"])
                paths = Paths(arrays["path_bytes"].tobytes(), arrays["path_ends"])
                labels, sizes, mtimes = (arrays[name] for name in ("labels", "sizes", "mtimes_ns"))
        except Exception as error:
            raise DataError(f"the cached list of samples cannot be read ({error}).") from error
        return cls(split, root, tuple(classes), paths, labels, sizes, mtimes, fingerprint)


def list_source(source: str, split: str, *, timeout: float = 300.0, quiet: bool = False) -> Manifest:
    """List an image folder on network storage, classes in parallel, with a progress bar.

    Raises:
        ValueError: if the split could lead outside the source, or contains no images.
        DataError: if storage cannot be listed.
    """
    if not split or split.startswith("/") or ".." in split.split("/"):
        raise ValueError(f"split={split!r} must be the name of a folder in {source}, such as 'train'.")
    storage = Storage(source, timeout=timeout, readers=LIST_READERS, quiet=quiet)
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
            f"source={source}: folder {split}/{classes[empty[0]]} contains no images. Remove it, or add images to it."
        )
    if not found:
        raise ValueError(
            f"source={source}: {split}/ contains no class folders. Expected {split}/<class>/<image>: put each image "
            "into the folder of its class."
        )
    found.sort()
    labels, sizes, mtimes = (np.array([row[column] for row in found], np.int64) for column in (1, 2, 3))
    paths = Paths.of([row[0] for row in found])
    return Manifest(split, source_name(source), tuple(classes), paths, labels, sizes, mtimes)


def load_or_list(config: CacheConfig, split: str, *, relist: bool = False, quiet: bool = False) -> Manifest:
    """Return the manifest from the cache, or list the source and cache the list. One process per node lists.

    Args:
        relist: list the source even if the cache has a list.
        quiet: show no progress bar.

    Raises:
        ValueError, DataError: as `list_source`.
    """
    file = _manifest_file(config, split)
    with locked(file.with_suffix(".lock")):
        if file.exists() and not relist:
            try:
                return Manifest.from_bytes(file.read_bytes())
            except DataError:
                file.unlink()  # list again
        manifest = list_source(config.source, split, timeout=config.storage_timeout, quiet=quiet)
        write_private(file, manifest.to_bytes())
        return manifest


def class_names(config: CacheConfig, split: str) -> tuple[str, ...]:
    """Return the names of the classes, from the cached manifest or from the folders of the source.

    Raises:
        DataError: if storage cannot be listed.
    """
    if _manifest_file(config, split).exists():
        return load_or_list(config, split).classes
    storage = Storage(config.source, timeout=config.storage_timeout, readers=1)
    try:
        return tuple(sorted(name for name, _, _ in next(storage.listing([f"{split}/"]))))
    finally:
        storage.close()


def _manifest_file(config: CacheConfig, split: str) -> Path:
    return cache_folder(config) / f"{file_name(split)}.manifest.npz"
