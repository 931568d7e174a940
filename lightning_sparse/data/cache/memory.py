"""Memory tier: one segment of shared memory per node and split, used by all ranks of the node.

All runs on a node that use the same samples and format share one segment, found by its name.

====================  =====================  ==========================================================
part of the segment   size                   contents
====================  =====================  ==========================================================
header                4096                   numbers, see `_Header`
slots                 32 per sample          state, length, offset, height, width, checksum
payloads              up to the budget       one after the other; never moved or evicted
====================  =====================  ==========================================================

If the samples do not fit, every epoch reads the rest from local disk.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.segment import Segment
from lightning_sparse.data.config import GB, CacheConfig
from lightning_sparse.data.decode import Format, View
from lightning_sparse.data.folders import file_name, source_name
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.messages import log

VERSION = 5  # of this layout, and of its lock
EMPTY, FILLING, READY = 0, 1, 2
ALIGN = 64
RESERVE_BYTES = 64 << 20
LOCK_S = 2.0
# Without probed files: bytes of an average photograph whose shorter side is 1, measured on ImageNet: 271,617 at 256.
PHOTOGRAPH = 271_617 / 256**2
MAX_COMPRESSION = 60  # upper bound of decoded size / JPEG size, reached by images of one color
DEFAULT_SHARE = 0.5  # of the available memory
UNKNOWN_BYTES = 1 << 20  # of a file whose size storage does not list
_SLOTS_AT = 4096
_SLOT = np.dtype(
    [("state", "u4"), ("length", "u4"), ("offset", "u8"), ("height", "u4"), ("width", "u4"), ("checksum", "u8")]
)
_FORMATS: tuple[Format, ...] = ("jpeg", "decoded", "bytes")


class _Header(IntEnum):
    """Positions in the header, int64 each."""

    FORMAT = 0
    SLOTS = 1
    CAPACITY = 2  # limit of the payloads in bytes
    TAIL = 3  # used bytes of payloads
    RESERVED = 4  # allocated bytes of payloads
    FULL = 5
    CACHED = 6  # slots that are ready, or being filled


class MemoryCache:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._header = np.frombuffer(segment.map, np.int64, 512)
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
        """Return (views in order, None for missing samples; number of checksum failures).

        A view of the segment is valid as long as it is referenced.
        """
        from xxhash import xxh3_64_intdigest

        views: list[View | None] = []
        flipped, decoded, payloads = 0, self.format == "decoded", self._readable
        # without a lock, and without a copy
        for index, slot in zip(indices, self._slots[indices].tolist(), strict=True):
            state, length, offset, height, width, checksum = slot
            if state != READY:
                views.append(None)
                continue
            data = payloads[offset : offset + length]
            if xxh3_64_intdigest(data.data, _seed(index, height, width)) != checksum:
                # The checksum covers the payload, its shape and its index. Empty the slot, so that the sample is cached
                # again.
                self._states[index] = EMPTY
                flipped += 1
                views.append(None)
                continue
            views.append(View(data.reshape(height, width, 3) if decoded else data, height, width))
        return views, flipped

    def put(self, index: int, data: npt.NDArray[np.uint8], height: int, width: int) -> bool:
        """Keep a sample, unless it is already there or the lock is not free. Return False if the cache is full."""
        from xxhash import xxh3_64_intdigest

        flat = data.reshape(-1)
        # space is reserved under a lock, which the kernel releases when its holder dies, and filled without it; `READY`
        # comes last, so that a slot whose writer was killed is never read
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
        if self.full or not self._is_free(index):
            return None
        with self._segment.locked(self._patience_s) as held:
            # a process that was suspended with the lock: wait once, not for each sample
            self._patience_s = LOCK_S if held else 0.0
            if not held:
                return None
            offset = int(self._header[_Header.TAIL])
            end = -(-(offset + length) // ALIGN) * ALIGN
            if not self._is_free(index):
                return None
            if end > self.capacity or not self._allocate(end):
                self._header[_Header.FULL] = 1
                return None
            self._header[_Header.TAIL] = end
            self._header[_Header.CACHED] += self._states[index] == EMPTY
            self._slots[index]["checksum"] = os.getpid()  # of who fills it, until it is there
            self._states[index] = FILLING
        return offset

    def _is_free(self, index: int) -> bool:
        state = self._states[index]
        # a killed process leaves a slot half filled
        return bool(state == EMPTY or (state == FILLING and _has_ended(int(self._slots[index]["checksum"]))))

    def _allocate(self, end: int) -> bool:
        reserved = int(self._header[_Header.RESERVED])
        if end <= reserved:
            return True
        free = segments.free_memory()  # some that was free when the budget was set may be in use now
        # ahead, in steps of RESERVE_BYTES while there is enough memory
        wanted = min(self.capacity, max(end, reserved + min(RESERVE_BYTES, free)))
        if wanted - reserved > free:
            return False
        try:
            os.posix_fallocate(self._segment.file, self._payloads_at + reserved, wanted - reserved)
        except OSError:
            return False
        self._header[_Header.RESERVED] = wanted
        return True

    def retry(self) -> None:
        # memory that was short in the last run may be free now
        self._header[_Header.FULL] = self.capacity == 0

    @property
    def full(self) -> bool:
        return bool(self._header[_Header.FULL])

    @property
    def cached(self) -> int:
        return int(self._header[_Header.CACHED])

    @property
    def bytes(self) -> int:
        return int(self._header[_Header.TAIL])

    def close(self) -> None:
        self._segment.close()


def create(name: str, format: Format, slots: int, capacity: int) -> MemoryCache:
    header = np.zeros(512, np.int64)
    header[_Header.FORMAT] = _FORMATS.index(format)
    header[_Header.SLOTS], header[_Header.CAPACITY] = slots, capacity
    header[_Header.FULL] = capacity == 0
    room = max(capacity, 4096)  # an empty map is not allowed
    return MemoryCache(segments.create(name, _payloads_at(slots) + room, header.tobytes()))


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's; a checksum, of one that has just ended filling it
        pass
    return False


def _payloads_at(slots: int) -> int:
    return -(-(_SLOTS_AT + slots * _SLOT.itemsize) // 4096) * 4096


def _seed(index: int, height: int, width: int) -> int:
    return (index * 0x9E3779B97F4A7C15 ^ height << 32 ^ width) & 0xFFFFFFFFFFFFFFFF


def needed_bytes(manifest: Manifest, owned: npt.NDArray[np.bool_], format: Format, short_side: int) -> int:
    """Return the bytes that the node's samples need in memory.

    This is an estimate for "decoded" and for files whose sizes storage does not list.
    """
    sizes = np.where(manifest.sizes < 0, UNKNOWN_BYTES, manifest.sizes)[owned]
    if format == "decoded" and len(manifest.probed):
        decoded = np.array([3 * np.prod(decode.scaled((w, h), short_side)) for _, h, w in manifest.probed.tolist()])
        mean = decoded.mean() + 2 * decoded.std() / np.sqrt(len(decoded))  # likely above that of all files
        return int(len(sizes) * (mean + ALIGN))
    if format == "decoded":
        sizes = np.minimum(sizes * MAX_COMPRESSION, int(PHOTOGRAPH * short_side**2))
    return int(sizes.sum() + len(sizes) * ALIGN)


def _allowed(config: CacheConfig) -> tuple[int, str]:
    free = segments.available_memory()
    if config.memory_gb is None:
        return int(free * DEFAULT_SHARE), "half of the free memory"
    if config.memory_gb * GB <= free:
        return int(config.memory_gb * GB), f"memory_gb={config.memory_gb:g}"
    return free, f"memory_gb={config.memory_gb:g}, of which {free / GB:.2f} GB are free,"


def format_for(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_]) -> Format:
    """Return the format in which this node keeps its samples.

    With "auto", it is the format of another run on this node. Otherwise it is "decoded" if all samples fit, which saves
    decoding in each epoch, and else "jpeg".
    """
    if config.format != "auto":
        return config.format
    for format in ("decoded", "jpeg"):
        for size, _ in segments.sizes(content_name(config, manifest, owned, format)):
            # A run with the option "decoded" may keep only some samples. More files would fit.
            return format if size >= needed_bytes(manifest, owned, format, config.short_side) else "jpeg"
    return "decoded" if needed_bytes(manifest, owned, "decoded", config.short_side) <= _allowed(config)[0] else "jpeg"


def open_memory(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], counter: Counter) -> MemoryCache:
    """Open the memory tier, which an earlier run on this node may have filled. One process calls it at a time.

    `owned`, bool [samples], selects the samples that this node keeps.
    """
    format = format_for(config, manifest, owned)
    name, needed = (
        content_name(config, manifest, owned, format),
        needed_bytes(manifest, owned, format, config.short_side),
    )
    segment, unknown = segments.find(name), format != "decoded" and bool((manifest.sizes < 0).any())
    if segment is None:
        allowed, limit = _allowed(config)
        # If the size of decoded images is a guess, leave room for other runs.
        guessed = format == "decoded" and not len(manifest.probed)
        most = allowed if unknown else 2 * needed if guessed else needed
        tier = create(name, format, len(manifest), min(allowed, most))
    else:
        tier, limit = MemoryCache(segment), "the copy of another run on this node"
        if not counter.is_first:
            return tier
        log.info(f"memory tier of {manifest.split}: {tier.cached:,} samples are there, of another run on this node")
        tier.retry()
    if needed > tier.capacity > 0 and not unknown:
        about = "about " if format == "decoded" else ""
        counter.warn_once(
            "memory full",
            f"memory tier of {manifest.split}: {int(owned.sum()):,} samples of this node need {about}{needed / GB:.2f} "
            f"GB as {format}, but {limit} allows {tier.capacity / GB:.2f} GB. {about.capitalize()}"
            f"{100 * tier.capacity / needed:.0f} % of them stay in memory; every epoch reads the others from local "
            "disk.",
        )
    return tier


def content_name(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], format: Format) -> str:
    """Return the name of a segment: a hash of everything that determines its contents, and of its size limit."""
    pixels = (config.short_side, decode.decoder_id(), decode.resizer_id()) if format == "decoded" else None
    # options choose the server or the version of a URL, and not all storage tells times, which tell files apart
    source = (source_name(config.source), json.dumps(config.storage_options, sort_keys=True))
    limit = None if config.memory_gb is None else float(config.memory_gb)
    others = config.shuffle == "local"  # keeps samples of other nodes, too, which would take the room of this one's
    content = (VERSION, *source, manifest.identity, config.member, pixels, limit, others)
    digest = hashlib.blake2b(repr(content).encode("utf-8", "surrogateescape"), digest_size=16)
    digest.update(np.packbits(owned).tobytes())
    return f"{digest.hexdigest()}-{format}-{file_name(manifest.split)}"
