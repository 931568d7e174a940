"""Samples that are files: ``<split>/<class>/**/*``, or ``<split>/*``, without labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_sparse.data.sources.layout import Split, manifest_of_files
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import Listed, MissingFolderError
from lightning_sparse.data.sources.storage_reader import is_image, is_visible
from lightning_sparse.messages import log


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
