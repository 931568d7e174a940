"""Parquet files: those of the folder of a split, ``<split>/*.parquet``, and those of a repository of Hugging Face.

A shard is a row group, ``<file>#<number>``, because it cannot be read in parts: it is read once, for all samples in it
that the node owns. A column of bytes, or of a struct with a field ``bytes``, as in image data sets of Hugging Face,
contains the samples; the column ``label`` or ``labels``, or the only one of whole numbers, the labels.

A repository, as it is cloned or downloaded, has the files of all splits in one folder:
``data/train-00000-of-00004.parquet``, ``data/validation-00000-of-00001.parquet``; those of one configuration are in the
folder of its name, which is then the source itself. The split is what a name begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.config import SPLITS, is_installed
from lightning_sparse.data.folders import source_name
from lightning_sparse.data.sources.layout import Split, folder_times
from lightning_sparse.data.sources.lists import numbered
from lightning_sparse.data.sources.manifest import Manifest, Paths
from lightning_sparse.data.sources.storage import Listed, MissingFolderError, Storage

_FOLDERS = ("data", "")
_NAMED = {"val": ("validation", "val")}  # what names of its files begin with; else the split
_FILE = re.compile(r"(\w+)(?:-(\d{5})-of-(\d{5})[\w-]*)?\.parquet")
_MAX_CONFIGURATIONS = 64  # folders that are looked into for them
File = tuple[str, int, int]


@dataclass
class ParquetFiles:
    """The rows of Parquet files, in order of files and rows."""

    split: Split
    listed: Listed

    @classmethod
    def find(cls, split: Split) -> ParquetFiles | None:
        """Raises: ValueError, MissingFolderError: as `files_of_repository` and `check_no_files_of`."""
        if isinstance(split.folders, MissingFolderError):
            files = files_of_repository(split.storage, split.name)
        else:
            check_no_files_of(split.storage, split.name)
            files = split.shards(".parquet")
        return None if files is None else cls(split, files)

    def classes(self) -> None:
        return None

    def manifest(self) -> Manifest:
        split, files = self.split, [path for path, _, _ in self.listed.files]
        if not is_installed("pyarrow"):
            raise ValueError(
                f"source={split.source}: the Parquet files in {split.name}/ need pyarrow: `pip install pyarrow`."
            )
        found = split.storage.row_groups(files, split.config.member or "")
        contents = list(split.progress(found, len(files), "shard"))
        groups = [
            (f"{file}#{number}", rows, nbytes, mtime)
            for (file, _, mtime), each in zip(self.listed.files, contents, strict=True)
            for number, (rows, nbytes) in enumerate(each["groups"])
        ]
        counts, sizes, mtimes = (np.array([group[column] for group in groups], np.int64) for column in (1, 2, 3))
        total = int(counts.sum())
        if not total:
            raise ValueError(f"the files {files[0]}, ... contain no rows.")
        labels, classes = self._labels(files, contents, total)
        shard_of = np.repeat(np.arange(len(groups)), counts)
        return Manifest(
            split.name,
            source_name(split.source),
            classes,
            [f"{group}/{row}" for group, rows, *_ in groups for row in range(rows)],
            labels,
            (sizes // counts.clip(1))[shard_of],
            mtimes[shard_of],
            shards=Paths.of([group for group, *_ in groups]),
            shard_of=shard_of,
            offsets=np.concatenate([np.arange(rows) for rows in counts]),
            **folder_times(self.listed.folders),
        )

    def _labels(
        self, files: list[str], contents: list[dict[str, Any]], total: int
    ) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
        """Return the labels [N, L] and the names of the classes.

        Raises:
            ValueError: if files differ in the names, or only some of them have labels.
        """
        names = tuple(contents[0]["names"])
        for file, each in zip(files, contents, strict=True):
            if tuple(each["names"]) != names:
                raise ValueError(
                    f"{file} has other names of classes than {files[0]}: write the files of a split together."
                )
        values = [label for each in contents for label in each["labels"]]
        if len(values) not in (0, total):
            raise ValueError(f"only some of the files {files[0]}, ... have a column of labels: give all of them one.")
        if not values:
            return np.zeros((total, 0), np.int64), names
        labels, found = numbered(f"{files[0]}, ...", {"label": values})
        return labels, found or names


def files_of_repository(storage: Storage, split: str) -> Listed | None:
    """Return the Parquet files of a split that has no folder, and the folder that they are in.

    Returns:
        None if the source is no such repository.

    Raises:
        ValueError: if it is not clear which files are those of the split, or some of them are missing.
        MissingFolderError: if the repository has files of other splits only.
    """
    folders = _folders(storage)
    if folders is None:
        return None
    there = [folder for folder in _FOLDERS if not folder or folder in folders]
    has_folders = sorted({"train", "val", "test"} & folders.keys())
    if has_folders:
        _check_alone(storage, split, f"{has_folders[0]}/", "data" in folders)
        return None
    found = {folder: files for folder in there if (files := _by_prefix(storage, folder))}
    if not found:
        _check_no_configurations(storage, folders)
        return None
    if len(found) > 1:
        raise ValueError(f"source={storage.source} has Parquet files in data/ and beside it: remove one of them.")
    ((folder, files),) = found.items()
    prefixes = [each for each in _prefixes(split) if each in files]
    if not prefixes:
        raise MissingFolderError(
            f"source={storage.source} has no {split}/, and Parquet files of {', '.join(sorted(files))} only."
        )
    if len(prefixes) > 1:
        raise ValueError(f"source={storage.source} has files of {' and of '.join(prefixes)}: remove one of them.")
    names = sorted(files[prefixes[0]])
    _check_complete(storage.source, [name for name, _, _ in names])
    path = f"{folder}/" if folder else ""
    return Listed([(path + name, size, mtime) for name, size, mtime in names], [(folder, storage.mtimes([folder])[0])])


def check_no_files_of(storage: Storage, split: str) -> None:
    """Raise ValueError if there are Parquet files of a split that also has a folder."""
    _check_alone(storage, split, f"{split}/", "data" in (_folders(storage) or {}))


def _folders(storage: Storage) -> dict[str, int] | None:
    """Return the folders in the source; None if it cannot be listed."""
    try:
        return storage.names("")
    except MissingFolderError:
        return None


def _check_alone(storage: Storage, split: str, folder: str, has_data: bool) -> None:
    files = _by_prefix(storage, "data") if has_data else {}
    for prefix in _prefixes(split):
        if prefix in files:
            raise ValueError(
                f"source={storage.source} has both {folder} and data/{min(files[prefix])[0]}, so it is not clear which "
                f"samples are meant: remove one of them, or give a source that has only one."
            )


def _check_no_configurations(storage: Storage, folders: Iterable[str]) -> None:
    """Raise ValueError if the repository has several configurations, each in a folder of its own."""
    some = sorted(name for name in folders if not name.startswith("."))[:_MAX_CONFIGURATIONS]
    found = [name for name in some if _by_prefix(storage, name)]
    if found:
        raise ValueError(
            f"source={storage.source} has no train/, but Parquet files in {', '.join(f'{name}/' for name in found)}. "
            f"Give one of these folders as the source, such as {storage.source}/{found[0]}."
        )


def _by_prefix(storage: Storage, folder: str) -> dict[str, list[File]]:
    """Return the Parquet files of each split in a folder."""
    found: dict[str, list[File]] = {}
    known = {prefix for split in SPLITS for prefix in _prefixes(split)}
    for file in storage.files(folder):
        match = _FILE.fullmatch(file[0])
        if match is not None and match[1] in known:
            found.setdefault(match[1], []).append(file)
    return found


def _prefixes(split: str) -> tuple[str, ...]:
    return _NAMED.get(split, (split,))


def _check_complete(source: str, names: list[str]) -> None:
    """Raise ValueError unless these are all files of one version of a split."""
    matches = [_FILE.fullmatch(name) for name in names]
    numbers = [(int(match[2]), int(match[3])) for match in matches if match is not None and match[2] is not None]
    if len(names) == 1 and not numbers:
        return
    total = numbers[0][1] if numbers else 0
    if len(numbers) < len(names) or numbers != [(number, total) for number in range(total)]:
        raise ValueError(
            f"source={source}: of the {total} files {names[0]}, ..., some are missing, or files of another version are "
            f"beside them; there are {len(names)}. Download the data set again, into an empty folder."
        )
