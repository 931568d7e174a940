"""Local disk -> memory of the node: one slab, shared by all ranks and workers of a run on the node.

====================  =====================  ==========================================================
part of the segment   size                   what
====================  =====================  ==========================================================
header                4096                   numbers, of which `_Head` lists the meaning
rows of counters      256 x 16 x 8           one row a process: tiers can be counted over the node
slots                 32 a sample            state, length, offset, height, width, checksum
payloads              up to the budget       one behind the other; never moved, never evicted
====================  =====================  ==========================================================

A slot goes empty -> filling -> ready. Whoever fills it takes its room under a lock that dies with its holder, writes
without the lock, and sets *ready* last. A process that is killed while filling leaves a slot that nobody reads.

Reading takes no lock and copies nothing: a sample is a read-only view of the slab, valid while anybody refers to it.
Every read verifies a checksum over the payload, its shape and its place in the manifest; what fails is emptied, and the
next tier is asked.

Memory is reserved (fallocate) before it is written: a full /dev/shm is an error to be handled, not a fatal SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache import shared_memory
from lightning_sparse.data.cache.counts import NAMES
from lightning_sparse.data.config import DataError
from lightning_sparse.data.sample import Format, View

MAGIC = 0x4C53_4D45_4D30_3031  # "LSMEM001"
EMPTY, FILLING, READY = 0, 1, 2
ALIGN = 64
RESERVE_BYTES = 64 << 20
_ROWS, _ROW = 256, 16
_SLOTS_AT = 4096 + _ROWS * _ROW * 8
_SLOT = np.dtype(
    [("state", "u4"), ("length", "u4"), ("offset", "u8"), ("height", "u4"), ("width", "u4"), ("checksum", "u8")]
)
_FORMATS: tuple[Format, ...] = ("jpeg", "decoded")
assert len(NAMES) <= _ROW


class _Head(IntEnum):
    """Places in the header, int64 each. TOPICS: what was said already, the rest of the page."""

    MAGIC = 0
    FORMAT = 1
    SLOTS = 2
    CAPACITY = 3  # bytes of payloads that the budget allows
    TAIL = 4  # bytes of payloads that are taken
    RESERVED = 5  # bytes of payloads that are backed by memory
    FULL = 6
    CACHED = 7  # slots that were made ready
    PROCESSES = 8
    TOPICS = 64


class MemoryCache:
    """The slab of one run, node and split, as this process sees it.

    Args:
        path: of the segment.
        file: its descriptor, held (`shared_memory.attach`, `shared_memory.create`).
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file, self._pid = path, file, os.getpid()
        self._map = mmap.mmap(file, os.fstat(file).st_size)
        self._head = np.frombuffer(self._map, np.int64, 512)
        if self._head[_Head.MAGIC] != MAGIC:
            raise DataError(f"{path} is no memory segment of this version; remove it.")
        slots = int(self._head[_Head.SLOTS])
        self._slots = np.frombuffer(self._map, _SLOT, slots, offset=_SLOTS_AT)
        self._states = self._slots["state"]
        self._payloads_at = _payloads_at(slots)
        self._payloads = np.frombuffer(self._map, np.uint8, offset=self._payloads_at)
        self._readable = self._payloads.view()
        self._readable.flags.writeable = False
        self._threads = threading.Lock()
        self.format: Format = _FORMATS[int(self._head[_Head.FORMAT])]
        self.capacity = int(self._head[_Head.CAPACITY])
        with self._locked():
            row = int(self._head[_Head.PROCESSES])
            self._head[_Head.PROCESSES] += 1
        rows = np.frombuffer(self._map, np.int64, _ROWS * _ROW, offset=4096).reshape(_ROWS, _ROW)
        self._rows = rows
        self.row = rows[min(row, _ROWS - 1), : len(NAMES)]  # past 256 processes the last row is shared, and less exact

    def get(self, indices: Sequence[int]) -> tuple[list[View | None], int]:
        """(views in order, None for what is not there; how many failed their checksum and were emptied)"""
        from xxhash import xxh3_64_intdigest

        found: list[View | None] = []
        flipped, decoded, payloads = 0, self.format == "decoded", self._readable
        for index, slot in zip(indices, self._slots[indices].tolist(), strict=True):
            state, length, offset, height, width, checksum = slot
            if state != READY:
                found.append(None)
                continue
            data = payloads[offset : offset + length]
            if xxh3_64_intdigest(data.data, _seed(index, height, width)) != checksum:
                self._states[index] = EMPTY
                flipped += 1
                found.append(None)
                continue
            found.append(View(data.reshape(height, width, 3) if decoded else data, height, width))
        return found, flipped

    def put(self, index: int, data: npt.NDArray[np.uint8], height: int, width: int) -> bool:
        """Keep a sample if there is room and nobody has it yet. False when there is none: the cache is full."""
        from xxhash import xxh3_64_intdigest

        flat = data.reshape(-1)
        offset = self._take(index, len(flat))
        if offset is None:
            return not self.full
        self._payloads[offset : offset + len(flat)] = flat
        slot = self._slots[index]
        slot["length"], slot["offset"], slot["height"], slot["width"] = len(flat), offset, height, width
        slot["checksum"] = xxh3_64_intdigest(flat.data, _seed(index, height, width))
        self._states[index] = READY
        with self._locked():
            self._head[_Head.CACHED] += 1
        return True

    def _take(self, index: int, length: int) -> int | None:
        """Room for a payload; None when somebody else fills that slot, or nothing is left."""
        if self.full or self._states[index] != EMPTY:
            return None
        with self._locked():
            offset = int(self._head[_Head.TAIL])
            end = -(-(offset + length) // ALIGN) * ALIGN
            if self._states[index] != EMPTY:
                return None
            if end > self.capacity or not self._backed(end):
                self._head[_Head.FULL] = 1
                return None
            self._head[_Head.TAIL] = end
            self._states[index] = FILLING
        return offset

    def _backed(self, end: int) -> bool:
        """Have memory behind the first `end` bytes of payloads."""
        reserved = int(self._head[_Head.RESERVED])
        if end <= reserved:
            return True
        wanted = min(self.capacity, max(end, reserved + RESERVE_BYTES))
        try:
            os.posix_fallocate(self._file, self._payloads_at + reserved, wanted - reserved)
        except OSError:  # ENOSPC: others took what was free when the budget was made
            return False
        self._head[_Head.RESERVED] = wanted
        return True

    @property
    def full(self) -> bool:
        return bool(self._head[_Head.FULL])

    @property
    def cached(self) -> int:
        """Samples that are kept."""
        return int(self._head[_Head.CACHED])

    @property
    def bytes(self) -> int:
        """Bytes of payloads."""
        return int(self._head[_Head.TAIL])

    def rows(self) -> npt.NDArray[np.int64]:
        """Counters of all processes of the run on this node: int64 [processes, len(NAMES)]."""
        return self._rows[: int(self._head[_Head.PROCESSES]), : len(NAMES)].copy()

    def first(self, topic: str) -> bool:
        """Whether no process of the run on this node said this yet; True once a topic."""
        number = zlib.crc32(topic.encode()) + 1
        with self._locked():
            said = self._head[_Head.TOPICS :]
            if number in said or 0 not in said:
                return False
            said[int(np.argmin(said != 0))] = number
            return True

    def close(self) -> None:
        """Let go; the last process of the run removes the segment. Views stay valid."""
        if self._pid == os.getpid() and self._file >= 0:
            shared_memory.remove_if_last(self.path, self._file)
            os.close(self._file)
            self._file = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Against threads and processes. An open-file lock: the kernel ends it with its holder, and closing another
        descriptor of the same file, as POSIX locks would have it, does not."""
        with self._threads:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def create(path: Path, format: Format, slots: int, capacity: int) -> MemoryCache:
    """A new slab for `slots` samples and `capacity` bytes of payloads.

    Raises:
        OSError: when there is no memory even for the slots.
    """

    room = max(capacity, 4096)  # a map of nothing is not allowed

    def prepare(file: int) -> None:
        os.posix_fallocate(file, 0, _payloads_at(slots))
        head = np.zeros(512, np.int64)
        head[_Head.FORMAT], head[_Head.SLOTS], head[_Head.CAPACITY] = _FORMATS.index(format), slots, capacity
        head[_Head.FULL] = capacity == 0
        head[_Head.MAGIC] = MAGIC
        os.pwrite(file, head.tobytes(), 0)

    return MemoryCache(path, shared_memory.create(path, _payloads_at(slots) + room, prepare))


def _payloads_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT.itemsize) // 4096) * 4096


def _seed(index: int, height: int, width: int) -> int:
    return (index * 0x9E3779B97F4A7C15 ^ height << 32 ^ width) & 0xFFFFFFFFFFFFFFFF
