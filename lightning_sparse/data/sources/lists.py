"""Samples that a list names: a CSV or Parquet file with the columns path, label and, if a sample has several, more.

Paths are relative to the source. The first column of labels may contain names, which are numbered in alphabetical
order; whole numbers are used as they are. The order of the list is that of the samples.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.sources.layout import Split, manifest_of_files
from lightning_sparse.data.sources.manifest import Manifest, count_classes
from lightning_sparse.data.sources.storage import Listed, MissingFolderError, Storage, Unreadable


@dataclass(frozen=True, eq=False)
class SampleList:
    """The samples that a list names.

    Args:
        file: the list.
        digest: hash of its contents.
        paths: of the samples, relative to the source.
        labels: int64 or float64 [N, L].
        names: names of the first label, in order; empty if it is a number.
    """

    split: Split
    file: str
    digest: str
    paths: list[str]
    labels: npt.NDArray[Any]
    names: tuple[str, ...]

    @classmethod
    def find(cls, split: Split) -> SampleList | None:
        """Read the list of a split.

        Raises:
            MissingFolderError: if there are lists, but none of this split.
            ValueError: if the list cannot be read, or is not a list of samples.
            DataError: if storage does not respond.
        """
        lists = split.config.lists
        if lists is None:
            return None
        if split.name not in lists:
            raise MissingFolderError(f"lists={lists} has no list of {split.name!r}.")
        file = lists[split.name]
        folder, _, name = file.rpartition("/")
        options = split.config.storage_options if "://" in file else None
        source = folder or ("/" if file.startswith("/") else ".")
        with Storage(source, timeout=split.timeout, readers=1, options=options) as storage:
            (answer,) = storage.read([name])
        if isinstance(answer, Unreadable):
            raise ValueError(f"the list {file} of {split.name} cannot be read: {answer.reason}.")
        columns = _of_parquet(answer.data) if name.endswith(".parquet") else _of_csv(file, answer.data)
        digest = hashlib.blake2b(answer.data, digest_size=16).hexdigest()
        if next(iter(columns), None) != "path" or not len(columns["path"]):
            raise ValueError(
                f"{file} must have a first column named path, and a row for each sample; its columns are "
                f"{', '.join(columns) or 'none'}. As in a CSV file: path,label / train/cat/1.jpg,cat"
            )
        paths = [str(each) for each in columns.pop("path")]
        labels, names = numbered(file, columns) if columns else (np.zeros((len(paths), 0), np.int64), ())
        return cls(split, file, digest, paths, labels, names)

    def classes(self) -> tuple[tuple[str, ...], int]:
        return self.names, count_classes(self.names, self.labels)

    def manifest(self) -> Manifest:
        """Find the files, in the order of the list. Raises: ValueError: if the source does not have all of them."""
        split, source = self.split, self.split.source
        try:
            below = split.below(_highest(self.paths), images=False)
            probed = split.probed(self.paths if split.images else [])
        except MissingFolderError as error:
            raise ValueError(f"{self.file} lists files of a folder that is not there: {error}") from error
        about = {path: (size, mtime) for each in below for path, size, mtime in each.files}
        absent = [path for path in self.paths if path not in about]
        if absent:
            raise ValueError(
                f"{self.file} lists {len(absent):,} file(s) that {source} does not have, such as {absent[0]!r}. Paths "
                "are relative to the source, and hidden files are left out: correct the list, or remove these rows."
            )
        folders = [folder for each in below for folder in each.folders]
        named = Listed([(path, *about[path]) for path in self.paths], folders)
        return manifest_of_files(
            source, split.name, named, self.labels, self.names, list_digest=self.digest, probed=probed
        )


def _of_csv(file: str, data: bytes) -> dict[str, Sequence[Any]]:
    try:
        rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not a CSV file in UTF-8: {error}.") from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{file}: row {number:,} has {len(row)} column(s), and the first row has {len(rows[0])}: {row}."
            )
    return {names[0]: names[1:] for names in zip(*rows, strict=True)}


def _of_parquet(data: bytes) -> dict[str, Sequence[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(data))
    return {name: table.column(name).to_pylist() for name in table.column_names}


def numbered(file: str, columns: Mapping[str, Sequence[Any]]) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Return the labels as numbers [N, L], and the names of the first column."""
    arrays: list[npt.NDArray[Any]] = []
    classes: tuple[str, ...] = ()
    for position, (name, values) in enumerate(columns.items()):
        if any(value is None or value == "" for value in values):
            raise ValueError(f"{file}: column {name} has rows without a value. Give each sample a label.")
        array = _as_numbers(values)
        if array is None and position:
            raise ValueError(
                f"{file}: column {name} contains {values[0]!r}, which is not a number. Only the first label may be a "
                "name."
            )
        if array is None:
            names, array = np.unique(np.array(values, str), return_inverse=True)
            classes = tuple(names.tolist())
        arrays.append(array)
    return np.stack(arrays, 1), classes


def _as_numbers(values: Sequence[Any]) -> npt.NDArray[Any] | None:
    """Return numbers, int64 or float64; None if the values are names. 007 is a name."""
    array = np.array(values)
    if array.dtype.kind in "US":
        numbers = _converted(array, np.int64)
        if numbers is None:
            return _converted(array, np.float64)
        return numbers if (numbers.astype(str) == array).all() else None
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64) if array.dtype.kind in "iufb" else None


def _converted(array: npt.NDArray[Any], dtype: type) -> npt.NDArray[Any] | None:
    try:
        return array.astype(dtype)
    except ValueError:
        return None


def _highest(paths: Sequence[str]) -> list[str]:
    """Return the folders of `paths` that are not in another one of them.

    >>> _highest(["a/b/1.jpg", "a/b/c/2.jpg", "d/3.jpg"])
    ['a/b', 'd']
    """
    folders = {path.rpartition("/")[0] for path in paths}
    found: list[str] = []
    for folder in sorted(folders, key=lambda each: f"{each}/") if "" not in folders else [""]:
        if not found or not folder.startswith(f"{found[-1]}/"):
            found.append(folder)
    return found
