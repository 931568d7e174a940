"""Windows of memory-mapped files of token ids: those of a stream, of whole documents, of a part, of a mixture.

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian, one after the other. Beside it, ``<name>.json``
says ``{"dtype": "uint16", "vocab_size": 50257}``, and may say more: ``"end": 50256`` is the id at the end of each
document. A folder of such files is read as shards, by name.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.config import DataError
from lightning_sparse.data.rng import shuffled
from lightning_sparse.data.text import TokenFile

Documents = Literal["joined", "separate", "packed"]
DOCUMENTS = get_args(Documents)
IGNORED = -100  # a target that torch's cross entropy leaves out
_BLOCK = 1 << 24
_MIXTURE = 4  # what is drawn from the seed: beside those of `sampler.py`
Arrays = tuple[NDArray[np.int64], ...]


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
            "tokens` or `lightning_sparse.data.tokens.prepare`; or give cache_dir, a local folder, to use text or "
            "network storage."
        )
    for each in paths:
        if not each.exists():
            raise ValueError(f"{each} is a link to {os.readlink(each)}, which is not there: mend or remove the link.")
    return _of_one_tokenizer(paths)


def _of_one_tokenizer(paths: Sequence[Path]) -> list[TokenFile]:
    files = [TokenFile.at(each) for each in paths]
    for each in files:
        if each.vocab_size != files[0].vocab_size:
            raise ValueError(
                f"{each.path} has vocab_size {each.vocab_size}, but {files[0].path} has {files[0].vocab_size}: use one "
                "tokenizer for all files."
            )
    return files


class Windows(Protocol):
    """Numbered windows of token ids, those of a stream the same in every epoch."""

    @property
    def context(self) -> int:
        """Number of tokens that a model sees."""

    def __len__(self) -> int:
        """Number of windows of an epoch."""

    @property
    def fingerprint(self) -> str:
        """Hash of what a window's number stands for in each epoch."""

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        """Return (inputs, targets), int64 [B, context] each; with documents that are not joined, (.., positions), too.

        Raises:
            DataError: if an id is not in the vocabulary.
        """


class TokenStream:
    """Fixed windows of token files. Window i of a file begins at token i * context; no window crosses two files.

    Args:
        path: file or folder of shards.
        context: number of tokens that a model sees; a window has one more, the last target.
        files: the shards, if `path` is where they come from.
        documents: as `TokenDataModule`.

    Raises:
        ValueError: as `files_of`; if no file is as long as a window, or `documents` needs an end that is unknown.
    """

    def __init__(
        self, path: str | Path, context: int, files: Sequence[Path] | None = None, documents: Documents = "joined"
    ) -> None:
        self.path, self.context, self.documents = path, context, documents
        self.files = files_of(path) if files is None else _of_one_tokenizer(files)
        self.vocab_size = self.files[0].vocab_size
        self._maps: list[NDArray[Any]] = [
            np.memmap(each.path, each.dtype, "r", shape=each.tokens) if each.tokens else np.zeros(0, each.dtype)
            for each in self.files
        ]
        if documents != "joined":
            self._check_ends()
        self._cut()

    def _check_ends(self) -> None:
        for each in self.files:
            if each.end is None or each.end != self.files[0].end:
                raise ValueError(
                    f"{self.path}: documents={self.documents!r} needs the id at the end of each document, the same in "
                    f'all files, and {each.path.name} has {each.end}: write "end": ID into the JSON beside it, or use '
                    "a tokenizer that has one."
                )

    def _cut(self) -> None:
        counts = np.array([max(0, each.tokens - 1) // self.context for each in self.files])
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        if not len(self):
            longest = max(each.tokens for each in self.files)
            raise ValueError(
                f"{self.path}: context={self.context} needs files of {self.context + 1:,} tokens or more, and the "
                f"longest has {longest:,}. Use a smaller context, or more text."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        about = [(each.dtype.name, each.vocab_size, each.tokens, each.checksum) for each in self.files]
        more = () if self.documents == "joined" else (self.documents, self.files[0].end)
        return hashlib.blake2b(repr((self.context, about, *more)).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        rows = np.empty((len(indices), self.context + 1), np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        starts = (indices - self._begins[shards]) * self.context
        for row, shard, start in zip(rows, shards.tolist(), starts.tolist(), strict=True):
            row[:] = self._read(shard, start, self.context + 1)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.documents == "joined":
            return inputs, targets
        ends = inputs == self.files[0].end
        firsts = np.ones_like(ends)
        firsts[:, 1:] = ends[:, :-1]
        return inputs, np.where(ends, IGNORED, targets), _positions(firsts)

    def _read(self, shard: int, first: int, count: int) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = self._maps[shard][first : first + count].astype(np.int64)
        if ids.max() >= self.vocab_size:
            raise DataError(
                f"{self.files[shard].path}: id {ids.max()} is not below vocab_size={self.vocab_size}. The JSON beside "
                "it belongs to another tokenizer, or the file is damaged."
            )
        return ids


class PackedStream(TokenStream):
    """Windows of whole documents. Those that are longer than a window are cut; room that is left is filled up.

    A document of d tokens, its end among them, has d - 1 inputs, since the end is a target alone.
    """

    def _cut(self) -> None:
        pieces = [self._pieces(shard) for shard in range(len(self.files))]
        shards = np.repeat(np.arange(len(pieces)), [each.shape[1] for each in pieces])
        firsts, lengths = np.concatenate(pieces, 1)
        if not len(lengths):
            raise ValueError(f"{self.path} has no document of two tokens or more. Use more text.")
        windows = pack(lengths, self.context)
        order = np.argsort(windows, kind="stable")
        self._by_window = np.stack([shards, firsts, lengths], 1)[order]
        self._ends = np.cumsum(np.bincount(windows))

    def _pieces(self, shard: int) -> NDArray[np.int64]:
        """Return the first token and the number of inputs of each piece of a document, [2, pieces]."""
        file, ids = self.files[shard], self._maps[shard]
        blocks = range(0, file.tokens, _BLOCK)
        ends = [np.flatnonzero(ids[each : each + _BLOCK] == file.end) + each for each in blocks]
        begins = np.concatenate([[-1], *ends]) + 1
        inputs = np.diff(begins, append=file.tokens) - 1
        begins, inputs = begins[inputs > 0], inputs[inputs > 0]
        counts = -(-inputs // self.context)
        offsets = self.context * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        lengths = np.minimum(np.repeat(inputs, counts) - offsets, self.context)
        return np.stack([np.repeat(begins, counts) + offsets, lengths])

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        inputs = np.full((len(indices), self.context), self.files[0].end, np.int64)
        targets, firsts = np.full_like(inputs, IGNORED), np.zeros(inputs.shape, np.bool_)
        for row, window in enumerate(indices.tolist()):
            begin = int(self._ends[window - 1]) if window else 0
            at = 0
            for shard, first, length in self._by_window[begin : self._ends[window]].tolist():
                ids = self._read(shard, first, length + 1)
                inputs[row, at : at + length], targets[row, at : at + length] = ids[:-1], ids[1:]
                firsts[row, at] = True
                at += length
            firsts[row, at : at + 1] = True  # what fills the window up is no part of the last document
        return inputs, targets, _positions(firsts)

    def __len__(self) -> int:
        return len(self._ends)


def pack(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return the window of each piece: the longest piece first, into the fullest window that has room for it.

    Args:
        lengths: of the pieces, 1 to `room` each.
        room: of a window.

    >>> pack(np.array([2, 5, 3, 4]), room=7)
    array([0, 0, 1, 1])
    """
    windows, count = np.empty(len(lengths), np.int64), 0
    left: dict[int, NDArray[np.int64]] = {}  # room that is left -> windows
    rooms: list[int] = []  # keys of `left`, sorted

    def leave(space: int, some: NDArray[np.int64]) -> None:
        if not space or not len(some):
            return
        if space not in left:
            insort(rooms, space)
        left[space] = np.concatenate([left.get(space, some[:0]), some])

    order = np.argsort(-lengths, kind="stable")
    for pieces in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[pieces[0]])
        while len(pieces) and (place := bisect_left(rooms, length)) < len(rooms):
            space = rooms.pop(place)
            some, rest = np.split(left.pop(space), [len(pieces)])
            windows[pieces[: len(some)]], pieces = some, pieces[len(some) :]
            leave(space, rest)
            leave(space - length, some)
        each = room // length
        new = count + np.arange(-(-len(pieces) // each))
        windows[pieces] = np.repeat(new, each)[: len(pieces)]
        full, last = np.split(new, [len(pieces) // each])
        leave(room - each * length, full)
        leave(room - len(pieces) % each * length, last)
        count += len(new)
    return windows


def _positions(firsts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the position of each token in its document, [B, context]. firsts: whether it is the first one."""
    places = np.arange(firsts.shape[1])
    positions: NDArray[np.int64] = places - np.maximum.accumulate(np.where(firsts, places, 0), 1)
    return positions


def cu_seqlens(positions: Tensor) -> Tensor:
    """Return where the documents of a batch begin, and its end, int32 [documents + 1], as kernels of attention with
    variable lengths take them.

    Args:
        positions: of the tokens, [B, context], as a batch has them.

    >>> cu_seqlens(torch.tensor([[0, 1, 0], [0, 1, 2]])).tolist()
    [0, 2, 3, 6]
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([positions.numel()])]).int()


def document_mask(positions: Tensor) -> Tensor:
    """Return which tokens a token sees: itself and those before it in its document, bool [B, 1, context, context], the
    `attn_mask` of ``scaled_dot_product_attention``. positions: as of `cu_seqlens`."""
    numbers = (positions == 0).cumsum(1)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()


class Part:
    """Some windows of others, numbered anew."""

    def __init__(self, whole: Windows, indices: NDArray[np.int64]) -> None:
        self._whole, self._indices, self.context = whole, indices, whole.context

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self._whole.fingerprint.encode(), digest_size=16)
        digest.update(self._indices.tobytes())
        return digest.hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        return self._whole.windows(self._indices[indices], epoch)


class Mixture:
    """Windows of several streams, in proportion to their weights.

    An epoch has as many windows as it takes to use one stream up. The others go on in the next epoch where they
    stopped, and start over at their end: each window of a stream is used once before any is used again.

    Args:
        weights: of the streams, above 0; only their ratios matter.
        seed: seed of the order in which a stream is used up.
    """

    def __init__(self, streams: Sequence[Windows], weights: Sequence[float], seed: int) -> None:
        self._streams, self.context = streams, streams[0].context
        lengths = np.array([len(each) for each in streams])
        shares = np.array(weights) / max(weights)  # first: their sum may overflow
        shares /= shares.sum()
        self._counts = np.round(shares * (lengths / shares).min()).clip(1, lengths).astype(np.int64)  # of an epoch
        self._ends = np.cumsum(self._counts)
        self._orders = [shuffled(np.arange(each), seed, number, _MIXTURE) for number, each in enumerate(lengths)]
        self._about = (self._counts.tolist(), seed)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        about = (*(each.fingerprint for each in self._streams), *self._about)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        numbers = np.searchsorted(self._ends, indices, side="right")
        out: list[NDArray[np.int64]] = []
        for number in np.unique(numbers).tolist():
            here, order, count = numbers == number, self._orders[number], int(self._counts[number])
            places = indices[here] - (self._ends[number] - count) + epoch * count
            found = self._streams[number].windows(order[places % len(order)], epoch)
            out = out or [np.empty((len(indices), self.context), np.int64) for _ in found]
            for whole, part in zip(out, found, strict=True):
                whole[here] = part
        return tuple(out)
