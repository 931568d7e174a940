"""Text to token ids: the documents of text shards, and tokenizers by name.

Tokenizers encode a document in blocks, so that memory does not limit the size of a ``.txt`` file.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import hashlib
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.sources.storage_base import UnreadableFileError, is_visible
from lightning_sparse.data.sources.tar_members import check_end

TEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".tar", ".parquet")
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READ = 1 << 17  # bytes of a document that are read at a time
_ROWS = 64
UNREADABLE = (  # errors of the readers for damaged contents and wrong suffixes
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, UnreadableFileError),
)


class Document(NamedTuple):
    """A document of a shard. `place` is such as "line 3". `blocks` yields UTF-8; it raises one of `UNREADABLE`."""

    place: str
    blocks: Iterator[bytes]


def text_suffix(name: str) -> str:
    """Return the suffix of a text shard in lower case, without that of its compression, or ""."""
    path = PurePosixPath(name.lower())
    is_compressed = path.suffix in _OPENERS
    suffix = PurePosixPath(path.stem).suffix if is_compressed else path.suffix
    return suffix if suffix in TEXT_SUFFIXES and not (is_compressed and suffix == ".parquet") else ""


def documents(name: str, file: BinaryIO) -> Iterator[Document]:
    """Yield the documents of a shard, after decompressing ``.gz``, ``.bz2`` and ``.xz``.

    A ``.txt`` file is one document. Each line of ``.jsonl`` and ``.ndjson`` has a document in its field `text`, and
    each row of ``.parquet`` in its column `text`. In ``.tar``, each member is a document: a ``.txt`` file, or the field
    `text` of a ``.json`` file.

    A damaged document raises the error when it is read. For a damaged shard, an additional last document raises it.
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
    try:
        yield from blocks
    except (OSError, NotImplementedError) as error:
        if isinstance(error, UNREADABLE):
            raise
        # An OSError usually means a problem with the cache. So report damaged contents as ValueError.
        raise ValueError(" ".join(str(error).split())) from error


def _failing(error: Exception) -> Iterator[bytes]:
    # raised when the document is read, not when it is listed
    for failure in (error,):
        raise failure
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
    for number, scalar in enumerate(chain.from_iterable(batch.column(0) for batch in batches), 1):
        yield Document(f"row {number:,}", _row(scalar))


def _row(scalar: Any) -> Iterator[bytes]:
    text: object = scalar.as_py()
    if not isinstance(text, (str, bytes, type(None))):
        raise TypeError(f"the column text has {type(text).__name__}, not a string")
    yield text.encode() if isinstance(text, str) else text or b""


TOKENIZERS = "'bytes', 'tiktoken:<encoding>' or 'tokenizers:<file>'"
BYTES = 256  # ids without a tokenizer
BLOCK = 1 << 17  # characters of a document that are encoded at a time
OVERLAP = 1 << 10  # characters before and after a block, which are encoded with it
_ENDS = (  # candidates, if no configuration names the token
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"),
    *("<｜end▁of▁sentence｜>", "<EOS_TOKEN>", "<|eot|>", "[EOS]"),
)
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")  # next to tokenizer.json; they name the token
Ids = NDArray[Any]
Encoded = tuple[Ids, NDArray[np.int64]]
"""The ids of a text, and the position of the first character of each token."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes documents as token ids.

    Args:
        identity: differs between tokenizers that may give different ids.
        encode: yields the ids of a document in blocks, without its end. Its input is UTF-8.
        end: id at the end of each document.
    """

    identity: str
    encode: Callable[[Iterator[bytes]], Iterator[Ids]]
    vocab_size: int
    end: int


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer ``"bytes"``, ``"tiktoken:<encoding>"`` or ``"tokenizers:<tokenizer.json>"``.

    Raises:
        ValueError: if the tokenizer is unknown, or has no token for the end of a document.
    """
    kind, _, which = name.partition(":")
    if name == "bytes":
        return Tokenizer(name, _bytes_of, BYTES, 0)  # 0 ends a document; _bytes_of refuses it in a text
    if kind not in ("tiktoken", "tokenizers") or not which:
        raise ValueError(f"tokenizer={name!r} must be {TOKENIZERS}. Use 'tiktoken:gpt2', for example.")
    if kind == "tokenizers" and not Path(which).exists():
        raise ValueError(f"tokenizer={name!r} does not exist. Give the path of an existing tokenizer.json.")
    try:
        return _tiktoken(which) if kind == "tiktoken" else _tokenizers(Path(which))
    except ImportError as error:
        raise ValueError(f"tokenizer={name!r} needs {kind}: `pip install {kind}`.") from error
    except Exception as error:  # raised by the package for an unusable name or file
        raise ValueError(f"tokenizer={name!r} cannot be used ({type(error).__name__}: {error}).") from error


def _bytes_of(blocks: Iterator[bytes]) -> Iterator[Ids]:
    for text in _decoded(blocks):
        if "\0" in text:  # such as in UTF-16
            raise ValueError("it contains a NUL character, which ends a document with tokenizer='bytes'")
        yield np.frombuffer(text.encode(), np.uint8)


def _tiktoken(name: str) -> Tokenizer:
    import tiktoken  # type: ignore[import-not-found, unused-ignore]

    encoding = tiktoken.get_encoding(name)

    def encode(text: str) -> Encoded:
        ids = encoding.encode_ordinary(text)
        sizes = np.array([len(token) for token in encoding.decode_tokens_bytes(ids)], np.int64)
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        bytes_of_characters = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        characters = np.searchsorted(np.cumsum(bytes_of_characters), np.cumsum(sizes) - sizes, side="right")
        return np.array(ids, np.int64), characters

    def encode_whole(text: str) -> Ids:
        return np.array(encoding.encode_ordinary(text), np.int64)

    in_blocks = partial(encode_in_blocks, encode=encode, encode_whole=encode_whole)
    return Tokenizer(f"tiktoken:{name}", in_blocks, encoding.n_vocab, encoding.eot_token)


def _tokenizers(file: Path) -> Tokenizer:
    import tokenizers  # type: ignore[import-not-found, unused-ignore]

    about = file.read_bytes()
    tokenizer = tokenizers.Tokenizer.from_str(about.decode())
    tokenizer.no_truncation()  # meant for short inputs of a fixed length, or for regularization
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    name, end = _end_of(tokenizer, file)
    tokenizer.add_special_tokens([name])  # some files do not mark it as special
    tokenizer.encode_special_tokens = True  # as ordinary text, if a document contains them

    def ids_of(text: str) -> NDArray[np.int64]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def spelled() -> NDArray[np.int64]:  # for models whose own vocabulary has the token
        return np.append(ids_of(name[:1]), ids_of(name[1:]))

    def encode_whole(text: str) -> Ids:
        return _spell_out(end, spelled, ids_of(text))[0]

    def encode(text: str) -> Encoded:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        begins = np.array(encoded.offsets, np.int64).reshape(-1, 2)[:, 0]
        ids, counts = _spell_out(end, spelled, np.array(encoded.ids, np.int64))
        return ids, np.repeat(begins, counts)

    digest = hashlib.blake2b(about, digest_size=16).hexdigest()
    in_blocks = partial(encode_in_blocks, encode=encode, encode_whole=encode_whole)
    size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    return Tokenizer(f"tokenizers:{digest} without truncation", in_blocks, size, end)


def _end_of(tokenizer: Any, file: Path) -> tuple[str, int]:
    named = next((token for config in _CONFIGS if (token := _named_end(file.with_name(config))) is not None), None)
    for token in _ENDS if named is None else (named,):
        token_id: int | None = tokenizer.token_to_id(token)
        if token_id is not None:
            return token, token_id
    problem = "names no token for the end of a document" if named is None else f"has no token {named!r}"
    raise ValueError(
        f"{file} {problem}: put a tokenizer_config.json, as save_pretrained() writes it, into the same folder, with a "
        'token of the vocabulary, such as {"eos_token": "<|endoftext|>"}'
    )


def _named_end(config: Path) -> str | None:
    if not config.exists():
        return None
    token: dict[str, str] | str | None = json.loads(config.read_bytes()).get("eos_token")
    return token["content"] if isinstance(token, dict) else token


def _spell_out(
    end: int, spelled: Callable[[], NDArray[np.int64]], ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
    """Replace end-of-text ids inside a document. Return the new ids, and how many of them replace each old id."""
    mentions = ids == end
    if not mentions.any():
        return ids, 1
    spelling = spelled()
    counts = np.where(mentions, len(spelling), 1)
    out = np.repeat(ids, counts)
    out[np.repeat(mentions, counts)] = np.tile(spelling, mentions.sum())
    return out, counts


def encode_in_blocks(
    blocks: Iterator[bytes], *, encode: Callable[[str], Encoded], encode_whole: Callable[[str], Ids]
) -> Iterator[Ids]:
    """Yield the ids of a document in blocks. They equal the ids of the whole document.

    `encode` returns the ids of a text and their positions. `encode_whole` returns the ids of a document of one block.
    """
    text, done, size = "", 0, BLOCK  # text that is still needed; number of its characters that are encoded
    is_first = True
    for part in _decoded(blocks):
        text += part
        while len(text) - done > size + OVERLAP:
            # The first and last ids of a text depend on the text around it. So encode each block with characters before
            # and after it, and drop their ids.
            ids, begins = _after(text[: done + size + OVERLAP], done, encode)
            last = _place_to_cut(text, begins, done, done + size)
            yield ids[: np.searchsorted(begins, last)]
            size = BLOCK if last > done else 2 * size  # a token spans the whole block
            begin = max(0, last - OVERLAP)
            text, done, is_first = text[begin:], last - begin, False
    if is_first and text:
        yield encode_whole(text)
    elif text:
        yield _after(text, done, encode)[0]


def _after(text: str, done: int, encode: Callable[[str], Encoded]) -> Encoded:
    # keep the tokens after the first `done` characters, which are already encoded
    ids, begins = encode(text)
    first = int(np.searchsorted(begins, done))
    if done and (first == len(begins) or begins[first] != done):  # a token crosses the end of the last block
        ids, begins = encode(text[done:])
        return ids, begins + done
    return ids[first:], begins[first:]


def _place_to_cut(text: str, begins: NDArray[np.int64], done: int, last: int) -> int:
    """Return the last position up to `last` where a token begins. If possible, a word or space begins there, too."""
    candidates = begins[(begins > done) & (begins <= last)][::-1].tolist()
    near = (candidate for candidate in candidates if candidate > last - OVERLAP)
    at_words = (place for place in near if text[place].isspace() != text[place - 1].isspace())
    return next(at_words, next(iter(candidates), done))


def _decoded(blocks: Iterator[bytes]) -> Iterator[str]:
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks, [b""]):
        begin = position - len(decoder.getstate()[0])  # includes the bytes of an incomplete character
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # positions in the document, not in the block
            error.start, error.end = error.start + begin, error.end + begin
            raise
        position += len(block)
