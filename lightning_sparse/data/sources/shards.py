"""Samples in shards: the tar files of WebDataset, ``<split>/*.tar``, or Parquet files, ``<split>/*.parquet``.

Members whose names are equal up to the first dot belong to one sample: ``0001.jpg`` and ``0001.cls``. A member ``.cls``
contains the label, a whole number; one of the others is the sample. Listing reads the headers once, and each sample is
then read by its place in the shard.

Of Parquet files, a shard is a row group, ``<file>#<number>``, because it cannot be read in parts: it is read once, for
all samples in it that the node owns. A column of bytes, or of a struct with a field ``bytes``, as in image data sets of
Hugging Face, contains the samples; the column ``label`` or ``labels``, or the only one of whole numbers, the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.sources.lists import numbered
from lightning_sparse.data.sources.manifest import Paths
from lightning_sparse.data.sources.storage_reader import is_image

TAR, PARQUET = ".tar", ".parquet"
Member = tuple[str, int, int, str]


class _Found(NamedTuple):
    path: str
    shard: int
    offset: int
    size: int
    label: str


@dataclass(frozen=True, eq=False)
class Shards:
    """The samples of shards, in order of shards and members. Fields: as those of `Manifest`."""

    shards: Paths
    paths: Paths
    labels: npt.NDArray[Any]
    shard_of: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    classes: tuple[str, ...] = ()


def samples_of(
    shards: Sequence[str], members: Sequence[Sequence[Member]], *, images: bool, member: str | None
) -> Shards:
    """Find the samples in the members of each shard.

    Args:
        members: (name, offset, size, label) of each.
        images: the sample is the member that is an image.
        member: extension of the member that is the sample, such as "npy"; None: there is only one.

    Raises:
        ValueError: if a sample has no such member or several, or only some samples have labels.
    """
    found = [
        sample
        for number, (shard, each) in enumerate(zip(shards, members, strict=True))
        for sample in _samples(number, shard, each, images, member)
    ]
    if not found:
        raise ValueError(f"the shards {shards[0]}, ... contain no samples.")
    labelled = [sample for sample in found if sample.label]
    if labelled and len(labelled) < len(found):
        without = next(sample for sample in found if not sample.label)
        raise ValueError(f"{without.path} has no .cls member, and other samples have one: give all of them a label.")
    try:
        labels = np.array([[int(sample.label)] for sample in labelled], np.int64)
    except ValueError as error:
        raise ValueError(f"a .cls member of {shards[0]}, ... is not a whole number: {error}.") from error
    shard_of, offsets, sizes = (np.array(each, np.int64) for each in list(zip(*found, strict=True))[1:4])
    paths = Paths.of([sample.path for sample in found])
    return Shards(Paths.of(shards), paths, labels.reshape(len(found), -1), shard_of, offsets, sizes)


def _samples(number: int, shard: str, members: Sequence[Member], images: bool, member: str | None) -> list[_Found]:
    groups: dict[str, list[Member]] = {}
    for each in members:
        folder, slash, name = each[0].rpartition("/")
        groups.setdefault(f"{folder}{slash}{name.partition('.')[0]}", []).append(each)
    found = []
    for key, group in groups.items():
        label = next((each[3] for each in group if each[0].endswith(".cls")), "")
        data = [each for each in group if _is_data(each[0], images, member)]
        if len(data) != 1:
            raise ValueError(
                f"{shard}: sample {key!r} has the members {', '.join(each[0] for each in group)}, of which "
                f"{len(data)} can be the sample. Give its extension, as in member='npy'."
            )
        name, offset, size, _ = data[0]
        found.append(_Found(f"{shard}/{name}", number, offset, size, label))
    return found


def _is_data(name: str, images: bool, member: str | None) -> bool:
    if member is not None:
        return name.rpartition("/")[2].partition(".")[2] == member
    return is_image(name) if images else not name.endswith(".cls")


def kind_of(paths: Sequence[str]) -> str:
    """Return the suffix of shards that all of these files have, or ""."""
    return next((kind for kind in (TAR, PARQUET) if paths and all(path.endswith(kind) for path in paths)), "")


def samples_of_rows(files: Sequence[str], contents: Sequence[Mapping[str, Any]]) -> Shards:
    """Find the samples in Parquet files.

    Args:
        contents: of each file, as `containers.row_groups`.

    Raises:
        ValueError: if the files have no rows, or only some of them have labels.
    """
    groups = [
        (f"{file}#{number}", rows, nbytes)
        for file, each in zip(files, contents, strict=True)
        for number, (rows, nbytes) in enumerate(each["groups"])
    ]
    counts = np.array([rows for _, rows, _ in groups], np.int64)
    total = int(counts.sum())
    if not total:
        raise ValueError(f"the files {files[0]}, ... contain no rows.")
    labels, classes = np.zeros((total, 0), np.int64), tuple(contents[0]["names"])
    for file, each in zip(files, contents, strict=True):
        if tuple(each["names"]) != classes:
            raise ValueError(f"{file} has other names of classes than {files[0]}: write the files of a split together.")
    values = [label for each in contents for label in each["labels"]]
    if len(values) not in (0, total):
        raise ValueError(f"only some of the files {files[0]}, ... have a column of labels: give all of them one.")
    if values:
        labels, named = numbered(f"{files[0]}, ...", {"label": values})
        classes = named or classes
    means = np.array([nbytes // max(1, rows) for _, rows, nbytes in groups], np.int64)
    offsets = np.concatenate([np.arange(rows) for rows in counts])
    paths = Paths.of([f"{group}/{row}" for group, rows, _ in groups for row in range(rows)])
    shard_of = np.repeat(np.arange(len(groups)), counts)
    return Shards(
        Paths.of([group for group, _, _ in groups]), paths, labels, shard_of, offsets, means[shard_of], classes
    )
