"""Shards of WebDataset: the tar files ``<split>/*.tar``.

Members whose names are equal up to the first dot belong to one sample: ``0001.jpg`` and ``0001.cls``. A member ``.cls``
contains the label, a whole number; one of the others is the sample. Listing reads the headers once, and each sample is
then read by its place in the shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_sparse.data.folders import source_name
from lightning_sparse.data.sources.layout import Split, folder_times
from lightning_sparse.data.sources.manifest import Manifest, Paths
from lightning_sparse.data.sources.storage import Listed
from lightning_sparse.data.sources.storage_reader import is_image

Member = tuple[str, int, int, str]
"""Name, offset, size and contents of a label, of a file in a shard."""


class _Sample(NamedTuple):
    path: str
    shard: int
    offset: int
    size: int
    label: str


@dataclass
class TarShards:
    """The samples of tar files, in order of shards and members."""

    split: Split
    listed: Listed

    @classmethod
    def find(cls, split: Split) -> TarShards | None:
        shards = split.shards(".tar")
        return None if shards is None else cls(split, shards)

    def classes(self) -> None:
        return None

    def manifest(self) -> Manifest:
        split, shards = self.split, [path for path, _, _ in self.listed.files]
        members = split.progress(split.storage.members(shards), len(shards), "shard")
        found = [each for number, shard in enumerate(shards) for each in self._samples(number, shard, next(members))]
        if not found:
            raise ValueError(f"the shards {shards[0]}, ... contain no samples.")
        labelled = [sample for sample in found if sample.label]
        if labelled and len(labelled) < len(found):
            without = next(sample for sample in found if not sample.label)
            raise ValueError(
                f"{without.path} has no .cls member, and other samples have one: give all of them a label."
            )
        try:
            labels = np.array([[int(sample.label)] for sample in labelled], np.int64)
        except ValueError as error:
            raise ValueError(f"a .cls member of {shards[0]}, ... is not a whole number: {error}.") from error
        shard_of, offsets, sizes = (np.array(each, np.int64) for each in list(zip(*found, strict=True))[1:4])
        mtimes = np.array([mtime for _, _, mtime in self.listed.files], np.int64)
        parts = [(shards[each.shard], each.offset, each.offset + each.size) for each in found if split.images]
        return Manifest(
            split.name,
            source_name(split.source),
            (),
            [sample.path for sample in found],
            labels.reshape(len(found), -1),
            sizes,
            mtimes[shard_of],
            shards=Paths.of(shards),
            shard_of=shard_of,
            offsets=offsets,
            probed=split.probed(parts),
            **folder_times(self.listed.folders),
        )

    def _samples(self, number: int, shard: str, members: list[Member]) -> Iterator[_Sample]:
        """Yield the samples in the members of a shard.

        Raises:
            ValueError: if a sample has no member that can be it, or several.
        """
        groups: dict[str, list[Member]] = {}
        for each in members:
            folder, slash, name = each[0].rpartition("/")
            groups.setdefault(f"{folder}{slash}{name.partition('.')[0]}", []).append(each)
        for key, group in groups.items():
            label = next((each[3] for each in group if each[0].endswith(".cls")), "")
            data = [each for each in group if self._is_data(each[0])]
            if len(data) != 1:
                raise ValueError(
                    f"{shard}: sample {key!r} has the members {', '.join(each[0] for each in group)}, of which "
                    f"{len(data)} can be the sample. Give its extension, as in member='npy'."
                )
            name, offset, size, _ = data[0]
            yield _Sample(f"{shard}/{name}", number, offset, size, label)

    def _is_data(self, name: str) -> bool:
        if self.split.config.member is not None:
            return name.rpartition("/")[2].partition(".")[2] == self.split.config.member
        return is_image(name) if self.split.images else not name.endswith(".cls")
