"""Where samples came from, counted: the evidence that each byte crosses the storage link once."""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TierCounts:
    """Samples and bytes by the tier that had them, and what was found wrong. Counts add and subtract.

    Args:
        memory_samples, memory_bytes: from the memory of this node.
        peer_samples, peer_bytes: from the memory of another node.
        disk_samples, disk_bytes: from local disk.
        storage_samples, storage_bytes: from network storage.
        flipped_memory, flipped_disk: a checksum did not match; the sample was taken from the next tier.
        changed: on storage the file is not the one that was listed; the new one was taken.
        replaced: the file is damaged and another sample took its place (``on_corrupt="skip"``).
        served_samples, served_bytes: given to other nodes from memory, by the process that does this.
    """

    memory_samples: int = 0
    memory_bytes: int = 0
    peer_samples: int = 0
    peer_bytes: int = 0
    disk_samples: int = 0
    disk_bytes: int = 0
    storage_samples: int = 0
    storage_bytes: int = 0
    flipped_memory: int = 0
    flipped_disk: int = 0
    changed: int = 0
    replaced: int = 0
    served_samples: int = 0
    served_bytes: int = 0

    def __add__(self, other: TierCounts) -> TierCounts:
        return TierCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TierCounts) -> TierCounts:
        return TierCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def samples(self) -> int:
        """All samples that were taken from the tiers; those that this node read for others included."""
        return self.memory_samples + self.peer_samples + self.disk_samples + self.storage_samples

    def describe(self) -> str:
        """One line: samples and bytes of each tier that had any, then what was wrong."""
        named = {field.name: value for field, value in zip(fields(self), astuple(self), strict=True)}
        parts = [
            f"{tier} {named[f'{tier}_samples']:,} ({named[f'{tier}_bytes'] / 1e6:,.1f} MB)"
            for tier in ("memory", "peer", "disk", "storage", "served")
            if named[f"{tier}_samples"]
        ]
        parts += [
            f"{name.replace('_', ' in ')}: {named[name]:,}"
            for name in ("flipped_memory", "flipped_disk", "changed", "replaced")
            if named[name]
        ]
        return ", ".join(parts) or "nothing read"


class TierSizes(NamedTuple):
    """What the tiers of one node hold. disk_bytes: of the file, with what its pages waste."""

    memory_samples: int
    memory_bytes: int
    disk_samples: int
    disk_bytes: int


NAMES = tuple(field.name for field in fields(TierCounts))
_PLACE = {name: place for place, name in enumerate(NAMES)}


class Counter:
    """The counts of this process. Its row may lie in shared memory, where other processes of the node read it."""

    def __init__(self, row: npt.NDArray[np.int64] | None = None) -> None:
        """row: int64 [len(NAMES)]."""
        self._row = np.zeros(len(NAMES), np.int64) if row is None else row
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._row[_PLACE[name]] += count

    def read(self) -> TierCounts:
        return TierCounts(*self._row.tolist())
