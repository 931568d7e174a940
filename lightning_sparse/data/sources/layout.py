"""Layouts: how the samples of a split are stored in its source.

=================== ======================================================================================
`SampleList`        named by a CSV or Parquet file with the columns path and labels, in its order
`ParquetFiles`      rows of ``<split>/*.parquet``, or of a Hugging Face repository as it is downloaded:
                    ``data/train-00000-of-00004.parquet``, ``data/validation-00000-of-00001.parquet``
`TarShards`         members of ``<split>/*.tar``, shards of WebDataset
`Files`             ``<split>/*``, without labels
`ClassFolders`      ``<split>/<class>/**/*``
=================== ======================================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lightning_sparse.data.config import SPLITS, CacheConfig, is_installed
from lightning_sparse.data.decode import UndecodableError, probe
from lightning_sparse.data.folders import source_name
from lightning_sparse.data.sources.labels import columns_of_csv, columns_of_parquet, numbered
from lightning_sparse.data.sources.manifest import Manifest, Paths, count_classes
from lightning_sparse.data.sources.storage import (
    Entry,
    Listed,
    Location,
    MissingFolderError,
    Storage,
    StoredFile,
    Unreadable,
)
from lightning_sparse.data.sources.storage_base import IMAGE_SUFFIXES, is_image, is_label, is_visible
from lightning_sparse.data.sources.tar_members import Member
from lightning_sparse.messages import log, log_ignored

IMAGES = f"images ({', '.join(IMAGE_SUFFIXES)})"
LIST_READERS = 16  # folders listed at the same time
PROBES = 64  # files that are read to estimate the size of decoded images
SHARD_SUFFIXES = (".tar", ".parquet")
COMPRESSED = (".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4", ".tgz", ".tbz2", ".txz", ".tzst")
COMPANIONS = (
    *(".json", ".idx", ".index", ".txt", ".md", ".csv", ".tsv", ".yaml", ".yml", ".log", ".html", ".crc", ".md5"),
)
"""Suffixes of files next to shards that are not samples. A file without a suffix is not a sample, either."""


@dataclass
class Split:
    """A split of a source, to be listed.

    timeout: in seconds. quiet: as `Storage`, and without progress bar. probes: images to read for `probed`.
    """

    config: CacheConfig
    name: str
    timeout: float
    quiet: bool = False
    probes: int = PROBES

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("/") or ".." in self.name.split("/"):
            raise ValueError(f"split={self.name!r} must be the name of a folder in {self.source}, such as 'train'.")
        self.storage = Storage(self.config, timeout=self.timeout, readers=LIST_READERS, quiet=self.quiet)

    @property
    def source(self) -> str:
        return self.config.source

    @property
    def images(self) -> bool:
        return self.config.format != "bytes"

    @cached_property
    def folders(self) -> dict[str, int] | MissingFolderError:
        """Stamps of the folders of the split, by name; the error if the split is missing."""
        try:
            return self.storage.names(self.name)
        except MissingFolderError as error:
            return error

    @cached_property
    def files(self) -> Listed | None:
        """All files, if the split is a folder without folders; else None."""
        if self.folders or isinstance(self.folders, MissingFolderError):
            return None
        (listed,) = self.storage.listing([self.name], images=False)
        return listed._replace(files=sorted(listed.files))

    def shards(self, suffix: str) -> Listed | None:
        """Return the shards if they have this suffix, else None. `Listed.ignored` contains the other files."""
        listed = self.files
        kind = None if listed is None else self._kind_of_shards([path for path, *_ in listed.files])
        if listed is None or kind != suffix:
            return None
        shards = [file for file in listed.files if file[0].lower().endswith(suffix)]
        stems = {shard[0][: -len(suffix)] for shard in shards}
        ignored = [path for path, *_ in listed.files if not path.lower().endswith(suffix)]
        unclear = next((path for path in ignored if not self._is_companion(path, stems)), None)
        if unclear is not None:
            raise ValueError(
                f"source={self.source}: {self.name}/ has shards ({shards[0][0]}) and other files ({unclear}), so it is "
                "not clear which are the samples: put them into separate folders."
            )
        return listed._replace(files=shards, ignored=ignored)

    def _kind_of_shards(self, paths: Sequence[str]) -> str | None:
        packed = next((path for path in paths if path.lower().endswith(COMPRESSED)), None)
        if packed is not None:
            raise ValueError(
                f"source={self.source}: the shard {packed} is compressed, so its samples cannot be read by their "
                "position: decompress it."
            )
        return next((kind for kind in SHARD_SUFFIXES if any(path.lower().endswith(kind) for path in paths)), None)

    def _is_companion(self, path: str, stems: Collection[str]) -> bool:
        stem, dot, suffix = path.rpartition(".")
        # img2dataset writes a table of the samples next to each shard
        if suffix.lower() == "parquet":
            return stem in stems
        return self.images or not dot or "/" in suffix or f".{suffix.lower()}" in COMPANIONS

    def below(self, folders: Sequence[str], *, images: bool) -> list[Listed]:
        return list(self.progress(self.storage.listing(folders, images=images), len(folders), "folder"))

    def progress(self, listed: Iterator[Any], total: int, unit: str) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(
            listed, total=total, desc=f"listing {self.name}", unit=unit, disable=self.quiet or None
        )
        return bar

    def probed(self, files: Sequence[Location]) -> npt.NDArray[np.int64]:
        """Return (size, height, width) of up to `probes` of these images, without corrupt images."""
        count = min(self.probes, len(files))
        some = [files[index] for index in np.unique(np.linspace(0, len(files) - 1, count, dtype=int))]
        rows = []
        for file in self.storage.read(some):
            with contextlib.suppress(UndecodableError):
                if isinstance(file, StoredFile):
                    rows.append((file.size, *probe(file.data)))
        return np.array(rows, np.int64).reshape(-1, 3)


@dataclass
class Layout(ABC):
    """How the samples of a split lie in its source. `listing.LAYOUTS` names the subclasses."""

    split: Split

    @classmethod
    @abstractmethod
    def find(cls, split: Split) -> Layout | None:
        """Return the layout of this split; None if it is another one."""

    def classes(self) -> tuple[tuple[str, ...], int] | None:
        """Return the names of the classes and their number; None if this needs the whole list."""
        return None

    @abstractmethod
    def manifest(self) -> Manifest:
        """List the samples. Raise ValueError if there are none, or they cannot be used."""


def build_manifest(
    source: str, split: str, listed: Listed, labels: npt.NDArray[Any], classes: tuple[str, ...], **others: Any
) -> Manifest:
    """Return the manifest of samples that are files. `others` overrides fields of the listed files."""
    sizes, mtimes, tags = (np.array([file[column] for file in listed.files], np.int64) for column in (1, 2, 3))
    values = {
        "paths": [path for path, *_ in listed.files],
        "sizes": sizes,
        "mtimes_ns": mtimes,
        "tags": tags,
        "folders": Paths.of([path for path, _ in listed.folders]),
        "folder_stamps": np.array([stamp for _, stamp in listed.folders], np.int64),
    }
    return Manifest(split, source_name(source), classes, labels=labels, **{**values, **others})


class Files(Layout):
    @classmethod
    def find(cls, split: Split) -> Files | None:
        return None if split.images or split.files is None else cls(split)

    def manifest(self) -> Manifest:
        split, listed = self.split, self.split.files
        assert listed is not None
        if not listed.files:
            raise ValueError(f"source={split.source}: {split.name}/ contains no files.")
        return build_manifest(split.source, split.name, listed, np.zeros((len(listed.files), 0), np.int64), ())


@dataclass
class ClassFolders(Layout):
    """Files in folders of classes, listed concurrently. `stamps` has the stamp of each class's folder."""

    stamps: dict[str, int]

    @classmethod
    def find(cls, split: Split) -> ClassFolders:
        if isinstance(split.folders, MissingFolderError):
            raise split.folders
        return cls(split, split.folders)

    def classes(self) -> tuple[tuple[str, ...], int] | None:
        return (tuple(sorted(self.stamps)), len(self.stamps)) if self.stamps else None

    def manifest(self) -> Manifest:
        split, names = self.split, sorted(self.stamps)
        self._check_beside()
        below = split.below([f"{split.name}/{name}" for name in names], images=split.images)
        by_class = dict(zip(names, below, strict=True))
        self._check_classes(by_class)
        if split.images:
            self._check_depth(by_class)
        else:
            self._warn_of_shards(by_class)
        log_ignored(f"{split.source}/{split.name}", [path for folder in below for path in folder.ignored], IMAGES)
        probed = split.probed([path for folder in below for path, *_ in folder.files] if split.images else [])
        return manifest_of(split.source, split.name, self.stamps, by_class, probed=probed)

    def _check_classes(self, below: Mapping[str, Listed]) -> None:
        source, split, what = self.split.source, self.split.name, "images" if self.split.images else "files"
        empty = [name for name, listed in below.items() if not listed.files]
        if empty:
            raise ValueError(
                f"source={source}: folder {split}/{empty[0]} contains no {what}. Remove it, or add {what} to it; "
                f"shards (.tar, .parquet) belong into {split}/ itself."
            )
        if not below:
            raise ValueError(
                f"source={source}: {split}/ contains no class folders. Expected {split}/<class>/<image>: put each "
                "image into the folder of its class"
                + (", give lists, or remove val/ and set val_fraction=0.05." if split == "val" else ", or give lists.")
            )

    def _check_depth(self, below: Mapping[str, Listed]) -> None:
        if len(below) > 1:
            return
        split = self.split.name
        ((name, listed),) = below.items()
        folders = sorted({path.rpartition("/")[0] for path, *_ in listed.files})
        # the classes seem to be in a folder of the split, which would be the only class
        if len(folders) > 1 and f"{split}/{name}" not in folders:
            raise ValueError(
                f"source={self.split.source}: {split}/{name}/ would be the only class, and its images are in folders "
                f"below it, such as {folders[0]}/. If those are the classes, move them into {split}/ itself; if {name} "
                f"is one class, move its images into {split}/{name}/ itself, or give lists."
            )

    def _warn_of_shards(self, below: Mapping[str, Listed]) -> None:
        paths = [path for listed in below.values() for path, *_ in listed.files]
        if all(path.lower().endswith(SHARD_SUFFIXES) for path in paths):
            log.warning(
                "source=%s: each file in the class folders, such as %s, is one sample. If these files are shards, move "
                "them into %s/ itself.",
                *(self.split.source, paths[0], self.split.name),
            )

    def _check_beside(self) -> None:
        source, split = self.split.source, self.split.name
        files = [file for file in self.split.storage.files(split) if is_visible(file[0])]
        # a broken link may lead to a class
        broken = [name for name, size, mtime, _ in files if not (size or mtime or "://" in source)]
        if broken:
            raise ValueError(
                f"source={source}: {split}/{min(broken)} is a broken link, and may be a class. Mount its target, "
                "or correct or remove the link."
            )
        names = sorted(name for name, *_ in files)
        shard = next((name for name in names if name.lower().endswith((*SHARD_SUFFIXES, *COMPRESSED))), None)
        if shard is not None and self.stamps and not self.split.images:
            raise ValueError(
                f"source={source}: {split}/ has shards ({shard}) and folders ({min(self.stamps)}), so it is not clear "
                "which contain the samples: put them into separate folders."
            )
        if self.stamps:
            log_ignored(f"{source}/{split}", names, "in a class folder")


def manifest_of(
    source: str, split: str, stamps: Mapping[str, int], below: Mapping[str, Listed], **more: object
) -> Manifest:
    """Return the manifest of class folders, from their stamps and contents."""
    rows = sorted((*file, label) for label, listed in enumerate(below.values()) for file in listed.files)
    folders = {f"{split}/{name}": stamp for name, stamp in stamps.items()}
    folders |= {path: stamp for listed in below.values() for path, stamp in listed.folders if path not in folders}
    labels = np.array([label for *_, label in rows], np.int64)
    listed = Listed([(path, size, mtime, tag) for path, size, mtime, tag, _ in rows], list(folders.items()), [])
    return build_manifest(source, split, listed, labels, tuple(below), **more)


@dataclass
class SampleList(Layout):
    """The samples that a list names.

    digest: hash of the list. paths: relative to the source. labels: int64 or float64 [N, L]. names: names of the first
    label, sorted; empty if it is a number.
    """

    file: str
    digest: str
    paths: list[str]
    labels: npt.NDArray[Any]
    names: tuple[str, ...]

    @classmethod
    def find(cls, split: Split) -> SampleList | None:
        """Read the list of a split. Raise MissingFolderError if there are only lists of other splits."""
        lists = split.config.lists
        if lists is None:
            return None
        if split.name not in lists:
            raise MissingFolderError(f"lists={lists} has no list of {split.name!r}.")
        file = lists[split.name]
        folder, _, name = file.rpartition("/")
        source = folder or ("/" if file.startswith("/") else ".")
        with Storage(split.config, source, timeout=split.timeout, readers=1) as storage:
            (answer,) = storage.read([name])
        if isinstance(answer, Unreadable):
            raise ValueError(f"the list {file} of {split.name} cannot be read: {answer.reason}.")
        is_csv = not name.lower().endswith(".parquet")
        columns = (columns_of_csv if is_csv else columns_of_parquet)(file, answer.data)
        digest = hashlib.blake2b(answer.data, digest_size=16).hexdigest()
        if next(iter(columns), None) != "path" or not len(columns["path"]):
            raise ValueError(
                f"{file} must have a first column named path, and a row for each sample; its columns are "
                f"{', '.join(columns) or 'none'}. As in a CSV file: path,label / train/cat/1.jpg,cat"
            )
        root = f"{source_name(split.source).rstrip('/')}/"
        paths = [str(path).removeprefix(root).removeprefix("./") for path in columns.pop("path")]
        no_labels: tuple[npt.NDArray[Any], tuple[str, ...]] = (np.zeros((len(paths), 0), np.int64), ())
        labels, names = numbered(file, columns, text=is_csv) if columns else no_labels
        return cls(split, file, digest, paths, labels, names)

    def classes(self) -> tuple[tuple[str, ...], int]:
        return self.names, count_classes(self.names, self.labels)

    def manifest(self) -> Manifest:
        split, source = self.split, self.split.source
        try:
            below = split.below(_highest(self.paths), images=False)
            probed = split.probed(self.paths if split.images else [])
        except MissingFolderError as error:
            raise ValueError(f"{self.file} lists files of a folder that is not there: {error}") from error
        about = {entry[0]: entry for listed in below for entry in listed.files}
        absent = [path for path in self.paths if path not in about]
        if absent:
            raise ValueError(
                f"{self.file} lists {len(absent):,} file(s) that {source} does not have, such as {absent[0]!r}. Paths "
                "are relative to the source, and hidden files are left out: correct the list, or remove these rows."
            )
        folders = [folder for listed in below for folder in listed.folders]
        named = Listed([about[path] for path in self.paths], folders, [])
        return build_manifest(
            source, split.name, named, self.labels, self.names, list_digest=self.digest, probed=probed
        )


def _highest(paths: Sequence[str]) -> list[str]:
    """Return the folders of `paths` that are not inside other folders of `paths`.

    >>> _highest(["a/b/1.jpg", "a/b/c/2.jpg", "d/3.jpg"])
    ['a/b', 'd']
    """
    folders = {path.rpartition("/")[0] for path in paths}
    roots: list[str] = []
    for folder in sorted(folders, key=lambda each: f"{each}/") if "" not in folders else [""]:
        if not roots or not folder.startswith(f"{roots[-1]}/"):
            roots.append(folder)
    return roots


class _Sample(NamedTuple):
    path: str
    shard: int
    offset: int
    size: int
    label: str
    header: list[int]


@dataclass
class TarShards(Layout):
    """The samples of tar files, in order of shards and members.

    Members whose names are equal up to the first dot belong to one sample, such as ``0001.jpg`` and the label
    ``0001.cls``.
    """

    listed: Listed

    @classmethod
    def find(cls, split: Split) -> TarShards | None:
        shards = split.shards(".tar")
        return None if shards is None else cls(split, shards)

    def manifest(self) -> Manifest:
        split, shards = self.split, [path for path, *_ in self.listed.files]
        samples = self._found(shards)
        if not samples:
            raise ValueError(f"the shards {shards[0]}, ... contain no samples.")
        labeled = [sample for sample in samples if sample.label]
        if labeled and len(labeled) < len(samples):
            without = next(sample for sample in samples if not sample.label)
            raise ValueError(
                f"{without.path} has no .cls member, and other samples have one: give all of them a label."
            )
        try:
            labels = np.array([[int(sample.label)] for sample in labeled], np.int64)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"a .cls member of {shards[0]}, ... is not a whole number: {error}.") from error
        shard_of, offsets, sizes = (np.array(values, np.int64) for values in list(zip(*samples, strict=True))[1:4])
        mtimes, tags = (np.array([file[column] for file in self.listed.files], np.int64) for column in (2, 3))
        parts = [
            (shards[sample.shard], sample.offset, sample.offset + sample.size) for sample in samples if split.images
        ]
        return build_manifest(
            split.source,
            split.name,
            self.listed,
            labels.reshape(len(samples), -1),
            (),
            paths=[sample.path for sample in samples],
            sizes=sizes,
            mtimes_ns=mtimes[shard_of],
            tags=tags[shard_of],
            shards=Paths.of(shards),
            shard_of=shard_of,
            offsets=offsets,
            headers=np.array([sample.header for sample in samples], np.int64),
            probed=split.probed(parts),
        )

    def _found(self, shards: list[str]) -> list[_Sample]:
        split, ignored = self.split, []
        samples: list[_Sample] = []
        answers = split.progress(split.storage.members(shards), len(shards), "shard")
        for number, (shard, (members, others)) in enumerate(zip(shards, answers, strict=True)):
            samples += self._samples(number, shard, members)
            ignored += [f"{shard}/{name}" for name in others]
        where = f"{split.source}/{split.name}"
        if not split.quiet:
            log_ignored(where, self.listed.ignored, "shards")
            log_ignored(where, ignored, "visible files in a shard")
        return samples

    def _samples(self, number: int, shard: str, members: list[Member]) -> Iterator[_Sample]:
        groups: dict[str, list[Member]] = {}
        for member in members:
            folder, slash, name = member[0].rpartition("/")
            groups.setdefault(f"{folder}{slash}{name.partition('.')[0]}", []).append(member)
        for key, group in groups.items():
            labels = [member for member in group if is_label(member[0])]
            if len(labels) > 1:
                raise ValueError(
                    f"{shard}: sample {key!r} has {len(labels)} labels: {', '.join(member[0] for member in labels)}. "
                    f"Keep one .cls member per sample."
                )
            label = labels[0][3] if labels else ""
            data = [member for member in group if self._is_data(member[0])]
            if len({member[0] for member in data}) < len(data):
                raise ValueError(f"{shard}: the member {data[0][0]} occurs {len(data)} times. Keep one of them.")
            if len(data) != 1:
                raise ValueError(
                    f"{shard}: sample {key!r} has the members {', '.join(member[0] for member in group)}, of which "
                    f"{len(data)} can be the sample. Give its extension, as in member='npy'."
                )
            name, offset, size, _, *header = data[0]
            yield _Sample(f"{shard}/{name}", number, offset, size, label, header)

    def _is_data(self, name: str) -> bool:
        if self.split.config.member is not None:
            return name.rpartition("/")[2].partition(".")[2].lower() == self.split.config.member.lower()
        return is_image(name) if self.split.images else not is_label(name)


_NAMED = {"val": ("validation", "val")}  # prefixes of file names, if not the split
_FILE = re.compile(r"(\w+)(?:-(\d{5})-of-(\d{5})[\w-]*)?\.parquet")
_MAX_CONFIGURATIONS = 64  # limit of the folders to search for configurations


@dataclass
class ParquetFiles(Layout):
    """The rows of Parquet files, in order of files and rows.

    A shard is a row group, ``<file>#<number>``. It cannot be read in parts, so it is read once, for all samples that
    the node owns. Samples are in a column of bytes, or of a struct with a field ``bytes``, as in image data sets of
    Hugging Face. Labels are in the column ``label`` or ``labels``, or in the only column of whole numbers.
    """

    listed: Listed

    @classmethod
    def find(cls, split: Split) -> ParquetFiles | None:
        folders = _folders(split.storage)
        if isinstance(split.folders, MissingFolderError):
            files = None if folders is None else files_of_repository(split.storage, split.name, folders)
        else:
            _check_alone(split.storage, split.name, f"{split.name}/", folders or {})
            files = split.shards(".parquet")
        return None if files is None else cls(split, files)

    def manifest(self) -> Manifest:
        split, files = self.split, [path for path, *_ in self.listed.files]
        if not is_installed("pyarrow"):
            raise ValueError(
                f"source={split.source}: the Parquet files in {split.name}/ need pyarrow: `pip install pyarrow`."
            )
        answers = split.storage.row_groups(files, split.config.member or "")
        contents = list(split.progress(answers, len(files), "shard"))
        log_ignored(f"{split.source}/{split.name}", self.listed.ignored, "shards")
        groups = [
            (f"{file}#{number}", rows, nbytes, mtime, tag)
            for (file, _, mtime, tag), content in zip(self.listed.files, contents, strict=True)
            for number, (rows, nbytes) in enumerate(content["groups"])
        ]
        counts, sizes, mtimes, tags = (
            np.array([group[column] for group in groups], np.int64) for column in (1, 2, 3, 4)
        )
        total = int(counts.sum())
        if not total:
            raise ValueError(f"the files {files[0]}, ... contain no rows.")
        labels, classes = self._labels(files, contents, total)
        shard_of = np.repeat(np.arange(len(groups)), counts)
        return build_manifest(
            split.source,
            split.name,
            self.listed,
            labels,
            classes,
            paths=[f"{group}/{row}" for group, rows, *_ in groups for row in range(rows)],
            sizes=(sizes // counts.clip(1))[shard_of],
            mtimes_ns=mtimes[shard_of],
            tags=tags[shard_of],
            is_vector=any(isinstance(label, list) for label in contents[0]["labels"][:1]),
            shards=Paths.of([group for group, *_ in groups]),
            shard_of=shard_of,
            offsets=np.concatenate([np.arange(rows) for rows in counts]),
        )

    def _labels(
        self, files: list[str], contents: list[dict[str, Any]], total: int
    ) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
        names = tuple(contents[0]["names"])
        for file, content in zip(files, contents, strict=True):
            if tuple(content["names"]) != names:
                raise ValueError(
                    f"{file} has other names of classes than {files[0]}: write the files of a split together."
                )
            if content["label"] != contents[0]["label"]:
                own, first = (
                    f"labels in column {name}" if name else "no column of labels"
                    for name in (content["label"], contents[0]["label"])
                )
                raise ValueError(
                    f"{file} has {own}, but {files[0]} has {first}: give all files of a split the same columns."
                )
        values = [label for content in contents for label in content["labels"]]
        if not values:
            self._check_columns(files, contents)
            return np.zeros((total, 0), np.int64), names
        labels, classes = numbered(f"{files[0]}, ...", {"label": values}, text=False)
        return labels, classes or names

    def _check_columns(self, files: list[str], contents: list[dict[str, Any]]) -> None:
        split, unclear = self.split, [name for content in contents[:1] for name in content["unclear"]]
        if not unclear:
            return
        problem = f"{files[0]} has no column label or labels, and {', '.join(unclear)} are whole numbers"
        # images need labels, except to test on
        if split.images and split.name != "test":
            raise ValueError(f"source={split.source}: {problem}: rename the column of labels to label.")
        log.warning("%s/%s: samples have no labels, because %s", split.source, split.name, problem)


def files_of_repository(storage: Storage, split: str, folders: dict[str, int]) -> Listed | None:
    """Return the Parquet files of a split that has no folder, and their folder; None if the source has no such files.

    Raise MissingFolderError if the repository has files of other splits only.
    """
    has_folders = sorted(set(SPLITS) & folders.keys())
    if has_folders:
        _check_alone(storage, split, f"{has_folders[0]}/", folders)
        return None
    candidates = ("data", "") if "data" in folders else ("",)
    by_folder = {folder: files for folder in candidates if (files := _by_prefix(storage, folder))}
    if not by_folder:
        _check_no_configurations(storage, folders)
        return None
    if len(by_folder) > 1:
        raise ValueError(f"source={storage.source} has Parquet files in the folder and in data/: remove one set.")
    ((folder, files),) = by_folder.items()
    prefixes = [prefix for prefix in _prefixes(split) if prefix in files]
    if not prefixes:
        raise MissingFolderError(
            f"source={storage.source} has no {split}/, and Parquet files of {', '.join(sorted(files))} only."
        )
    if len(prefixes) > 1:
        raise ValueError(f"source={storage.source} has files of {' and of '.join(prefixes)}: remove one of them.")
    names = sorted(files[prefixes[0]])
    _check_complete(storage.source, [name for name, *_ in names])
    path = f"{folder}/" if folder else ""
    located = [(path + name, size, mtime, tag) for name, size, mtime, tag in names]
    return Listed(located, [(folder, storage.stamps([folder])[0])], [])


def _folders(storage: Storage) -> dict[str, int] | None:
    try:
        return storage.names("")
    except MissingFolderError:
        return None


def _check_alone(storage: Storage, split: str, folder: str, folders: Iterable[str]) -> None:
    files = _by_prefix(storage, "data") if "data" in folders else {}
    for prefix in _prefixes(split):
        if prefix in files:
            raise ValueError(
                f"source={storage.source} has both {folder} and data/{min(files[prefix])[0]}, so it is not clear which "
                f"samples are meant: remove one of them, or give a source that has only one."
            )


def _check_no_configurations(storage: Storage, folders: Iterable[str]) -> None:
    some = sorted(name for name in folders if not name.startswith("."))[:_MAX_CONFIGURATIONS]
    names = [name for name in some if _by_prefix(storage, name)]
    if names:
        raise ValueError(
            f"source={storage.source} has no train/, but Parquet files in {', '.join(f'{name}/' for name in names)}. "
            f"Give one of these folders as the source, such as {storage.source}/{names[0]}."
        )


def _by_prefix(storage: Storage, folder: str) -> dict[str, list[Entry]]:
    by_prefix: dict[str, list[Entry]] = {}
    prefixes = {prefix for split in SPLITS for prefix in _prefixes(split)}
    for file in storage.files(folder):
        match = _FILE.fullmatch(file[0])
        if match is not None and match[1] in prefixes:
            by_prefix.setdefault(match[1], []).append(file)
    return by_prefix


def _prefixes(split: str) -> tuple[str, ...]:
    return _NAMED.get(split, (split,))


def _check_complete(source: str, names: list[str]) -> None:
    matches = [_FILE.fullmatch(name) for name in names]
    numbers = [(int(match[2]), int(match[3])) for match in matches if match is not None and match[2] is not None]
    if len(names) == 1 and not numbers:
        return
    total = numbers[0][1] if numbers else 0
    if len(numbers) < len(names) or numbers != [(number, total) for number in range(total)]:
        raise ValueError(
            f"source={source}: {len(names)} of {total} files {names[0]}, ... are there: some are missing, or belong to "
            f"another version. Download the data set again, into an empty folder."
        )
