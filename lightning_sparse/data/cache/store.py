"""`SampleStore`: reads each sample from the nearest tier that has it. Pipelines read from it.

::

    get(indices) ->  memory of this node         a view, no copy
                     memory of the owner         samples of other nodes, shuffle="partial" and "global"
                     local disk                  decoded if the format is "decoded", then kept in memory
                     network storage             validated by decoding, then kept on disk and in memory

If a tier fails, the next one is read: a flipped bit, a dead peer or a full disk cost time and are counted, but do not
end the run. Only two errors do: a corrupt file on storage, unless ``on_corrupt="skip"``, and storage that does not
respond.
"""

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache.counts import TierCounts
from lightning_sparse.data.cache.disk import CachedFile, FileKey
from lightning_sparse.data.cache.folders import locked
from lightning_sparse.data.cache.placement import Placement, owners_of
from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.cache.storage import StoredFile, Unreadable
from lightning_sparse.data.cache.tiers import Tiers, open_tiers, store_file
from lightning_sparse.data.config import CacheConfig, CorruptSampleError
from lightning_sparse.data.peers.client import PeerClient
from lightning_sparse.data.peers.interface import node_address
from lightning_sparse.data.peers.limits import allow_connections
from lightning_sparse.data.peers.server import PeerServer
from lightning_sparse.data.sample import EXIT_PRIORITY, Format, Sample, View

ROW_GROUPS = (
    "the disk cache is full, so whole row groups are read from network storage for single samples of them: increase "
    "disk_gb, or use smaller row groups."
)
GROUP_LOCKS = 64
MAX_REPLACEMENTS = 100  # candidates that are tried in place of a corrupt file


def new_run() -> bytes:
    """Return a new secret that identifies a run; its keys are derived from it. One rank makes it and shares it."""
    return secrets.token_bytes(32)


class SampleStore:
    """Reads the samples of a split. One per split and process; `get` is thread-safe.

    It can be pickled: a spawned or forked process opens the tiers itself.

    Args:
        placement: position of this process; default: a single process.
        run: secret from `new_run`, the same on all ranks; default: a new one.

    Raises:
        DataError: if a folder of the cache cannot be used.
    """

    def __init__(
        self, config: CacheConfig, manifest: Manifest, placement: Placement | None = None, run: bytes | None = None
    ) -> None:
        self.config, self.manifest = config, manifest
        self.placement, self._run = placement or Placement(), run or new_run()
        self.owners = owners_of(manifest, self.placement.num_nodes, config.seed)
        self._owned = self.owners == self.placement.node_index
        self.hits_count_as: Literal["memory", "served"] = "memory"  # "served" in the server process
        self._corrupt: dict[int, str] = {}
        self._endpoints: dict[int, str] = {}
        self._opened: Tiers | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self.format: Format = self._tiers().memory.format

    @property
    def short_side(self) -> int:
        """Shorter side of decoded images, at most."""
        return self.config.short_side

    def get(self, indices: Sequence[int]) -> list[Sample]:
        """Return samples in the order of `indices`, which refer to the manifest.

        Raises:
            CorruptSampleError: if a file is corrupt and ``on_corrupt="raise"``.
            StorageTimeoutError: if network storage does not respond.
        """
        with self._tiers().reading() as tiers:
            return self._get(tiers, indices)

    def _get(self, tiers: Tiers, indices: Sequence[int]) -> list[Sample]:
        array = np.asarray(indices, np.int64)
        requested: list[int] = array.tolist()
        views, flipped = tiers.memory.get(requested)
        samples: list[Sample | None] = []
        nbytes = missing = 0
        for index, label, view in zip(requested, self.manifest.labels[array].tolist(), views, strict=True):
            if view is None:
                samples.append(None)
                missing += 1
            else:
                data, height, width = view
                nbytes += data.nbytes
                samples.append(Sample(data, label, index, height, width))
        hits = {f"{self.hits_count_as}_samples": len(requested) - missing, f"{self.hits_count_as}_bytes": nbytes}
        tiers.counter.add(**hits, flipped_memory=flipped)
        if missing:
            self._fill_in(tiers, requested, samples)
        tiers.disk.flush_old()
        return samples  # type: ignore[return-value]  # _fill_in leaves no None

    def _fill_in(self, tiers: Tiers, requested: list[int], samples: list[Sample | None]) -> None:
        """Replace each None in `samples` by the sample from a lower tier."""
        positions: dict[int, list[int]] = {}
        for position, (index, sample) in enumerate(zip(requested, samples, strict=True)):
            if sample is None:
                positions.setdefault(index, []).append(position)
        for index, found in self._below_memory(tiers, list(positions)).items():
            sample = self._replacement(tiers, index, found) if isinstance(found, str) else found
            for position in positions[index]:
                samples[position] = sample

    def _below_memory(self, tiers: Tiers, indices: list[int]) -> dict[int, Sample | str]:
        """Read samples that are not in memory. A str is the reason why a file is corrupt."""
        found: dict[int, Sample | str] = {}
        if tiers.peers is not None:
            foreign = [index for index in indices if not self._owned[index]]
            for requested, index, view in tiers.peers.fetch(foreign, self.owners[foreign]):
                found[requested] = view if isinstance(view, str) else self._sample(index, view)
                if not isinstance(view, str):
                    tiers.counter.add(peer_samples=1, peer_bytes=view.data.nbytes)
        for index in indices:
            if index not in found and index in self._corrupt:
                found[index] = self._corrupt[index]
        rest = [index for index in indices if index not in found]
        for index, view in self._from_files(tiers, rest):
            found[index] = view if isinstance(view, str) else self._sample(index, view)
        return found

    def _from_files(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, View | str]]:
        """Read from local disk, then from network storage. Samples are kept in the tiers above."""
        absent = []
        files = tiers.disk.get([self.manifest.key(index) for index in indices])
        for index, file in zip(indices, files, strict=True):
            found = None if file is None else self._from_disk(tiers, index, file)
            if found is None:
                absent.append(index)
            else:
                yield index, found
        if absent and self.manifest.has_row_groups:
            yield from self._from_row_groups(tiers, absent)
        elif absent:
            answers = tiers.storage.read([self.manifest.location(index) for index in absent])
            for index, answer in zip(absent, answers, strict=True):
                yield index, self._from_storage(tiers, index, answer)

    def _from_row_groups(self, tiers: Tiers, indices: list[int]) -> Iterator[tuple[int, View | str]]:
        """Read row groups from network storage, and keep all of their samples that this node owns."""
        groups = self.manifest.shard_of
        for group in np.unique(groups[indices]).tolist():
            requested = [index for index in indices if groups[index] == group]
            # the ranks of a node ask for the same groups
            with locked(tiers.disk.folder.with_suffix(f".{group % GROUP_LOCKS}.lock")):
                keys = [self.manifest.key(index) for index in requested]
                for index, file in zip(requested, tiers.disk.get(keys), strict=True):
                    found = None if file is None else self._from_disk(tiers, index, file)
                    if found is not None:
                        requested = [each for each in requested if each != index]
                        yield index, found
                if requested:
                    yield from self._from_row_group(tiers, group, set(requested))

    def _from_row_group(self, tiers: Tiers, group: int, requested: set[int]) -> Iterator[tuple[int, View | str]]:
        if tiers.disk.full:
            tiers.warn_once("row groups", ROW_GROUPS)
        first = int(np.searchsorted(self.manifest.shard_of, group))
        answers = tiers.storage.rows(*self.manifest.row_group(first), self.config.member or "")
        for index, answer in enumerate(answers, start=first):
            if index in requested or self._owned[index] or self.config.shuffle == "local":
                found = self._from_storage(tiers, index, answer)
                if index in requested:
                    yield index, found
        tiers.disk.flush()

    def _from_disk(self, tiers: Tiers, index: int, file: CachedFile) -> View | str | None:
        """Return the sample of a cached file; None if it has to be read from storage."""
        known = file.decoder == tiers.decoder  # another decoder may decide otherwise
        if file.error is not None:
            return file.error if known and self.config.on_corrupt == "skip" else None
        try:
            pixels = None if known and self.format != "decoded" else decode.decode(file.data, self.config.short_side)
        except decode.UndecodableError:
            return None
        if not known:
            file = file._replace(decoder=tiers.decoder)
            tiers.disk.put(self.manifest.key(index), file)
        tiers.counter.add(disk_samples=1, disk_bytes=len(file.data))
        return self._kept(tiers, index, file, pixels)

    def _from_storage(self, tiers: Tiers, index: int, answer: StoredFile | Unreadable) -> View | str:
        """Validate a file from storage and keep it."""
        key = self.manifest.key(index)
        if isinstance(answer, StoredFile):
            tiers.counter.add(storage_samples=1, storage_bytes=len(answer.data))
            if not self.manifest.has_row_groups:  # which do not tell the size of a sample before they are read
                self._check_unchanged(tiers, key, answer)
        found = store_file(self.config, tiers.disk, key, answer, tiers.decoder)
        return found if isinstance(found, str) else self._kept(tiers, index, *found)

    def _kept(self, tiers: Tiers, index: int, file: CachedFile, pixels: npt.NDArray[np.uint8] | None) -> View:
        """Return the sample of a file, and keep it in memory if this node keeps it."""
        if self.format == "decoded":
            assert pixels is not None
            view = View(pixels, pixels.shape[0], pixels.shape[1])
        else:
            view = View(np.frombuffer(file.data, np.uint8), file.height, file.width)
        view.data.flags.writeable = False  # like a view of the memory tier
        if self._owned[index] or self.config.shuffle == "local":
            tiers.keep(index, view)
        return view

    def _check_unchanged(self, tiers: Tiers, key: FileKey, file: StoredFile) -> None:
        if file.size == key.size and (file.mtime_ns == key.mtime_ns or 0 in (file.mtime_ns, key.mtime_ns)):
            return
        tiers.counter.add(changed=1)
        tiers.warn_once(
            "changed",
            f"{key.path} has changed since it was listed ({key.size:,} bytes then, {file.size:,} now); using its "
            f"current content. Run `lightning-sparse cache warm` to list the source again.",
        )

    def replacement(self, index: int, reason: str) -> Sample:
        """Return another sample in place of one that cannot be decoded.

        Raises:
            CorruptSampleError: if ``on_corrupt="raise"``, or if the samples that could replace it are corrupt, too.
        """
        with self._tiers().reading() as tiers:
            return self._replacement(tiers, index, reason)

    def _replacement(self, tiers: Tiers, index: int, reason: str) -> Sample:
        """Return the next valid sample of the same owner in place of a corrupt one; the same in each epoch and run."""
        path = self.manifest.paths[index]
        if self.config.on_corrupt == "raise":
            raise CorruptSampleError(path, reason)
        self._corrupt[index] = reason
        tiers.counter.add(replaced=1)
        tiers.warn_once(f"corrupt {index}", f"{path} cannot be used and is replaced by another sample: {reason}")
        same_owner = np.flatnonzero(self.owners == self.owners[index])
        position = int(np.searchsorted(same_owner, index))
        for other in np.roll(same_owner, -position - 1)[:MAX_REPLACEMENTS].tolist():
            view = tiers.memory.get([other])[0][0]
            found = self._below_memory(tiers, [other])[other] if view is None else self._sample(other, view)
            if not isinstance(found, str):
                return found
            self._corrupt[other] = found
        tried = min(MAX_REPLACEMENTS, len(same_owner) - 1)
        raise CorruptSampleError(path, f"{reason}; the next {tried} samples are corrupt, too")

    def _sample(self, index: int, view: View) -> Sample:
        return Sample(view.data, self.manifest.labels[index].tolist(), index, view.height, view.width)

    def serve(self, address: str | None = None, clients: int = 0) -> str:
        """Start the server process that serves this node's samples; called by one rank per node.

        Args:
            address: IP address to listen on; default: `interface.node_address`.
            clients: processes of other nodes that connect.

        Returns:
            The endpoint, to pass to `connect` on the other nodes.

        Raises:
            ValueError: if this node does not have `peer_address`.
            DataError: if no port is free, or the limit of open files is too low for the clients.
            RuntimeError: if the server does not start.
        """
        tiers = self._tiers()
        if tiers.server is None:
            address = address or node_address(self.config.peer_address)
            ports = self.config.peer_ports
            tiers.server = PeerServer(self, self._run, address, ports=ports, clients=clients)
        return tiers.server.endpoint

    def connect(self, endpoints: Mapping[int, str]) -> None:
        """Read the samples of other nodes from their memory. endpoints: results of `serve`, by node."""
        self._endpoints = {node: each for node, each in endpoints.items() if node != self.placement.node_index}
        self._connect(self._tiers())

    def _connect(self, tiers: Tiers) -> None:
        if tiers.peers is not None:
            tiers.peers.close()
        allow_connections(2 * len(self._endpoints))
        tiers.peers = PeerClient(self._endpoints, self._run, self.format, tiers.warn_once) if self._endpoints else None

    def counters(self) -> TierCounts:
        """Return what this process has read since it opened the store."""
        return self._tiers().counter.read()

    def node_counters(self) -> TierCounts:
        """Return what all processes of the run on this node have read, including workers and ended processes."""
        return TierCounts(*self._tiers().run.rows().sum(0).tolist())

    def sizes(self) -> tuple[int, ...]:
        """Return (samples in memory, bytes in memory, files on disk, bytes on disk) of this node now."""
        tiers = self._tiers()
        return tiers.memory.cached, tiers.memory.bytes, tiers.disk.entries(), tiers.disk.bytes()

    def flush(self) -> None:
        """Write pending files to disk."""
        self._tiers().disk.flush()

    def interrupt(self) -> None:
        """As `Tiers.interrupt`."""
        if self._opened is not None and self._opened.pid == os.getpid():
            self._opened.interrupt()

    def close(self) -> None:
        """Write pending files and close the tiers. The last process on a node that uses the memory tier frees it."""
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
                self._opened = open_tiers(self.config, self.manifest, self.placement, self._owned, self._run)
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
