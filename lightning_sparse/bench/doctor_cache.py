"""Checks of `lightning-sparse doctor` for the data cache on this node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.bench.doctor import Finding
from lightning_sparse.data.cache.commands import caches
from lightning_sparse.data.cache.segment import available_memory
from lightning_sparse.data.folders import NETWORK_FILE_SYSTEMS, VERSION, file_system

MIN_FREE = 10e9
"""Free bytes below which an image data set is unlikely to fit."""


def examine_cache(cache_dir: str) -> Iterator[Finding]:
    """Check free space on disk and in memory, and list the caches in the folder."""
    folder = Path(cache_dir)
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    kind = file_system(existing)
    if kind in NETWORK_FILE_SYSTEMS:
        said = f"{folder} is on a network file system ({kind}), which the cache does not support: use a local disk"
        yield Finding("bad", "disk cache", said)
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("bad", "disk cache", f"{existing} is not a folder that this user may write to")
    else:
        free = shutil.disk_usage(existing).free
        missing = "" if folder.exists() else "; the folder will be created"
        little = "" if free > MIN_FREE else "; little space for an image data set, see disk_gb"
        said = f"{free / 1e9:,.0f} GB free in {folder} ({kind or 'file system unknown'}){missing}{little}"
        yield Finding("note" if little else "ok", "disk cache", said)
    if folder.is_dir():
        for each in caches(cache_dir):
            splits = ", ".join(f"{name} {kept:,} of {listed:,} files" for name, kept, listed, _ in each.splits)
            old = "" if each.version == VERSION else f"version {each.version}, unused: run lightning-sparse cache clear"
            said = f"{each.source}: {each.bytes / 1e9:,.2f} GB, {old or splits or 'empty'}"
            yield Finding("note" if old else "ok", "cached", said)
    said = f"{available_memory() / 1e9:,.1f} GB of this node's memory are available for samples"
    yield Finding("ok", "memory cache", said)
