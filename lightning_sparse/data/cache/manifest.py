"""Makes the list of a split's samples on network storage, and keeps it in the cache.

Listing takes minutes over a network, so a run uses the list in the cache if the folders on storage have not changed
since: it compares the names of the classes and the modification times of all folders, which change when a file is
added, removed or renamed. A file that is overwritten in place does not change its folder, and object stores keep no
times of folders: there, `lightning-sparse cache warm` lists again. Without an answer from storage, the run uses the
list in the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.cache.folders import (
    cache_folder,
    file_name,
    is_read_only,
    locked,
    source_name,
    usable,
    write_private,
)
from lightning_sparse.data.cache.samples import Manifest, Paths
from lightning_sparse.data.cache.storage import Listed, MissingFolderError, Storage, StoredFile
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.decode import UndecodableError, probe
from lightning_sparse.messages import log

LIST_READERS = 16  # folders listed at the same time
PROBES = 64  # files that are read to estimate the size of decoded images
CHECK_S = 10.0  # without an answer, a list in the cache is used as it is


def list_source(
    source: str,
    split: str,
    *,
    timeout: float = 300.0,
    quiet: bool = False,
    options: dict[str, Any] | None = None,
) -> Manifest:
    """List an image folder on network storage, classes in parallel, with a progress bar.

    Args:
        timeout, options: as `Storage`.
        quiet: show no progress bar.

    Raises:
        ValueError: if the split could lead outside the source, or contains no images.
        DataError: if storage cannot be listed.
    """
    if not split or split.startswith("/") or ".." in split.split("/"):
        raise ValueError(f"split={split!r} must be the name of a folder in {source}, such as 'train'.")
    storage = Storage(source, timeout=timeout, readers=LIST_READERS, quiet=quiet, options=options)
    try:
        times = storage.names(split)
        classes = sorted(times)
        listed = storage.listing([f"{split}/{name}" for name in classes])
        below = list(tqdm(listed, total=len(classes), desc=f"listing {split}", unit="class", disable=quiet or None))
        probed = _probed(storage, [path for each in below for path, _, _ in each.files])
    finally:
        storage.close()
    found = dict(zip(classes, below, strict=True))
    _check_classes(source, split, found)
    manifest = _manifest_of(source_name(source), split, times, found)
    return replace(manifest, probed=probed)


def _check_classes(source: str, split: str, below: Mapping[str, Listed]) -> None:
    """Raise ValueError if there are no classes, or one without images."""
    empty = [name for name, each in below.items() if not each.files]
    if empty:
        raise ValueError(
            f"source={source}: folder {split}/{empty[0]} contains no images. Remove it, or add images to it."
        )
    if not below:
        raise ValueError(
            f"source={source}: {split}/ contains no class folders. Expected {split}/<class>/<image>: put each image "
            "into the folder of its class."
        )


def _probed(storage: Storage, paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return (size, height, width) of up to `PROBES` of these images, without those that are corrupt."""
    some = [paths[index] for index in np.unique(np.linspace(0, len(paths) - 1, PROBES, dtype=int))] if paths else []
    rows = []
    for file in storage.read(some):
        with contextlib.suppress(UndecodableError):
            if isinstance(file, StoredFile):
                rows.append((file.size, *probe(file.data)))
    return np.array(rows, np.int64).reshape(-1, 3)


def _manifest_of(root: str, split: str, times: Mapping[str, int], below: Mapping[str, Listed]) -> Manifest:
    """times: modification time of the folder of each class. below: what each contains, by class in order."""
    found = sorted(
        (path, label, size, mtime) for label, each in enumerate(below.values()) for path, size, mtime in each.files
    )
    labels, sizes, mtimes = (np.array([row[column] for row in found], np.int64) for column in (1, 2, 3))
    paths = Paths.of([row[0] for row in found])
    folders = {f"{split}/{name}": time for name, time in times.items()}
    folders |= {path: time for each in below.values() for path, time in each.folders if path not in folders}
    return Manifest(
        split,
        root,
        tuple(below),
        paths,
        labels,
        sizes,
        mtimes,
        folders=Paths.of(list(folders)),
        folder_mtimes_ns=np.array(list(folders.values()), np.int64),
    )


def load_or_list(config: CacheConfig, split: str, *, relist: bool = False, quiet: bool = False) -> Manifest:
    """Return the manifest from the cache if the source has not changed, or list the source and keep the list.

    One process per node lists.

    Args:
        relist: list the source in any case.
        quiet: show no progress bar.

    Raises:
        ValueError, DataError: as `list_source`.
    """
    file = _file(config, split)
    with usable(file.parent), locked(file.with_suffix(".lock")):
        kept = None if relist else kept_manifest(config, split)
        if kept is not None and not _has_changed(config, kept):
            return kept
        if kept is not None and is_read_only(file.parent):
            log.warning("using the list of %s/ in %s, which cannot be written", split, file.parent)
            return kept
        manifest = list_source(
            config.source, split, timeout=config.storage_timeout, quiet=quiet, options=config.storage_options
        )
        write_private(file, manifest.to_bytes())
        _old_file(config, split).unlink(missing_ok=True)
        return manifest


def class_names(config: CacheConfig, split: str) -> tuple[str, ...]:
    """Return the names of the classes: the folders of the source, or if storage does not answer, those in the cache.

    Raises:
        DataError: if there are neither.
    """
    kept = kept_manifest(config, split)
    storage = Storage(config.source, timeout=_patience(config, kept), readers=1, options=config.storage_options)
    try:
        return tuple(sorted(storage.names(split)))
    except DataError:
        if kept is None:
            raise
        return kept.classes
    finally:
        storage.close()


def kept_manifest(config: CacheConfig, split: str) -> Manifest | None:
    """Return the list in the cache; None if there is none, or if it is corrupt."""
    for file in (_file(config, split), _old_file(config, split)):
        try:
            if file.exists():
                return Manifest.load(file)
        except DataError:
            continue
    return None


def keep(config: CacheConfig, split: str, data: bytes) -> Manifest:
    """Keep a list of another node (`Manifest.to_bytes`) in the cache, unless a process of this node has done so."""
    sent, file = Manifest.from_bytes(data), _file(config, split)
    if is_read_only(file.parent):
        return sent
    with usable(file.parent), locked(file.with_suffix(".lock")):
        kept = kept_manifest(config, split)
        if kept is not None and kept.fingerprint == sent.fingerprint:
            return kept
        write_private(file, data)
        return Manifest.load(file)


def listed_splits(folder: Path) -> dict[str, int]:
    """Return the number of listed samples of each split, of the lists in a cache folder that can be read."""
    found = {}
    for file in sorted([*folder.glob("*.manifest.npz"), *folder.glob("*.manifest")]):
        try:
            found[file.name.partition(".manifest")[0]] = len(Manifest.load(file))
        except DataError:
            continue  # corrupt; the run that uses it lists again
    return found


def _has_changed(config: CacheConfig, kept: Manifest) -> bool:
    """Whether the source has changed since it was listed. False if storage does not answer."""
    storage = Storage(
        config.source,
        timeout=_patience(config, kept),
        readers=LIST_READERS,
        quiet=True,
        options=config.storage_options,
    )
    try:
        change = _change(storage, kept)
    except DataError as error:
        log.warning("using the list of %s/ in the cache, because storage cannot be asked: %s", kept.split, error)
        return False
    finally:
        storage.close()
    if change:
        log.info("%s: listing %s/ again", change, kept.split)
    return bool(change)


def _change(storage: Storage, kept: Manifest) -> str:
    """Return what has changed on storage since it was listed, or "".

    Raises:
        DataError: if storage does not answer, or does not have the split.
    """
    now = {f"{kept.split}/{name}": time for name, time in storage.names(kept.split).items()}
    if not len(kept.folders):
        return f"the list of {kept.split}/ is of an older version"
    classes = {f"{kept.split}/{name}" for name in kept.classes}
    for verb, names in (("is new", now.keys() - classes), ("is gone", classes - now.keys())):
        if names:
            return f"{min(names)}/ {verb}"
    listed = dict(zip(kept.folders, kept.folder_mtimes_ns.tolist(), strict=True))
    deeper = sorted(listed.keys() - classes)
    try:
        now |= dict(zip(deeper, storage.mtimes(deeper), strict=True))
    except MissingFolderError:
        return f"a folder below {kept.split}/ is gone"
    changed = [name for name, time in now.items() if time and listed[name] and time != listed[name]]
    return f"{min(changed)}/ has changed" if changed else ""


def _patience(config: CacheConfig, kept: Manifest | None) -> float:
    return config.storage_timeout if kept is None else min(CHECK_S, config.storage_timeout)


def _file(config: CacheConfig, split: str) -> Path:
    return cache_folder(config) / f"{file_name(split)}.manifest"


def _old_file(config: CacheConfig, split: str) -> Path:
    """Where earlier versions kept the list, without the times of folders."""
    return cache_folder(config) / f"{file_name(split)}.manifest.npz"
