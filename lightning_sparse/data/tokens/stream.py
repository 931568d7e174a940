"""Reads windows of memory-mapped files of token ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.config import DataError

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as the JSON beside it describes it.

    Args:
        tokens: number of ids in the file.
        checksum: of the ids, 0 if unknown.
    """

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    tokens: int
    checksum: int = 0


def files_of(path: str | Path) -> list[TokenFile]:
    """Return the file at `path`, or all ``*.bin`` in that folder, in order of their names.

    Raises:
        ValueError: if there is none, a file does not match its JSON, or the files have different vocabularies.
    """
    path = Path(path)
    paths = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    if not paths or not path.exists():
        raise ValueError(
            f"{path} is neither a file of token ids nor a folder with *.bin files. Write one with `lightning-sparse "
            "tokens` or `lightning_sparse.data.tokens.prepare`."
        )
    files = [_described(each) for each in paths]
    for each in files:
        if each.vocab_size != files[0].vocab_size:
            raise ValueError(
                f"{each.path} has vocab_size {each.vocab_size}, but {files[0].path} has {files[0].vocab_size}: use one "
                "tokenizer for all files."
            )
    return files


def _described(path: Path) -> TokenFile:
    beside = path.with_suffix(".json")
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        dtype, vocab_size = DTYPES[about["dtype"]], int(about["vocab_size"])
        said, checksum = about.get("tokens"), int(about.get("checksum", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{beside} must describe {path.name}, as in "
            f'{{"dtype": "uint16", "vocab_size": 50257}}, with dtype one of {", ".join(DTYPES)} '
            f"({type(error).__name__}: {error})."
        ) from error
    size = path.stat().st_size
    tokens = size // dtype.itemsize
    if size % dtype.itemsize or said not in (None, tokens):
        raise ValueError(
            f"{path} has {size:,} bytes, which are not the {said or 'whole number of'} tokens of {dtype.name} that "
            f"{beside.name} describes: the file is incomplete, or of another run. Write it again."
        )
    if not 1 <= vocab_size <= np.iinfo(dtype).max + 1:
        raise ValueError(f"{beside}: vocab_size={vocab_size} must be between 1 and the {dtype.name} limit.")
    return TokenFile(path, dtype, vocab_size, tokens, checksum)


class TokenStream:
    """Fixed windows of token files. Window i of a file begins at token i * context; no window crosses two files.

    Args:
        path: file or folder of shards.
        context: number of tokens that a model sees; a window has one more, the last target.

    Raises:
        ValueError: as `files_of`; if no file is as long as a window.
    """

    def __init__(self, path: str | Path, context: int) -> None:
        self.path, self.context = Path(path), context
        self._files = files_of(path)
        self.vocab_size = self._files[0].vocab_size
        counts = np.array([max(0, each.tokens - 1) // context for each in self._files])
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        if not len(self):
            longest = max(each.tokens for each in self._files)
            raise ValueError(
                f"{path}: context={context} needs files of {context + 1:,} tokens or more, and the longest has "
                f"{longest:,}. Use a smaller context, or more text."
            )
        self._maps: list[NDArray[Any]] = [
            np.memmap(each.path, each.dtype, "r", shape=each.tokens) if each.tokens else np.zeros(0, each.dtype)
            for each in self._files
        ]

    def __len__(self) -> int:
        """Number of windows."""
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of what a window's number stands for."""
        about = [(each.dtype.name, each.vocab_size, each.tokens, each.checksum) for each in self._files]
        return hashlib.blake2b(repr((self.context, about)).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows, int64 [B, context + 1].

        Raises:
            DataError: if an id is not in the vocabulary.
        """
        out = np.empty((len(indices), self.context + 1), np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        starts = (indices - self._begins[shards]) * self.context
        for row, shard, start in zip(out, shards.tolist(), starts.tolist(), strict=True):
            row[:] = self._maps[shard][start : start + self.context + 1]
        if out.size and out.max() >= self.vocab_size:
            row_index = int(out.max(1).argmax())
            raise DataError(
                f"{self._files[int(shards[row_index])].path}: id {out.max()} is not below vocab_size="
                f"{self.vocab_size}. The JSON beside it belongs to another tokenizer, or the file is damaged."
            )
        return out
