"""The samples of a split, and the file that keeps them.

Classes are numbered by name, as in torchvision's ImageFolder; other splits use the numbers of train/
(`Manifest.relabel`). The size, the modification time and the tag of each file identify its listed version: a file that
differs has changed on storage.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.config import DataError
from lightning_sparse.data.decode import FileKey

VERSION = 5  # of manifest files


class Paths:
    """Strings in one block of bytes. A million str objects per process would need gigabytes of memory per node.

    joined: uint8, all strings one after the other. ends: int64, end of each string in `joined`.
    """

    def __init__(self, joined: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.joined, self.ends = joined, ends

    @classmethod
    def of(cls, paths: Sequence[str]) -> Paths:
        encoded = [os.fsencode(path) for path in paths]
        ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        end = int(self.ends[index])
        begin = int(self.ends[index - 1]) if index % len(self) else 0
        return os.fsdecode(self.joined[begin:end].tobytes())

    def __iter__(self) -> Iterator[str]:
        joined, begin = self.joined.tobytes(), 0
        for end in self.ends.tolist():
            yield os.fsdecode(joined[begin:end])
            begin = end

    def unsafe(self) -> str | None:
        """Return a path that could lead outside a folder; None if there is none."""
        begins = np.append(0, self.ends[:-1])
        begins = begins[begins < len(self.joined)]
        places = [np.flatnonzero(self.joined == 0), begins[self.joined[begins] == ord("/")]]
        for place in (*np.concatenate(places).tolist(), *(m.start() for m in re.finditer(rb"\.\.", self.joined.data))):
            path = self[int(np.searchsorted(self.ends, place, side="right"))]
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                return path
        return None


_NONE = Paths.of([])


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of one split.

    Args:
        root: the source.
        paths: paths of the files relative to the root, with forward slashes, sorted.
        labels: int64 [N], class of each sample; or int64 or float64 [N, L], the L columns of a list.
        sizes: int64, size of each file when it was listed; -1 if unknown.
        mtimes_ns: int64, modification time of each file when it was listed; 0 if unknown.
        fingerprint: hash of split, classes, paths, labels, sizes, times and offsets; computed if "". Equal for
            a copy of the source that keeps times.
        tags: int64, changes when a path leads to another file, even of equal size and time; 0 if unknown.
        is_vector: whether the L labels of a sample are one list of numbers, such as a 0 or 1 for each class.
        folder_stamps: int64, changes with each folder; 0 if unknown.
        list_digest: hash of the list that names the samples; "" without a list.
        shards: paths of the tar files, or of the row groups, that the samples are in; none if they are files.
        shard_of: int64 [N], shard of each sample. `paths` are then <shard>/<member>.
        offsets: int64 [N], first byte of each sample in its shard (if sparse, see `tar_members.Member`); of row
            groups, its row.
        headers: int64 [N, 2], size in bytes and CRC-32 of the tar headers before each sample, which show whether it is
            still there. Empty for other sources and in older lists. Not part of the fingerprint.
        probed: int64 [n, 3], size, height and width of n images, spread over all classes.

    Raises:
        DataError: if a path could lead outside the source, or the fingerprint does not match.
        ValueError: if arrays have different lengths.
    """

    split: str
    root: str
    classes: tuple[str, ...]
    paths: Sequence[str] | Paths
    labels: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    fingerprint: str = ""
    tags: npt.NDArray[np.int64] = field(default_factory=lambda: _NONE.ends)
    is_vector: bool = False
    folders: Paths = _NONE
    folder_stamps: npt.NDArray[np.int64] = field(default_factory=lambda: _NONE.ends)
    list_digest: str = ""
    shards: Paths = _NONE
    shard_of: npt.NDArray[np.int64] = field(default_factory=lambda: _NONE.ends)
    offsets: npt.NDArray[np.int64] = field(default_factory=lambda: _NONE.ends)
    headers: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    probed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    def __post_init__(self) -> None:
        paths = self.paths if isinstance(self.paths, Paths) else Paths.of(self.paths)
        object.__setattr__(self, "paths", paths)
        unsafe = paths.unsafe()
        if unsafe is not None:
            raise DataError(f"the manifest of {self.root} contains {unsafe!r}, which could lead outside the source.")
        if not len(self.tags):
            object.__setattr__(self, "tags", np.zeros(len(paths), np.int64))
        if not len(paths) == len(self.labels) == len(self.sizes) == len(self.mtimes_ns) == len(self.tags):
            raise ValueError("paths, labels, sizes, mtimes_ns and tags of a manifest must have equal lengths.")
        digest = hashlib.blake2b(repr((self.split, self.classes)).encode("utf-8", "surrogateescape"), digest_size=16)
        digest.update(paths.joined.data)
        if self._columns:
            digest.update(repr(self._columns).encode())
        for numbers in (paths.ends, _as_int64(self.labels), self.sizes, self.mtimes_ns, self.offsets):
            digest.update(np.ascontiguousarray(numbers, np.int64).tobytes())
        if self.fingerprint not in ("", digest.hexdigest()):
            raise DataError(
                f"the manifest of {self.root}, split {self.split}, is corrupt: its fingerprint does not match."
            )
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def identity(self) -> str:
        """Hash of the fingerprint and the tags. It differs if a path leads to another file."""
        return hashlib.blake2b(self.fingerprint.encode() + self.tags.tobytes(), digest_size=16).hexdigest()

    @property
    def class_ids(self) -> npt.NDArray[np.int64]:
        """Class of each sample, int64 [N], which placement spreads evenly over nodes; 0 if samples have none."""
        if self.labels.dtype.kind == "f" or not self.labels.size:
            return np.zeros(len(self), np.int64)
        return self.labels if self.labels.ndim == 1 else self.labels[:, 0]

    @property
    def label_columns(self) -> int:
        return 1 if self.labels.ndim == 1 else self.labels.shape[1]

    @property
    def num_classes(self) -> int:
        """Number of classes: for whole numbers in a list, the largest plus 1; for vectors of 0 and 1, their length.

        Labels with a fraction have no classes: 0.
        """
        if self.is_vector and not self.classes and self.labels.dtype.kind != "f":
            is_hot = bool(self.labels.size) and 0 <= self.labels.min() <= self.labels.max() <= 1
            return self.label_columns if is_hot else count_classes((), self.labels.reshape(-1, 1))
        return count_classes(self.classes, self.labels)

    @property
    def _columns(self) -> tuple[str, int] | None:
        # None for the classes of a folder
        return None if self.labels.ndim == 1 else (self.labels.dtype.name, self.labels.shape[1])

    def relabel(self, classes: tuple[str, ...]) -> Manifest:
        """Renumber the labels by the `classes` of train/, which may include more."""
        if classes == self.classes or not self.label_columns:
            return self
        if not (classes and self.classes):
            raise ValueError(
                f"{self.root}: the labels of {self.split} are {'names' if self.classes else 'numbers'}, but the labels "
                f"of train are not. Use names in all lists, or numbers."
            )
        number = {name: label for label, name in enumerate(classes)}
        unknown = [name for name in self.classes if name not in number]
        if unknown:
            if self.list_digest:
                raise ValueError(
                    f"the labels of {self.split} include {len(unknown):,} class(es) that train lacks: "
                    f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}. Correct the labels, or add "
                    "samples of these classes to train."
                )
            names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else "")
            raise ValueError(
                f"source={self.root}: {self.split}/ has {len(unknown):,} folder(s) that train/ does not have: {names}. "
                f"Their images would have no label. Put each image into {self.split}/<class>/, with the names of the "
                f"folders of train/, or remove {self.split}/ and set val_fraction=0.05."
            )
        numbers = np.array([number[name] for name in self.classes], np.int64)
        labels = self.labels.copy()
        first = labels if labels.ndim == 1 else labels[:, 0]
        labeled = first >= 0  # -1: it has no label, in data sets of Hugging Face
        first[labeled] = numbers[first[labeled].astype(np.int64)]
        return replace(self, classes=classes, labels=labels, fingerprint="")

    def with_labels_like(self, whole: bool) -> Manifest:
        """Convert the labels to the type of train/'s labels. `whole`: whether these are whole numbers."""
        if not self.labels.size or whole == (self.labels.dtype.kind != "f"):
            return self
        if whole:
            raise ValueError(
                f"{self.root}: the labels of {self.split} are not whole numbers, but the labels of train are. "
                "Write the labels of train with a point, such as 1.0, or use whole numbers in all splits."
            )
        return replace(self, labels=self.labels.astype(np.float64), fingerprint="")

    def select(self, indices: npt.NDArray[np.int64]) -> Manifest:
        """Return the manifest of some of the samples, in this order. Shards, classes and folders stay."""
        arrays = {name: getattr(self, name)[indices] for name in ("labels", "sizes", "mtimes_ns", "tags")}
        placed = [name for name in ("shard_of", "offsets", "headers") if len(getattr(self, name))]
        arrays |= {name: getattr(self, name)[indices] for name in placed}
        return replace(self, paths=[self.paths[index] for index in indices.tolist()], **arrays, fingerprint="")

    def key(self, index: int) -> FileKey:
        return FileKey(self.paths[index], int(self.sizes[index]), int(self.mtimes_ns[index]), int(self.tags[index]))

    def keys(self, indices: Sequence[int]) -> list[FileKey]:
        # faster than one by one
        columns = (column[indices].tolist() for column in (self.sizes, self.mtimes_ns, self.tags))
        return list(map(FileKey, map(self.paths.__getitem__, indices), *columns))

    @property
    def has_row_groups(self) -> bool:
        """Whether the shards are row groups of Parquet files, which are read as a whole."""
        return len(self.shards) > 0 and ".parquet#" in self.shards[0].lower()

    def shard_file(self, number: int) -> str:
        """Return the path of a shard, or of the file that contains a row group."""
        shard = self.shards[number]
        return shard.rpartition("#")[0] if self.has_row_groups else shard

    def row_group(self, index: int) -> tuple[str, int]:
        """Return (file, number of the row group) of a sample."""
        file, _, number = self.shards[int(self.shard_of[index])].rpartition("#")
        return file, int(number)

    def location(self, index: int) -> str | tuple[str, int, int, int]:
        """Return the path of a sample's file; or the place in its shard, see `storage.Location`."""
        if not len(self.shards):
            return self.paths[index]
        first = int(self.offsets[index])
        last, header = first + int(self.sizes[index]), int(self.headers[index, 0]) if len(self.headers) else 0
        return self.shards[int(self.shard_of[index])], first, last, header

    def to_bytes(self) -> bytes:
        import torch  # the process that serves a node's samples starts without it

        content: dict[str, Any] = {"version": VERSION}
        for name in (member.name for member in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Paths):
                content[name] = [torch.from_numpy(np.array(array)) for array in (value.joined, value.ends)]
            elif isinstance(value, np.ndarray):
                content[name] = torch.from_numpy(np.array(value))  # a copy, because this one may be read-only
            else:
                content[name] = value
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    @classmethod
    def load(cls, source: Path | bytes) -> Manifest:
        """Return the manifest in a file or in the result of `to_bytes`. Raise DataError if it cannot be read."""
        import torch

        try:
            if isinstance(source, Path):
                # mapped, so that all processes of a node share one copy
                content = torch.load(source, mmap=True, weights_only=True)
            else:
                content = torch.load(io.BytesIO(source), weights_only=True)
            if content.pop("version", None) != VERSION:
                raise ValueError("it is of another version")
            for name, value in content.items():
                if isinstance(value, list):
                    content[name] = Paths(*(tensor.numpy() for tensor in value))
                elif isinstance(value, torch.Tensor):
                    content[name] = value.numpy()
            return cls(**content)
        except DataError:
            raise
        except Exception as error:
            where = source if isinstance(source, Path) else "of another node"
            raise DataError(f"the list of samples {where} cannot be read ({error}).") from error


def is_same_time(first_ns: int, second_ns: int) -> bool:
    """Whether two modification times are equal or unknown (0). Some storage rounds times to seconds in some answers."""
    if 0 in (first_ns, second_ns):
        return True
    unit = 10**9 if 0 in (first_ns % 10**9, second_ns % 10**9) else 1
    return first_ns // unit == second_ns // unit


def count_classes(classes: tuple[str, ...], labels: npt.NDArray[Any]) -> int:
    if classes or labels.dtype.kind == "f" or labels.ndim == 1 or not labels.size:
        return len(classes)
    return int(labels[:, 0].max()) + 1


def _as_int64(labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    # the bits, not the values, of float64 labels
    return np.ascontiguousarray(labels).reshape(-1).view(np.int64)
