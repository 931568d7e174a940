"""Memory tier: one shared-memory segment per run, node and split, used by all ranks of the node.

====================  =====================  ==========================================================
part of the segment   size                   contents
====================  =====================  ==========================================================
header                4096                   numbers, see `_Header`
counters              256 x 16 x 8           one row per process
slots                 32 per sample          state, length, offset, height, width, checksum
payloads              up to the budget       one after the other; never moved or evicted
====================  =====================  ==========================================================

A writer reserves space under a lock that the kernel releases when its holder dies, writes without the lock, and sets
*ready* last, so a slot whose writer was killed is never read. Memory is allocated (fallocate) before it is written, so
that a full /dev/shm raises OSError instead of SIGBUS.

Reads take no lock and copy nothing: a sample is a read-only view of the segment, valid as long as it is referenced.
Each read verifies a checksum of the payload, its shape and its index. If it fails, the slot is emptied, and the sample
is read from the next tier.
"""

import contextlib
import errno
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
from lightning_sparse.data.config import DataError, no_address_space
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
_FORMATS: tuple[Format, ...] = ("jpeg", "decoded", "bytes")
assert len(NAMES) <= _ROW


class _Header(IntEnum):
    """Positions in the header, int64 each. TOPICS: topics that were logged, up to the end of the page."""

    MAGIC = 0
    FORMAT = 1
    SLOTS = 2
    CAPACITY = 3  # limit of the payloads in bytes
    TAIL = 4  # used bytes of payloads
    RESERVED = 5  # allocated bytes of payloads
    FULL = 6
    CACHED = 7  # slots that are ready, or being filled
    PROCESSES = 8
    TOPICS = 64


class MemoryCache:
    """The memory tier of a run, node and split.

    Args:
        path: path of the segment.
        file: its locked descriptor, from `shared_memory.attach` or `shared_memory.create`.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file, self._pid = path, file, os.getpid()
        size = os.fstat(file).st_size
        try:
            self._map = mmap.mmap(file, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise DataError(no_address_space(f"the memory tier {path}", size)) from error
        self._header = np.frombuffer(self._map, np.int64, 512)
        if self._header[_Header.MAGIC] != MAGIC:
            raise DataError(f"{path} is not a segment of this version; remove it.")
        slots = int(self._header[_Header.SLOTS])
        self._slots = np.frombuffer(self._map, _SLOT, slots, offset=_SLOTS_AT)
        self._states = self._slots["state"]
        self._payloads_at = _payloads_at(slots)
        self._payloads = np.frombuffer(self._map, np.uint8, offset=self._payloads_at)
        self._readable = self._payloads.view()
        self._readable.flags.writeable = False
        self._thread_lock = threading.Lock()
        self.format: Format = _FORMATS[int(self._header[_Header.FORMAT])]
        self.capacity = int(self._header[_Header.CAPACITY])
        with self._locked():
            row = int(self._header[_Header.PROCESSES])
            self._header[_Header.PROCESSES] += 1
        rows = np.frombuffer(self._map, np.int64, _ROWS * _ROW, offset=4096).reshape(_ROWS, _ROW)
        self._rows = rows
        self.row = rows[min(row, _ROWS - 1), : len(NAMES)]  # from the 256th process on, rows are shared and less exact

    def get(self, indices: Sequence[int]) -> tuple[list[View | None], int]:
        """Return (views in order, None for missing samples; number of checksum failures)."""
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
        """Keep a sample unless it is already there. Return False if the cache is full."""
        from xxhash import xxh3_64_intdigest

        flat = data.reshape(-1)
        offset = self._reserve(index, len(flat))
        if offset is None:
            return not self.full
        self._payloads[offset : offset + len(flat)] = flat
        slot = self._slots[index]
        slot["length"], slot["offset"], slot["height"], slot["width"] = len(flat), offset, height, width
        slot["checksum"] = xxh3_64_intdigest(flat.data, _seed(index, height, width))
        self._states[index] = READY
        return True

    def _reserve(self, index: int, length: int) -> int | None:
        """Reserve space for a payload; None if the slot is taken or the cache is full."""
        if self.full or self._states[index] != EMPTY:
            return None
        with self._locked():
            offset = int(self._header[_Header.TAIL])
            end = -(-(offset + length) // ALIGN) * ALIGN
            if self._states[index] != EMPTY:
                return None
            if end > self.capacity or not self._allocate(end):
                self._header[_Header.FULL] = 1
                return None
            self._header[_Header.TAIL] = end
            self._header[_Header.CACHED] += 1
            self._states[index] = FILLING
        return offset

    def _allocate(self, end: int) -> bool:
        """Allocate memory for the first `end` bytes of payloads."""
        reserved = int(self._header[_Header.RESERVED])
        if end <= reserved:
            return True
        wanted = min(self.capacity, max(end, reserved + RESERVE_BYTES))
        try:
            os.posix_fallocate(self._file, self._payloads_at + reserved, wanted - reserved)
        except OSError:  # ENOSPC: memory that was free when the budget was set is in use now
            return False
        self._header[_Header.RESERVED] = wanted
        return True

    @property
    def full(self) -> bool:
        return bool(self._header[_Header.FULL])

    @property
    def cached(self) -> int:
        """Number of samples."""
        return int(self._header[_Header.CACHED])

    @property
    def bytes(self) -> int:
        """Used bytes of payloads."""
        return int(self._header[_Header.TAIL])

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the counters of all processes of the run on this node, int64 [processes, len(NAMES)]."""
        return self._rows[: int(self._header[_Header.PROCESSES]), : len(NAMES)].copy()

    def claim_topic(self, topic: str) -> bool:
        """Return True for the first process of the run on this node that asks for this topic, to log it once."""
        number = zlib.crc32(topic.encode()) + 1
        with self._locked():
            logged = self._header[_Header.TOPICS :]
            if number in logged or 0 not in logged:
                return False
            logged[int(np.argmin(logged != 0))] = number
            return True

    def close(self) -> None:
        """Release the segment; the last process of the run removes it. Views stay valid."""
        if self._pid == os.getpid() and self._file >= 0:
            shared_memory.remove_if_last(self.path, self._file)
            os.close(self._file)
            self._file = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads and processes. An open file description lock: the kernel releases it when its holder
        dies, but unlike a POSIX lock not when another descriptor of the file is closed."""
        with self._thread_lock:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def create(path: Path, format: Format, slots: int, capacity: int) -> MemoryCache:
    """Create a segment for `slots` samples and `capacity` bytes of payloads.

    Raises:
        OSError: if there is not enough memory for the slots.
    """
    room = max(capacity, 4096)  # an empty map is not allowed

    def prepare(file: int) -> None:
        os.posix_fallocate(file, 0, _payloads_at(slots))
        header = np.zeros(512, np.int64)
        header[_Header.MAGIC], header[_Header.FORMAT] = MAGIC, _FORMATS.index(format)
        header[_Header.SLOTS], header[_Header.CAPACITY] = slots, capacity
        header[_Header.FULL] = capacity == 0
        os.pwrite(file, header.tobytes(), 0)

    return MemoryCache(path, shared_memory.create(path, _payloads_at(slots) + room, prepare))


def _payloads_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT.itemsize) // 4096) * 4096


def _seed(index: int, height: int, width: int) -> int:
    return (index * 0x9E3779B97F4A7C15 ^ height << 32 ^ width) & 0xFFFFFFFFFFFFFFFF
