"""Implement `lightning-sparse cache`: fill the disk tier before a run, list and remove caches."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.cache.disk import DiskCache
from lightning_sparse.data.cache.store import Placement, SampleStore
from lightning_sparse.data.config import SPLITS, CacheConfig, DataError
from lightning_sparse.data.folders import VERSION, source_name
from lightning_sparse.data.sources.listing import has_split, listed_splits, load_or_list
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.messages import human_bytes

CHUNK = 16  # files per request of a thread


@dataclass
class WarmReport:
    """Result for a split.

    present: files cached before. corrupt: (path, reason). full: whether the cache has no space left. pruned: files
    removed. differing: paths of cached files that differed from the source.
    """

    split: str
    files: int = 0
    present: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    corrupt: list[tuple[str, str]] = field(default_factory=list)
    full: bool = False
    pruned: int = 0
    differing: list[str] = field(default_factory=list)

    def describe(self) -> str:
        left = self.files - self.present - self.fetched - len(self.corrupt)
        text = f"{self.split}: {self.files:,} files, {self.present:,} cached before, {self.fetched:,} fetched "
        text += f"({human_bytes(self.fetched_bytes)})"
        text += f", {len(self.corrupt):,} corrupt" if self.corrupt else ""
        text += f", {left:,} did not fit" if self.full else ""
        text += f", {len(self.differing):,} replaced, which differed from the source" if self.differing else ""
        return text + (f", {self.pruned:,} removed" if self.pruned else "")


def warm(
    config: CacheConfig,
    split: str,
    *,
    placement: Placement | None = None,
    threads: int = 4,
    prune: bool = False,
    verify: bool = False,
) -> WarmReport:
    """Copy the files of a split to the disk tier of this node. It continues an interrupted call.

    Args:
        placement: with several nodes, copy only the files that the node owns.
        threads: number of threads that read and decode.
        prune: first remove files that are no longer listed, or that other nodes own. A run with an older list reads
            them from storage again.
        verify: first read cached files from storage again, and replace the files that differ.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1.")
    placement, report = placement or Placement(), WarmReport(split)
    # files are kept as they are, and on disk alone
    config = replace(config, memory_gb=0, format="bytes" if config.format == "bytes" else "jpeg")
    # a new list, to also read files that were added or changed
    store = SampleStore(config, load_or_list(config, split, relist=True), placement)
    # Ctrl-C closes the store before it waits for the threads, which may wait for storage
    # several threads, because files are decoded to validate them
    with ThreadPoolExecutor(threads) as pool, contextlib.closing(store):
        owned = np.flatnonzero(store.owners == placement.node_index)
        keys = store.manifest.keys(owned.tolist())
        report.files, report.pruned = len(keys), store.disk.prune(keys) if prune else 0
        missing = owned[~np.array(store.disk.has(keys), np.bool_)]
        report.present = len(keys) - len(missing)
        if verify:
            cached = np.setdiff1d(owned, missing)
            with tqdm(total=len(cached), desc=f"verifying {split}", unit="file") as bar:
                chunks = [*_chunks(store.manifest, cached)]
                for chunk, differing in zip(chunks, pool.map(store.differing, chunks), strict=True):
                    report.differing += [store.manifest.paths[index] for index in differing]
                    bar.update(len(chunk))
        _fill(store, missing, pool, report)
        store.disk.flush()
        corrupt = {path for path, _ in report.corrupt}
        kept = store.disk.has(store.manifest.keys(missing.tolist()))
        fetched = (store.manifest.paths[index] for index, is_kept in zip(missing, kept, strict=True) if is_kept)
        report.fetched = sum(path not in corrupt for path in fetched)
        report.full, report.fetched_bytes = store.disk.full, store.counters().storage_bytes
    return report


def warm_splits(
    config: CacheConfig,
    splits: Sequence[str] | None = None,
    *,
    placement: Placement | None = None,
    threads: int = 4,
    prune: bool = False,
    verify: bool = False,
) -> list[WarmReport]:
    """Call `warm` for several splits. Default: "train", and "val" and "test" if the source has them."""
    reports = []
    for split in splits or SPLITS:
        if splits or split == "train" or has_split(config, split):
            reports.append(warm(config, split, placement=placement, threads=threads, prune=prune, verify=verify))
    return reports


def _fill(store: SampleStore, missing: npt.NDArray[np.int64], pool: ThreadPoolExecutor, report: WarmReport) -> None:
    bar = tqdm(total=report.files, initial=report.present, desc=f"caching {report.split}", unit="file")

    def fetch(chunk: list[int]) -> tuple[int, dict[int, str]]:
        if store.disk.full:
            return 0, {}
        corrupt = store.cache_files(chunk)
        return 0 if store.disk.full else len(chunk) - len(corrupt), corrupt

    try:
        with bar:
            for fetched, corrupt in pool.map(fetch, _chunks(store.manifest, missing)):
                report.corrupt += [(store.manifest.paths[index], reason) for index, reason in corrupt.items()]
                bar.update(fetched + len(corrupt))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(manifest: Manifest, missing: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    ends = np.arange(CHUNK, len(missing), CHUNK)
    if manifest.has_row_groups:
        ends = np.flatnonzero(np.diff(manifest.shard_of[missing])) + 1
    return (chunk.tolist() for chunk in np.split(missing, ends) if len(chunk))


_FOLDER = re.compile(r"v(\d+)-[0-9a-f]{16}")


@dataclass(frozen=True)
class CachedSource:
    """The cache of a source. splits: (name, cached files, listed files, bytes); empty if of another version."""

    folder: Path
    source: str
    version: int
    splits: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def describe(self) -> str:
        other = "" if self.version == VERSION else f" (version {self.version}, which this version does not use)"
        lines = [f"{self.source}{other}: {human_bytes(self.bytes)} in {self.folder}"]
        for split, entries, listed, nbytes in self.splits:
            lines.append(f"  {split}: {entries:,} of {listed:,} files, {human_bytes(nbytes)}")
        return "\n".join(lines)


def caches(cache_dir: str) -> list[CachedSource]:
    """Return the caches of all sources and versions. Raise ValueError if there is no such folder."""
    root = Path(cache_dir)
    if not root.is_dir():
        raise ValueError(f"cache_dir={root} is not a folder. Give the cache_dir of your runs.")
    sources = []
    for folder in sorted(root.iterdir()):
        match = _FOLDER.fullmatch(folder.name)
        if match is None or folder.is_symlink() or not (folder / "cache.json").is_file():
            continue
        version = int(match[1])
        try:
            source = str(json.loads((folder / "cache.json").read_text())["source"])
        except (OSError, ValueError, KeyError, TypeError):
            source = "an unknown source (its cache.json is corrupt)"
        splits = _splits(folder) if version == VERSION else ()
        sources.append(CachedSource(folder, source, version, splits))
    return sources


def clear(cache_dir: str, source: str | None = None) -> list[CachedSource]:
    """Remove the cache of a source, or of all sources. Running jobs keep their open files."""
    removed = [cache for cache in caches(cache_dir) if source is None or cache.source == source_name(source)]
    for cache in removed:
        shutil.rmtree(cache.folder)
    return removed


def _splits(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    rows = []
    for split, files in listed_splits(folder).items():
        store = folder / f"{split}.lmdb"
        entries, nbytes = 0, 0
        try:
            if store.is_dir():
                disk = DiskCache(store)
                entries, nbytes = disk.entries(), disk.bytes()
                disk.close()
        except DataError:
            continue  # corrupt; the run that uses it reports it
        rows.append((split, entries, files, nbytes))
    for tokens in sorted(folder.glob("tokens-*")):  # of a tokenizer, see `shards.py`
        sizes = [file.stat().st_size for file in tokens.glob("*.bin") if file.with_suffix(".json").exists()]
        rows.append((tokens.name, len(sizes), len(list(tokens.glob("*.bin"))), sum(sizes)))
    return tuple(rows)
