"""The tiers that a process has open."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache.budget import open_memory
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.disk import CachedFile, DiskCache, FileKey, corrupt_file
from lightning_sparse.data.cache.folders import cache_folder, file_name
from lightning_sparse.data.cache.memory import MemoryCache
from lightning_sparse.data.cache.placement import Placement
from lightning_sparse.data.cache.run_counters import RunCounters
from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.cache.storage import Storage, StoredFile, Unreadable
from lightning_sparse.data.config import GB, CacheConfig
from lightning_sparse.data.peers.client import PeerClient
from lightning_sparse.data.peers.server import PeerServer
from lightning_sparse.data.sample import View
from lightning_sparse.messages import log

LAST_READ_S = 5.0  # without storage and other nodes, what a thread has begun to read takes less


@dataclass
class Tiers:
    """The tiers that a process has open. A forked process opens its own: pid tells them apart.

    decoder: id of the decoder in use.
    warn_once: called with (topic, text); logs each topic once per run and node, whichever process calls it first.
    """

    pid: int
    run: RunCounters
    memory: MemoryCache
    disk: DiskCache
    storage: Storage
    counter: Counter
    decoder: int
    warn_once: Callable[[str, str], None]
    peers: PeerClient | None = None
    server: PeerServer | None = None
    _reads: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def reading(self) -> Iterator["Tiers"]:
        """Put off `close`, up to `LAST_READ_S`: LMDB must not be closed under a thread that reads it."""
        with self._changed:
            self._reads += 1
        try:
            yield self
        finally:
            with self._changed:
                self._reads -= 1
                self._changed.notify_all()

    def keep(self, index: int, view: View) -> None:
        """Keep a sample in memory if there is space."""
        if not self.memory.put(index, view.data, view.height, view.width) and self.memory.capacity:
            self.warn_once(
                "memory full",
                f"memory tier is full with {self.memory.cached:,} samples in {self.memory.bytes / GB:.2f} GB; every "
                "epoch reads the other samples of this node from local disk. Increase memory_gb to keep more.",
            )

    def interrupt(self) -> None:
        """End the reads of network storage. Threads that wait for it raise DataError."""
        if self.server is not None:
            self.server.stop()
        self.storage.close()

    def close(self) -> None:
        self.interrupt()
        if self.server is not None:
            self.server.close()
        if self.peers is not None:
            self.peers.close()
        with self._changed:
            self._changed.wait_for(lambda: self._reads == 0, LAST_READ_S)
        self.disk.close()
        self.memory.close()
        self.run.close()


def decoder_of(config: CacheConfig) -> int:
    """Return the id of the decoder that validates files; 0 if none does."""
    return 0 if config.format == "bytes" else decode.decoder_id()


def store_file(
    config: CacheConfig, disk: DiskCache, key: FileKey, answer: StoredFile | Unreadable, decoder: int
) -> tuple[CachedFile, npt.NDArray[np.uint8] | None] | str:
    """Validate a file from storage by decoding it if it is an image, and cache it on disk.

    Returns:
        The file and its pixels, or the reason why it is corrupt.
    """
    pixels = None
    try:
        if isinstance(answer, Unreadable):
            raise decode.UndecodableError(answer.reason)
        if config.format == "bytes":
            file = CachedFile(answer.data, 1, len(answer.data), decoder)
        else:
            pixels, height, width = decode.decode_sized(answer.data, config.short_side)
            file = CachedFile(answer.data, height, width, decoder)
    except decode.UndecodableError as error:
        if config.on_corrupt == "skip":
            disk.put(key, corrupt_file(str(error), decoder))
        return str(error)
    disk.put(key, file)
    return file, pixels


def open_disk(config: CacheConfig, split: str, counter: Counter, warn_once: Callable[[str, str], None]) -> DiskCache:
    """Open the disk tier of a split."""
    return DiskCache(
        cache_folder(config) / f"{file_name(split)}.lmdb",
        limit_bytes=None if config.disk_gb is None else int(config.disk_gb * GB),
        counter=counter,
        warn_once=warn_once,
    )


def open_tiers(
    config: CacheConfig, manifest: Manifest, placement: Placement, owned: npt.NDArray[np.bool_], run: bytes
) -> Tiers:
    """Open all tiers of a split. owned: bool [samples], samples that this node owns."""
    folder = cache_folder(config)
    memory, shared = open_memory(config, manifest, owned, run, placement.node_index, folder)
    counter = Counter(shared.row)

    def warn_once(topic: str, text: str) -> None:
        if shared.claim_topic(topic):
            log.warning("%s", text)

    disk = open_disk(config, manifest.split, counter, warn_once)
    quiet = placement.device_index != 0  # one rank per node logs interruptions of storage
    storage = Storage(
        config.source,
        timeout=config.storage_timeout,
        readers=config.storage_readers,
        quiet=quiet,
        options=config.storage_options,
    )
    return Tiers(os.getpid(), shared, memory, disk, storage, counter, decoder_of(config), warn_once)
