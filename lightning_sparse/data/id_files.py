"""Files of token ids: their description, how they are written and read, and their checksums."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.config import DataError
from lightning_sparse.data.folders import temporary_for
from lightning_sparse.data.text import BYTES
from lightning_sparse.options import whole

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_KEPT_OPEN = 256  # files; others are opened for each read, because open files are limited
_BLOCK, _SCANNED = 1 << 20, 1 << 22  # ids written, and searched for ends of documents, at a time


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as its JSON file describes it.

    tokens: number of ids, 0 if unknown. checksum: of the ids, 0 if unknown. end: id at the end of each document, if
    known.
    """

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    tokens: int
    checksum: int = 0
    end: int | None = None

    @classmethod
    def at(cls, path: Path) -> TokenFile:
        return cls.of(str(path), path.with_suffix(".json").read_bytes, path.stat().st_size)

    @classmethod
    def of(cls, name: str, describe: Callable[[], bytes], size: int | None) -> TokenFile:
        """Return a file from its path or URL `name`, its JSON, and its size in bytes (None if unknown).

        Raises:
            ValueError: if the JSON does not describe the file.
        """
        json_file = f"{os.path.splitext(name)[0]}.json"
        try:
            about = json.loads(describe())
            dtype, vocab_size = DTYPES[about["dtype"]], _whole("vocab_size", about["vocab_size"])
            expected, checksum = about.get("tokens"), _whole("checksum", about.get("checksum", 0))
            end = None if about.get("end") is None else _whole("end", about["end"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{json_file} must describe {os.path.basename(name)}, as in "
                f'{{"dtype": "uint16", "vocab_size": 50257}}, with dtype one of {", ".join(DTYPES)} '
                f"({type(error).__name__}: {error})."
            ) from error
        tokens = (size or 0) // dtype.itemsize
        if size is not None and (size % dtype.itemsize or expected not in (None, tokens)):
            raise ValueError(
                f"{name} has {size:,} bytes, but {os.path.basename(json_file)} describes "
                f"{expected or 'a whole number of'} {dtype.name} tokens: the file is incomplete, or belongs to another "
                "run. Write it again."
            )
        if not 1 <= vocab_size <= np.iinfo(dtype).max + 1:
            raise ValueError(f"{json_file}: vocab_size={vocab_size} must be between 1 and the {dtype.name} limit.")
        if end is not None and not 0 <= end < vocab_size:
            raise ValueError(
                f"{json_file}: end={end} must be an id below vocab_size={vocab_size}, the id that ends a document."
            )
        return cls(Path(name), dtype, vocab_size, tokens, checksum, end)


def check_vocab_size(size: int) -> None:
    whole({"vocab_size": size}, "vocab_size", low=1, high=2**32, hint="it is the number of ids")


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number")
    return value


class VocabularyError(ValueError):
    """An id is not in the vocabulary."""


class IdWriter:
    """Writes ids to a file, and can remove the ids of an unfinished document. Errors mention `name`."""

    def __init__(self, stream: BinaryIO, vocab_size: int, name: str) -> None:
        self._stream, self._vocab_size, self.name = stream, vocab_size, name
        self.dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self.tokens = self.checksum = 0
        self._kept = (0, 0)

    def write(self, ids: NDArray[Any]) -> None:
        for first in range(0, len(ids), _BLOCK):
            some = ids[first : first + _BLOCK]
            if not 0 <= some.min() <= some.max() < self._vocab_size:
                raise VocabularyError(
                    f"{self.name} has ids from {some.min()} to {some.max()}, but vocab_size={self._vocab_size} allows "
                    f"0 to {self._vocab_size - 1}. Give the vocab_size of the tokenizer."
                )
            data = some.astype(DTYPES[self.dtype]).tobytes()
            self._stream.write(data)
            self.tokens, self.checksum = self.tokens + len(some), zlib.crc32(data, self.checksum)

    @property
    def is_empty(self) -> bool:
        return self.tokens == self._kept[0]

    def end_document(self) -> None:
        self._kept = (self.tokens, self.checksum)

    def take_back(self) -> None:
        """Remove the ids of the unfinished document."""
        self.tokens, self.checksum = self._kept
        self._stream.seek(self.tokens * DTYPES[self.dtype].itemsize)
        self._stream.truncate()


@contextlib.contextmanager
def id_writer(target: Path, name: str, vocab_size: int, end: int | None, about: dict[str, Any]) -> Iterator[IdWriter]:
    """Write ids to a ``.bin`` file and its description to a JSON file. The files appear when they are complete.

    The caller may add entries of the description to `about` until the block ends.
    """
    temporary, json_file = temporary_for(target), target.with_suffix(".json")
    try:
        with open(temporary, "wb") as stream:
            writer = IdWriter(stream, vocab_size, name)
            yield writer
        json_file.unlink(missing_ok=True)  # it describes the old file
        os.replace(temporary, target)
        entries = {
            "dtype": writer.dtype,
            "vocab_size": vocab_size,
            "tokens": writer.tokens,
            "checksum": writer.checksum,
        }
        entries |= about if end is None else {"end": end, **about}
        temporary.write_text(json.dumps(entries) + "\n", encoding="utf-8")
        os.replace(temporary, json_file)
    finally:
        temporary.unlink(missing_ok=True)


def verified_checksums(files: Sequence[TokenFile], known: Mapping[str, int]) -> dict[str, int]:
    """Return the checksum of each file, by the identity of the file. Read only files that are not `known`.

    Raises:
        ValueError: if a checksum differs from the checksum in the JSON file.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        names = []  # they differ after each change of a file
        for about, path in ((file.path.stat(), file.path.resolve()) for file in files):
            names.append(f"{path} {about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}")
        results = threads.map(lambda name, file: known[name] if name in known else _checksum(file.path), names, files)
        checksums = dict(zip(names, results, strict=True))
    for name, file in zip(names, files, strict=True):
        if file.checksum not in (0, checksums[name]):
            raise ValueError(
                f"{file.path} is damaged: its checksum differs from the checksum in its JSON file. Write it again."
            )
    return checksums


def _checksum(path: Path) -> int:
    checksum, block = 0, bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:count], checksum)
    return checksum


def prepare(
    texts: Sequence[str | Path],
    out: str | Path,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    vocab_size: int = BYTES,
    end: int | None = None,
) -> Path:
    """Write the ids of text files to ``<out>.bin`` and their description to ``<out>.json``.

    Args:
        texts: files, in order.
        out: path of the file to write; ``.bin`` is added if it is missing.
        tokenizer: makes the ids of one file's text (UTF-8); default: its bytes are the ids.
        vocab_size: number of ids of the tokenizer.
        end: id to put after each text; default: none.

    Returns:
        Path of the ``.bin``.

    Raises:
        ValueError: if there is no text, a text is not UTF-8, or an id is not in the vocabulary.
    """
    out = Path(out) if Path(out).suffix == ".bin" else Path(f"{out}.bin")
    check_vocab_size(vocab_size)
    if end is not None and not 0 <= end < vocab_size:
        raise ValueError(f"end={end} must be an id of the vocabulary, 0 or more and below vocab_size={vocab_size}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with id_writer(out, "", vocab_size, end, {}) as writer:
        for path in texts:
            writer.name = str(path)
            if tokenizer is None:
                with open(path, "rb") as stream:
                    while block := stream.read(_BLOCK):
                        writer.write(np.frombuffer(block, np.uint8))
            else:
                try:
                    text = Path(path).read_bytes().decode()
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path} is not UTF-8 ({error}). Convert it, or leave out the tokenizer."
                    ) from error
                writer.write(_ids_of(tokenizer(text), path))
            if end is not None and not writer.is_empty:
                writer.write(np.array([end]))
            writer.end_document()
        if not writer.tokens:
            raise ValueError(f"{len(texts)} text file(s) contain no tokens: give files with text.")
    return out


def _ids_of(returned: Any, path: str | Path) -> NDArray[np.int64]:
    try:
        ids = np.asarray(returned)
        if ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu"):
            return ids.astype(np.int64)
    except (TypeError, ValueError, RuntimeError):  # lists of other lengths, or a tensor with a gradient
        pass
    raise ValueError(f"the tokenizer returns {returned!r:.60} for {path}: return a list of ids.")


class Spans(NamedTuple):
    """Parts of a corpus, in order: position of the first id, and number of ids."""

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]


def token_files(paths: Sequence[Path]) -> list[TokenFile]:
    files = [TokenFile.at(path) for path in paths]
    for file in files:
        if file.vocab_size != files[0].vocab_size:
            raise ValueError(
                f"{file.path} has vocab_size {file.vocab_size}, but {files[0].path} has {files[0].vocab_size}: use one "
                "tokenizer for all files."
            )
    return files


class Corpus:
    """The concatenated ids of files. Thread-safe. `path` is their origin."""

    def __init__(self, path: str | Path, files: Sequence[TokenFile]) -> None:
        self.path, self.files, self.vocab_size = path, files, files[0].vocab_size
        self.begins = np.cumsum([0, *(file.tokens for file in files)])
        """Position of the first id of each file, and the end."""
        self._begins = self.begins.tolist()  # faster for single positions
        self._open = [os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) for file in files[:_KEPT_OPEN]]
        weakref.finalize(self, _close, self._open)

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def has_ends(self) -> bool:
        return all(file.end is not None for file in self.files)

    def read(self, begin: int, count: int) -> NDArray[Any]:
        """Return `count` ids from the position `begin`. All must be in one file."""
        number = bisect_right(self._begins, begin) - 1
        file = self.files[number]
        ids = self._read(number, begin - self._begins[number], count)
        if ids.max() >= self.vocab_size:
            raise DataError(
                f"{file.path}: id {ids.max()} is not below vocab_size={self.vocab_size}. Its JSON file belongs to "
                "another tokenizer, or the file is damaged. Write it again."
            )
        return ids

    def _read(self, number: int, first: int, count: int) -> NDArray[Any]:
        file = self.files[number]
        size = file.dtype.itemsize
        # read, not map: a mapped file that becomes shorter ends the process with SIGBUS
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
        """Read all ids and return all documents, each with its end. The end of a file also ends a document."""
        ends = [self._document_ends(number) for number in range(len(self.files))]
        all_ends = np.concatenate(ends)
        begins = np.concatenate([[0], all_ends[:-1]])
        return Spans(begins, all_ends - begins)

    def _document_ends(self, number: int) -> NDArray[np.int64]:
        file, ends = self.files[number], [np.zeros(0, np.int64)]
        for first in range(0, file.tokens, _SCANNED):
            ids = self._read(number, first, min(_SCANNED, file.tokens - first))
            ends.append(np.flatnonzero(ids == file.end) + first + 1)
        positions = np.concatenate(ends)
        if file.tokens and (not len(positions) or positions[-1] != file.tokens):
            positions = np.append(positions, file.tokens)
        shifted: NDArray[np.int64] = positions + self._begins[number]
        return shifted


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
