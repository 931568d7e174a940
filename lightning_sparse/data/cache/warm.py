"""Fill the disk tier ahead of a run: `lightning-sparse cache warm`. Ended at any time, it goes on where it was.

It lists the source anew, so it is also what notices files that were added or changed: those are read again, all others
stay. Files are read and decoded in several threads, since decoding is what proves that a file is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from lightning_sparse.data import decode
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.disk import DiskCache, Key, damaged, decoder_number
from lightning_sparse.data.cache.manifest import Manifest, load_or_list
from lightning_sparse.data.cache.placement import Placement, owners
from lightning_sparse.data.cache.storage import Fetched, MissingFolderError, Refusal, Source
from lightning_sparse.data.cache.tiers import checked, open_disk
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.messages import log

CHUNK = 16  # files that one thread asks for at once


@dataclass
class WarmReport:
    """What became of one split.

    files: that this node should hold. present: were there before. damaged: (path, what is wrong). full: the disk, or
    the limit, took no more.
    """

    split: str
    files: int = 0
    present: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    full: bool = False

    def describe(self) -> str:
        left = self.files - self.present - self.fetched - len(self.damaged)
        text = f"{self.split}: {self.files:,} files, {self.present:,} were there, {self.fetched:,} fetched "
        text += f"({self.fetched_bytes / 1e6:,.1f} MB)"
        text += f", {len(self.damaged):,} damaged" if self.damaged else ""
        return text + (f", {left:,} did not fit" if self.full else "")


def warm(config: CacheConfig, split: str, *, place: Placement | None = None, threads: int = 4) -> WarmReport:
    """Bring the files of one split to this node's disk.

    Args:
        place: with several nodes, only the files that the node owns.

    Raises:
        ValueError, DataError: as `manifest.list_source`; StorageTimeoutError when storage does not come back.
    """
    place = place or Placement()
    manifest = load_or_list(config, split, relist=True)
    mine = np.flatnonzero(owners(manifest.labels, place.num_nodes, config.seed) == place.node_index)
    report = WarmReport(split, files=len(mine))
    disk = open_disk(config, split, Counter(), lambda topic, text: log.warning("%s", text))
    storage = Source(config.source, timeout=config.storage_timeout, readers=config.storage_readers)
    try:
        keys = [_key(manifest, index) for index in mine.tolist()]
        missing = [key for key, has in zip(keys, disk.has(keys), strict=True) if not has]
        report.present = len(keys) - len(missing)
        with tqdm(total=len(keys), initial=report.present, desc=f"caching {split}", unit="file") as bar:
            _fill(config, disk, storage, missing, threads, report, bar)
        disk.flush()
        report.full = disk.full
    finally:
        disk.close()
        storage.close()
    return report


def warm_splits(
    config: CacheConfig, splits: Sequence[str] | None = None, *, place: Placement | None = None, threads: int = 4
) -> list[WarmReport]:
    """`warm` for several splits; None: "train", and "val" if the source has it."""
    reports = []
    for split in splits or ("train", "val"):
        try:
            reports.append(warm(config, split, place=place, threads=threads))
        except MissingFolderError:
            if splits or split == "train":
                raise
    return reports


def _fill(
    config: CacheConfig,
    disk: DiskCache,
    storage: Source,
    missing: Sequence[Key],
    threads: int,
    report: WarmReport,
    bar: tqdm[None],
) -> None:
    decoder = decoder_number(decode.decoder_version())

    def fetch(keys: Sequence[Key]) -> list[tuple[Key, int, str]]:
        """(file, its bytes, what is wrong with it)"""
        done = []
        for key, answer in zip(keys, storage.read([key.path for key in keys]), strict=True):
            done.append((key, *_keep(config, disk, key, answer, decoder)))
        return done

    chunks = [missing[begin : begin + CHUNK] for begin in range(0, len(missing), CHUNK)][::-1]
    with ThreadPoolExecutor(threads) as pool:
        running: set[Future[list[tuple[Key, int, str]]]] = set()
        while chunks or running:
            while chunks and len(running) < 2 * threads and not disk.full:
                running.add(pool.submit(fetch, chunks.pop()))
            if not running:
                return  # the disk is full
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for key, nbytes, reason in (each for future in finished for each in future.result()):
                report.fetched_bytes += nbytes
                if reason:
                    report.damaged.append((key.path, reason))
                elif not disk.full:
                    report.fetched += 1
                bar.update()


def _keep(config: CacheConfig, disk: DiskCache, key: Key, answer: Fetched | Refusal, decoder: int) -> tuple[int, str]:
    """(bytes read, what is wrong)"""
    try:
        if isinstance(answer, Refusal):
            raise decode.UndecodableError(answer.reason)
        stored, _ = checked(answer.data, decoder, config.short_side)
    except decode.UndecodableError as error:
        if config.on_corrupt == "skip":
            disk.put(key, damaged(str(error), decoder))
        return 0 if isinstance(answer, Refusal) else len(answer.data), str(error)
    disk.put(key, stored)
    return len(answer.data), ""


def _key(manifest: Manifest, index: int) -> Key:
    return Key(manifest.paths[index], int(manifest.sizes[index]), int(manifest.mtimes_ns[index]))
