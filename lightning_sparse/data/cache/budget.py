"""How much memory the slab of a node gets, in which format, and where it lies. Decided by the first process of a node.

What is decided is written into the slab, where all others of the node find it. The message says what will happen when
the node's share does not fit: as much of it as fits is kept, the rest is read from local disk in every epoch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache import shared_memory
from lightning_sparse.data.cache.folders import file_name, locked, private_folder
from lightning_sparse.data.cache.manifest import Manifest
from lightning_sparse.data.cache.memory import ALIGN, MemoryCache
from lightning_sparse.data.config import GB, CacheConfig
from lightning_sparse.data.sample import Format
from lightning_sparse.messages import log

# Pixels of an average photograph whose shorter side is 1, measured on ImageNet: 271,617 bytes at 256.
PHOTOGRAPH = 271_617 / 256**2
# A JPEG of one colour is much smaller than its pixels, but not by more than this.
MOST_COMPRESSED = 60
SHARE = 0.5  # of what is free, when no budget is given


def needed_bytes(manifest: Manifest, owned: npt.NDArray[np.bool_], format: Format, short_side: int) -> int:
    """Bytes of the node's samples in memory: known for "jpeg", estimated for "decoded"."""
    sizes = manifest.sizes[owned]
    if format == "decoded":
        sizes = np.minimum(sizes * MOST_COMPRESSED, int(PHOTOGRAPH * short_side**2))
    return int(sizes.sum() + len(sizes) * ALIGN)


def choose_format(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], budget: int) -> Format:
    """Pixels where all of them fit, since they cost no decoding; else JPEG, of which more fits."""
    if config.format != "auto":
        return config.format
    return "decoded" if needed_bytes(manifest, owned, "decoded", config.short_side) <= budget else "jpeg"


def open_memory(
    config: CacheConfig,
    manifest: Manifest,
    owned: npt.NDArray[np.bool_],
    name: str,
    cache: Path,
    shm: Path = shared_memory.SHARED_MEMORY,
) -> MemoryCache:
    """Join the slab called `name`, or make it, and remove what killed runs left behind.

    Args:
        owned: bool [samples], which of them this node keeps.
        cache: the folder of the disk cache; the slab lies there where /dev/shm is missing or too small.
    """
    fallback = cache / "memory"
    private_folder(fallback)
    shared = shared_memory.memory_folder(shm)
    folders = [shared, fallback] if shared is not None else [fallback]
    with locked(cache / "memory.lock"):
        for folder in folders:
            if (file := shared_memory.attach(folder / name)) is not None:
                return MemoryCache(folder / name, file)
        shared_memory.remove_leftovers(folders)
        return _create(config, manifest, owned, name, folders)


class _Plan(NamedTuple):
    """A slab in one folder. needed: bytes of this node's samples; capacity: what it may take; given: by whose word."""

    folder: Path
    format: Format
    needed: int
    capacity: int
    given: str

    @property
    def holds(self) -> int:
        return min(self.needed, self.capacity)


def _plan(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], folder: Path) -> _Plan:
    free = shared_memory.available_memory(folder)
    if config.memory_gb is None:
        allowed, given = int(free * SHARE), "half of what is free"
    elif config.memory_gb * GB <= free:
        allowed, given = int(config.memory_gb * GB), f"memory_gb={config.memory_gb:g}"
    else:
        allowed, given = free, f"memory_gb={config.memory_gb:g}, of which {free / GB:.2f} GB are free,"
    format = choose_format(config, manifest, owned, allowed)
    needed = needed_bytes(manifest, owned, format, config.short_side)
    # room to spare, because what decoded pictures need is an estimate
    return _Plan(folder, format, needed, min(allowed, 2 * needed if format == "decoded" else needed), given)


def _create(
    config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], name: str, folders: list[Path]
) -> MemoryCache:
    plans = [_plan(config, manifest, owned, folder) for folder in folders]
    if plans[0].holds < SHARE * plans[-1].holds:
        log.warning(
            "%s has room for %.2f GB of samples only: the memory tier lies in %s instead, in the page cache of the "
            "local disk. In a container, give it more shared memory (docker run --shm-size).",
            folders[0].parent,
            plans[0].holds / GB,
            folders[-1],
        )
        plans = plans[-1:]
    for plan in plans:
        try:
            memory = memory_tier.create(plan.folder / name, plan.format, len(manifest), plan.capacity)
        except OSError:
            if plan is plans[-1]:
                raise
            continue
        if plan.needed > plan.capacity > 0 and memory.first("memory full"):
            log.warning("%s", _too_small(manifest.split, int(owned.sum()), plan))
        return memory
    raise AssertionError("unreachable: the last folder returns or raises")


def _too_small(split: str, samples: int, plan: _Plan) -> str:
    about = "" if plan.format == "jpeg" else "about "
    return (
        f"memory tier of {split}: {samples:,} samples of this node need {about}{plan.needed / GB:.2f} GB as "
        f"{plan.format}, and {plan.given} holds {plan.capacity / GB:.2f} GB: "
        f"{about}{100 * plan.capacity / plan.needed:.0f} % of them stay in memory, the others are read from local disk "
        "in every epoch."
    )


def segment_name(run: bytes, node_index: int, split: str) -> str:
    """Of the slab of one run, node and split. The run is a secret, and a name is not: it holds a hash of it."""
    return f"{hashlib.blake2b(run, digest_size=8, person=b'segment').hexdigest()}-n{node_index}-{file_name(split)}"
