"""The DataModule of token ids, as a mixin that does not import Lightning, and masks for the documents of its batches.

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian. ``<name>.json`` describes it: ``{"dtype":
"uint16", "vocab_size": 50257}``. The optional ``"end": 50256`` is the id at the end of each document.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.agree import on_all, on_first
from lightning_sparse.data.config import check_batch_size, check_fraction, check_limit, limited_count
from lightning_sparse.data.datamodule import DataModuleMixin
from lightning_sparse.data.id_files import Corpus, check_vocab_size, prepare, token_files
from lightning_sparse.data.pipeline.loader import BatchRequest, EvalLoader, TrainLoader, Turn, prefetch_map
from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.data.session import find_topology
from lightning_sparse.data.shards import (
    TokenSource,
    Workers,
    check_cache_dir,
    files_of,
    is_used_in_place,
    log_unused_files,
    verified_in_place,
)
from lightning_sparse.data.text import TOKENIZERS
from lightning_sparse.data.windows import (
    DOCUMENTS,
    Documents,
    Mixture,
    PackedStream,
    TokenStream,
    TokenWindows,
    limited,
    mixed,
    split,
)
from lightning_sparse.messages import class_repr, ensure_log_handler, log
from lightning_sparse.options import one_of, whole
from lightning_sparse.topology import Topology

__all__ = ["TokenDataModuleMixin", "TokenStream", "cu_seqlens", "document_mask", "files_of", "prepare"]

POLL_S = 2.0  # far below the timeout of a process group
_PREFETCH = 4  # batches


def cu_seqlens(positions: Tensor) -> Tensor:
    """Return the begins of the documents of a batch, and its end, int32 [documents + 1].

    Variable-length attention kernels take this format. `positions` [B, context] are those of the batch.

    >>> cu_seqlens(torch.tensor([[0, 1, 0], [0, 1, 2]])).tolist()
    [0, 2, 3, 6]
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([positions.numel()])]).int()


def document_mask(positions: Tensor) -> Tensor:
    """Return the `attn_mask` of ``scaled_dot_product_attention``, bool [B, 1, context, context]. See `cu_seqlens`."""
    numbers = (positions == 0).cumsum(1)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()


class TokenDataModuleMixin(DataModuleMixin):
    """DataModule for token ids, and for text, which it tokenizes once.

    A sample is a window of ``context + 1`` tokens. The inputs of windows do not overlap. Each epoch uses every window
    at least once; the last steps may repeat some. A mixture is an exception (see `train`). The order depends only on
    (seed, epoch). A resumed run continues with the next batch, even on another number of nodes.

    ``.bin`` files on a local disk, such as `lightning_sparse.data.tokens.prepare` writes, are used in place. Other
    sources need `cache_dir`: each host reads each file from storage once, tokenizes text, and keeps the ids there.
    Files of ids are ``.bin`` and ``.npy``; files of text are ``.txt``, ``.jsonl``, ``.tar`` and ``.parquet``.

    A batch is (inputs, targets), both int64 [B, context]. The targets are the inputs shifted by one token. Unless
    documents are joined, a batch also contains the positions of the tokens in their documents, int64 [B, context], for
    `lightning_sparse.data.tokens.document_mask` and `cu_seqlens`. A target in another document is -100, which torch's
    cross entropy ignores.

    Args:
        train: Path or fsspec URL of a file, a folder, or a pattern such as ``data/train-*.parquet``; or a mixture with
            weights. An epoch of the mixture ``{"s3://bucket/web": 0.7, "/data/books": 0.3}`` uses windows of each
            source in this proportion. It ends when all windows of one source are used; the other sources continue in
            the next epoch.
        val: Path or URL of a file or folder to validate on.
        test: Path or URL of a file or folder to test on. Default: `val`.
        context: Number of input tokens per sample.
        documents: How windows treat the ends of documents: ``"joined"``, ``"separate"`` or ``"packed"``. ``"joined"``:
            windows continue across the ends of documents and files. ``"separate"``: the windows of "joined", with
            positions. ``"packed"``: windows contain whole documents; longer documents are cut.
        limit: Number or fraction of the training samples to use, for a trial. All runs train on identical windows. With
            a mixture, the number is approximate, because each source keeps its weight and at least one window.
        batch_size: Number of samples per device and step.
        val_fraction: Fraction of the tokens of each source of `train` to validate on, instead of `val`. It consists of
            random documents, equal for all seeds.
        seed: Seed of the order of samples.
        cache_dir: Folder on a local disk of each node. It keeps the ids of text and of network storage. Runs may share
            it.
        tokenizer: Tokenizer of text: ``"bytes"``, ``"tiktoken:<encoding>"`` or ``"tokenizers:<path of
            tokenizer.json>"``.
        vocab_size: Number of distinct ids. Required for ``.npy``. Default: from the tokenizer, or from the JSON file of
            a ``.bin``.
        on_corrupt: How to handle an unreadable document: ``"raise"`` an error that names it, or ``"skip"`` and count
            it.
        storage_timeout: Seconds to wait for storage that does not respond before the run fails.
        storage_options: Arguments for fsspec to open the source, such as ``{"endpoint_url": "http://minio:9000"}``.

    Raises:
        ValueError: if an argument is out of range, a file of `train` cannot be used, or a folder contains several
            splits, such as ``train`` and ``validation``.
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
        on_corrupt: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__()
        options = {"batch_size": batch_size, "context": context, "val_fraction": val_fraction, "documents": documents}
        check_batch_size(options)
        whole(options, "context", low=1, hint="it is the number of tokens of a sample")
        check_fraction(options)
        one_of(options, "documents", DOCUMENTS)
        if val is not None and val_fraction is not None:
            raise ValueError(f"val={str(val)!r} and val_fraction={val_fraction} exclude each other: omit one.")
        if vocab_size is not None:
            check_vocab_size(vocab_size)
        check_limit(limit)
        whole({"seed": seed}, "seed")
        if not isinstance(tokenizer, str):
            raise ValueError(f"tokenizer={tokenizer!r} must be {TOKENIZERS}. Omit it to use 'bytes'.")
        for name, path in (("val", val), ("test", test)):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise ValueError(f"{name}={path!r} must be a path.")
        self._weights = _weights_of(train)
        self._documents, self._limit = documents, limit
        self._paths = {split: str(path) for split, path in (("val", val), ("test", test)) if path is not None}
        self._context, self._val_fraction, self._seed = context, val_fraction, seed
        self.batch_size = batch_size
        self._cache_dir = cache_dir
        self._sources: dict[str, TokenSource] = {}  # by path
        if cache_dir is not None:
            for path in self._all_paths:
                check_cache_dir(path, cache_dir)
                if not is_used_in_place(path):
                    self._sources[path] = TokenSource.of(
                        path,
                        cache_dir,
                        tokenizer,
                        vocab_size,
                        storage_timeout=storage_timeout,
                        on_corrupt=on_corrupt,
                        storage_options=storage_options if "://" in path else None,
                    )
        for path in sorted(self._weights.keys() - self._sources.keys()):  # files that are used in place
            own = files_of(path)[0].vocab_size
            if vocab_size not in (None, own):
                raise ValueError(f"{path} has vocab_size {own}, not {vocab_size}: use one tokenizer for all.")
            vocab_size = own
        self._vocab_size = vocab_size
        self._topology: Topology | None = None
        self._streams: dict[str, TokenWindows] = {}
        self._turns: dict[str, Turn] = defaultdict(Turn)  # by split

    @property
    def vocab_size(self) -> int:
        """Number of token ids, available before setup to create the model. It may list the shards."""
        if self._vocab_size is None:
            source = self._sources[next(iter(self._weights))]
            self._vocab_size = source.size_of_vocabulary(source.listed())
        return self._vocab_size

    def __str__(self) -> str:
        return class_repr(type(self), {"train": ", ".join(self._weights)})

    def setup(self, stage: str) -> None:
        """Write missing ids to the cache, then open the files. A collective."""
        ensure_log_handler()
        self._average_exactly()
        self._close()
        self._topology = topology = find_topology(*self._position)
        if len(set(on_all(lambda: tuple(path in self._sources for path in self._all_paths)))) > 1:
            raise ValueError(f"{', '.join(self._all_paths)}: some nodes have the files, others do not.")
        made = {path: _prepared(source, topology) for path, source in self._sources.items()}
        checksums = {path: self._checksums(path) for path in self._all_paths if path not in made}
        fingerprints = on_all(lambda: self._open(made, checksums))
        for rank, of_rank in enumerate(fingerprints):
            for path, own, first in zip(self._all_paths, of_rank, fingerprints[0], strict=True):
                if own != first:
                    raise ValueError(
                        f"{path} has different tokens on rank {rank} and on rank 0: copy the same files to all nodes."
                    )

    def _checksums(self, path: str) -> list[int]:
        topology = self._topology
        assert topology is not None
        on_first(lambda: log_unused_files(path))
        # one process per host reads the files
        of_ranks = on_all(
            lambda: verified_in_place(files_of(path), self._cache_dir) if topology.device_index == 0 else []
        )
        return of_ranks[topology.nodes[topology.node_index][0]]

    @property
    def _all_paths(self) -> tuple[str, ...]:
        return (*self._weights, *self._paths.values())

    def _open(self, made: Mapping[str, Sequence[Path]], checksums: Mapping[str, Sequence[int]]) -> list[str]:
        kind = PackedStream if self._documents == "packed" else TokenStream
        streams = {}
        for path in self._all_paths:
            if path in made:
                files = token_files(made[path])
            else:
                pairs = zip(files_of(path), checksums[path], strict=True)
                files = [replace(file, checksum=checksum) for file, checksum in pairs]
            streams[path] = kind(Corpus(path, files), self._context, self._documents)
        first = next(iter(self._weights))
        self._vocab_size = self._vocab_size or streams[first].corpus.vocab_size  # without asking storage again
        for path, stream in streams.items():
            if stream.corpus.vocab_size != self._vocab_size:
                raise ValueError(
                    f"{path} has vocab_size {stream.corpus.vocab_size}, but train={first!r} has {self._vocab_size}: "
                    "use one tokenizer for all files."
                )
        parts: Sequence[TokenWindows] = [streams[path] for path in self._weights]
        weights = [*self._weights.values()]
        self._streams = {split: streams[path] for split, path in self._paths.items()}
        if self._val_fraction is not None:
            halves = [split(streams[path], self._val_fraction) for path in self._weights]
            parts, held_out = zip(*halves, strict=True)
            # of all held-out windows
            self._streams["val"] = mixed(held_out, [len(part) for part in held_out], self._seed)
        if self._limit is not None:
            whole = len(mixed(parts, weights, self._seed))
            fraction = limited_count(self._limit, whole) / whole
            parts = [limited(part, fraction) for part in parts]
        self._streams["train"] = mixed(parts, weights, self._seed)
        # in the order of the options, because paths may differ between ranks
        return [streams[path].fingerprint for path in self._all_paths]

    def train_dataloader(self) -> TrainLoader:
        stream, topology = self._opened("train")
        samples = np.arange(len(stream))
        sampler = Sampler(samples, lambda nodes: samples % nodes, self._sampler(topology))
        self._log_epoch(stream, sampler)
        loader = TrainLoader(
            sampler,
            TokenPipeline(stream, pin=self._device.type == "cuda", fixed=self._fixed),
            rank=(topology.node_index, topology.device_index),
            fingerprint=stream.fingerprint,
            fixed=self._fixed,
            on_resume=self._correct_batch_count,
            turn=self._turns["train"],
        )
        return self._resume(loader)

    def _log_epoch(self, stream: TokenWindows, sampler: Sampler) -> None:
        if self._topology is None or self._topology.rank != 0:
            return
        batch, count = sampler.config.global_batch, len(stream)
        log.info(
            f"{count:,} windows, global batch {batch:,}: {sampler.steps:,} steps per epoch, with "
            f"{sampler.epoch(0).num_repeated:,} windows repeated to fill the last steps"
        )
        if batch > count:
            log.warning(
                f"an epoch has only {count:,} windows, so each batch of {batch:,} repeats windows: use a smaller "
                "batch_size, fewer ranks, or more data"
                + (", or other weights." if isinstance(stream, Mixture) else ".")
            )
        if isinstance(stream, Mixture):
            for path, (intended, share) in zip(self._weights, stream.shares, strict=True):
                if abs(share - intended) > 0.1 * intended:
                    log.warning(
                        f"{path} has a weight of {intended:.2%} but {share:.2%} of the windows of an epoch: an epoch "
                        f"has only {count:,} windows, and at least one of each source. Use other weights, or more data."
                    )

    def val_dataloader(self) -> EvalLoader:
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        return self._eval_loader("test" if "test" in self._streams else "val")

    predict_dataloader = test_dataloader

    def _eval_loader(self, split: str) -> EvalLoader:
        if self._topology is not None and split not in self._streams:
            raise ValueError(
                "there are no tokens to validate on: give val='val.bin', or validate on a part of train: "
                "val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        stream, topology = self._opened(split)
        rank = (topology.node_index, topology.device_index)
        samples = np.arange(len(stream))
        batches = evaluation_batches(samples, samples % topology.num_nodes, self._sampler(topology), *rank, pairs=True)
        pipeline = TokenPipeline(stream, pin=self._device.type == "cuda")
        return EvalLoader(batches, pipeline, turn=self._turns[split])

    def _sampler(self, topology: Topology) -> SamplerConfig:
        devices = tuple(len(node) for node in topology.nodes)
        return SamplerConfig(batch_size=self.batch_size, devices=devices, shuffle="global", seed=self._seed)

    def _opened(self, split: str) -> tuple[TokenWindows, Topology]:
        if self._topology is None:
            raise ValueError("TokenDataModule has no loaders before setup(): call it, or use a Trainer.")
        return self._streams[split], self._topology

    def _close(self) -> None:
        for turn in self._turns.values():
            turn.end()
        self._streams, self._topology = {}, None
        self._forget_loader()


def _prepared(source: TokenSource, topology: Topology) -> list[Path]:
    shards = on_first(source.listed)
    workers = Workers(source, shards if topology.device_index == 0 else [], quiet=topology.rank != 0)
    try:
        # One process per host makes missing files. All ranks poll, so that no collective reaches its timeout.
        while not all(on_all(lambda: workers.done(POLL_S))):
            pass
    finally:
        workers.close()
    return [source.file(shard) for shard in shards]


def _weights_of(train: str | Path | Mapping[str, float]) -> dict[str, float]:
    if isinstance(train, (str, os.PathLike)):
        return {str(train): 1.0}
    if not isinstance(train, Mapping):
        raise ValueError(f"train={train!r} must be a path, or a dict of paths and weights.")
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
    """Makes batches of windows, in a thread: pages of the files are read from disk when they are used."""

    def __init__(self, stream: TokenWindows, *, pin: bool = False, fixed: bool = False) -> None:
        self._stream, self._pin, self._fixed, self.prefetch_depth = stream, pin, fixed, _PREFETCH

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, ...], None, None]:
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, ...]:
        arrays = self._stream.windows(request.indices, 0 if self._fixed else request.epoch)
        tensors = (torch.from_numpy(array).contiguous() for array in arrays)
        return tuple(tensor.pin_memory() if self._pin else tensor for tensor in tensors)
