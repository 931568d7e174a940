"""What a layout of a source is, what its class is given, and the layouts of samples that are files:
``<split>/<class>/**/*``, or ``<split>/*``, without labels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.decode import UndecodableError, probe
from lightning_sparse.data.folders import source_name
from lightning_sparse.data.sources.manifest import Manifest, Paths
from lightning_sparse.data.sources.storage import Listed, Location, MissingFolderError, Storage, StoredFile
from lightning_sparse.data.sources.storage_reader import is_image, is_visible
from lightning_sparse.messages import log

LIST_READERS = 16  # folders listed at the same time
PROBES = 64  # files that are read to estimate the size of decoded images


class Layout(Protocol):
    """How the samples of a split lie in its source."""

    @classmethod
    def find(cls, split: Split) -> Layout | None:
        """Return the layout of this split; None if it is another one."""

    def classes(self) -> tuple[tuple[str, ...], int] | None:
        """Return the names of the classes and their number; None if only the whole list tells them."""

    def manifest(self) -> Manifest:
        """List the samples.

        Raises:
            ValueError: if there are none, or they cannot be used.
            DataError: if storage cannot be listed.
        """


@dataclass
class Split:
    """A split of a source, to be listed.

    Args:
        name: of the split, such as "train".
        timeout: seconds to wait for storage.
        quiet: show no progress bar.
    """

    config: CacheConfig
    name: str
    timeout: float
    quiet: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("/") or ".." in self.name.split("/"):
            raise ValueError(f"split={self.name!r} must be the name of a folder in {self.source}, such as 'train'.")
        self.storage = Storage.of(self.config, timeout=self.timeout, readers=LIST_READERS, quiet=self.quiet)

    @property
    def source(self) -> str:
        return self.config.source

    @property
    def images(self) -> bool:
        """Whether samples are images."""
        return self.config.format != "bytes"

    @cached_property
    def folders(self) -> dict[str, int] | MissingFolderError:
        """Modification times of the folders in the folder of the split, by name; the error if it is missing."""
        try:
            return self.storage.names(self.name)
        except MissingFolderError as error:
            return error

    @cached_property
    def files(self) -> Listed | None:
        """All files, if the split is a folder without folders; else None."""
        if self.folders or isinstance(self.folders, MissingFolderError):
            return None
        (listed,) = self.storage.listing([self.name], images=False)
        return listed._replace(files=sorted(listed.files))

    def shards(self, suffix: str) -> Listed | None:
        """The files of the split, if all of them have this suffix; else None."""
        files = self.files
        return files if files and files.files and all(path.endswith(suffix) for path, _, _ in files.files) else None

    def below(self, folders: Sequence[str], *, images: bool) -> list[Listed]:
        """List folders, with a progress bar."""
        return list(self.progress(self.storage.listing(folders, images=images), len(folders), "folder"))

    def progress(self, listed: Iterator[Any], total: int, unit: str) -> Iterator[Any]:
        bar = tqdm(listed, total=total, desc=f"listing {self.name}", unit=unit, disable=self.quiet or None)
        yield from bar

    def probed(self, files: Sequence[Location]) -> npt.NDArray[np.int64]:
        """Return (size, height, width) of up to `PROBES` of these images, without those that are corrupt."""
        some = [files[index] for index in np.unique(np.linspace(0, len(files) - 1, PROBES, dtype=int))] if files else []
        rows = []
        for file in self.storage.read(some):
            with contextlib.suppress(UndecodableError):
                if isinstance(file, StoredFile):
                    rows.append((file.size, *probe(file.data)))
        return np.array(rows, np.int64).reshape(-1, 3)


def manifest_of_files(
    source: str, split: str, listed: Listed, labels: npt.NDArray[Any], classes: tuple[str, ...], **more: Any
) -> Manifest:
    """Return the manifest of samples that are files. more: other fields of `Manifest`."""
    sizes, mtimes = (np.array([each[column] for each in listed.files], np.int64) for column in (1, 2))
    paths = [path for path, _, _ in listed.files]
    return Manifest(
        split, source_name(source), classes, paths, labels, sizes, mtimes, **folder_times(listed.folders), **more
    )


def folder_times(folders: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the fields of `Manifest` that tell when folders changed."""
    times = np.array([time for _, time in folders], np.int64)
    return {"folders": Paths.of([path for path, _ in folders]), "folder_mtimes_ns": times}


@dataclass
class Files:
    """Files of any kind in the folder of the split."""

    split: Split

    @classmethod
    def find(cls, split: Split) -> Files | None:
        return None if split.images or split.files is None else cls(split)

    def classes(self) -> None:
        return None

    def manifest(self) -> Manifest:
        split, listed = self.split, self.split.files
        assert listed is not None
        if not listed.files:
            raise ValueError(f"source={split.source}: {split.name}/ contains no files.")
        return manifest_of_files(split.source, split.name, listed, np.zeros((len(listed.files), 0), np.int64), ())


@dataclass
class ClassFolders:
    """Files in folders of classes, which are listed at the same time.

    Args:
        times: modification time of the folder of each class.
    """

    split: Split
    times: dict[str, int]

    @classmethod
    def find(cls, split: Split) -> ClassFolders:
        """Raises: MissingFolderError: if the split has no folder."""
        if isinstance(split.folders, MissingFolderError):
            raise split.folders
        return cls(split, split.folders)

    def classes(self) -> tuple[tuple[str, ...], int] | None:
        return (tuple(sorted(self.times)), len(self.times)) if self.times else None

    def manifest(self) -> Manifest:
        split, names = self.split, sorted(self.times)
        below = split.below([f"{split.name}/{name}" for name in names], images=split.images)
        found = dict(zip(names, below, strict=True))
        self._check_classes(found)
        if not split.images:
            return manifest_of(split.source, split.name, self.times, found)
        self._check_depth(found)
        self._check_beside()
        probed = split.probed([path for each in below for path, _, _ in each.files])
        return manifest_of(split.source, split.name, self.times, found, probed=probed)

    def _check_classes(self, below: Mapping[str, Listed]) -> None:
        """Raise ValueError if there are no classes, or one without files."""
        source, split, what = self.split.source, self.split.name, "images" if self.split.images else "files"
        empty = [name for name, each in below.items() if not each.files]
        if empty:
            raise ValueError(
                f"source={source}: folder {split}/{empty[0]} contains no {what}. Remove it, or add {what} to it; "
                f"shards (.tar, .parquet) belong into {split}/ itself."
            )
        if not below:
            raise ValueError(
                f"source={source}: {split}/ contains no class folders. Expected {split}/<class>/<image>: put each "
                "image into the folder of its class"
                + (", give lists, or remove val/ and set val_fraction=0.05." if split == "val" else ", or give lists.")
            )

    def _check_depth(self, below: Mapping[str, Listed]) -> None:
        """Raise ValueError if the classes seem to be in a folder of the split, which would be the only class."""
        if len(below) > 1:
            return
        split = self.split.name
        ((name, listed),) = below.items()
        folders = sorted({path.rpartition("/")[0] for path, _, _ in listed.files})
        if len(folders) > 1 and f"{split}/{name}" not in folders:
            raise ValueError(
                f"source={self.split.source}: {split}/{name}/ would be the only class, and its images are in folders "
                f"below it, such as {folders[0]}/. If those are the classes, move them into {split}/ itself; if {name} "
                f"is one class, move its images into {split}/{name}/ itself, or give lists."
            )

    def _check_beside(self) -> None:
        """Say which images lie beside the folders of classes, and raise ValueError for a broken link of a class."""
        source, split = self.split.source, self.split.name
        files = self.split.storage.files(split)
        broken = [name for name, size, mtime in files if not (size or mtime or "://" in source or not is_visible(name))]
        if broken:
            raise ValueError(
                f"source={source}: {split}/{min(broken)} is a link that leads nowhere, and may be that of a class. "
                "Mount what it leads to, or correct or remove the link."
            )
        beside = [name for name, _, _ in files if is_image(name) and is_visible(name)]
        if beside:
            log.warning(
                "%d image(s) beside the folders of classes in %s/ are left out, such as %s: put each into the folder "
                "of its class",
                len(beside),
                split,
                min(beside),
            )


def manifest_of(
    source: str, split: str, times: Mapping[str, int], below: Mapping[str, Listed], **more: object
) -> Manifest:
    """Return the manifest of folders of classes.

    Args:
        times: modification time of the folder of each class.
        below: what each contains, by class in order.
        more: other fields of `Manifest`.
    """
    found = sorted((*file, label) for label, each in enumerate(below.values()) for file in each.files)
    folders = {f"{split}/{name}": time for name, time in times.items()}
    folders |= {path: time for each in below.values() for path, time in each.folders if path not in folders}
    labels = np.array([label for *_, label in found], np.int64)
    listed = Listed([(path, size, mtime) for path, size, mtime, _ in found], list(folders.items()))
    return manifest_of_files(source, split, listed, labels, tuple(below), **more)
