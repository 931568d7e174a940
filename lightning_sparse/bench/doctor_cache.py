"""The doctor's look at the data cache's tiers on this node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.bench.doctor import Finding
from lightning_sparse.data.cache.folders import NETWORK_FILE_SYSTEMS, VERSION, file_system
from lightning_sparse.data.cache.inventory import caches
from lightning_sparse.data.cache.shared_memory import available_memory

LITTLE = 10e9
"""Free bytes below which a data set of pictures is unlikely to fit."""


def examine_cache(cache_dir: str) -> Iterator[Finding]:
    """Free space on the disk and in memory, and what is kept in the folder."""
    folder = Path(cache_dir)
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    kind = file_system(existing)
    if kind in NETWORK_FILE_SYSTEMS:
        said = (
            f"{folder} is on a network file system ({kind}), where the cache refuses to work: give a disk of this node"
        )
        yield Finding("bad", "disk cache", said)
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("bad", "disk cache", f"{existing} is no folder that this user may write to")
    else:
        free = shutil.disk_usage(existing).free
        missing = "" if folder.exists() else "; the folder will be made"
        little = "" if free > LITTLE else "; little for a data set of pictures, see disk_gb"
        said = f"{free / 1e9:,.0f} GB free in {folder} ({kind or 'file system unknown'}){missing}{little}"
        yield Finding("note" if little else "ok", "disk cache", said)
    if folder.is_dir():
        for each in caches(cache_dir):
            splits = ", ".join(f"{name} {kept:,} of {listed:,} files" for name, kept, listed, _ in each.splits)
            old = "" if each.version == VERSION else f"version {each.version}, unused: lightning-sparse cache clear"
            said = f"{each.source}: {each.bytes / 1e9:,.2f} GB, {old or splits or 'nothing yet'}"
            yield Finding("note" if old else "ok", "cached", said)
    shared = Path("/dev/shm")
    if shared.is_dir():
        said = f"{available_memory(shared) / 1e9:,.1f} GB of this node's memory could hold samples now"
        yield Finding("ok", "memory cache", said)
