"""The ids of all files of a source, as one sequence."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.config import DataError
from lightning_sparse.data.id_files import TokenFile
from lightning_sparse.data.shards import id_suffix, local_files, shards_of
from lightning_sparse.data.text import text_suffix

_BLOCK = 1 << 22  # ids
_KEPT_OPEN = 256  # files; others are opened for each read, because open files are limited
Ids = NDArray[Any]


class Spans(NamedTuple):
    """Parts of a corpus: the position of the first id of each, in order, and the number of its ids."""

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]


def files_of(path: str | Path) -> list[TokenFile]:
    """Return the file at `path`, or all ``.bin`` below that folder, in the order of their paths.

    Raises:
        ValueError: if there is no file, a shard is of another kind, a file does not match its JSON, or the files have
            different vocabularies.
    """
    path = Path(path)
    if path.is_file() and (id_suffix(path.name) or text_suffix(path.name)) not in ("", ".bin"):
        raise ValueError(
            f"{path} cannot be used in place as .bin files are: give cache_dir, a local folder for its ids."
        )
    paths = _bins_below(path) if path.is_dir() else [path]
    for each in paths:
        if each.is_symlink() and not each.exists():
            raise ValueError(
                f"{each} is a link to {os.readlink(each)}, which does not exist: repair or remove the link."
            )
    if not paths or not paths[0].exists():
        raise ValueError(
            f"{path} is neither a file of token ids nor a folder with *.bin files. Write one with `lightning-sparse "
            "tokens` or `lightning_sparse.data.tokens.prepare`; or give cache_dir, a local folder, to use text or "
            "network storage."
        )
    return token_files(paths)


def _bins_below(folder: Path) -> list[Path]:
    files = local_files(folder)
    if not any(id_suffix(name) for name, *_ in files):
        return []
    shards, _ = shards_of(str(folder), files)
    for each in shards:
        if id_suffix(each.path) != ".bin":
            raise ValueError(
                f"{folder} has {each.path}, which cannot be used in place, because it is not a .bin file: give "
                "cache_dir, a local folder for its ids, or remove the file."
            )
    return [folder / each.path for each in shards]


def token_files(paths: Sequence[Path]) -> list[TokenFile]:
    """Return files with one vocabulary size. Raises: ValueError: as `files_of`"""
    files = [TokenFile.at(each) for each in paths]
    for each in files:
        if each.vocab_size != files[0].vocab_size:
            raise ValueError(
                f"{each.path} has vocab_size {each.vocab_size}, but {files[0].path} has {files[0].vocab_size}: use one "
                "tokenizer for all files."
            )
    return files


class Corpus:
    """The concatenated ids of files. Thread-safe.

    Args:
        path: where the files come from.
        files: as `files_of` or `token_files` returns them.
    """

    def __init__(self, path: str | Path, files: Sequence[TokenFile]) -> None:
        self.path, self.files, self.vocab_size = path, files, files[0].vocab_size
        self.begins = np.cumsum([0, *(each.tokens for each in files)])
        """Position of the first id of each file, and the end."""
        self._begins = self.begins.tolist()  # faster for single positions
        self._open = [os.open(each.path, os.O_RDONLY | os.O_CLOEXEC) for each in files[:_KEPT_OPEN]]
        weakref.finalize(self, _close, self._open)

    @classmethod
    def of(cls, path: str | Path) -> Corpus:
        """Return the corpus of files on a disk of this node. Raises: ValueError: as `files_of`"""
        return cls(path, files_of(path))

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def has_ends(self) -> bool:
        """Whether the ends of documents are known."""
        return all(each.end is not None for each in self.files)

    def read(self, begin: int, count: int) -> Ids:
        """Return `count` ids from the position `begin`. All must be in one file.

        Raises:
            DataError: if an id is not in the vocabulary, or the file has become shorter.
        """
        number = bisect_right(self._begins, begin) - 1
        file = self.files[number]
        ids = self._read(number, begin - self._begins[number], count)
        if ids.max() >= self.vocab_size:
            raise DataError(
                f"{file.path}: id {ids.max()} is not below vocab_size={self.vocab_size}. Its JSON file belongs to "
                "another tokenizer, or the file is damaged. Write it again."
            )
        return ids

    def _read(self, number: int, first: int, count: int) -> Ids:
        """Read, not map: a mapped file that becomes shorter ends the process with SIGBUS."""
        file = self.files[number]
        size = file.dtype.itemsize
        if number < len(self._open):
            data = os.pread(self._open[number], count * size, first * size)
        else:
            with open(file.path, "rb", buffering=0) as stream:
                data = os.pread(stream.fileno(), count * size, first * size)
        if len(data) != count * size:
            raise DataError(
                f"{file.path} has become shorter since the run began: files must not change during a run. Restore it, "
                "and resume."
            )
        return np.frombuffer(data, file.dtype)

    def documents(self) -> Spans:
        """Read all ids, and return all documents, each with its end. The end of a file also ends a document."""
        ends = [self._document_ends(number) for number in range(len(self.files))]
        all_ends = np.concatenate(ends)
        begins = np.concatenate([[0], all_ends[:-1]])
        return Spans(begins, all_ends - begins)

    def _document_ends(self, number: int) -> NDArray[np.int64]:
        """Return the position after each document of a file."""
        file, ends = self.files[number], [np.zeros(0, np.int64)]
        for first in range(0, file.tokens, _BLOCK):
            ids = self._read(number, first, min(_BLOCK, file.tokens - first))
            ends.append(np.flatnonzero(ids == file.end) + first + 1)
        found = np.concatenate(ends)
        if file.tokens and (not len(found) or found[-1] != file.tokens):
            found = np.append(found, file.tokens)
        shifted: NDArray[np.int64] = found + self._begins[number]
        return shifted


def _close(files: list[int]) -> None:
    for each in files:
        os.close(each)
