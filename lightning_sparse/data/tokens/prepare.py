"""Writes a file of token ids from text files."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.tokens.datamodule import DTYPES

BYTES = 256  # ids without a tokenizer
_BLOCK = 1 << 24


def prepare(
    texts: Sequence[str | Path],
    out: str | Path,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    vocab_size: int = BYTES,
) -> Path:
    """Write the ids of text files to ``<out>.bin`` and their description to ``<out>.json``.

    Args:
        texts: files, in order. Nothing is put between them.
        out: path of the file to write; ``.bin`` is added if it is missing.
        tokenizer: makes the ids of one file's text (UTF-8); default: its bytes are the ids.
        vocab_size: number of ids of the tokenizer.

    Returns:
        Path of the ``.bin``.

    Raises:
        ValueError: if there is no text, a text is not UTF-8, or an id is not in the vocabulary.
        OSError: if a file cannot be read or written.
    """
    out = Path(out) if Path(out).suffix == ".bin" else Path(f"{out}.bin")
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and 2**32: it is the number of ids.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        about = _write(temporary, _ids(texts, tokenizer, vocab_size), vocab_size)
        if not about["tokens"]:
            raise ValueError(f"{len(texts)} text file(s) contain no tokens: give files with text.")
        out.with_suffix(".json").unlink(missing_ok=True)  # it would describe the new file wrongly
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    out.with_suffix(".json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return out


def _write(file: Path, parts: Iterator[NDArray[np.int64]], vocab_size: int) -> dict[str, Any]:
    """Write ids; return their description."""
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    tokens = checksum = 0
    with open(file, "wb") as stream:
        for ids in parts:
            data = ids.astype(DTYPES[dtype]).tobytes()
            stream.write(data)
            tokens, checksum = tokens + len(ids), zlib.crc32(data, checksum)
    return {"dtype": dtype, "vocab_size": vocab_size, "tokens": tokens, "checksum": checksum}


def _ids(
    texts: Sequence[str | Path], tokenizer: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of the texts, in parts."""
    for path in texts:
        if tokenizer is None:
            parts = _bytes_of(path)
        else:
            try:
                parts = iter([np.asarray(tokenizer(Path(path).read_text(encoding="utf-8")), np.int64)])
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 ({error}). Convert it, or leave out the tokenizer.") from error
        for ids in parts:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(
                    f"{path}: the tokenizer made ids from {ids.min()} to {ids.max()}, and vocab_size={vocab_size} "
                    "allows 0 and up to one less. Give the vocab_size of the tokenizer."
                )
            yield ids


def _bytes_of(path: str | Path) -> Iterator[NDArray[np.int64]]:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            yield np.frombuffer(block, np.uint8).astype(np.int64)
