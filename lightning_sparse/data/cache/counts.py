"""Samples and bytes by tier: the evidence that each file crosses the storage link once."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache import shared_memory
from lightning_sparse.data.cache.shared_memory import Segment
from lightning_sparse.data.peers.collectives import on_all_ranks


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


_PROCESSES, _TOPICS = 0, 64
_ROWS, _ROW = 256, 16
_SIZE = 4096 + _ROWS * _ROW * 8
assert len(NAMES) <= _ROW


class RunCounters:
    """The counters of a run, node and split. Each process of the run opens them once.

    Attributes:
        row: int64 [len(NAMES)], the counters of this process.
        is_first: whether no other process of the run had opened them.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._header = np.frombuffer(segment.map, np.int64, 512)
        self._rows = np.frombuffer(segment.map, np.int64, _ROWS * _ROW, offset=4096).reshape(_ROWS, _ROW)
        with segment.locked():
            row = int(self._header[_PROCESSES])
            self._header[_PROCESSES] += 1
        self.is_first = row == 0
        self.row = self._rows[min(row, _ROWS - 1), : len(NAMES)]  # from the 256th process on, less exact: shared

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the counters of all processes, also of those that have ended, int64 [processes, len(NAMES)]."""
        return self._rows[: int(self._header[_PROCESSES]), : len(NAMES)].copy()

    def claim_topic(self, topic: str) -> bool:
        """Return True for the first process of the run on this node that asks for this topic, to log it once."""
        number = zlib.crc32(topic.encode()) + 1
        with self._segment.locked():
            logged = self._header[_TOPICS:]
            if number in logged or 0 not in logged:
                return False
            logged[int(np.argmin(logged != 0))] = number
            return True

    def close(self) -> None:
        """Release the segment; the last process of the run removes it."""
        self._segment.close()


def open_counters(folders: Sequence[Path], name: str) -> RunCounters:
    """Attach the segment `name` in one of the folders, or create it in the first one with enough memory.

    Raises:
        OSError: if no folder has enough memory.
    """
    for folder in folders:
        if (segment := shared_memory.attach(folder / name)) is not None:
            return RunCounters(segment)
    *preferred, last = folders
    for folder in preferred:
        with contextlib.suppress(OSError):
            return _create(folder / name)
    return _create(last / name)


def _create(path: Path) -> RunCounters:
    return RunCounters(shared_memory.create(path, _SIZE, lambda file: os.posix_fallocate(file, 0, _SIZE)))


TIERS = ("memory", "peer", "disk", "storage")
_ERRORS = {
    "flipped_memory": "checksum failures in memory, read from the next tier",
    "flipped_disk": "checksum failures on disk, read from the next tier",
    "changed": "files that have changed on storage",
    "replaced": "corrupt files replaced by other samples",
}


class TierLog:
    """Counts by epoch.

    Args:
        read: returns what this rank reports so far; the reports of all ranks are added.
    """

    def __init__(self, read: Callable[[], TierCounts]) -> None:
        self._read = read
        self._total = TierCounts()
        self.epochs: dict[int, TierCounts] = {}

    def end_epoch(self, epoch: int) -> TierCounts:
        """Return what was read since the last call. A collective."""
        total = sum(on_all_ranks(self._read), TierCounts())
        self.epochs[epoch] = self.epochs.get(epoch, TierCounts()) + (total - self._total)
        self._total = total
        return self.epochs[epoch]

    def sizes(self, read: Callable[[], tuple[int, ...]]) -> str:
        """Return one line on what the tiers of all nodes hold. A collective; `read`: see `SampleStore.sizes`."""
        memory, memory_bytes, disk, disk_bytes = (sum(column) for column in zip(*on_all_ranks(read), strict=True))
        return (
            f"  in memory: {memory:,} samples, {memory_bytes / 1e6:,.1f} MB; on local disks: {disk:,} samples, "
            f"{disk_bytes / 1e6:,.1f} MB"
        )

    def table(self) -> list[str]:
        """Return one line per epoch, of long runs the first and the last ones."""
        epochs = list(self.epochs.items())
        shown = epochs if len(epochs) <= 8 else [*epochs[:3], *epochs[-3:]]
        lines = ["  epoch  " + "".join(f"{tier:>12} MB" for tier in TIERS) + "   hits in memory"]
        for row, (epoch, counts) in enumerate(shown):
            if len(epochs) > len(shown) and row == 3:
                lines.append(f"  ... {len(epochs) - len(shown)} more")
            numbers = asdict(counts)
            sizes = "".join(f"{numbers[f'{tier}_bytes'] / 1e6:>15,.1f}" for tier in TIERS)
            lines.append(f"  {epoch:>5}  {sizes}{100 * counts.memory_hits:>16.1f} %")
        total = asdict(sum(self.epochs.values(), TierCounts()))
        return lines + [f"  {text}: {total[name]:,}" for name, text in _ERRORS.items() if total[name]]


def metrics(counts: TierCounts) -> dict[str, float]:
    """Return values for a logger: bytes by tier, and the fraction of samples that were in memory."""
    numbers = asdict(counts)
    sizes = {f"data/{tier}_bytes": float(numbers[f"{tier}_bytes"]) for tier in TIERS}
    return {**sizes, "data/memory_hits": counts.memory_hits}
