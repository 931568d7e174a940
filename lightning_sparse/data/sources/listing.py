"""The samples of a split: found in the source, kept in the cache, and found again when the source has changed.

A run uses the list in the cache if the classes and the stamps of all folders are unchanged, or if storage does not
answer. A stamp changes when a file is added, removed or renamed, and when a path leads to another folder. It does not
change when a file is overwritten in place, and object stores keep no times of folders: then run `lightning-sparse cache
warm`. For shards, a run also compares their own times, if storage lists them. Each read of a sample in a tar shard, if
it is not sparse, compares its headers, which contain its name, size and time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.folders import (
    cache_folder,
    cache_path,
    file_name,
    is_read_only,
    locked,
    wrap_os_errors,
    write_private,
)
from lightning_sparse.data.sources.layout import ClassFolders, Files, Layout, ParquetFiles, SampleList, Split, TarShards
from lightning_sparse.data.sources.manifest import Manifest, is_same_time
from lightning_sparse.data.sources.storage import CHECK_S, Listed, MissingFolderError, Storage
from lightning_sparse.messages import log

LAYOUTS: tuple[type[Layout], ...] = (SampleList, ParquetFiles, TarShards, Files, ClassFolders)  # the first one found


@contextlib.contextmanager
def _open_split(
    config: CacheConfig, split: str, kept: Manifest | None = None, *, quiet: bool = False
) -> Iterator[Split]:
    # a short time if the cache has a list
    timeout = config.storage_timeout if kept is None else min(CHECK_S, config.storage_timeout)
    source_split = Split(config, split, timeout, quiet)
    with source_split.storage:
        yield source_split


def find_layout(split: Split) -> Layout:
    """Return the layout of a split. Raise MissingFolderError if the source does not have the split."""
    return next(layout for kind in LAYOUTS if (layout := kind.find(split)) is not None)


def list_source(config: CacheConfig, split: str) -> Manifest:
    with _open_split(config, split) as source_split:
        return find_layout(source_split).manifest()


def load_or_list(config: CacheConfig, split: str, *, relist: bool = False) -> Manifest:
    """Return the manifest from the cache if the source has not changed, or list the source and keep the list.

    `relist` lists the source in any case.
    """
    file = _file(config, split)
    if not file.parent.exists():
        with _open_split(config, split) as source_split:
            find_layout(source_split)  # a missing source must leave no folder in the cache
    cache_folder(config)
    with wrap_os_errors(file.parent), locked(file.with_suffix(".lock")):
        # under the lock: one process per node lists
        cached = None if relist else cached_manifest(config, split)
        if cached is not None and not _has_changed(config, cached):
            return cached
        fixed = not relist and is_read_only(file.parent)
        if cached is not None and fixed and not (config.lists or cached.list_digest):
            log.warning("using the list of %s/ in %s, which cannot be written", split, file.parent)
            return cached
        manifest = list_source(config, split)
        if fixed:
            log.warning("%s cannot be written: each run lists %s/ again", file.parent, split)
        else:
            write_private(file, manifest.to_bytes())
        return manifest


def has_split(config: CacheConfig, split: str) -> bool:
    """Whether the source has a split with classes, or with any files if they are not images."""
    if config.lists is not None:
        return split in config.lists
    if cached_manifest(config, split) is not None:
        return True
    others = (cached_manifest(config, name) for name in ("val", "train"))
    cached = next((manifest for manifest in others if manifest), None)
    try:
        with _open_split(config, split, cached) as source_split:
            layout = find_layout(source_split)
            return not isinstance(layout, ClassFolders) or layout.classes() is not None
    except MissingFolderError:
        return False
    except DataError:
        if cached is None:
            raise
        return False


def classes_of(config: CacheConfig, split: str) -> tuple[tuple[str, ...], int]:
    """Return the names of the classes (none if labels are numbers), and their number."""
    cached = cached_manifest(config, split)
    try:
        with _open_split(config, split, cached) as source_split:
            classes = find_layout(source_split).classes()
    except DataError:
        if cached is None:
            raise
        return cached.classes, cached.num_classes
    if classes is not None:
        return classes
    manifest = load_or_list(config, split)  # shards say their labels only when they are listed
    return manifest.classes, manifest.num_classes


def cached_manifest(config: CacheConfig, split: str) -> Manifest | None:
    """Return the list in the cache; None if there is none, or if it is corrupt."""
    file = _file(config, split)
    with contextlib.suppress(DataError):
        return Manifest.load(file)
    return None


def store_manifest(config: CacheConfig, split: str, data: bytes) -> Manifest:
    """Keep a list of another node (`Manifest.to_bytes`) in the cache, unless a process of this node has done so."""
    sent, file = Manifest.load(data), _file(config, split)
    cache_folder(config)
    if is_read_only(file.parent):
        return sent
    with wrap_os_errors(file.parent), locked(file.with_suffix(".lock")):
        cached = cached_manifest(config, split)
        if cached is not None and cached.identity == sent.identity:
            return cached
        write_private(file, data)
        return Manifest.load(file)


def listed_splits(folder: Path) -> dict[str, int]:
    counts = {}
    for file in sorted(folder.glob("*.manifest")):
        with contextlib.suppress(DataError):  # corrupt; the run that uses it lists again
            counts[file.stem] = len(Manifest.load(file))
    return counts


def _has_changed(config: CacheConfig, kept: Manifest) -> bool:
    try:
        with _open_split(config, kept.split, kept, quiet=True) as source_split:
            change = _change(source_split, kept)
    except DataError as error:
        log.warning("using the list of %s/ in the cache, because storage did not answer: %s", kept.split, error)
        return False
    if change:
        log.info("%s: listing %s/ again", change, kept.split)
    return bool(change)


def _change(split: Split, kept: Manifest) -> str:
    """Return the change on storage since it was listed, or ""."""
    named = SampleList.find(split)
    if (named.digest if named is not None else "") != kept.list_digest:
        return f"the list of {split.name} has changed"
    by_folder = named is None and not len(kept.shards)
    times = split.storage.names(split.name) if by_folder else {}
    now = {f"{split.name}/{name}": time for name, time in times.items()}
    classes = {f"{split.name}/{name}" for name in kept.classes} if by_folder else set()
    for verb, names in (("is new", now.keys() - classes), ("is gone", classes - now.keys())):
        if names:
            return f"{min(names)}/ {verb}"
    listed = dict(zip(kept.folders, kept.folder_stamps.tolist(), strict=True))
    deeper = sorted(listed.keys() - classes)
    try:
        now |= dict(zip(deeper, split.storage.stamps(deeper), strict=True))
        shards = _changed_shards(split.storage, kept)
    except MissingFolderError:
        return f"a folder below {split.name}/ is gone"
    if shards:
        return f"{min(shards)} has changed"
    changed = [name for name, time in now.items() if time and listed[name] and time != listed[name]]
    return f"{min(changed)}/ has changed" if changed else ""


def _changed_shards(storage: Storage, kept: Manifest) -> list[str]:
    # object stores list times in seconds, and a tag for each version; on a mount, permissions change the tag, too
    tags = kept.tags if "://" in storage.source else np.zeros_like(kept.tags)
    if not (kept.mtimes_ns.any() or tags.any()):  # such as on a web server
        return []
    numbers, firsts = np.unique(kept.shard_of, return_index=True)
    versions = zip(kept.mtimes_ns[firsts].tolist(), tags[firsts].tolist(), strict=True)
    known = dict(zip(map(kept.shard_file, numbers.tolist()), versions, strict=True))
    now = {
        f"{folder}/{name}".lstrip("/"): (mtime, tag)
        for folder in {file.rpartition("/")[0] for file in known}
        for name, _, mtime, tag in storage.files(folder)
    }
    return [file for file, version in known.items() if file not in now or not _is_same_version(version, now[file])]


def _is_same_version(listed: tuple[int, int], now: tuple[int, int]) -> bool:
    (listed_time, listed_tag), (time, tag) = listed, now
    return is_same_time(listed_time, time) and (0 in (listed_tag, tag) or listed_tag == tag)


def relist_shard(
    storage: Storage, config: CacheConfig, manifest: Manifest, file: str
) -> tuple[npt.NDArray[np.int64], Manifest] | None:
    """List a shard again. Return the indices of its samples in the manifest, and a new manifest of these samples.

    Return None if a sample no longer has its place and its label.
    """
    split = Split(config, manifest.split, storage.timeout, quiet=True, probes=0)
    split.storage = storage  # already open, and interrupted with the caller
    kind = ParquetFiles if manifest.has_row_groups else TarShards
    try:
        now = kind(split, Listed([(file, 0, 0, 0)], [], [])).manifest()
    except ValueError:  # it is damaged, or has no samples
        return None
    shards = [number for number in range(len(manifest.shards)) if manifest.shard_file(number) == file]
    indices = np.flatnonzero(np.isin(manifest.shard_of, shards))
    present = {path: (number, sample) for number, (path, sample) in enumerate(_samples(now, range(len(now))))}
    numbers = []
    for path, sample in _samples(manifest, indices.tolist()):
        number, found = present.get(path, (0, None))
        if found != sample:
            return None
        numbers.append(number)
    return indices, now.select(np.array(numbers, np.int64))


def _samples(manifest: Manifest, indices: Iterable[int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the path of each sample, and its place and label."""
    for index in indices:
        label = np.atleast_1d(manifest.labels[index]).tolist()
        if manifest.classes and label and label[0] >= 0:
            label[0] = manifest.classes[label[0]]  # train/ may have numbered the classes differently
        size = 0 if manifest.has_row_groups else int(manifest.sizes[index])
        yield manifest.paths[index], [int(manifest.offsets[index]), size, *label]


def _file(config: CacheConfig, split: str) -> Path:
    return cache_path(config) / f"{file_name(split)}.manifest"
