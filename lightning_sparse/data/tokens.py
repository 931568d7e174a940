"""Windows of memory-mapped files of token ids, and their DataModule, as a mixin that does not import Lightning.

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian, one after the other. Beside it, ``<name>.json``
says ``{"dtype": "uint16", "vocab_size": 50257}``, and may say more: ``"end": 50256`` is the id at the end of each
document. A folder of such files is read as shards, by name. `text` makes them of text, `shards` of network storage.
"""

from __future__ import annotations

import hashlib
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.config import DataError, check_fraction, check_limit, limited_count
from lightning_sparse.data.datamodule import DataModuleMixin
from lightning_sparse.data.peers.collectives import find_topology, on_all_ranks, on_rank_zero
from lightning_sparse.data.pipeline.batch import BatchRequest
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.pipeline.prefetch import prefetch_map
from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.data.rng import shuffled
from lightning_sparse.data.shards import TokenSource, Workers, is_mapped_in_place
from lightning_sparse.data.text import TokenFile, check_vocab_size, prepare
from lightning_sparse.messages import described, show_log_lines
from lightning_sparse.topology import Topology

__all__ = ["TokenDataModuleMixin", "TokenStream", "cu_seqlens", "document_mask", "files_of", "prepare"]

POLL_S = 2.0  # far below the timeout of a process group
_PREFETCH = 4  # batches
_MIXTURE, _LIMIT = 4, 5  # what is drawn: beside those of `sampler.py`
Loader = TypeVar("Loader", TrainLoader, EvalLoader)
Documents = Literal["joined", "separate", "packed"]
DOCUMENTS = get_args(Documents)
IGNORED = -100  # a target that torch's cross entropy leaves out
_BLOCK = 1 << 24
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


class TokenDataModuleMixin(DataModuleMixin):
    """DataModule for token ids, and for text, which it tokenises once.

    A sample is a window of ``context + 1`` tokens. Windows follow one another, and their inputs do not overlap. Each
    epoch sees all of them once, in an order that (seed, epoch) determines. A resumed run continues with the next batch,
    also with other nodes.

    Files ``.bin`` on a disk of the node, such as `lightning_sparse.data.tokens.prepare` writes, are memory-mapped where
    they are. Other sources need `cache_dir`: each host reads each shard from storage once, tokenises it if it is text,
    and keeps its ids there. Shards of ids are ``.bin`` and ``.npy``, shards of text ``.txt``, ``.jsonl``, ``.tar`` and
    ``.parquet``.

    Batches are (inputs int64 [B, context], targets int64 [B, context]): the targets are the inputs, one token later. If
    documents are not joined, the positions of the tokens in their documents follow, int64 [B, context], of which
    `lightning_sparse.data.tokens.document_mask` makes a mask for attention and `cu_seqlens` the ends of documents; a
    target that is of another document is -100, which torch's cross entropy leaves out.

    Args:
        train: a file, or a folder of shards: a path or an fsspec URL. Or several with weights, as
            ``{"s3://bucket/web": 0.7, "/data/books": 0.3}``: an epoch takes windows of each in this proportion, and
            ends when all windows of one were used; the others go on in the next epoch.
        val: a file, or a folder of shards, to validate on.
        test: the same, to test on; default: `val`.
        context: tokens of a sample.
        documents: ``"joined"``: windows go on over the ends of documents; ``"separate"``: the same windows, with
            positions; ``"packed"``: a window has whole documents, and only those that are longer are cut.
        limit: train on this number of windows, or this fraction of them, the same in every run: for a trial. Of a
            mixture as many as the weights allow near it, at least one of each source.
        batch_size: samples per device and step.
        val_fraction: validate on the end of `train`, this fraction of the windows of each source, instead of on `val`.
        seed: seed of the order.
        cache_dir: folder on a local disk of each node, for the ids of text and of network storage. Runs may share it.
        tokenizer: of text: ``"bytes"``, ``"tiktoken:<encoding>"`` or ``"tokenizers:<path of tokenizer.json>"``.
        vocab_size: number of ids; needed for ``.npy``; default: that of the tokenizer, or of the JSON beside ``.bin``.
        storage_timeout: seconds to wait for storage that does not respond before the run fails.
        storage_options: arguments for fsspec to open a URL, such as ``{"endpoint_url": "http://minio:9000"}``.

    Raises:
        ValueError: if an argument is out of range, or a file of `train` cannot be used.
    """

    def __init__(
        self,
        train: str | Path | dict[str, float],
        val: str | Path | None = None,
        test: str | Path | None = None,
        context: int = 1024,
        batch_size: int = 8,
        val_fraction: float | None = None,
        seed: int = 0,
        *,
        cache_dir: str | None = None,
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        storage_timeout: float = 300.0,
        storage_options: dict[str, Any] | None = None,
        documents: Documents = "joined",
        limit: int | float | None = None,
    ) -> None:
        super().__init__()
        SamplerConfig(batch_size=batch_size)
        _check_options(context, val, val_fraction, vocab_size, documents)
        check_limit(limit)
        self._weights = _weights_of(train)
        self._documents, self._limit = documents, limit
        self._paths = {split: str(path) for split, path in (("val", val), ("test", test)) if path is not None}
        self._context, self._val_fraction, self._seed = context, val_fraction, seed
        self.batch_size = batch_size
        self._sources: dict[str, TokenSource] = {}  # by path
        for path in (*self._weights, *self._paths.values()):
            if cache_dir is not None and not is_mapped_in_place(path):
                options = storage_options if "://" in path else None
                self._sources[path] = TokenSource.of(
                    path, cache_dir, tokenizer, vocab_size, storage_timeout=storage_timeout, storage_options=options
                )
        self._vocab_size = self._mapped_vocabulary(vocab_size)
        self._topology: Topology | None = None
        self._streams: dict[str, Windows] = {}
        self._loaders: dict[str, TrainLoader | EvalLoader] = {}

    def _mapped_vocabulary(self, vocab_size: int | None) -> int | None:
        """Return the vocabulary of the files to train on that are mapped in place; the given one if there are none."""
        for path in sorted(self._weights.keys() - self._sources.keys()):
            own = files_of(path)[0].vocab_size
            if vocab_size not in (None, own):
                raise ValueError(f"{path} has vocab_size {own}, not {vocab_size}: use one tokenizer for all.")
            vocab_size = own
        return vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Available before setup, to create the model: lists the shards, if it depends on them."""
        if self._vocab_size is None:
            source = self._sources[next(iter(self._weights))]
            self._vocab_size = source.size_of_vocabulary(source.listed())
        return self._vocab_size

    def __str__(self) -> str:
        return described(type(self), {"train": ", ".join(self._weights)})

    def setup(self, stage: str) -> None:
        """Map the files, after those that are missing in the cache were made. A collective.

        Raises:
            ValueError: if a file cannot be used, or differs between ranks.
            DataError: if storage or the cache folder cannot be used.
        """
        show_log_lines()
        self._close()
        self._topology = topology = find_topology(*self._position)
        if len(set(on_all_ranks(lambda: tuple(path in self._sources for path in self._all_paths)))) > 1:
            raise ValueError(f"{', '.join(self._all_paths)}: some nodes have the files, others do not.")
        made = {path: _prepared(source, topology) for path, source in self._sources.items()}
        fingerprints = on_all_ranks(lambda: self._open(made))
        for rank, each in enumerate(fingerprints):
            for path, own, first in zip(self._all_paths, each, fingerprints[0], strict=True):
                if own != first:
                    raise ValueError(
                        f"{path} has other tokens on rank {rank} than on rank 0: copy the same files to all nodes."
                    )

    @property
    def _all_paths(self) -> tuple[str, ...]:
        return (*self._weights, *self._paths.values())

    def _open(self, made: Mapping[str, Sequence[Path]]) -> list[str]:
        """Map the files; return the fingerprint of each path, in one order on all ranks, since paths may differ.

        Args:
            made: files in the cache, of those paths that are not mapped in place.
        """
        kind = PackedStream if self._documents == "packed" else TokenStream
        streams = {path: kind(path, self._context, made.get(path), self._documents) for path in self._all_paths}
        first = next(iter(self._weights))
        self._vocab_size = self._vocab_size or streams[first].vocab_size  # without asking storage again
        for path, stream in streams.items():
            if stream.vocab_size != self._vocab_size:
                raise ValueError(
                    f"{path} has vocab_size {stream.vocab_size}, but train={first!r} has {self._vocab_size}: use one "
                    "tokenizer for all files."
                )
        parts: Sequence[Windows] = [streams[path] for path in self._weights]
        weights = [*self._weights.values()]
        self._streams = {split: streams[path] for split, path in self._paths.items()}
        if self._val_fraction is not None:
            parts, held_out = zip(*(_split(each, self._val_fraction) for each in parts), strict=True)
            self._streams["val"] = _mixed(held_out, [len(each) for each in held_out], self._seed)  # all of each
        if self._limit is not None:
            whole = len(_mixed(parts, weights, self._seed))
            fraction = limited_count(self._limit, whole) / whole
            parts = [_limited(each, fraction) for each in parts]
        self._streams["train"] = _mixed(parts, weights, self._seed)
        return [streams[path].fingerprint for path in self._all_paths]

    def train_dataloader(self) -> TrainLoader:
        """Random windows of this rank."""
        stream, topology = self._opened("train")
        samples = np.arange(len(stream))
        sampler = Sampler(samples, lambda nodes: samples % nodes, self._sampler(topology))
        loader = TrainLoader(
            sampler,
            TokenPipeline(stream, pin=self._device.type == "cuda", fixed=self._fixed),
            rank=(topology.node_index, topology.device_index),
            fingerprint=stream.fingerprint,
            fixed=self._fixed,
            on_resume=self._correct_batch_count,
        )
        return self._resume(self._replace("train", loader))

    def val_dataloader(self) -> EvalLoader:
        """This rank's share of the windows to validate on, in order.

        Raises:
            ValueError: if there are none.
        """
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """This rank's share of the windows to test on, in order."""
        return self._eval_loader("test" if "test" in self._streams else "val")

    predict_dataloader = test_dataloader

    def _eval_loader(self, split: str) -> EvalLoader:
        if self._topology is not None and split not in self._streams:
            raise ValueError(
                "there are no tokens to validate on: give val='val.bin', or validate on the end of train: "
                "val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        stream, topology = self._opened(split)
        rank = (topology.node_index, topology.device_index)
        samples = np.arange(len(stream))
        batches = evaluation_batches(samples, samples % topology.num_nodes, self._sampler(topology), *rank)
        return self._replace(split, EvalLoader(batches, TokenPipeline(stream, pin=self._device.type == "cuda")))

    def _sampler(self, topology: Topology) -> SamplerConfig:
        devices = tuple(len(node) for node in topology.nodes)
        return SamplerConfig(batch_size=self.batch_size, devices=devices, shuffle="global", seed=self._seed)

    def _opened(self, split: str) -> tuple[Windows, Topology]:
        if self._topology is None:
            raise ValueError("TokenDataModule has no loaders before setup(): call it, or use a Trainer.")
        return self._streams[split], self._topology

    def _replace(self, split: str, loader: Loader) -> Loader:
        if split in self._loaders:  # Lightning requests a new loader: stop the old one
            self._loaders[split].close()
        self._loaders[split] = loader
        return loader

    def _close(self) -> None:
        """Stop the loaders and unmap the files."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders, self._streams, self._topology = {}, {}, None
        self._forget_loader()


def _prepared(source: TokenSource, topology: Topology) -> list[Path]:
    """Return the files of ids of all shards, after one process of each host has made those that are missing. A
    collective.

    Raises:
        ValueError, DataError: on all ranks, as `TokenSource.listed` and `TokenSource.make` on one.
    """
    shards = on_rank_zero(source.listed)
    workers = Workers(source, shards if topology.device_index == 0 else [], quiet=topology.rank != 0)
    try:
        while not all(on_all_ranks(lambda: workers.done(POLL_S))):
            pass
    finally:
        workers.close()
    return [source.file(each) for each in shards]


def _mixed(parts: Sequence[Windows], weights: Sequence[float], seed: int) -> Windows:
    """Return the mixture of several parts, or the only one."""
    return parts[0] if len(parts) == 1 else Mixture(parts, weights, seed)


def _split(windows: Windows, fraction: float) -> tuple[Windows, Windows]:
    """Return the windows to train on, and those at the end, this fraction, to validate on."""
    count = len(windows)
    if count < 2:
        raise ValueError(f"val_fraction={fraction}: {count} window(s) are too few to split; at least 2 are needed.")
    first = count - min(count - 1, max(1, round(fraction * count)))
    return Part(windows, np.arange(first)), Part(windows, np.arange(first, count))


def _limited(windows: Windows, fraction: float) -> Windows:
    """Return this fraction of the windows, at least one. Those of a smaller fraction are among those of a larger."""
    some = shuffled(np.arange(len(windows)), 0, _LIMIT)[: max(1, round(fraction * len(windows)))]
    return Part(windows, np.sort(some))


def _check_options(
    context: int, val: object, val_fraction: float | None, vocab_size: int | None, documents: str
) -> None:
    """Raise ValueError if an option of `TokenDataModuleMixin` is out of range."""
    if context < 1:
        raise ValueError(f"context={context} must be at least 1: it is the number of tokens of a sample.")
    check_fraction(val_fraction)
    if val is not None and val_fraction is not None:
        raise ValueError(f"val={str(val)!r} and val_fraction={val_fraction} exclude each other: omit one.")
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    if documents not in DOCUMENTS:
        raise ValueError(f"documents={documents!r}: choose one of {', '.join(DOCUMENTS)}.")


def _weights_of(train: str | Path | Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each path of `train`."""
    if not isinstance(train, Mapping):
        return {str(train): 1.0}
    if not train:
        raise ValueError("train={} names no source: give a path, or paths with weights.")
    for path, weight in train.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight <= sys.float_info.max:
            raise ValueError(
                f"train: the weight {weight!r} of {path} must be a finite number above 0: omit a source that is not "
                "used."
            )
    return {str(path): float(weight) for path, weight in train.items()}


class TokenPipeline:
    """Makes batches of windows, in a thread: pages of the files are read from disk when they are used.

    Args:
        pin: use pinned memory, for asynchronous copies to a GPU.
        fixed: use the windows of epoch 0 in every epoch.
    """

    def __init__(self, stream: Windows, *, pin: bool = False, fixed: bool = False) -> None:
        self._stream, self._pin, self._fixed, self.ahead = stream, pin, fixed, _PREFETCH

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, ...], None, None]:
        """Yield batches, in the order of requests."""
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, ...]:
        arrays = self._stream.windows(request.indices, 0 if self._fixed else request.epoch)
        tensors = (torch.from_numpy(each).contiguous() for each in arrays)
        return tuple(each.pin_memory() if self._pin else each for each in tensors)
