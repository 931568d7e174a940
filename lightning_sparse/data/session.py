"""Everything that is open between setup and teardown: manifests, stores, pipelines, loaders. No Lightning.

What depends on other ranks happens in one order on all of them, when a session is made: where the ranks are, the
manifest (rank 0 lists, all have the same), the secret of the run, the addresses of peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np
import torch

from lightning_sparse.data.cache.counts import TierCounts, TierSizes
from lightning_sparse.data.cache.manifest import Manifest, load_or_list
from lightning_sparse.data.cache.placement import Placement, owners
from lightning_sparse.data.cache.storage import StorageTimeoutError
from lightning_sparse.data.cache.store import SampleStore, new_run, open_store
from lightning_sparse.data.cache.summary import TierLog
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.peers.collectives import find_topology, on_all_ranks, on_rank_zero
from lightning_sparse.data.pipeline.backend import BACKENDS, Backend, choose_backend
from lightning_sparse.data.pipeline.batch import Look, Pipeline
from lightning_sparse.data.pipeline.loader import EvalLoader, ImageSizes, TrainLoader
from lightning_sparse.data.pipeline.rng import shuffled
from lightning_sparse.data.pipeline.sampler import Indices, Layout, Order, evaluation_batches
from lightning_sparse.messages import log, show_log_lines
from lightning_sparse.topology import Topology

_MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asked for, beyond the cache.

    Raises:
        ValueError: for a value out of its range.
    """

    cache: CacheConfig
    batch_size: int
    sizes: ImageSizes
    look: Look
    backend: Backend = "auto"
    val_fraction: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        Layout(batch_size=self.batch_size)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not known: choose one of {', '.join(BACKENDS)}.")
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must lie between 0 and 1: it is a share of train/.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or None for a share of the cores.")
        if self.cache.short_side < self.sizes.largest:
            raise ValueError(
                f"short_side={self.cache.short_side} is less than the largest image_size, {self.sizes.largest}: cached "
                f"pictures would be blown up. Leave it out, or give at least {self.sizes.largest}."
            )


@dataclass
class Part:
    """Samples of a split that are trained or validated on."""

    store: SampleStore
    samples: Indices


@dataclass
class Session:
    """
    Args:
        wish: what was asked for.
        topology: of the run.
        device: that the batches are for.

    Attributes:
        train, val: None where there is none.
    """

    wish: Wish
    topology: Topology
    device: torch.device
    train: Part | None = None
    val: Part | None = None
    _stores: list[SampleStore] = field(default_factory=list)
    _pipelines: dict[str, Pipeline] = field(default_factory=dict)  # by purpose, as the loaders
    _loaders: dict[str, TrainLoader | EvalLoader] = field(default_factory=dict)

    def open(self, run: bytes, training: bool) -> None:
        """Open the stores of a run. A collective."""
        cache, fraction = self.wish.cache, self.wish.val_fraction
        if training or fraction is not None:
            store = self._open_store(on_rank_zero(partial(load_or_list, cache, "train")), run)
            self.train = Part(store, np.arange(len(store.manifest)))
            if fraction is not None:
                held_out, rest = _split(len(store.manifest), fraction)
                self.train, self.val = Part(store, rest), Part(store, held_out)
                return
        manifest = on_rank_zero(partial(_manifest_if_any, cache, "val"))
        if manifest is not None:
            self.val = Part(self._open_store(manifest, run), np.arange(len(manifest)))

    def _open_store(self, manifest: Manifest, run: bytes) -> SampleStore:
        here = self.topology
        place = Placement(here.node_index, here.num_nodes, here.device_index, here.num_devices)
        serves = here.num_nodes > 1 and self.wish.cache.shuffle != "local"

        def endpoint() -> tuple[int, str]:
            self._stores.append(open_store(self.wish.cache, manifest, place, run))
            return here.node_index, self._stores[-1].serve() if serves and here.device_index == 0 else ""

        endpoints = {node: where for node, where in on_all_ranks(endpoint) if where}
        if endpoints:
            self._stores[-1].connect(endpoints)
        return self._stores[-1]

    def train_loader(
        self, *, fixed: bool, on_epoch: Callable[[int], None], on_resume: Callable[[int], None]
    ) -> TrainLoader:
        """Of this rank."""
        assert self.train is not None
        manifest, layout = self.train.store.manifest, self.layout
        owners_of = lru_cache(lambda nodes: owners(manifest.labels, nodes, self.wish.cache.seed))
        order = Order(self.train.samples, owners_of, layout)
        padding = order.epoch(0).padding
        self.say(
            f"{len(self.train.samples):,} samples, global batch {layout.global_batch:,}, shuffle={layout.shuffle!r}: "
            f"{order.steps:,} steps an epoch, {padding:,} samples of which are repetitions that fill the last"
        )
        loader = TrainLoader(
            order,
            self._pipeline("train", self.train.store),
            node=self.topology.node_index,
            device=self.topology.device_index,
            sizes=self.wish.sizes,
            fingerprint=manifest.fingerprint,
            fixed=fixed,
            on_epoch=on_epoch,
            on_resume=on_resume,
        )
        self._loaders["train"] = loader
        return loader

    def eval_loader(self) -> EvalLoader:
        """Of this rank.

        Raises:
            ValueError: when there is nothing to validate on.
        """
        if self.val is None:
            raise ValueError(
                f"source={self.wish.cache.source!r} has no folder val/. Add one, or validate on a fixed share of "
                f"train/: val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        store, place = self.val.store, (self.topology.node_index, self.topology.device_index)
        home = owners(store.manifest.labels, self.topology.num_nodes, self.wish.cache.seed)
        batches = evaluation_batches(self.val.samples, home, self.layout, *place)
        loader = EvalLoader(batches, self._pipeline("val", store), size=self.wish.sizes.largest)
        self._loaders["val"] = loader
        return loader

    @property
    def layout(self) -> Layout:
        """How global batches are made here."""
        cache = self.wish.cache
        return Layout(
            batch_size=self.wish.batch_size,
            devices=tuple(len(node) for node in self.topology.nodes),
            shuffle=cache.shuffle,
            exchange_fraction=cache.exchange_fraction,
            seed=cache.seed,
        )

    @cached_property
    def tiers(self) -> TierLog:
        """Of the training samples, over all nodes."""
        assert self.train is not None
        store = self.train.store
        return TierLog(lambda: store.node_counters() if self._reports else TierCounts())

    @property
    def _reports(self) -> bool:
        return self.topology.device_index == 0  # one rank of each node does

    def summary(self) -> str:
        """Sizes of the tiers, and where each epoch's samples came from. A collective."""
        assert self.train is not None
        store = self.train.store
        sizes = self.tiers.sizes(lambda: store.sizes() if self._reports else TierSizes(0, 0, 0, 0))
        return "\n".join(["where the samples of each epoch came from, all nodes:", *self.tiers.table(), sizes])

    def say(self, line: str) -> None:
        """To the log, once."""
        if self.topology.rank == 0:
            log.info("%s", line)

    def close(self) -> None:
        """Give everything back: threads, processes, shared memory."""
        for each in (*self._loaders.values(), *self._pipelines.values()):
            each.close()
        for store in self._stores:
            store.close()
        self._loaders, self._pipelines, self._stores = {}, {}, []

    def _pipeline(self, purpose: str, store: SampleStore) -> Pipeline:
        """Training and validation have one each, since one is under way while the other runs."""
        if purpose in self._loaders:  # loaders are asked for anew; the last one's work is for nothing
            self._loaders.pop(purpose).close()
        if purpose in self._pipelines:
            return self._pipelines[purpose]
        backend, why = choose_backend(self.wish.backend, self.device)
        if not self._pipelines:
            self.say(f"samples in memory as {store.format}; backend={backend!r}: {why}")
        threads = self.wish.threads or _threads(self.topology.num_devices)
        gpu = self.device.index if self.device.type == "cuda" else None
        made: Pipeline
        if backend == "dali":
            from lightning_sparse.data.pipeline.backend_dali import DaliPipeline

            made = DaliPipeline(store, self.wish.look, batch_size=self.wish.batch_size, threads=threads, device=gpu)
        else:
            from lightning_sparse.data.pipeline.backend_torch import TorchPipeline

            made = TorchPipeline(store, self.wish.look, threads=threads, pin=gpu is not None)
        self._pipelines[purpose] = made
        return made


def open_session(
    wish: Wish,
    *,
    device: torch.device | None = None,
    training: bool = True,
    node_rank: int | None = None,
    local_rank: int | None = None,
) -> Session:
    """Find the ranks, the samples and their store. A collective.

    Args:
        training: open the training samples too, not only those to validate on.

    Raises:
        ValueError, DataError: when the source is not what it should be.
    """
    show_log_lines()
    topology = find_topology(node_rank, local_rank)
    session = Session(wish, topology, device or torch.device("cpu"))
    try:
        session.open(on_rank_zero(new_run), training)
    except BaseException:
        session.close()
        raise
    return session


def _threads(devices: int) -> int:
    """Of one rank: its share of the node's cores, less the one that trains."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // devices - 1))


def _manifest_if_any(config: CacheConfig, split: str) -> Manifest | None:
    try:
        return load_or_list(config, split)
    except StorageTimeoutError:
        raise
    except DataError:
        return None


def _split(count: int, fraction: float) -> tuple[Indices, Indices]:
    """Samples to validate on, the same in every run whatever its seed, and the others."""
    if count < 2:
        raise ValueError(f"val_fraction={fraction}: {count} sample(s) cannot be split into two parts.")
    order = shuffled(np.arange(count), 0, 0)
    held_out = min(count - 1, max(1, round(fraction * count)))
    return np.sort(order[:held_out]), np.sort(order[held_out:])
