"""The LightningDataModule of token streams, as a mixin that does not import Lightning."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.data.base import DataModuleMixin
from lightning_sparse.data.peers.collectives import find_topology, on_all_ranks
from lightning_sparse.data.pipeline.batch import BatchRequest
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.pipeline.prefetch import prefetch_map
from lightning_sparse.data.pipeline.sampler import Indices, Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.data.tokens.stream import TokenStream, files_of
from lightning_sparse.messages import described
from lightning_sparse.topology import Topology

_PREFETCH = 4  # batches
Loader = TypeVar("Loader", TrainLoader, EvalLoader)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of `TokenDataModule`, validated on creation."""

    train: str
    val: str | None
    test: str | None
    context: int
    batch_size: int
    val_fraction: float | None
    seed: int

    def __post_init__(self) -> None:
        SamplerConfig(batch_size=self.batch_size)
        if self.context < 1:
            raise ValueError(f"context={self.context} must be at least 1: it is the number of tokens of a sample.")
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must be between 0 and 1: it is a fraction of train.")
        if self.val is not None and self.val_fraction is not None:
            raise ValueError(f"val={self.val!r} and val_fraction={self.val_fraction} exclude each other: omit one.")


class TokenDataModuleMixin(DataModuleMixin):
    """DataModule for files of token ids, such as `lightning_sparse.data.tokens.prepare` writes.

    A sample is a window of ``context + 1`` tokens. Windows follow one another, and their inputs do not overlap. Each
    epoch sees all of them once, in an order that (seed, epoch) determines. A resumed run continues with the next batch,
    also with other nodes. Files are memory-mapped: give each node a copy on a local disk.

    Batches are (inputs int64 [B, context], targets int64 [B, context]): the targets are the inputs, one token later.

    Args:
        train: a ``.bin`` file, or a folder of them.
        val: the same, to validate on.
        test: the same, to test on; default: `val`.
        context: tokens of a sample.
        batch_size: samples per device and step.
        val_fraction: validate on the end of `train`, this fraction of its windows, instead of on `val`.
        seed: seed of the order.

    Raises:
        ValueError: if an argument is out of range, or a file of `train` cannot be used.
    """

    def __init__(
        self,
        train: str | Path,
        val: str | Path | None = None,
        test: str | Path | None = None,
        context: int = 1024,
        batch_size: int = 8,
        val_fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._options = TokenOptions(
            train=str(train),
            val=None if val is None else str(val),
            test=None if test is None else str(test),
            context=context,
            batch_size=batch_size,
            val_fraction=val_fraction,
            seed=seed,
        )
        self.batch_size = batch_size
        self.vocab_size = files_of(train)[0].vocab_size
        """Number of token ids."""
        self._topology: Topology | None = None
        self._streams: dict[str, TokenStream] = {}
        self._loaders: dict[str, TrainLoader | EvalLoader] = {}

    def __str__(self) -> str:
        return described(type(self), repr(self._options.train))

    def setup(self, stage: str) -> None:
        """Map the files. A collective.

        Raises:
            ValueError: if a file cannot be used, or differs between ranks.
        """
        self._close()
        options = self._options

        def opened() -> dict[str, str]:
            wanted = {"train": options.train, "val": options.val, "test": options.test}
            for split, path in wanted.items():
                if path is not None:
                    self._streams[split] = TokenStream(path, options.context)
                    self._check_vocabulary(self._streams[split])
            return {split: stream.fingerprint for split, stream in self._streams.items()}

        self._topology = find_topology(*self._position)
        fingerprints = on_all_ranks(opened)
        for rank, each in enumerate(fingerprints):
            for split, fingerprint in each.items():
                if fingerprint != fingerprints[0][split]:
                    raise ValueError(
                        f"{split}={getattr(options, split)!r} has other tokens on rank {rank} than on rank 0: copy the "
                        "same files to all nodes."
                    )

    def train_dataloader(self) -> TrainLoader:
        """Random windows of this rank."""
        stream, topology = self._opened("train")
        sampler = Sampler(self._samples("train"), lambda nodes: np.arange(len(stream)) % nodes, self._sampler(topology))
        loader = TrainLoader(
            sampler,
            TokenPipeline(stream, pin=self._device.type == "cuda"),
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
        return self._eval_loader("val" if self._options.test is None else "test")

    predict_dataloader = test_dataloader

    def teardown(self, stage: str) -> None:
        """Unmap the files."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Unmap the files."""
        self._close()

    def _eval_loader(self, split: str) -> EvalLoader:
        held_out = split == "val" and self._options.val_fraction is not None
        if split == "val" and self._options.val is None and not held_out:
            raise ValueError(
                "there are no tokens to validate on: give val='val.bin', or validate on the end of train: "
                "val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        stream, topology = self._opened("train" if held_out else split)
        rank = (topology.node_index, topology.device_index)
        owners = np.arange(len(stream)) % topology.num_nodes
        batches = evaluation_batches(self._samples(split), owners, self._sampler(topology), *rank)
        loader = EvalLoader(batches, TokenPipeline(stream, pin=self._device.type == "cuda"))
        return self._replace(split, loader)

    def _samples(self, split: str) -> Indices:
        """Return the windows of a split, in order."""
        fraction = self._options.val_fraction
        if split == "test" or fraction is None:
            return np.arange(len(self._streams[split]))
        count = len(self._streams["train"])
        if count < 2:
            raise ValueError(f"val_fraction={fraction}: {count} window(s) are too few to split; at least 2 are needed.")
        first = count - min(count - 1, max(1, round(fraction * count)))
        return np.arange(first, count) if split == "val" else np.arange(first)

    def _sampler(self, topology: Topology) -> SamplerConfig:
        devices = tuple(len(node) for node in topology.nodes)
        return SamplerConfig(batch_size=self.batch_size, devices=devices, shuffle="global", seed=self._options.seed)

    def _check_vocabulary(self, stream: TokenStream) -> None:
        if stream.vocab_size != self.vocab_size:
            raise ValueError(
                f"{stream.path} has vocab_size {stream.vocab_size}, but train={self._options.train!r} has "
                f"{self.vocab_size}: use one tokenizer for all files."
            )

    def _opened(self, split: str) -> tuple[TokenStream, Topology]:
        if self._topology is None:
            raise ValueError("TokenDataModule has no loaders before setup(): call it, or use a Trainer.")
        return self._streams[split], self._topology

    def _replace(self, split: str, loader: Loader) -> Loader:
        if split in self._loaders:  # Lightning requests a new loader: stop the old one
            self._loaders[split].close()
        self._loaders[split] = loader
        return loader

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders, self._streams, self._topology = {}, {}, None
        self._forget_loader()


class TokenPipeline:
    """Makes batches of windows, in a thread: pages of the files are read from disk when they are used.

    Args:
        pin: use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, stream: TokenStream, *, pin: bool = False) -> None:
        self._stream, self._pin = stream, pin

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield (inputs, targets), int64 [B, context] each, in the order of requests."""
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(self._stream.windows(request.indices))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return (inputs.pin_memory(), targets.pin_memory()) if self._pin else (inputs, targets)
