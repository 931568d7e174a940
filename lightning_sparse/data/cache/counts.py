"""Samples and bytes by tier: the evidence that each file crosses the storage link once."""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TierCounts:
    """Samples and bytes read from each tier, and errors. Supports + and -.

    Args:
        memory_samples, memory_bytes: read from the memory of this node.
        peer_samples, peer_bytes: read from the memory of other nodes.
        disk_samples, disk_bytes: read from local disk.
        storage_samples, storage_bytes: read from network storage.
        flipped_memory, flipped_disk: checksum failures; the sample was read from the next tier.
        changed: files that changed on storage after they were listed.
        replaced: corrupt files replaced by other samples (``on_corrupt="skip"``).
        served_samples, served_bytes: sent to other nodes from memory, by the server process.
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
        """Samples read from the tiers, including those that this node read for others."""
        return self.memory_samples + self.peer_samples + self.disk_samples + self.storage_samples

    @property
    def memory_hits(self) -> float:
        """Fraction of the samples that were in the node's own memory."""
        return self.memory_samples / max(1, self.samples)


NAMES = tuple(field.name for field in fields(TierCounts))
_COLUMN = {name: column for column, name in enumerate(NAMES)}


class Counter:
    """The counts of this process.

    Args:
        row: int64 [len(NAMES)], in shared memory if other processes of the node read it.
    """

    def __init__(self, row: npt.NDArray[np.int64] | None = None) -> None:
        self._row = np.zeros(len(NAMES), np.int64) if row is None else row
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._row[_COLUMN[name]] += count

    def read(self) -> TierCounts:
        return TierCounts(*self._row.tolist())
