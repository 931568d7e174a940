"""Memory tier: one shared-memory segment per node and split, used by all ranks of the node.

Runs that want the same samples in the same format use the same segment.

====================  =====================  ==========================================================
part of the segment   size                   contents
====================  =====================  ==========================================================
header                4096                   numbers, see `_Header`
slots                 32 per sample          state, length, offset, height, width, checksum
payloads              up to the budget       one after the other; never moved or evicted
====================  =====================  ==========================================================

A writer reserves space under a lock that the kernel releases when its holder dies, writes without the lock, and sets
*ready* last, so a slot whose writer was killed is never read. A run does not wait for one that was suspended with the
lock: it does not keep the sample then. Memory is allocated (fallocate) before it is written, so that a full /dev/shm
raises OSError instead of SIGBUS.

Reads take no lock and copy nothing: a sample is a read-only view of the segment, valid as long as it is referenced.
Each read verifies a checksum of the payload, its shape and its index. If it fails, the slot is emptied, and the sample
is read from the next tier.
"""

import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache import shared_memory
from lightning_sparse.data.cache.shared_memory import Segment
from lightning_sparse.data.config import DataError
from lightning_sparse.data.sample import Format, View

MAGIC = 0x4C53_4D45_4D30_3032  # "LSMEM002"
EMPTY, FILLING, READY = 0, 1, 2
ALIGN = 64
RESERVE_BYTES = 64 << 20
LOCK_S = 2.0
_SLOTS_AT = 4096
_SLOT = np.dtype(
    [("state", "u4"), ("length", "u4"), ("offset", "u8"), ("height", "u4"), ("width", "u4"), ("checksum", "u8")]
)
_FORMATS: tuple[Format, ...] = ("jpeg", "decoded", "bytes")


class _Header(IntEnum):
    """Positions in the header, int64 each."""

    MAGIC = 0
    FORMAT = 1
    SLOTS = 2
    CAPACITY = 3  # limit of the payloads in bytes
    TAIL = 4  # used bytes of payloads
    RESERVED = 5  # allocated bytes of payloads
    FULL = 6
    CACHED = 7  # slots that are ready, or being filled


class MemoryCache:
    """The memory tier of a node and split.

    Args:
        segment: from `shared_memory.attach`, or prepared by `create`.
    """

    def __init__(self, segment: Segment) -> None:
        self.path, self._segment = segment.path, segment
        self._header = np.frombuffer(segment.map, np.int64, 512)
        if self._header[_Header.MAGIC] != MAGIC:
            raise DataError(f"{self.path} is not a segment of this version; remove it.")
        slots = int(self._header[_Header.SLOTS])
        self._slots = np.frombuffer(segment.map, _SLOT, slots, offset=_SLOTS_AT)
        self._states = self._slots["state"]
        self._payloads_at = _payloads_at(slots)
        self._payloads = np.frombuffer(segment.map, np.uint8, offset=self._payloads_at)
        self._readable = self._payloads.view()
        self._readable.flags.writeable = False
        self._patience_s = LOCK_S
        self.format: Format = _FORMATS[int(self._header[_Header.FORMAT])]
        self.capacity = int(self._header[_Header.CAPACITY])

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
        """Keep a sample, unless it is already there or the lock is not free. Return False if the cache is full."""
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
        """Reserve space for a payload; None if the slot is taken, the cache is full, or the lock is not free."""
        if self.full or self._states[index] != EMPTY:
            return None
        with self._segment.locked(self._patience_s) as held:
            self._patience_s = LOCK_S if held else 0.0  # wait once, not for each sample
            if not held:
                return None
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
        """Allocate memory for the first `end` bytes of payloads, and for some that follow while there is enough."""
        reserved = int(self._header[_Header.RESERVED])
        if end <= reserved:
            return True
        wanted = min(self.capacity, max(end, reserved + RESERVE_BYTES))
        while True:
            try:
                os.posix_fallocate(self._segment.file, self._payloads_at + reserved, wanted - reserved)
                break
            except OSError:  # ENOSPC: memory that was free when the budget was set is in use now
                if wanted == end:
                    return False
                wanted = max(end, (reserved + wanted) // 2)
        self._header[_Header.RESERVED] = wanted
        return True

    def retry(self) -> None:
        """Keep samples again: if there was not enough memory for all, some may be free now."""
        self._header[_Header.FULL] = self.capacity == 0

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

    def close(self) -> None:
        """Release the segment; the last process that uses it removes it. Views stay valid."""
        self._segment.close()


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

    return MemoryCache(shared_memory.create(path, _payloads_at(slots) + room, prepare))


def _payloads_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT.itemsize) // 4096) * 4096


def _seed(index: int, height: int, width: int) -> int:
    return (index * 0x9E3779B97F4A7C15 ^ height << 32 ^ width) & 0xFFFFFFFFFFFFFFFF
