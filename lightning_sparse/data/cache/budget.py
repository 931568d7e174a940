"""Size, format and folder of a node's memory tier: the first process of the node writes them to the segment.

Its name says what is in it, so all runs on a node that want the same find it: one copy, however many runs.

If the samples do not fit, the tier keeps as many as fit, and every epoch reads the others from local disk.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_sparse.data import decode
from lightning_sparse.data.cache import free_memory, memory, shared_memory
from lightning_sparse.data.cache.counts import RunCounters, open_counters
from lightning_sparse.data.cache.memory import ALIGN, MAGIC, MemoryCache
from lightning_sparse.data.config import GB, CacheConfig, DataError
from lightning_sparse.data.folders import file_name, is_read_only, locked, private_folder, source_name, usable
from lightning_sparse.data.sample import Format
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.messages import log

# Without probed files: bytes of an average photograph whose shorter side is 1, measured on ImageNet: 271,617 at 256.
PHOTOGRAPH = 271_617 / 256**2
MAX_COMPRESSION = 60  # upper bound of decoded size / JPEG size, reached by images of one colour
DEFAULT_SHARE = 0.5  # of the available memory


def needed_bytes(manifest: Manifest, owned: npt.NDArray[np.bool_], format: Format, short_side: int) -> int:
    """Return the bytes that the node's samples need in memory: an estimate for "decoded", else exact."""
    sizes = manifest.sizes[owned]
    if format == "decoded" and len(manifest.probed):
        decoded = np.array([3 * np.prod(decode.scaled((w, h), short_side)) for _, h, w in manifest.probed.tolist()])
        mean = decoded.mean() + 2 * decoded.std() / np.sqrt(len(decoded))  # likely above that of all files
        return int(len(sizes) * (mean + ALIGN))
    if format == "decoded":
        sizes = np.minimum(sizes * MAX_COMPRESSION, int(PHOTOGRAPH * short_side**2))
    return int(sizes.sum() + len(sizes) * ALIGN)


def choose_format(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], limit: int) -> Format:
    """Return "decoded" if all samples fit, which saves decoding in each epoch; else "jpeg", of which more fit."""
    if config.format != "auto":
        return config.format
    return "decoded" if needed_bytes(manifest, owned, "decoded", config.short_side) <= limit else "jpeg"


def format_for(
    config: CacheConfig,
    manifest: Manifest,
    owned: npt.NDArray[np.bool_],
    cache: Path,
    shm: Path = shared_memory.SHARED_MEMORY,
) -> Format:
    """Return the format in which this node keeps its samples, or would keep them. Arguments: as `open_memory`."""
    with _folders(cache, shm) as folders:
        shared_memory.remove_stale(folders)
        for format in _formats(config):
            name = content_name(config, manifest, owned, format)
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    size = (folder / name).stat().st_size
                    # pixels of some samples only, of a run that was told their format: of files, more fit
                    return format if size >= needed_bytes(manifest, owned, format, config.short_side) else "jpeg"
        return _plans(config, manifest, owned, folders)[0].format


def open_memory(
    config: CacheConfig,
    manifest: Manifest,
    owned: npt.NDArray[np.bool_],
    run: bytes,
    node_index: int,
    cache: Path,
    shm: Path = shared_memory.SHARED_MEMORY,
) -> tuple[MemoryCache, RunCounters]:
    """Open the memory tier, which a run on this node may have filled, and the counters of this run.

    Remove the segments of runs that have ended.

    Args:
        owned: bool [samples], samples that this node keeps.
        run: secret of the run.
        cache: folder of the disk tier. Segments are created there if shared memory is missing or too small.
        shm: folder of shared memory.
    """
    with _folders(cache, shm) as folders:
        shared_memory.remove_stale(folders)
        counters = open_counters(folders, run_name(run, node_index, manifest.split))
        try:
            tier = _attach(config, manifest, owned, folders)
            if tier is None:
                tier = _create(config, manifest, owned, folders, counters)
            elif counters.is_first:
                _join(config, manifest, owned, tier, counters)
        except BaseException:
            counters.close()
            raise
        return tier, counters


def _attach(
    config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], folders: list[Path]
) -> MemoryCache | None:
    for format in _formats(config):
        name = content_name(config, manifest, owned, format)
        for folder in folders:
            if (segment := shared_memory.attach(folder / name)) is not None:
                return MemoryCache(segment)
    return None


def _join(
    config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], tier: MemoryCache, counters: RunCounters
) -> None:
    """Use the segment of another run, in the first process of this one."""
    log.info(f"memory tier of {manifest.split}: {tier.cached:,} samples are there, of another run on this node")
    tier.retry()
    needed = needed_bytes(manifest, owned, tier.format, config.short_side)
    plan = _Plan(tier.path.parent, tier.format, needed, tier.capacity, "the copy of another run on this node")
    _warn_if_too_small(manifest.split, int(owned.sum()), plan, counters)


def _formats(config: CacheConfig) -> tuple[Format, ...]:
    return ("decoded", "jpeg") if config.format == "auto" else (config.format,)


@contextlib.contextmanager
def _folders(cache: Path, shm: Path) -> Iterator[list[Path]]:
    """Lock and yield the folders for segments, the preferred one first. Runs with other caches use the first one, too.

    Raises:
        DataError: if there is neither shared memory nor a folder that can be written.
    """
    fallback = cache / "memory"
    shared = shared_memory.memory_folder(shm)
    if is_read_only(cache):
        if shared is None:
            raise DataError(f"there is no shared memory ({shm}), and cache_dir={cache.parent} cannot be written.")
        with locked(shared / ".lock"):
            yield [shared]
        return
    with usable(cache.parent):
        private_folder(fallback)
        folders = [shared, fallback] if shared is not None else [fallback]
        with contextlib.ExitStack() as stack:
            for folder in folders:
                stack.enter_context(locked(folder / ".lock"))
            yield folders


class _Plan(NamedTuple):
    """A segment in a folder. needed: bytes of this node's samples. capacity: its limit. limit: what sets the limit."""

    folder: Path
    format: Format
    needed: int
    capacity: int
    limit: str

    @property
    def holds(self) -> int:
        return min(self.needed, self.capacity)


def _plan(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], folder: Path) -> _Plan:
    free = free_memory.available_memory(folder)
    if config.memory_gb is None:
        allowed, limit = int(free * DEFAULT_SHARE), "half of the free memory"
    elif config.memory_gb * GB <= free:
        allowed, limit = int(config.memory_gb * GB), f"memory_gb={config.memory_gb:g}"
    else:
        allowed, limit = free, f"memory_gb={config.memory_gb:g}, of which {free / GB:.2f} GB are free,"
    format = choose_format(config, manifest, owned, allowed)
    needed = needed_bytes(manifest, owned, format, config.short_side)
    # leave room, because the size of decoded images is an estimate
    return _Plan(folder, format, needed, min(allowed, 2 * needed if format == "decoded" else needed), limit)


def _plans(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], folders: list[Path]) -> list[_Plan]:
    """Return the plans to try, in order."""
    plans = [_plan(config, manifest, owned, folder) for folder in folders]
    return plans[-1:] if plans[0].holds < DEFAULT_SHARE * plans[-1].holds else plans


def _create(
    config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], folders: list[Path], counters: RunCounters
) -> MemoryCache:
    plans = _plans(config, manifest, owned, folders)
    if len(plans) < len(folders):
        shared = _plan(config, manifest, owned, folders[0])
        log.warning(
            f"{folders[0].parent} has only {shared.holds / GB:.2f} GB for samples: using {folders[-1]} instead, in "
            "the page cache of the local disk. In a container, increase shared memory (docker run --shm-size)."
        )
    for plan in plans:
        path = plan.folder / content_name(config, manifest, owned, plan.format)
        try:
            tier = memory.create(path, plan.format, len(manifest), plan.capacity)
            break
        except OSError:
            if plan is plans[-1]:
                raise
    _warn_if_too_small(manifest.split, int(owned.sum()), plan, counters)
    return tier


def _warn_if_too_small(split: str, samples: int, plan: _Plan, counters: RunCounters) -> None:
    if not (plan.needed > plan.capacity > 0 and counters.claim_topic("memory full")):
        return
    about = "about " if plan.format == "decoded" else ""
    log.warning(
        f"memory tier of {split}: {samples:,} samples of this node need {about}{plan.needed / GB:.2f} GB as "
        f"{plan.format}, but {plan.limit} allows {plan.capacity / GB:.2f} GB. {about.capitalize()}"
        f"{100 * plan.capacity / plan.needed:.0f} % of them stay in memory; every epoch reads the others from local "
        "disk."
    )


def run_name(run: bytes, node_index: int, split: str) -> str:
    """Return the name of a run's counters. It contains a hash of the run's secret, because names are public."""
    return f"{hashlib.blake2b(run, digest_size=8, person=b'segment').hexdigest()}-n{node_index}-{file_name(split)}"


def content_name(config: CacheConfig, manifest: Manifest, owned: npt.NDArray[np.bool_], format: Format) -> str:
    """Return the name of a segment of samples: a hash of all that decides what is in it, and of its limit."""
    pixels = (config.short_side, decode.decoder_id(), torch.__version__) if format == "decoded" else None
    # options choose the server or the version of a URL, and not all storage tells times, which tell files apart
    source = (source_name(config.source), json.dumps(config.storage_options, sort_keys=True))
    limit = None if config.memory_gb is None else float(config.memory_gb)
    others = config.shuffle == "local"  # keeps samples of other nodes, too, which would take the room of this one's
    content = (MAGIC, *source, manifest.fingerprint, config.member, pixels, limit, others)
    digest = hashlib.blake2b(repr(content).encode("utf-8", "surrogateescape"), digest_size=16)
    digest.update(np.packbits(owned).tobytes())
    return f"{digest.hexdigest()}-{format}-{file_name(manifest.split)}"
