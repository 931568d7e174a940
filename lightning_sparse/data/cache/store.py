"""`SampleStore`: reads each sample from the nearest tier that has it.

::

    get(indices) ->  memory of this node         a view, no copy
                     memory of the owner         samples of other nodes, shuffle="global"
                     local disk                  decoded if the format is "decoded", then kept in memory
                     network storage             validated by decoding, then kept on disk and in memory

The owner of a sample is the node that keeps it in memory and serves it to other nodes. If a tier fails, the store
counts the failure and reads the next tier.
"""

import contextlib
import os
import secrets
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache.counts import Counter, TierCounts, TierSizes, run_name
from lightning_sparse.data.cache.disk import CachedFile, DiskCache, corrupt_file
from lightning_sparse.data.cache.memory import open_memory
from lightning_sparse.data.config import GB, CacheConfig, CorruptSampleError, DataError
from lightning_sparse.data.decode import EXIT_PRIORITY, FileKey, Format, Sample, View
from lightning_sparse.data.folders import cache_folder, file_name, locked, wrap_os_errors
from lightning_sparse.data.peers import allow_connections, node_address
from lightning_sparse.data.peers.client import PeerClient
from lightning_sparse.data.peers.server import PeerServer
from lightning_sparse.data.rng import bits
from lightning_sparse.data.sources.listing import relist_shard
from lightning_sparse.data.sources.manifest import Manifest, is_same_time
from lightning_sparse.data.sources.storage import Storage, StoredFile, Unreadable

LAST_READ_S = 5.0  # reads of local tiers take less
ROW_GROUPS = (
    "the disk cache is full, so whole row groups are read from network storage for single samples of them: increase "
    "disk_gb, or use smaller row groups."
)
GROUP_LOCKS = 64
RANDOM_TRIES, MAX_REPLACEMENTS = 32, 100  # candidates to replace a corrupt sample: random, consecutive


@dataclass(frozen=True)
class Placement:
    node_index: int = 0
    num_nodes: int = 1
    device_index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.node_index < self.num_nodes:
            raise ValueError(
                f"node {self.node_index} must be from 0 to {self.num_nodes - 1}, because there are {self.num_nodes} "
                "nodes."
            )


def owners(labels: npt.NDArray[np.int64], num_nodes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the node that owns each sample. A pure function. Nodes differ by at most one sample, also in each class.

    >>> owners(np.array([0, 0, 0, 1, 1, 1]), num_nodes=2, seed=1).tolist()
    [1, 0, 0, 0, 1, 1]
    """
    order = np.lexsort((bits(seed, np.arange(len(labels))), labels))  # sorted by class, shuffled within each
    result = np.empty(len(labels), np.int64)
    result[order] = np.arange(len(labels)) % num_nodes
    return result


def owners_of(manifest: Manifest, num_nodes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the node that owns each sample of a manifest. A pure function."""
    # one owner per row group, so that only one node reads it
    if manifest.has_row_groups and len(manifest.shards) >= num_nodes:
        return owners(np.zeros(len(manifest.shards), np.int64), num_nodes, seed)[manifest.shard_of]
    return owners(manifest.class_ids, num_nodes, seed)


class Tiers:
    """The open tiers of a process. A forked process opens its own."""

    def __init__(
        self, config: CacheConfig, manifest: Manifest, placement: Placement, owned: npt.NDArray[np.bool_], run: bytes
    ) -> None:
        self.pid, folder = os.getpid(), cache_folder(config)
        with contextlib.ExitStack() as stack:  # one process creates the tiers, and others find them
            with wrap_os_errors(folder):
                stack.enter_context(locked(folder))
            self.counter = Counter(run_name(run, placement.node_index, manifest.split))
            self.memory = open_memory(config, manifest, owned, self.counter)
        limit = None if config.disk_gb is None else int(config.disk_gb * GB)
        disk = folder / f"{file_name(manifest.split)}.lmdb"
        self.disk = DiskCache(disk, limit_bytes=limit, counter=self.counter)
        self.storage = Storage(config, quiet=placement.device_index != 0)  # one rank per node logs interruptions
        self.decoder = 0 if config.format == "bytes" else decode.decoder_id()  # that validates files
        self.peers: PeerClient | None = None
        self.server: PeerServer | None = None
        self._reads, self._changed = 0, threading.Condition()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Delay `close`, up to `LAST_READ_S`: LMDB must not be closed under a thread that reads it."""
        with self._changed:
            self._reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._reads -= 1
                self._changed.notify_all()

    def keep(self, index: int, view: View) -> None:
        if not self.memory.put(index, view.data, view.height, view.width) and self.memory.capacity:
            self.counter.warn_once(
                "memory full",
                f"memory tier is full with {self.memory.cached:,} samples in {self.memory.bytes / GB:.2f} GB; every "
                "epoch reads the other samples of this node from local disk. Increase memory_gb to keep more.",
            )

    def interrupt(self) -> None:
        """End the reads of network storage. Threads that wait for it raise DataError."""
        if self.server is not None:
            self.server.stop()
        self.storage.close()

    def close(self) -> None:
        self.interrupt()
        if self.server is not None:
            self.server.close()
        if self.peers is not None:
            self.peers.close()
        with self._changed:
            self._changed.wait_for(lambda: self._reads == 0, LAST_READ_S)
        self.disk.close()
        self.memory.close()
        self.counter.close()


def new_run() -> bytes:
    """Return a new secret that identifies a run. One rank creates it and shares it."""
    return secrets.token_bytes(32)


class SampleStore:
    """Reads the samples of a split. `get` is thread-safe.

    The store can be pickled: a spawned or forked process opens the tiers itself. `run` is a secret from `new_run`, the
    same on all ranks.
    """

    def __init__(
        self, config: CacheConfig, manifest: Manifest, placement: Placement | None = None, run: bytes | None = None
    ) -> None:
        self.config, self.manifest = config, manifest
        self.short_side = config.short_side
        self.placement, self._run = placement or Placement(), run or new_run()
        self.owners = owners_of(manifest, self.placement.num_nodes, config.seed)
        self._owned = self.owners == self.placement.node_index
        self.hit_counter: Literal["memory", "served"] = "memory"  # "served" in the server process
        self._corrupt: dict[int, str] = {}
        self._changed: set[str] = set()
        # times and headers of the shards, which change if a shard is replaced by one with the listed samples
        self._times: dict[str, int] = {}
        self._headers = manifest.headers
        self._endpoints: dict[int, str] = {}
        self._opened: Tiers | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self.format: Format = self._tiers().memory.format

    def get(self, indices: Sequence[int]) -> list[Sample]:
        """Return samples in the order of `indices`, which refer to the manifest.

        Raises:
            CorruptSampleError: if a file is corrupt and ``on_corrupt="raise"``.
            StorageTimeoutError: if network storage does not respond.
        """
        tiers = self._tiers()
        with tiers.reading():
            return self._get(tiers, indices)

    def _get(self, tiers: Tiers, indices: Sequence[int]) -> list[Sample]:
        array = np.asarray(indices, np.int64)
        requested: list[int] = array.tolist()
        labels = self.manifest.labels[array].tolist()
        views, flipped = tiers.memory.get(requested)
        hits = [view.data.nbytes for view in views if view is not None]
        counts = {f"{self.hit_counter}_samples": len(hits), f"{self.hit_counter}_bytes": sum(hits)}
        tiers.counter.add(**counts, checksum_errors_memory=flipped)
        samples: dict[int, Sample] = {}
        if len(hits) < len(views):
            absent = dict.fromkeys(index for index, view in zip(requested, views, strict=True) if view is None)
            for index, answer in self._read_lower_tiers(tiers, [*absent]).items():
                samples[index] = self._replacement(tiers, index, answer) if isinstance(answer, str) else answer
        tiers.disk.flush_old()
        return [
            samples[index] if view is None else Sample(view.data, label, index, view.height, view.width)
            for index, label, view in zip(requested, labels, views, strict=True)
        ]

    def _read_lower_tiers(self, tiers: Tiers, indices: list[int]) -> dict[int, Sample | str]:
        answers: dict[int, Sample | str] = {}
        if tiers.peers is not None:
            foreign = [index for index in indices if not self._owned[index]]
            for requested, index, view in tiers.peers.fetch(foreign, self.owners[foreign]):
                # a str is the reason why a file is corrupt
                answers[requested] = view if isinstance(view, str) else self._sample(index, view)
                if not isinstance(view, str):
                    tiers.counter.add(peer_samples=1, peer_bytes=view.data.nbytes)
        for index in indices:
            if index not in answers and index in self._corrupt:
                answers[index] = self._corrupt[index]
        absent = [index for index in indices if index not in answers]
        for index, view in self._from_files(tiers, absent):
            answers[index] = view if isinstance(view, str) else self._sample(index, view)
        return answers

    def _from_files(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, View | str]]:
        absent = dict.fromkeys(indices)
        for index, view in self._on_disk(tiers, indices):
            del absent[index]
            yield index, view
        if absent and self.manifest.has_row_groups:
            yield from self._from_row_groups(tiers, [*absent])
        else:
            for index, answer in self._answers(tiers, [*absent]):
                yield index, self._from_storage(tiers, index, answer)

    def _answers(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, StoredFile | Unreadable]]:
        answers = tiers.storage.read([self.manifest.location(index) for index in indices])
        return zip(indices, answers, strict=True)

    def _on_disk(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, View | str]]:
        files = tiers.disk.get(self.manifest.keys(indices))
        for index, file in zip(indices, files, strict=True):
            view = None if file is None else self._from_disk(tiers, index, file)
            if view is not None:
                yield index, view

    def _from_row_groups(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, View | str]]:
        groups = self.manifest.shard_of
        for group in np.unique(groups[indices]).tolist():
            requested = dict.fromkeys(index for index in indices if groups[index] == group)
            # the ranks of a node ask for the same groups
            with locked(tiers.disk.folder.with_suffix(f".{group % GROUP_LOCKS}.lock"), quiet=True):
                for index, view in self._on_disk(tiers, [*requested]):
                    del requested[index]
                    yield index, view
                if requested:
                    yield from self._from_row_group(tiers, group, set(requested))

    def _from_row_group(self, tiers: Tiers, group: int, requested: set[int]) -> Iterator[tuple[int, View | str]]:
        if tiers.disk.full:
            tiers.counter.warn_once("row groups", ROW_GROUPS)
        first, last = self._samples_of_shard(group)
        answers = self._rows(tiers, first)
        for index in range(first, last):
            # keep all samples of the group that this node owns, because it is read as a whole
            if index in requested or self._owned[index] or self.config.shuffle == "local":
                view = self._from_storage(tiers, index, answers[int(self.manifest.offsets[index])])
                if index in requested:
                    yield index, view
        tiers.disk.flush()

    def _samples_of_shard(self, number: int) -> tuple[int, int]:
        first, last = np.searchsorted(self.manifest.shard_of, [number, number + 1]).tolist()
        return first, last

    def _rows(self, tiers: Tiers, index: int) -> list[StoredFile | Unreadable]:
        """Return the rows of a sample's row group."""
        file, group = self.manifest.row_group(index)
        rows = tiers.storage.rows(file, group, self.config.member or "")
        first, last = self._samples_of_shard(int(self.manifest.shard_of[index]))
        if len(rows) <= self.manifest.offsets[first:last].max():
            raise self._was_replaced(file)
        return rows

    def _from_disk(self, tiers: Tiers, index: int, file: CachedFile) -> View | str | None:
        same_decoder = file.decoder == tiers.decoder  # another decoder may decide otherwise
        if file.error is not None:
            return file.error if same_decoder and self.config.on_corrupt == "skip" else None
        try:
            pixels = (
                None if same_decoder and self.format != "decoded" else decode.decode(file.data, self.config.short_side)
            )
        except decode.UndecodableError:
            return None
        if not same_decoder:
            file = file._replace(decoder=tiers.decoder)
            tiers.disk.put(self.manifest.key(index), file)
        tiers.counter.add(disk_samples=1, disk_bytes=len(file.data))
        return self._cache_in_memory(tiers, index, file, pixels)

    def _from_storage(self, tiers: Tiers, index: int, answer: StoredFile | Unreadable) -> View | str:
        key = self.manifest.key(index)
        if isinstance(answer, StoredFile):
            tiers.counter.add(storage_samples=1, storage_bytes=len(answer.data))
            key = self._version_read(tiers, index, key, answer)
        pixels = None
        try:
            if isinstance(answer, Unreadable):
                raise decode.UndecodableError(answer.reason)
            if self.config.format == "bytes":
                file = CachedFile(answer.data, 1, len(answer.data), tiers.decoder)
            else:
                pixels, height, width = decode.decode_sized(answer.data, self.config.short_side)
                file = CachedFile(answer.data, height, width, tiers.decoder)
        except decode.UndecodableError as error:
            if self.config.on_corrupt == "skip":
                tiers.disk.put(key, corrupt_file(str(error), tiers.decoder))
            return str(error)
        tiers.disk.put(key, file)
        return self._cache_in_memory(tiers, index, file, pixels)

    def _cache_in_memory(
        self, tiers: Tiers, index: int, file: CachedFile, pixels: npt.NDArray[np.uint8] | None
    ) -> View:
        if self.format == "decoded":
            assert pixels is not None
            view = View(pixels, pixels.shape[0], pixels.shape[1])
        else:
            view = View(np.frombuffer(file.data, np.uint8), file.height, file.width)
        view.data.flags.writeable = False  # like a view of the memory tier
        if self._owned[index] or self.config.shuffle == "local":
            tiers.keep(index, view)
        return view

    def _version_read(self, tiers: Tiers, index: int, key: FileKey, file: StoredFile) -> FileKey:
        if len(self.manifest.shards):
            name = self.manifest.shard_file(int(self.manifest.shard_of[index]))
            with self._lock:
                is_listed = self._is_listed(name, index, key, file)
                if not is_listed:
                    self._check_shard(tiers, name, file.mtime_ns)
            current, change = key, "but its samples still have the listed places and labels"
        else:
            name = key.path
            is_listed = key.size in (-1, file.size) and is_same_time(key.mtime_ns, file.mtime_ns)
            # the disk must not keep a changed file under its listed key
            current = FileKey(key.path, file.size, file.mtime_ns)
            change = f"({key.size:,} bytes then, {file.size:,} now), so its current content is used"
        if is_listed:
            return key
        tiers.counter.add(changed=name not in self._changed)
        self._changed.add(name)
        tiers.counter.warn_once(
            "changed",
            f"{name} has changed since it was listed, {change}. Run `lightning-sparse cache warm` to list the source "
            f"again.",
        )
        return current

    def _is_listed(self, shard: str, index: int, key: FileKey, file: StoredFile) -> bool:
        # the sizes of rows are estimates
        same_size = self.manifest.has_row_groups or key.size == file.size
        nbytes, crc = self._headers[index].tolist() if file.header else (0, 0)
        same_header = len(file.header) != nbytes or zlib.crc32(file.header) == crc
        return same_size and same_header and is_same_time(self._times.get(shard, key.mtime_ns), file.mtime_ns)

    def _check_shard(self, tiers: Tiers, file: str, mtime_ns: int) -> None:
        """Raise DataError if a shard that has changed does not contain the listed samples."""
        found = relist_shard(tiers.storage, self.config, self.manifest, file)
        if found is None:
            raise self._was_replaced(file)
        indices, now = found
        if len(self._headers):
            self._headers = self._headers.copy()  # the manifest may be read-only
            self._headers[indices] = now.headers
        self._times[file] = mtime_ns

    def _was_replaced(self, file: str) -> DataError:
        return DataError(
            f"source={self.config.source}: {file} has changed since it was listed, and contains other samples or "
            f"labels now. Run `lightning-sparse cache warm` to list the source again, and start again."
        )

    def differing(self, indices: Sequence[int]) -> list[int]:
        """Read samples from storage again, and update the disk cache.

        Return the samples that differed from the cache, or that can no longer be read.
        """
        tiers, differing = self._tiers(), []
        with tiers.reading():
            cached = tiers.disk.get(self.manifest.keys(indices))
            for (index, answer), file in zip(self._read_again(tiers, list(indices)), cached, strict=True):
                if file is None:
                    continue
                result = self._from_storage(tiers, index, answer)
                same = isinstance(answer, StoredFile) and answer.data == file.data
                if result != file.error if isinstance(result, str) else not same:
                    differing.append(index)
        return differing

    def _read_again(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, StoredFile | Unreadable]]:
        if not self.manifest.has_row_groups:
            yield from self._answers(tiers, indices)
            return
        rows: dict[tuple[str, int], list[StoredFile | Unreadable]] = {}
        for index in indices:
            group = self.manifest.row_group(index)
            if group not in rows:
                rows = {group: self._rows(tiers, index)}  # only one row group is in memory
            yield index, rows[group][int(self.manifest.offsets[index])]

    def cache_files(self, indices: Sequence[int]) -> dict[int, str]:
        """Cache files on disk; return the errors of corrupt files, by index."""
        tiers = self._tiers()
        with tiers.reading():
            answers = dict(self._from_files(tiers, list(indices)))
        return {index: reason for index, reason in answers.items() if isinstance(reason, str)}

    def replacement(self, requested: int, index: int, reason: str) -> Sample:
        """Return a sample that replaces a requested sample, because sample `index` cannot be decoded.

        `index` is the requested sample or its earlier replacement. Raise CorruptSampleError if no sample can replace
        it.
        """
        tiers = self._tiers()
        with tiers.reading():
            return self._replacement(tiers, requested, reason, index)

    def _replacement(self, tiers: Tiers, requested: int, reason: str, index: int | None = None) -> Sample:
        index = requested if index is None else index
        path = self.manifest.paths[index]
        if self.config.on_corrupt == "raise":
            raise CorruptSampleError(path, reason)
        self._corrupt[index] = reason
        tiers.counter.add(replaced=index == requested)  # counted once, also if its replacement is corrupt
        tiers.counter.warn_once(
            f"corrupt {index}", f"{path} cannot be used and is replaced by another sample: {reason}"
        )
        # The replacement is the same in each epoch and run. Random samples are tried first, so that different samples
        # replace corrupt neighbors.
        same_owner = np.flatnonzero(self.owners == self.owners[requested])
        drawn = (bits(self.config.seed, requested, np.arange(RANDOM_TRIES)) % len(same_owner)).astype(np.int64)
        following = np.roll(same_owner, -int(drawn[0]))[:MAX_REPLACEMENTS]
        tries = dict.fromkeys([*same_owner[drawn].tolist(), *following.tolist()])
        for other in tries:
            if other in self._corrupt:
                continue
            view = tiers.memory.get([other])[0][0]
            answer = self._read_lower_tiers(tiers, [other])[other] if view is None else self._sample(other, view)
            if not isinstance(answer, str):
                return answer
            self._corrupt[other] = answer
        raise CorruptSampleError(path, f"{reason}; the {len(tries)} samples that could replace it are corrupt, too")

    def _sample(self, index: int, view: View) -> Sample:
        return Sample(view.data, self.manifest.labels[index].tolist(), index, view.height, view.width)

    def serve(self, address: str | None = None, clients: int = 0) -> str:
        """Start the server process of this node, and return its endpoint for `connect` on other nodes.

        Call it on one rank per node. `clients` processes of other nodes will connect.
        """
        tiers = self._tiers()
        if tiers.server is None:
            address = address or node_address(self.config.peer_address)
            ports = self.config.peer_ports
            tiers.server = PeerServer(self, self._run, address, ports=ports, clients=clients)
        return tiers.server.endpoint

    def end_serving(self) -> None:
        # waits, because the server process writes its last files to the disk cache
        server = self._tiers().server
        if server is not None:
            server.close()

    def connect(self, endpoints: Mapping[int, str]) -> None:
        """Read the samples of other nodes from their memory. endpoints: results of `serve`, by node."""
        self._endpoints = {node: endpoint for node, endpoint in endpoints.items() if node != self.placement.node_index}
        self._connect(self._tiers())

    def _connect(self, tiers: Tiers) -> None:
        if tiers.peers is not None:
            tiers.peers.close()
        allow_connections(2 * len(self._endpoints))
        tiers.peers = PeerClient(self._endpoints, self._run, self.format, tiers.counter.warn_once)

    def counters(self) -> TierCounts:
        return self._tiers().counter.read()

    def node_counters(self) -> TierCounts:
        """Return the counts of the node, including workers and ended processes."""
        return self._tiers().counter.total()

    def sizes(self) -> TierSizes:
        tiers = self._tiers()
        memory, disk = tiers.memory, tiers.disk
        folder = f"{socket.gethostname()}:{disk.folder.resolve()}"
        # without files that wait to be written to disk
        return TierSizes(memory.cached, memory.bytes, disk.entries(), disk.bytes(), folder)

    @property
    def disk(self) -> DiskCache:
        return self._tiers().disk

    def interrupt(self) -> None:
        if self._opened is not None and self._opened.pid == os.getpid():
            self._opened.interrupt()

    def close(self) -> None:
        """Write pending files and close the tiers. The memory tier ends with the last process that has it open."""
        if self._opened is not None and self._opened.pid == os.getpid():
            for closer in self._closers:
                closer()
        self._opened = None

    def _tiers(self) -> Tiers:
        if self._opened is not None and self._opened.pid == os.getpid():
            return self._opened
        if self._pid != os.getpid():  # forked: a thread of the parent may hold the lock forever
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():
                self._opened = Tiers(self.config, self.manifest, self.placement, self._owned, self._run)
                if self._endpoints:
                    self._connect(self._opened)
                # when this object is collected and when the process ends, also in multiprocessing children
                ends = ((self._opened.interrupt, EXIT_PRIORITY + 1), (self._opened.close, EXIT_PRIORITY - 1))
                self._closers = [Finalize(self, end, exitpriority=priority) for end, priority in ends]
            return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock", "_closers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = None
        self._lock, self._pid = threading.Lock(), os.getpid()
