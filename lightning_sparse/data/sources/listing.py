"""Keeps the list of a split's samples in the cache, and makes it again when the source has changed.

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.config import CacheConfig, DataError, is_installed
from lightning_sparse.data.decode import UndecodableError, probe
from lightning_sparse.data.folders import (
    cache_folder,
    file_name,
    is_read_only,
    locked,
    source_name,
    usable,
    write_private,
)
from lightning_sparse.data.sources import repository
from lightning_sparse.data.sources.lists import SampleList, read_list
from lightning_sparse.data.sources.manifest import Manifest, Paths
from lightning_sparse.data.sources.repository import files_of
from lightning_sparse.data.sources.shards import PARQUET, kind_of, samples_of, samples_of_rows
from lightning_sparse.data.sources.storage import Listed, MissingFolderError, Storage, StoredFile
from lightning_sparse.data.sources.storage_reader import is_image, is_visible
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


LIST_READERS = 16  # folders listed at the same time
PROBES = 64  # files that are read to estimate the size of decoded images


def list_source(
    source: str,
    split: str,
    *,
    timeout: float = 300.0,
    quiet: bool = False,
    options: dict[str, Any] | None = None,
    images: bool = True,
    member: str | None = None,
) -> Manifest:
    """List a folder on network storage, classes in parallel, with a progress bar.

    Args:
        timeout, options: as `Storage`.
        quiet: show no progress bar.
        images: list images only. Other samples need not be in folders of classes; then they have no labels.
        member: of samples in shards, as `shards.samples_of`.

    Raises:
        ValueError: if the split could lead outside the source, or contains no samples.
        DataError: if storage cannot be listed.
    """
    if not split or split.startswith("/") or ".." in split.split("/"):
        raise ValueError(f"split={split!r} must be the name of a folder in {source}, such as 'train'.")
    storage = Storage(source, timeout=timeout, readers=LIST_READERS, quiet=quiet, options=options)
    try:
        return _list(storage, source, split, images=images, quiet=quiet, member=member)
    finally:
        storage.close()


def _list(storage: Storage, source: str, split: str, *, images: bool, quiet: bool, member: str | None) -> Manifest:
    try:
        times = storage.names(split)
    except MissingFolderError:
        if (files := repository.files_of(storage, split)) is None:
            raise
        return _of_shards(storage, source, split, files, images, member)
    repository.check_no_files_of(storage, split)
    if not times and (flat := _flat(storage, source, split, images, member)) is not None:
        return flat
    classes = sorted(times)
    below = _below(storage, [f"{split}/{name}" for name in classes], split, images=images, quiet=quiet)
    found = dict(zip(classes, below, strict=True))
    _check_classes(source, split, found, "images" if images else "files")
    if images:
        _check_depth(source, split, found)
        _check_beside(storage, source, split)
    probed = _probed(storage, [path for each in below for path, _, _ in each.files] if images else [])
    return replace(manifest_of(source, split, times, found), probed=probed)


def list_named(config: CacheConfig, split: str, samples: SampleList, *, quiet: bool = False) -> Manifest:
    """Find the files that a list names, in its order.

    Raises:
        ValueError: if the source does not have all of them.
        DataError: if storage cannot be listed.
    """
    storage = Storage(
        config.source,
        timeout=config.storage_timeout,
        readers=LIST_READERS,
        quiet=quiet,
        options=config.storage_options,
    )
    try:
        below = _below(storage, _highest(samples.paths), split, images=False, quiet=quiet)
        probed = _probed(storage, samples.paths if config.format != "bytes" else [])
    except MissingFolderError as error:
        raise ValueError(f"{samples.file} lists files of a folder that is not there: {error}") from error
    finally:
        storage.close()
    about = {path: (size, mtime) for each in below for path, size, mtime in each.files}
    absent = [path for path in samples.paths if path not in about]
    if absent:
        raise ValueError(
            f"{samples.file} lists {len(absent):,} file(s) that {config.source} does not have, such as {absent[0]!r}. "
            "Paths are relative to the source, and hidden files are left out: correct the list, or remove these rows."
        )
    named = Listed(
        [(path, *about[path]) for path in samples.paths], [folder for each in below for folder in each.folders]
    )
    manifest = _of_listed(config.source, split, named, samples.labels, samples.classes)
    return replace(manifest, list_digest=samples.digest, probed=probed)


def _below(storage: Storage, folders: Sequence[str], split: str, *, images: bool, quiet: bool) -> list[Listed]:
    """List folders, with a progress bar."""
    listed = storage.listing(folders, images=images)
    return list(tqdm(listed, total=len(folders), desc=f"listing {split}", unit="folder", disable=quiet or None))


def _highest(paths: Sequence[str]) -> list[str]:
    """Return the folders of `paths` that are not in another one of them.

    >>> _highest(["a/b/1.jpg", "a/b/c/2.jpg", "d/3.jpg"])
    ['a/b', 'd']
    """
    folders = {path.rpartition("/")[0] for path in paths}
    if "" in folders:
        return [""]
    parts = ([folder, *_parents(folder)] for folder in sorted(folders))
    return [folder for folder, *above in parts if not folders.intersection(above)]


def _parents(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _flat(storage: Storage, source: str, split: str, images: bool, member: str | None) -> Manifest | None:
    """List a folder without classes: shards, or files without labels; None if it contains images."""
    (listed,) = storage.listing([split], images=False)
    files = sorted(listed.files)
    if kind_of([path for path, _, _ in files]):
        return _of_shards(storage, source, split, Listed(files, listed.folders), images, member)
    if images:
        return None
    if not files:
        raise ValueError(f"source={source}: {split}/ contains no files.")
    return _of_listed(source, split, Listed(files, listed.folders), np.zeros((len(files), 0), np.int64), ())


def _of_shards(storage: Storage, source: str, split: str, listed: Listed, images: bool, member: str | None) -> Manifest:
    """listed: the shards."""
    paths = [path for path, _, _ in listed.files]
    bar = partial(tqdm, total=len(paths), desc=f"listing {split}", unit="shard", disable=None)
    mtimes = np.array([mtime for _, _, mtime in listed.files], np.int64)
    if kind_of(paths) == PARQUET:
        if not is_installed("pyarrow"):
            raise ValueError(f"source={source}: the Parquet files in {split}/ need pyarrow: `pip install pyarrow`.")
        contents = list(bar(storage.row_groups(paths, member or "")))
        found = samples_of_rows(paths, contents)
        mtimes = np.repeat(mtimes, [len(each["groups"]) for each in contents])
    else:
        found = samples_of(paths, list(bar(storage.members(paths))), images=images, member=member)
    return Manifest(
        split,
        source_name(source),
        found.classes,
        found.paths,
        found.labels,
        found.sizes,
        mtimes[found.shard_of],
        folders=Paths.of([path for path, _ in listed.folders]),
        folder_mtimes_ns=np.array([time for _, time in listed.folders], np.int64),
        shards=found.shards,
        shard_of=found.shard_of,
        offsets=found.offsets,
    )


def _of_listed(source: str, split: str, listed: Listed, labels: npt.NDArray[Any], classes: tuple[str, ...]) -> Manifest:
    sizes, mtimes = (np.array([each[column] for each in listed.files], np.int64) for column in (1, 2))
    return Manifest(
        split,
        source_name(source),
        classes,
        [path for path, _, _ in listed.files],
        labels,
        sizes,
        mtimes,
        folders=Paths.of([path for path, _ in listed.folders]),
        folder_mtimes_ns=np.array([time for _, time in listed.folders], np.int64),
    )


def _check_classes(source: str, split: str, below: Mapping[str, Listed], what: str) -> None:
    """Raise ValueError if there are no classes, or one without files."""
    empty = [name for name, each in below.items() if not each.files]
    if empty:
        raise ValueError(
            f"source={source}: folder {split}/{empty[0]} contains no {what}. Remove it, or add {what} to it; "
            f"shards (.tar, .parquet) belong into {split}/ itself."
        )
    if not below:
        raise ValueError(
            f"source={source}: {split}/ contains no class folders. Expected {split}/<class>/<image>: put each image "
            "into the folder of its class"
            + (", give lists, or remove val/ and set val_fraction=0.05." if split == "val" else ", or give lists.")
        )


def _check_depth(source: str, split: str, below: Mapping[str, Listed]) -> None:
    """Raise ValueError if the classes seem to be in a folder of `split`, which would be the only class."""
    if len(below) > 1:
        return
    ((name, listed),) = below.items()
    folders = sorted({path.rpartition("/")[0] for path, _, _ in listed.files})
    if len(folders) > 1 and f"{split}/{name}" not in folders:
        raise ValueError(
            f"source={source}: {split}/{name}/ would be the only class, and its images are in folders below it, such "
            f"as {folders[0]}/. If those are the classes, move them into {split}/ itself; if {name} is one class, move "
            f"its images into {split}/{name}/ itself, or give lists."
        )


def _check_beside(storage: Storage, source: str, split: str) -> None:
    """Say which images lie beside the folders of classes, and raise ValueError for a link of a class that is broken."""
    files = storage.files(split)
    broken = [name for name, size, mtime in files if not (size or mtime or "://" in source or not is_visible(name))]
    if broken:
        raise ValueError(
            f"source={source}: {split}/{min(broken)} is a link that leads nowhere, and may be that of a class. Mount "
            "what it leads to, or correct or remove the link."
        )
    beside = [name for name, _, _ in files if is_image(name) and is_visible(name)]
    if beside:
        log.warning(
            "%d image(s) beside the folders of classes in %s/ are left out, such as %s: put each into the folder of "
            "its class",
            len(beside),
            split,
            min(beside),
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


def manifest_of(source: str, split: str, times: Mapping[str, int], below: Mapping[str, Listed]) -> Manifest:
    """times: modification time of the folder of each class. below: what each contains, by class in order."""
    found = sorted((*file, label) for label, each in enumerate(below.values()) for file in each.files)
    folders = {f"{split}/{name}": time for name, time in times.items()}
    folders |= {path: time for each in below.values() for path, time in each.folders if path not in folders}
    labels = np.array([label for *_, label in found], np.int64)
    listed = Listed([(path, size, mtime) for path, size, mtime, _ in found], list(folders.items()))
    return _of_listed(source, split, listed, labels, tuple(below))
