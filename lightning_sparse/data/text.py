"""Documents of text shards, tokenizers by name, and the files of ids that they become."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

BYTES = 256  # ids without a tokenizer
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TEXT_SUFFIXES = (".txt", ".jsonl", ".tar", ".parquet")
_BLOCK = 1 << 24
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # in tokenizer.json, which does not say which


@dataclass(frozen=True)
class Tokenizer:
    """Makes ids of documents.

    Args:
        identity: differs where ids may differ.
        encode: returns the ids of a document, given in UTF-8.
        vocab_size: number of ids.
        end: id at the end of each document; None: nothing is put there.
    """

    identity: str
    encode: Callable[[bytes], NDArray[Any] | Sequence[int]]
    vocab_size: int
    end: int | None


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer ``"bytes"``, ``"tiktoken:<encoding>"`` or ``"tokenizers:<tokenizer.json>"``.

    Raises:
        ValueError: if there is none of this name, or its package is not installed.
    """
    kind, _, which = name.partition(":")
    if name == "bytes":
        return Tokenizer(name, lambda text: np.frombuffer(text, np.uint8), BYTES, 0)  # 0: rare in text, and ends it
    if kind not in ("tiktoken", "tokenizers") or not which:
        raise ValueError(
            f"tokenizer={name!r} must be 'bytes', an encoding such as 'tiktoken:gpt2', or a file such as "
            "'tokenizers:/data/tokenizer.json'."
        )
    try:
        return _tiktoken(which) if kind == "tiktoken" else _tokenizers(which)
    except ImportError as error:
        raise ValueError(f"tokenizer={name!r} needs {kind}: `pip install 'lightning-sparse[tokenizers]'`.") from error
    except Exception as error:  # of the package, for a name or a file that it cannot use
        raise ValueError(f"tokenizer={name!r} cannot be used ({type(error).__name__}: {error}).") from error


def _tiktoken(name: str) -> Tokenizer:
    import tiktoken  # type: ignore[import-not-found, unused-ignore]

    found = tiktoken.get_encoding(name)
    return Tokenizer(
        f"tiktoken:{name}", lambda text: found.encode_ordinary(text.decode()), found.n_vocab, found.eot_token
    )


def _tokenizers(file: str) -> Tokenizer:
    import tokenizers  # type: ignore[import-not-found, unused-ignore]

    about = Path(file).read_bytes()
    found = tokenizers.Tokenizer.from_str(about.decode())
    end = next((each for each in map(found.token_to_id, _ENDS) if each is not None), None)
    return Tokenizer(
        f"tokenizers:{hashlib.blake2b(about, digest_size=16).hexdigest()}",
        lambda text: found.encode(text.decode(), add_special_tokens=False).ids,
        found.get_vocab_size(),
        end,
    )


def documents(name: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the documents of a shard, in UTF-8: of ``.txt`` the whole, of ``.jsonl`` the field `text` of each line, of
    ``.tar`` its members ``.txt`` and ``.json``, of ``.parquet`` the column `text`.

    Raises:
        ValueError: if the shard is not what its name says.
    """
    kinds: dict[str, Callable[[BinaryIO], Iterable[bytes]]] = {
        ".txt": lambda file: [file.read()],
        ".jsonl": lambda file: (_field(line) for line in file if line.strip()),
        ".tar": _members,
        ".parquet": _rows,
    }
    try:
        yield from kinds[Path(name).suffix](file)
    except ImportError as error:
        raise ValueError(f"{name} needs pyarrow: `pip install 'lightning-sparse[storage]'`.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, tarfile.TarError) as error:
        raise ValueError(f"{name} cannot be read as text ({type(error).__name__}: {error}).") from error


def _field(line: bytes) -> bytes:
    text: str = json.loads(line)["text"]
    if not isinstance(text, str):
        raise TypeError(f"the field text is {type(text).__name__}, not a string")
    return text.encode()


def _members(file: BinaryIO) -> Iterator[bytes]:
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name.endswith((".txt", ".json")) else None
            if stream is not None:
                yield _field(stream.read()) if member.name.endswith(".json") else stream.read()


def _rows(file: BinaryIO) -> Iterator[bytes]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(pyarrow.PythonFile(file, "r")).iter_batches(1024, columns=["text"]):
        if not batch.num_columns:
            raise KeyError("it has no column text")
        for each in batch.column(0).to_pylist():
            yield each if isinstance(each, bytes) else (each or "").encode()


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as the JSON beside it describes it.

    Args:
        tokens: number of ids in the file; 0 if unknown.
        checksum: of the ids, 0 if unknown.
        end: id at the end of each document; None if unknown.
    """

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    tokens: int
    checksum: int = 0
    end: int | None = None

    @classmethod
    def at(cls, path: Path) -> TokenFile:
        """Return a file on disk. Raises: ValueError: as `of`"""
        return cls.of(str(path), path.with_suffix(".json").read_bytes, path.stat().st_size)

    @classmethod
    def of(cls, name: str, describe: Callable[[], bytes], size: int | None) -> TokenFile:
        """Return a file.

        Args:
            name: its path or URL.
            describe: returns the contents of the JSON.
            size: of the file in bytes; None if unknown.

        Raises:
            ValueError: if the JSON does not describe the file.
        """
        beside = f"{os.path.splitext(name)[0]}.json"
        try:
            about = json.loads(describe())
            dtype, vocab_size = DTYPES[about["dtype"]], _whole("vocab_size", about["vocab_size"])
            said, checksum = about.get("tokens"), _whole("checksum", about.get("checksum", 0))
            end = None if about.get("end") is None else _whole("end", about["end"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{beside} must describe {os.path.basename(name)}, as in "
                f'{{"dtype": "uint16", "vocab_size": 50257}}, with dtype one of {", ".join(DTYPES)} '
                f"({type(error).__name__}: {error})."
            ) from error
        tokens = (size or 0) // dtype.itemsize
        if size is not None and (size % dtype.itemsize or said not in (None, tokens)):
            raise ValueError(
                f"{name} has {size:,} bytes, which are not the {said or 'whole number of'} tokens of {dtype.name} that "
                f"{os.path.basename(beside)} describes: the file is incomplete, or of another run. Write it again."
            )
        if not 1 <= vocab_size <= np.iinfo(dtype).max + 1:
            raise ValueError(f"{beside}: vocab_size={vocab_size} must be between 1 and the {dtype.name} limit.")
        if end is not None and not 0 <= end < vocab_size:
            raise ValueError(
                f"{beside}: end={end} must be an id below vocab_size={vocab_size}, the id that ends a document."
            )
        return cls(Path(name), dtype, vocab_size, tokens, checksum, end)


def check_vocab_size(size: int) -> None:
    """Raise ValueError if no file can have ids of a vocabulary of this size."""
    if not 1 <= size <= 2**32:
        raise ValueError(f"vocab_size={size} must be between 1 and 2**32: it is the number of ids.")


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number")
    return value


def within(ids: NDArray[np.int64], vocab_size: int, path: str | Path) -> NDArray[np.int64]:
    """Return the ids. Raises ValueError, naming the file, if one is not in the vocabulary."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{path} has ids from {ids.min()} to {ids.max()}, and vocab_size={vocab_size} allows 0 and up to one less. "
            "Give the vocab_size of the tokenizer."
        )
    return ids


def write_ids(
    target: Path, parts: Iterable[NDArray[np.int64]], vocab_size: int, end: int | None, **more: object
) -> None:
    """Write ids to a ``.bin``, which is there when it is whole, and its description to the JSON beside it.

    Args:
        end: id at the end of each document, None if there is none.
        more: what else the description says.
    """
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    tokens = checksum = 0
    temporary, beside = target.with_name(f"{_unfinished(target)}{os.getpid()}.tmp"), target.with_suffix(".json")
    try:
        with open(temporary, "wb") as stream:
            for ids in parts:
                data = ids.astype(DTYPES[dtype]).tobytes()
                stream.write(data)
                tokens, checksum = tokens + len(ids), zlib.crc32(data, checksum)
        beside.unlink(missing_ok=True)  # it would describe the new file wrongly
        os.replace(temporary, target)
        about = {"dtype": dtype, "vocab_size": vocab_size, "tokens": tokens, "checksum": checksum}
        about |= more if end is None else {"end": end, **more}
        temporary.write_text(json.dumps(about) + "\n", encoding="utf-8")
        os.replace(temporary, beside)
    finally:
        temporary.unlink(missing_ok=True)


def _unfinished(target: Path) -> str:
    """Return what the names of files begin with that processes of this host write, to be renamed to `target`."""
    return f"{target.name}.{socket.gethostname()}."


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
        OSError: if a file cannot be read or written.
    """
    out = Path(out) if Path(out).suffix == ".bin" else Path(f"{out}.bin")
    check_vocab_size(vocab_size)
    if end is not None and not 0 <= end < vocab_size:
        raise ValueError(f"end={end} must be an id of the vocabulary, 0 or more and below vocab_size={vocab_size}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f"{glob.escape(_unfinished(out))}*.tmp"):
        if not Path("/proc", left.name.split(".")[-2]).exists():  # its process was killed
            left.unlink(missing_ok=True)
    write_ids(out, _ids(texts, tokenizer, vocab_size, end), vocab_size, end)
    return out


def _ids(
    texts: Sequence[str | Path], tokenizer: Callable[[str], Sequence[int]] | None, vocab_size: int, end: int | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of the texts, in parts."""
    empty = True
    for path in texts:
        if tokenizer is None:
            parts = _bytes_of(path)
        else:
            try:
                parts = iter([np.asarray(tokenizer(Path(path).read_text(encoding="utf-8")), np.int64)])
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 ({error}). Convert it, or leave out the tokenizer.") from error
        length = 0
        for ids in parts:
            length += len(ids)
            yield within(ids, vocab_size, path)
        if end is not None and length:
            yield np.array([end])
        empty = empty and not length
    if empty:
        raise ValueError(f"{len(texts)} text file(s) contain no tokens: give files with text.")


def _bytes_of(path: str | Path) -> Iterator[NDArray[np.int64]]:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            yield np.frombuffer(block, np.uint8).astype(np.int64)
