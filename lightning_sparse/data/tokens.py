"""The LightningDataModule of token ids, as a mixin that does not import Lightning.

`text` makes ids of text, `shards` those of sources on network storage, and `streams` windows of them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.data.config import check_fraction, check_limit, limited_count
from lightning_sparse.data.datamodule import DataModuleMixin
from lightning_sparse.data.peers.collectives import find_topology, on_all_ranks, on_rank_zero
from lightning_sparse.data.pipeline.batch import BatchRequest
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.pipeline.prefetch import prefetch_map
from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.data.rng import shuffled
from lightning_sparse.data.shards import TokenSource, Workers, is_mapped_in_place
from lightning_sparse.data.streams import (
    DOCUMENTS,
    Documents,
    Mixture,
    PackedStream,
    Part,
    TokenStream,
    Windows,
    cu_seqlens,
    document_mask,
    files_of,
)
from lightning_sparse.data.text import check_vocab_size, prepare
from lightning_sparse.messages import described, show_log_lines
from lightning_sparse.topology import Topology

__all__ = ["TokenDataModuleMixin", "TokenStream", "cu_seqlens", "document_mask", "files_of", "prepare"]

POLL_S = 2.0  # far below the timeout of a process group
_PREFETCH = 4  # batches
_LIMIT = 5  # what is drawn: beside those of `sampler.py` and `streams.py`
Loader = TypeVar("Loader", TrainLoader, EvalLoader)


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
        self._stream, self._pin, self._fixed = stream, pin, fixed

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, ...], None, None]:
        """Yield batches, in the order of requests."""
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, ...]:
        arrays = self._stream.windows(request.indices, 0 if self._fixed else request.epoch)
        tensors = (torch.from_numpy(each).contiguous() for each in arrays)
        return tuple(each.pin_memory() if self._pin else each for each in tensors)
