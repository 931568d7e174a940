"""Samples in shards: the tar files of WebDataset, ``<split>/*.tar``.

Members whose names are equal up to the first dot belong to one sample: ``0001.jpg`` and ``0001.cls``. A member ``.cls``
contains the label, a whole number; one of the others is the sample. Listing reads the headers once, and each sample is
then read by its place in the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache.samples import Paths
from lightning_sparse.data.cache.storage_reader import is_image

SUFFIX = ".tar"
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
    labels: npt.NDArray[np.int64]
    shard_of: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


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
