"""Documents of text shards."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from lightning_sparse.data.id_files import TokenFile, prepare
from lightning_sparse.data.sources.storage_reader import UnreadableFileError, check_end, is_visible

__all__ = ["TEXT_SUFFIXES", "UNREADABLE", "Document", "TokenFile", "documents", "prepare", "text_suffix"]

TEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".tar", ".parquet")
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READ = 1 << 17  # bytes of a document that are read at a time
_ROWS = 64
UNREADABLE = (  # errors of the readers for damaged contents and wrong suffixes
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, UnreadableFileError),
)


class Document(NamedTuple):
    """A document of a shard.

    Args:
        place: where it is in the shard, such as "line 3".
        blocks: yields the document in UTF-8; raises one of `UNREADABLE` if it cannot be read.
    """

    place: str
    blocks: Iterator[bytes]


def text_suffix(name: str) -> str:
    """Return the suffix of a text shard in lower case, without the suffix of its compression; "" for other files."""
    path = PurePosixPath(name.lower())
    is_compressed = path.suffix in _OPENERS
    suffix = PurePosixPath(path.stem).suffix if is_compressed else path.suffix
    return suffix if suffix in TEXT_SUFFIXES and not (is_compressed and suffix == ".parquet") else ""


def documents(name: str, file: BinaryIO) -> Iterator[Document]:
    """Yield the documents of a shard, after decompressing ``.gz``, ``.bz2`` and ``.xz``.

    A ``.txt`` file is one document. Each line of ``.jsonl`` and ``.ndjson`` has a document in its field `text`, and
    each row of ``.parquet`` in its column `text`. In ``.tar``, each member is a document: a ``.txt`` file, or the field
    `text` of a ``.json`` file.

    If the contents are damaged or do not match the suffix, reading the last document raises the error.

    Raises:
        ImportError: if pyarrow is missing.
    """
    kinds: dict[str, Callable[[Any], Iterator[Document]]] = {
        ".txt": lambda file: iter([Document("", _blocks_of(file))]),
        ".jsonl": _lines,
        ".ndjson": _lines,
        ".tar": _members,
        ".parquet": _rows,
    }
    with contextlib.ExitStack() as stack:
        if (opened := _OPENERS.get(PurePosixPath(name.lower()).suffix)) is not None:
            file = stack.enter_context(opened(file))
        place = "its beginning"
        try:
            for document in kinds[text_suffix(name)](file):
                place = document.place
                yield document._replace(blocks=_readable(document.blocks))
        except (*UNREADABLE, OSError, NotImplementedError) as error:
            yield Document(f"the data after {place}", _readable(_failing(error)))


def _readable(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks. For damaged contents, some readers such as bz2 raise OSError, which elsewhere means an error of the
    cache folder: raise ValueError instead."""
    try:
        yield from blocks
    except (OSError, NotImplementedError) as error:
        if isinstance(error, UNREADABLE):
            raise
        raise ValueError(" ".join(str(error).split())) from error


def _failing(error: Exception) -> Iterator[bytes]:
    """Raise the error when the document is read."""
    for each in (error,):
        raise each
    yield b""


def _blocks_of(file: Any) -> Iterator[bytes]:
    while block := file.read(_READ):
        yield block


def _lines(file: BinaryIO) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Document(f"line {number:,}", _field(line))


def _field(line: bytes) -> Iterator[bytes]:
    text: object = json.loads(line)["text"]
    if not isinstance(text, str):
        raise TypeError(f"the field text is {type(text).__name__}, not a string")
    yield text.encode()


def _members(file: BinaryIO) -> Iterator[Document]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            is_wanted = path.suffix.lower() in (".txt", ".json") and all(map(is_visible, path.parts))
            stream = tar.extractfile(member) if is_wanted else None
            if stream is not None:
                is_text = path.suffix.lower() == ".txt"
                yield Document(f"member {member.name}", _blocks_of(stream) if is_text else _field(stream.read()))
        check_end(file, tar.offset)


def _rows(file: BinaryIO) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(pyarrow.PythonFile(file, "r"), buffer_size=_READ)
    if "text" not in table.schema_arrow.names:
        raise KeyError("it has no column text")
    batches = table.iter_batches(_ROWS, columns=["text"])
    for number, each in enumerate(chain.from_iterable(batch.column(0) for batch in batches), 1):
        yield Document(f"row {number:,}", _row(each))


def _row(scalar: Any) -> Iterator[bytes]:
    text: object = scalar.as_py()
    if not isinstance(text, (str, bytes, type(None))):
        raise TypeError(f"the column text has {type(text).__name__}, not a string")
    yield text.encode() if isinstance(text, str) else text or b""
