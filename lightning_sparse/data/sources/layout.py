"""What a layout of a source is, and what its class is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
