"""Keeps the list of a split's samples in the cache, and makes it again when the source has changed.

Listing takes minutes over a network, so a run uses the list in the cache if the folders on storage have not changed
since: it compares the names of the classes and the modification times of all folders, which change when a file is
added, removed or renamed. A file that is overwritten in place does not change its folder, and object stores keep no
times of folders: there, `lightning-sparse cache warm` lists again. Without an answer from storage, the run uses the
list in the cache.
"""

from __future__ import annotations

from pathlib import Path

from lightning_sparse.data.cache.folders import cache_folder, file_name, is_read_only, locked, usable, write_private
from lightning_sparse.data.cache.listing import LIST_READERS, list_named, list_source
from lightning_sparse.data.cache.lists import SampleList, read_list
from lightning_sparse.data.cache.repository import files_of
from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.cache.shards import kind_of
from lightning_sparse.data.cache.storage import MissingFolderError, Storage
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.messages import log

CHECK_S = 10.0  # without an answer, a list in the cache is used as it is


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
        fixed = kept is not None and is_read_only(file.parent)
        if kept is not None and fixed and not (config.lists or kept.list_digest):
            log.warning("using the list of %s/ in %s, which cannot be written", split, file.parent)
            return kept
        manifest = _listed(config, split, quiet)
        if not fixed:
            write_private(file, manifest.to_bytes())
            _old_file(config, split).unlink(missing_ok=True)
        return manifest


def _listed(config: CacheConfig, split: str, quiet: bool) -> Manifest:
    if config.lists is not None:
        return list_named(config, split, _list_of(config, split), quiet=quiet)
    return list_source(
        config.source,
        split,
        timeout=config.storage_timeout,
        quiet=quiet,
        options=config.storage_options,
        images=config.format != "bytes",
        member=config.member,
    )


def _list_of(config: CacheConfig, split: str, kept: Manifest | None = None) -> SampleList:
    """Read the list of a split."""
    assert config.lists is not None
    if split not in config.lists:
        raise MissingFolderError(f"lists={config.lists} has no list of {split!r}.")
    return read_list(config, split, timeout=_patience(config, kept))


def has_split(config: CacheConfig, split: str) -> bool:
    """Whether the source has a split with classes, or with any files if they are not images.

    Raises:
        DataError: if storage does not respond, and the cache has no other split.
    """
    if config.lists is not None:
        return split in config.lists
    if kept_manifest(config, split) is not None:
        return True
    kept = next((each for each in map(lambda name: kept_manifest(config, name), ("val", "train")) if each), None)
    storage = Storage(config.source, timeout=_patience(config, kept), readers=1, options=config.storage_options)
    try:
        return _has_samples(storage, split, config.format == "bytes")
    except MissingFolderError:
        return False
    except DataError:
        if kept is None:
            raise
        return False
    finally:
        storage.close()


def _has_samples(storage: Storage, split: str, any_files: bool) -> bool:
    try:
        if storage.names(split) or any_files:
            return True
    except MissingFolderError:
        return files_of(storage, split) is not None
    (listed,) = storage.listing([split], images=False)
    return bool(kind_of([path for path, _, _ in listed.files]))


def class_names(config: CacheConfig, split: str) -> tuple[str, ...]:
    """Return the names of the classes: those on storage, or if storage does not answer, those in the cache.

    Raises:
        ValueError: as `read_list`.
        DataError: if there are neither.
    """
    return _classes(config, split)[0]


def num_classes(config: CacheConfig, split: str) -> int:
    """Return the number of classes. Raises: as `class_names`."""
    return _classes(config, split)[1]


def _classes(config: CacheConfig, split: str) -> tuple[tuple[str, ...], int]:
    """Return the names of the classes, and their number."""
    kept = kept_manifest(config, split)
    try:
        if config.lists is not None:
            named = _list_of(config, split, kept)
            return named.classes, named.num_classes
        storage = Storage(config.source, timeout=_patience(config, kept), readers=1, options=config.storage_options)
        try:
            names = tuple(sorted(storage.names(split)))
        except MissingFolderError:
            names = ()
        finally:
            storage.close()
    except DataError:
        if kept is None:
            raise
        return kept.classes, kept.num_classes
    if names:
        return names, len(names)
    manifest = load_or_list(config, split)  # shards say their labels only when they are listed; or there is no folder
    return manifest.classes, manifest.num_classes


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
        change = _change(config, storage, kept)
    except DataError as error:
        log.warning("using the list of %s/ in the cache, because storage cannot be asked: %s", kept.split, error)
        return False
    finally:
        storage.close()
    if change:
        log.info("%s: listing %s/ again", change, kept.split)
    return bool(change)


def _change(config: CacheConfig, storage: Storage, kept: Manifest) -> str:
    """Return what has changed on storage since it was listed, or "".

    Raises:
        DataError: if storage does not answer, or does not have the split.
    """
    digest = _list_of(config, kept.split, kept).digest if config.lists is not None else ""
    if digest != kept.list_digest:
        return f"the list of {kept.split} has changed"
    by_folder = not digest and not len(kept.shards)
    now = {f"{kept.split}/{name}": time for name, time in (storage.names(kept.split) if by_folder else {}).items()}
    if not len(kept.folders):
        return f"the list of {kept.split}/ is of an older version"
    classes = {f"{kept.split}/{name}" for name in kept.classes} if by_folder else set()
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
