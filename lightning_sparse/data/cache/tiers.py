"""The tiers that one process has open, and how they are opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache.budget import open_memory, segment_name
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.disk import DiskCache, Stored, decoder_number
from lightning_sparse.data.cache.folders import cache_folder, file_name
from lightning_sparse.data.cache.manifest import Manifest
from lightning_sparse.data.cache.memory import MemoryCache
from lightning_sparse.data.cache.placement import Placement
from lightning_sparse.data.cache.storage import Source
from lightning_sparse.data.config import GB, CacheConfig
from lightning_sparse.data.peers.client import PeerClient
from lightning_sparse.data.peers.server import PeerServer
from lightning_sparse.data.sample import View
from lightning_sparse.messages import log


@dataclass
class Tiers:
    """What one process has open. pid: of that process; a forked one opens its own.

    decoder: the number of the decoder in use (`disk_cache.decoder_number`).
    say: warns (topic, text), once a topic, whichever process of the run on this node is the first to say it.
    """

    pid: int
    memory: MemoryCache
    disk: DiskCache
    source: Source
    counter: Counter
    decoder: int
    say: Callable[[str, str], None]
    peers: PeerClient | None = None
    server: PeerServer | None = None

    def keep(self, index: int, view: View) -> None:
        """Keep a sample in memory while there is room."""
        if not self.memory.put(index, view.data, view.height, view.width) and self.memory.capacity:
            self.say(
                "memory full",
                f"memory tier is full with {self.memory.cached:,} samples in {self.memory.bytes / GB:.2f} GB; the "
                "others of this node are read from local disk in every epoch. More memory_gb keeps more of them.",
            )

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.peers is not None:
            self.peers.close()
        self.disk.close()
        self.source.close()
        self.memory.close()


def checked(data: bytes, decoder: int, short_side: int) -> tuple[Stored, npt.NDArray[np.uint8]]:
    """What disk keeps of a file that was read from storage, and its pixels: decoded before anything else sees it.

    Raises:
        UndecodableError: when it is no whole picture.
    """
    return Stored(data, *decode.probe(data), decoder), decode.decode(data, short_side)


def open_disk(config: CacheConfig, split: str, counter: Counter, say: Callable[[str, str], None]) -> DiskCache:
    """The disk tier of one split, wherever it is opened from."""
    return DiskCache(
        cache_folder(config) / f"{file_name(split)}.lmdb",
        limit_bytes=None if config.disk_gb is None else int(config.disk_gb * GB),
        counter=counter,
        say=say,
    )


def open_tiers(
    config: CacheConfig, manifest: Manifest, place: Placement, mine: npt.NDArray[np.bool_], run: bytes
) -> Tiers:
    """mine: bool [samples], which this node owns."""
    folder = cache_folder(config)
    memory = open_memory(config, manifest, mine, segment_name(run, place.node_index, manifest.split), folder)
    counter = Counter(memory.row)

    def say(topic: str, text: str) -> None:
        if memory.first(topic):
            log.warning("%s", text)

    disk = open_disk(config, manifest.split, counter, say)
    # one rank of a node speaks of the storage that all of its ranks wait for
    quiet = place.device_index != 0
    source = Source(config.source, timeout=config.storage_timeout, readers=config.storage_readers, quiet=quiet)
    return Tiers(os.getpid(), memory, disk, source, counter, decoder_number(decode.decoder_version()), say)
