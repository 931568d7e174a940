"""Samples and bytes read from each tier. They show that each file crosses the storage link once."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.folders import file_name
from lightning_sparse.messages import human_bytes, log


@dataclass(frozen=True)
class TierCounts:
    """Samples and bytes read from each tier, and errors. Supports + and -.

    Args:
        peer_samples, peer_bytes: read from the memory of other nodes.
        checksum_errors_memory, checksum_errors_disk: failures after which the next tier was read.
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
    checksum_errors_memory: int = 0
    checksum_errors_disk: int = 0
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
        # includes samples that were read for other nodes
        return self.memory_samples + self.peer_samples + self.disk_samples + self.storage_samples

    @property
    def memory_hits(self) -> float:
        return self.memory_samples / max(1, self.samples)


NAMES = tuple(field.name for field in fields(TierCounts))
_COLUMN = {name: column for column, name in enumerate(NAMES)}
_PROCESSES, _TOPICS = 0, 64
_ROWS, _ROW = 256, 16
_SIZE = 4096 + _ROWS * _ROW * 8
assert len(NAMES) <= _ROW


class Counter:
    """The counts of all processes of a run on a node, and the logged topics, in shared memory.

    =================== ============= ==================================================
    part of the segment size          contents
    =================== ============= ==================================================
    header              4096          int64 each: number of processes; from 64 on, topics
    counters            256 x 16 x 8  one row per process
    =================== ============= ==================================================

    Each process opens it once per split, by its `run_name`; "": no other process uses it.
    """

    def __init__(self, name: str = "") -> None:
        self._segment = (segments.find(name) if name else None) or segments.create(name, _SIZE, b"")
        self._header = np.frombuffer(self._segment.map, np.int64, 512)
        self._rows = np.frombuffer(self._segment.map, np.int64, _ROWS * _ROW, offset=4096).reshape(_ROWS, _ROW)
        with self._segment.locked():
            row = int(self._header[_PROCESSES])
            self._header[_PROCESSES] += 1
        self.is_first = row == 0
        self._row = self._rows[min(row, _ROWS - 1)]  # from the 256th process on, less exact: shared
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._row[_COLUMN[name]] += count

    def read(self) -> TierCounts:
        return TierCounts(*self._row[: len(NAMES)].tolist())

    def total(self) -> TierCounts:
        # includes processes that have ended
        return TierCounts(*self._rows[:, : len(NAMES)].sum(0).tolist())

    def warn_once(self, topic: str, text: str) -> None:
        """Log a warning once per topic, run and node."""
        # not 0, which marks a free entry
        number = zlib.crc32(topic.encode()) + 1
        with self._segment.locked():
            logged = self._header[_TOPICS:]
            if number in logged or 0 not in logged:
                return
            logged[int(np.argmin(logged != 0))] = number
        log.warning("%s", text)

    def close(self) -> None:
        self._segment.close()


def run_name(run: bytes, node_index: int, split: str) -> str:
    # a hash, because names are public and `run` is a secret
    return f"{hashlib.blake2b(run, digest_size=8, person=b'segment').hexdigest()}-n{node_index}-{file_name(split)}"


TIERS = ("memory", "peer", "disk", "storage")
_ERRORS = {
    "checksum_errors_memory": "checksum failures in memory, read from the next tier",
    "checksum_errors_disk": "checksum failures on disk, read from the next tier",
    "changed": "files that have changed on storage",
    "replaced": "corrupt files replaced by other samples",
}


class TierSizes(NamedTuple):
    """Samples and bytes in the tiers of a node. ``folder`` is the host and folder of its disk tier."""

    memory: int = 0
    memory_bytes: int = 0
    disk: int = 0
    disk_bytes: int = 0
    folder: str = ""


class TierLog:
    """Counts by epoch, summed over ranks. `gather` is `lightning_sparse.agree.on_all`, which imports torch."""

    def __init__(
        self,
        read: Callable[[], TierCounts],
        sizes: Callable[[], TierSizes],
        gather: Callable[[Callable[[], Any]], list[Any]],
    ) -> None:
        self._read, self._sizes, self._gather = read, sizes, gather
        self._total = TierCounts()
        self.epochs: dict[int, TierCounts] = {}

    def end_epoch(self, epoch: int) -> TierCounts:
        """Return the counts since the last call. A collective."""
        total = sum(self._gather(self._read), TierCounts())
        self.epochs[epoch] = self.epochs.get(epoch, TierCounts()) + (total - self._total)
        self._total = total
        return self.epochs[epoch]

    def summary(self) -> str:
        """Return a table of the samples by tier and epoch. A collective."""
        held = self._gather(self._sizes)
        # several nodes of a host may share a disk tier
        disks = {node.folder: node for node in held}.values()
        sizes = (
            f"  in memory: {sum(node.memory for node in held):,} samples, "
            f"{human_bytes(sum(node.memory_bytes for node in held))}; "
            f"on local disks: {sum(tier.disk for tier in disks):,} samples, "
            f"{human_bytes(sum(node.disk_bytes for node in disks))}"
        )
        return "\n".join(["samples by tier and epoch, all nodes:", *self._table(), sizes])

    def _table(self) -> list[str]:
        epochs = list(self.epochs.items())
        shown = epochs if len(epochs) <= 8 else [*epochs[:3], *epochs[-3:]]
        lines = ["  epoch  " + "".join(f"{tier:>15}" for tier in TIERS) + "   hits in memory"]
        for row, (epoch, counts) in enumerate(shown):
            if len(epochs) > len(shown) and row == 3:
                lines.append(f"  ... {len(epochs) - len(shown)} more")
            numbers = asdict(counts)
            sizes = "".join(f"{human_bytes(numbers[f'{tier}_bytes']):>15}" for tier in TIERS)
            lines.append(f"  {epoch:>5}  {sizes}{100 * counts.memory_hits:>16.1f}%")
        total = asdict(sum(self.epochs.values(), TierCounts()))
        return lines + [f"  {text}: {total[name]:,}" for name, text in _ERRORS.items() if total[name]]


def metrics(counts: TierCounts) -> dict[str, float]:
    numbers = asdict(counts)
    sizes = {f"data/{tier}_bytes": float(numbers[f"{tier}_bytes"]) for tier in TIERS}
    return {**sizes, "data/memory_hits": counts.memory_hits}
