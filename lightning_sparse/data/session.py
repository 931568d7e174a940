"""The open data between setup and teardown: manifests, stores, pipelines and loaders. Does not import Lightning.

To open a session, all ranks share five values in this order: the topology, the secret of the run, the manifests that
rank 0 lists, the format of the memory tier, and the addresses of the servers.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_sparse.agree import is_distributed, on_all, on_first
from lightning_sparse.data.cache.counts import TierCounts, TierLog, TierSizes
from lightning_sparse.data.cache.memory import format_for
from lightning_sparse.data.cache.store import Placement, SampleStore, new_run, owners_of
from lightning_sparse.data.config import (
    CacheConfig,
    ImageOptions,
    SampleOptions,
    check_batch_size,
    check_fraction,
    check_limit,
    limited_count,
)
from lightning_sparse.data.decode import Format
from lightning_sparse.data.peers import node_address, reachable
from lightning_sparse.data.pipeline.images import TorchPipeline, choose_backend, has_dali
from lightning_sparse.data.pipeline.loader import EvalLoader, Pipeline, TrainLoader, Turn
from lightning_sparse.data.pipeline.sampler import Indices, Sampler, SamplerConfig, evaluation_batches, repeated
from lightning_sparse.data.pipeline.workers import WorkerPipeline
from lightning_sparse.data.rng import bits, shuffled
from lightning_sparse.data.sources.listing import cached_manifest, classes_of, has_split, load_or_list, store_manifest
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import MissingFolderError
from lightning_sparse.messages import ensure_log_handler, log
from lightning_sparse.options import flag
from lightning_sparse.topology import Topology, find_nodes


def find_topology(node_rank: int | None = None, local_rank: int | None = None) -> Topology:
    """Find which ranks share a host, as disks and memory do. A collective."""
    if not is_distributed():
        return Topology(((0,),), 0)
    topology = find_nodes(node_rank=node_rank, local_rank=local_rank)
    # a node of the gradients, such as a rack, may have several hosts
    names, hosts = on_all(socket.gethostname), dict[tuple[int, str], list[int]]()
    for index, node in enumerate(topology.nodes):
        for rank in node:
            hosts.setdefault((index, names[rank]), []).append(rank)
    return Topology(tuple(map(tuple, hosts.values())), topology.rank)


def broadcast_manifest(config: CacheConfig, split: str) -> Manifest:
    """Return the samples of a split, as rank 0 lists them. A collective."""
    own: list[Manifest] = []  # on rank 0

    def lead() -> str:
        own.append(load_or_list(config, split))
        return own[0].identity

    identity = on_first(lead)
    manifest = own[0] if own else cached_manifest(config, split)
    if manifest is not None and manifest.identity != identity:
        manifest = None
    # Each node keeps the list in its cache, where its ranks map it. It is sent only if a node lacks it.
    if all(on_all(lambda: manifest is not None)):
        assert manifest is not None
        return manifest
    sent = on_first(lambda: own[0].to_bytes())
    return manifest or store_manifest(config, split, sent)


def common_format(config: CacheConfig, manifest: Manifest, placement: Placement) -> Format:
    """Return the format of the memory tier: "decoded" if the samples of each node fit. A collective."""

    def own() -> Format:
        if placement.device_index != 0:
            return "decoded"
        owned = owners_of(manifest, placement.num_nodes, config.seed) == placement.node_index
        return format_for(config, manifest, owned)

    if config.format != "auto":
        return config.format
    # nodes with different formats could not read each other's samples
    return "decoded" if all(format == "decoded" for format in on_all(own)) else "jpeg"


_MAX_THREADS = 16
_LIMIT = 6  # number of a random stream; `sampler.py` uses others
Formats = dict[str, Format]
"""Format of the memory tier, by split."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the DataModule, validated on creation.

    Args:
        cache: Where samples come from.
        samples: How samples become batches.
        batch_size: Number of samples per device and step.
        val_fraction: Fraction of train/ to validate on, between 0 and 1. Every run uses the same samples.
        with_indices: Add the indices of its samples to each batch. An index counts from 0. It is a row of the list, or
            a place in the sorted folder; with a limit, a place among the selected samples. A replacement has the index
            of the corrupt sample.
        limit: Number or fraction of the training samples to use, for a trial. They are spread evenly over the classes,
            and equal in every run.
    """

    cache: CacheConfig
    samples: ImageOptions | SampleOptions
    batch_size: int = 64
    val_fraction: float | None = None
    with_indices: bool = False
    limit: int | float | None = None

    def __post_init__(self) -> None:
        check_batch_size(self)
        check_limit(self.limit)
        check_fraction(self)
        flag(self, "with_indices")
        largest = max(self.sizes.values()) if self.sizes else 0
        if self.cache.short_side < largest:
            raise ValueError(
                f"short_side={self.cache.short_side} is less than the largest image_size, {largest}: cached images "
                f"would be upscaled. Omit it, or give at least {largest}."
            )

    @property
    def sizes(self) -> dict[int, int] | None:
        return self.samples.sizes if isinstance(self.samples, ImageOptions) else None


@dataclass
class Subset:
    store: SampleStore
    samples: Indices


@dataclass
class Session:
    """The open data of a run.

    Attributes:
        train, val, test: samples for training, validation and test; None if there are none.
        formats: format of the memory tier, by split.
        backend: backend of images, equal for all splits; None: not chosen yet, or not images.
        num_classes: number of classes of train/; None if there is no train/.
    """

    options: DataOptions
    topology: Topology
    device: torch.device
    train: Subset | None = None
    val: Subset | None = None
    test: Subset | None = None
    formats: Formats = field(default_factory=dict)
    backend: str | None = None
    num_classes: int | None = None
    _no_val: str = ""  # why there are no samples to validate on
    _stores: list[SampleStore] = field(default_factory=list)
    _pipelines: dict[str, Pipeline] = field(default_factory=dict)  # by split
    _batch_sizes: dict[str, int] = field(default_factory=dict)  # of the pipelines
    _turns: dict[str, Turn] = field(default_factory=lambda: defaultdict(Turn))

    def open(self, run: bytes, stage: str) -> None:
        """Open the stores, and choose the backend. A collective."""
        self._open_stores(run, stage)
        if isinstance(self.options.samples, ImageOptions):
            samples = self.options.samples
            everywhere = all(on_all(has_dali))
            self.backend, reason = choose_backend(samples.backend, self.device, has_dali=everywhere, kept=self.backend)
            self.log_once(f"backend={self.backend!r}: {reason}")
            self.options = replace(self.options, samples=replace(samples, backend=self.backend))

    def _open_stores(self, run: bytes, stage: str) -> None:
        cache, fraction = self.options.cache, self.options.val_fraction
        if stage in ("test", "predict"):
            if on_first(partial(has_split, cache, "test")):
                self.test = self._open_evaluation("test", run)
                return
            self.log_once("there is no test/: testing on the samples to validate on")
        if stage == "fit" or fraction is not None:
            manifest = broadcast_manifest(cache, "train")
            self._check_labels(manifest)
            self.num_classes = manifest.num_classes  # of all samples: a limit may leave out a class
            held_out, train = _split(len(manifest), fraction or 0.0)
            if self.options.limit is not None:
                train = _limited(train, manifest.class_ids, self.options.limit)
                indices = np.union1d(held_out, train)
                manifest = manifest.select(indices)
                held_out, train = np.searchsorted(indices, held_out), np.searchsorted(indices, train)
            store = self._open_store(manifest, run)
            self.train = Subset(store, train)
            if fraction is not None:
                self.val = Subset(store, held_out)
                return
        try:
            self.val = self._open_evaluation("val", run)
        except MissingFolderError as error:
            self._no_val = str(error)

    def _open_evaluation(self, split: str, run: bytes) -> Subset:
        manifest = broadcast_manifest(self.options.cache, split)
        self._check_labels(manifest)
        # the class numbers of train/
        if self.train is not None:
            classes, whole = _labels_of(self.train.store.manifest)
        else:
            classes, whole, self.num_classes = on_first(partial(_labels_of_train, self.options.cache))
        if classes or self.train is not None:
            manifest = manifest.relabel(classes)
        if whole is not None:
            manifest = manifest.with_labels_like(whole)
        return Subset(self._open_store(manifest, run), np.arange(len(manifest)))

    def _check_labels(self, manifest: Manifest) -> None:
        columns = manifest.label_columns
        # test samples need no labels
        if manifest.split == "test" and not columns:
            return
        if not columns and isinstance(self.options.samples, ImageOptions):
            raise ValueError(
                f"the images of {manifest.split} have no labels. Give the list a column with labels, or each sample of "
                "a shard a .cls member; or use CachedDataModule, which needs none."
            )
        expected = columns if self.train is None else self.train.store.manifest.label_columns
        if columns != expected:
            raise ValueError(
                f"samples of {manifest.split} have {columns} label(s), but samples of train have {expected}. Use the "
                "same labels in all splits."
            )

    def _open_store(self, manifest: Manifest, run: bytes) -> SampleStore:
        topology = self.topology
        placement = Placement(topology.node_index, topology.num_nodes, topology.device_index)
        serves = topology.num_nodes > 1 and self.options.cache.shuffle != "local"
        wanted = replace(self.options.cache, format=self.formats.get(manifest.split, self.options.cache.format))
        self.formats[manifest.split] = common_format(wanted, manifest, placement)
        config = replace(wanted, format=self.formats[manifest.split])

        if serves:
            self.log_once(f"starting a server process on each node, for the {manifest.split} samples in its memory")
        serves = serves and topology.device_index == 0
        addresses = on_all(lambda: node_address(config.peer_address) if serves else "")

        def endpoint() -> tuple[int, str]:
            self._stores.append(SampleStore(config, manifest, placement, run))
            if not serves:
                return topology.node_index, ""
            own, others = addresses[topology.rank], [address for address in addresses if address]
            address = own if config.peer_address else reachable(own, others)
            return topology.node_index, self._stores[-1].serve(address, topology.world_size - topology.num_devices)

        endpoints = {node: url for node, url in on_all(endpoint) if url}
        if endpoints:
            self._stores[-1].connect(endpoints)
        return self._stores[-1]

    def check_classes(self, used: int | None) -> int:
        """Return the number of classes; compare it with the `used` number of each rank's model. A collective."""
        if self.num_classes is None:  # the model may come from elsewhere
            subset = self.val or self.test
            own = subset.store.manifest.num_classes if subset is not None else 0
            return own if used is None else used
        classes = self.num_classes
        others = {rank: other for rank, other in enumerate(on_all(lambda: used)) if other not in (None, classes)}
        if others:
            rank, other = next(iter(others.items()))
            raise ValueError(
                f"source={self.options.cache.source!r} has {classes} classes, but num_classes was {other} on rank "
                f"{rank} when it created its model: train/ has changed, or this node cannot read it. Mount the source "
                "on all nodes, and start the run again."
            )
        return classes

    def train_loader(
        self, *, fixed: bool, on_epoch: Callable[[int], None], on_resume: Callable[[int], None]
    ) -> TrainLoader:
        assert self.train is not None
        manifest, config = self.train.store.manifest, self.sampler_config
        placed = lru_cache(lambda nodes: owners_of(manifest, nodes, self.options.cache.seed))
        sampler = Sampler(self.train.samples, placed, config)
        num_repeated = sampler.epoch(0).num_repeated
        self.log_once(
            f"{len(self.train.samples):,} samples, global batch {config.global_batch:,}, shuffle={config.shuffle!r}: "
            f"{sampler.steps:,} steps per epoch, with {num_repeated:,} samples repeated to fill the last steps"
        )
        if config.global_batch > len(self.train.samples) and self.topology.rank == 0:
            log.warning("each batch has some samples more than once: use a smaller batch_size, or fewer ranks")
        return TrainLoader(
            sampler,
            self._pipeline("train", self.train.store),
            rank=self._rank,
            sizes=self.options.sizes,
            fingerprint=manifest.fingerprint,
            fixed=fixed,
            on_epoch=on_epoch,
            on_resume=on_resume,
            with_indices=self.options.with_indices,
            turn=self._turns["train"],
        )

    def eval_loader(self) -> EvalLoader:
        """Return the loader of this rank's samples to test on, in a test, or else to validate on."""
        split, subset = ("val", self.val) if self.test is None else ("test", self.test)
        if subset is None:
            raise ValueError(
                f"there are no samples to validate on: {self._no_val} Add val/<class>/<image>, or validate on a fixed "
                f"fraction of train/: val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        config, count = self.sampler_config, len(subset.samples)
        # images have equal sizes; two other samples may not fit into one batch
        pairs = isinstance(self.options.samples, ImageOptions)
        if not pairs and (twice := repeated(count, config)):
            self.log_once(
                f"batch_size=1: {twice} of {count:,} samples are evaluated twice, so that all ranks have the same "
                "number of batches. Use batch_size=2 or more for exact metrics."
            )
        batches = evaluation_batches(subset.samples, subset.store.owners, config, *self._rank, pairs=pairs)
        sizes = self.options.sizes
        return EvalLoader(
            batches,
            self._pipeline(split, subset.store),
            size=max(sizes.values()) if sizes else 0,
            with_indices=self.options.with_indices,
            turn=self._turns[split],
        )

    @property
    def sampler_config(self) -> SamplerConfig:
        cache, devices = self.options.cache, tuple(len(node) for node in self.topology.nodes)
        return SamplerConfig(
            batch_size=self.options.batch_size, devices=devices, shuffle=cache.shuffle, seed=cache.seed
        )

    @cached_property
    def tiers(self) -> TierLog:
        assert self.train is not None
        store, reports = self.train.store, self.topology.device_index == 0  # one rank per node
        return TierLog(
            lambda: store.node_counters() if reports else TierCounts(),
            lambda: store.sizes() if reports else TierSizes(),
            on_all,
        )

    @property
    def _rank(self) -> tuple[int, int]:
        return self.topology.node_index, self.topology.device_index

    def log_once(self, line: str) -> None:
        if self.topology.rank == 0:
            log.info("%s", line)

    def end_reading(self) -> None:
        """End all loaders and pipelines, and flush the node's disk cache. A collective."""

        def end() -> None:
            self._end_pipelines()
            for store in self._stores:
                store.end_serving()
                store.disk.flush()

        on_all(end)

    def close(self) -> None:
        self._end_pipelines()
        for store in self._stores:
            store.close()
        self._stores = []

    def _end_pipelines(self) -> None:
        for store in self._stores:
            store.interrupt()  # threads that make batches may wait for storage
        for turn in self._turns.values():
            turn.end()
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines = {}

    def _pipeline(self, split: str, store: SampleStore) -> Pipeline:
        if split in self._pipelines and self._batch_sizes[split] != self.options.batch_size:
            self._turns[split].end()
            self._pipelines.pop(split).close()
        # one pipeline per split: training has batches in progress while validation runs
        if split not in self._pipelines:
            share = len(os.sched_getaffinity(0)) // self.topology.num_devices - 1  # of the CPU cores; one for training
            cores = max(1, min(_MAX_THREADS, share))
            options = self.options.samples
            made: Pipeline
            about, pin = "", self.device.type == "cuda"
            if isinstance(options, ImageOptions) and options.backend == "dali":
                from lightning_sparse.data.pipeline.dali import DaliPipeline

                made = DaliPipeline(
                    store,
                    options,
                    batch_size=max(2, self.options.batch_size),  # 2: in an evaluation
                    threads=options.threads or cores,
                    device=self.device.index if pin else None,
                )
            elif isinstance(options, ImageOptions):
                device = self.device if pin and self.device.index is not None else None
                made = TorchPipeline(store, options, threads=options.threads or cores, device=device)
            else:
                workers = cores if options.workers is None else options.workers
                made = WorkerPipeline(store, options, workers=workers, pin=pin)
                about = f"; {workers} process(es) per rank make batches"
            if not self._batch_sizes:  # the first
                contents = {"bytes": "files", "decoded": "decoded pixels"}.get(store.format, f"{store.format} files")
                self.log_once(f"the memory of the nodes holds {contents}{about}")
            self._pipelines[split], self._batch_sizes[split] = made, self.options.batch_size
        return self._pipelines[split]


def open_session(
    options: DataOptions,
    *,
    position: tuple[int | None, int | None] = (None, None),
    device: torch.device | None = None,
    stage: str = "fit",
    formats: Formats | None = None,
    backend: str | None = None,
) -> Session:
    """Find the topology, list the samples and open their stores. A collective.

    Args:
        position: node rank and local rank of this process, if known.
        stage: stage of the Trainer: "fit", "validate", "test" or "predict".
        formats, backend: values of the continued run; see `Session`.
    """
    ensure_log_handler()
    topology = find_topology(*position)
    session = Session(options, topology, device or torch.device("cpu"), formats=dict(formats or {}), backend=backend)
    try:
        session.open(on_first(new_run), stage)
    except BaseException:
        session.close()
        raise
    return session


def _labels_of(train: Manifest) -> tuple[tuple[str, ...], bool | None]:
    # names of the classes, and whether labels are whole numbers; None if there are no labels
    return train.classes, train.labels.dtype.kind != "f" if train.labels.size else None


def _labels_of_train(config: CacheConfig) -> tuple[tuple[str, ...], bool | None, int | None]:
    # like _labels_of, and the number of classes; None if there is no train/, as in a source to test on
    try:
        names, number = classes_of(config, "train")
    except MissingFolderError:
        return (), None, None
    if names or number > 0:  # names are numbered; of other labels, only whole numbers tell the number of classes
        return names, None if names else True, number
    return names, _labels_of(load_or_list(config, "train"))[1], number


def _split(count: int, fraction: float) -> tuple[Indices, Indices]:
    if not fraction:
        return np.arange(0), np.arange(count)
    if count < 2:
        raise ValueError(f"val_fraction={fraction}: {count} sample(s) are too few to split; at least 2 are needed.")
    # equal in all runs and for all seeds
    order = shuffled(np.arange(count), 0, 0)
    held_out = min(count - 1, max(1, round(fraction * count)))
    return np.sort(order[:held_out]), np.sort(order[held_out:])


def _limited(samples: Indices, classes: NDArray[np.int64], limit: int | float) -> Indices:
    """Return some of the samples, with each class in proportion. A lower limit selects a subset of a higher limit."""
    number, sizes = np.unique(classes[samples], return_inverse=True, return_counts=True)[1:]
    by_class = np.lexsort((bits(0, samples, _LIMIT), number))  # shuffled within each class
    places = np.empty(len(samples), np.int64)
    places[by_class] = np.arange(len(samples))
    places -= (np.cumsum(sizes) - sizes)[number]  # in the class
    order = np.argsort((places + 0.5) / sizes[number], kind="stable")
    return np.sort(samples[order[: limited_count(limit, len(samples))]])
