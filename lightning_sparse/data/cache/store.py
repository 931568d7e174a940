"""`SampleStore`: a sample from the nearest tier that has it. What pipelines and samplers build on.

::

    get(indices) ->  memory of this node         a view, nothing is copied
                     memory of its owner         shuffle="partial" and "global", for samples of other nodes
                     local disk                  decoded if pixels are wanted, then kept in memory
                     network storage             checked by decoding it, then kept on disk and in memory

A tier that fails hands on to the next: a flipped bit, a peer that is dead, a full disk cost time and are counted, they
do not end a run. Only two things do: a damaged file on storage, unless ``on_corrupt="skip"``, and storage that does not
come back.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_sparse.data import decode
from lightning_sparse.data.cache.counts import TierCounts, TierSizes
from lightning_sparse.data.cache.disk import Key, Stored, damaged
from lightning_sparse.data.cache.manifest import Manifest
from lightning_sparse.data.cache.placement import Placement, owners
from lightning_sparse.data.cache.storage import Fetched, Refusal
from lightning_sparse.data.cache.tiers import Tiers, checked, open_tiers
from lightning_sparse.data.config import CacheConfig, CorruptSampleError
from lightning_sparse.data.peers.interface import node_address
from lightning_sparse.data.peers.client import PeerClient
from lightning_sparse.data.peers.server import PeerServer
from lightning_sparse.data.sample import Format, Sample, View

REPLACEMENTS = 100  # damaged files in a row that are stepped over


def new_run() -> bytes:
    """The identity of a run, from which its keys are derived. Made by one rank and given to all; keep it secret."""
    return secrets.token_bytes(32)


def open_store(
    config: CacheConfig, manifest: Manifest, place: Placement | None = None, run: bytes | None = None
) -> SampleStore:
    """The store of one split.

    Args:
        place: of this process; default: a single process.
        run: from `new_run`, the same for all ranks; default: a run of this process alone.

    Raises:
        DataError: when a folder of the cache cannot be used.
    """
    return SampleStore(config, manifest, place or Placement(), run or new_run())


class SampleStore:
    """One per split and process. May be pickled: a spawned or forked process opens the files for itself.

    `get` may be called by several threads.
    """

    def __init__(self, config: CacheConfig, manifest: Manifest, place: Placement, run: bytes) -> None:
        self.config, self.manifest, self.place, self._run = config, manifest, place, run
        self.owners = owners(manifest.labels, place.num_nodes, config.seed)
        self._mine = self.owners == place.node_index
        self.hits_count_as: Literal["memory", "served"] = "memory"  # "served" by a process that reads for other nodes
        self._damage: dict[int, str] = {}
        self._endpoints: dict[int, str] = {}
        self._opened: Tiers | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self.format: Format = self._tiers().memory.format

    # ------------------------------------------------------------------------------------------------ reading

    def get(self, indices: Sequence[int]) -> list[Sample]:
        """Samples in the order of `indices`, which point into the manifest.

        Raises:
            CorruptSampleError: names a damaged file, with ``on_corrupt="raise"``.
            StorageTimeoutError: when network storage does not come back.
        """
        tiers = self._tiers()
        array = np.asarray(indices, np.int64)
        wanted: list[int] = array.tolist()
        views, flipped = tiers.memory.get(wanted)
        samples: list[Sample | None] = []
        nbytes = missing = 0
        for index, label, view in zip(wanted, self.manifest.labels[array].tolist(), views, strict=True):
            if view is None:
                samples.append(None)
                missing += 1
            else:
                data, height, width = view
                nbytes += data.nbytes
                samples.append(Sample(data, label, index, height, width))
        hits = {f"{self.hits_count_as}_samples": len(wanted) - missing, f"{self.hits_count_as}_bytes": nbytes}
        tiers.counter.add(**hits, flipped_memory=flipped)
        if missing:
            self._complete(tiers, wanted, samples)
        tiers.disk.flush_old()
        return samples  # type: ignore[return-value]  # none is None any more

    def _complete(self, tiers: Tiers, wanted: list[int], samples: list[Sample | None]) -> None:
        """Put the samples that memory does not have in their places."""
        places: dict[int, list[int]] = {}
        for place, (index, sample) in enumerate(zip(wanted, samples, strict=True)):
            if sample is None:
                places.setdefault(index, []).append(place)
        for index, outcome in self._below_memory(tiers, list(places)).items():
            sample = self._replacement(tiers, index, outcome) if isinstance(outcome, str) else outcome
            for place in places[index]:
                samples[place] = sample

    def _below_memory(self, tiers: Tiers, wanted: list[int]) -> dict[int, Sample | str]:
        """Samples that memory does not have; for a damaged one, what is wrong with it."""
        found: dict[int, Sample | str] = {}
        if tiers.peers is not None:
            foreign = [index for index in wanted if not self._mine[index]]
            for asked, index, view in tiers.peers.fetch(foreign, self.owners[foreign]):
                found[asked] = view if isinstance(view, str) else self._sample(index, view)
                if not isinstance(view, str):
                    tiers.counter.add(peer_samples=1, peer_bytes=view.data.nbytes)
        for index in wanted:
            if index not in found and index in self._damage:
                found[index] = self._damage[index]
        rest = [index for index in wanted if index not in found]
        for index, view in self._from_files(tiers, rest):
            found[index] = view if isinstance(view, str) else self._sample(index, view)
        return found

    def _from_files(self, tiers: Tiers, wanted: list[int]) -> Iterator[tuple[int, View | str]]:
        """From local disk, then from network storage. Everything good is kept in the tiers above."""
        absent = []
        for index, stored in zip(wanted, tiers.disk.get([self._key(index) for index in wanted]), strict=True):
            found = None if stored is None else self._from_disk(tiers, index, stored)
            if found is None:
                absent.append(index)
            else:
                yield index, found
        if absent:
            answers = tiers.source.read([self.manifest.paths[index] for index in absent])
            for index, answer in zip(absent, answers, strict=True):
                yield index, self._from_storage(tiers, index, answer)

    def _from_disk(self, tiers: Tiers, index: int, stored: Stored) -> View | str | None:
        """None: storage has to be asked."""
        known = stored.decoder == tiers.decoder  # another version of it may judge otherwise
        if stored.damage is not None:
            return stored.damage if known and self.config.on_corrupt == "skip" else None
        try:
            pixels = None if known and self.format == "jpeg" else decode.decode(stored.data, self.config.short_side)
        except decode.UndecodableError:
            return None
        if not known:
            stored = stored._replace(decoder=tiers.decoder)
            tiers.disk.put(self._key(index), stored)
        tiers.counter.add(disk_samples=1, disk_bytes=len(stored.data))
        return self._kept(tiers, index, stored, pixels)

    def _from_storage(self, tiers: Tiers, index: int, answer: Fetched | Refusal) -> View | str:
        """Decode what storage gave before anything else sees it, and keep it."""
        key = self._key(index)
        try:
            if isinstance(answer, Refusal):
                raise decode.UndecodableError(answer.reason)
            tiers.counter.add(storage_samples=1, storage_bytes=len(answer.data))
            self._look_for_change(tiers, key, answer)
            stored, pixels = checked(answer.data, tiers.decoder, self.config.short_side)
        except decode.UndecodableError as error:
            if self.config.on_corrupt == "skip":
                tiers.disk.put(key, damaged(str(error), tiers.decoder))
            return str(error)
        tiers.disk.put(key, stored)
        return self._kept(tiers, index, stored, pixels)

    def _kept(self, tiers: Tiers, index: int, stored: Stored, pixels: npt.NDArray[np.uint8] | None) -> View:
        """What pipelines get of a file, kept in memory if this node keeps the sample."""
        if self.format == "decoded":
            assert pixels is not None
            view = View(pixels, pixels.shape[0], pixels.shape[1])
        else:
            view = View(np.frombuffer(stored.data, np.uint8), stored.height, stored.width)
        view.data.flags.writeable = False  # as a view of the slab is
        if self._mine[index] or self.config.shuffle == "local":
            tiers.keep(index, view)
        return view

    def _look_for_change(self, tiers: Tiers, key: Key, answer: Fetched) -> None:
        if answer.size == key.size and (answer.mtime_ns == key.mtime_ns or key.mtime_ns == 0):
            return
        tiers.counter.add(changed=1)
        tiers.say(
            "changed",
            f"{key.path} is not the file that was listed ({key.size:,} bytes then, {answer.size:,} now): the source "
            f"has changed, and its present content is used. `lightning-sparse cache warm` lists the source again.",
        )

    def _replacement(self, tiers: Tiers, index: int, reason: str) -> Sample:
        """The next good sample of the same owner in the place of a damaged one, the same in every epoch and run."""
        path = self.manifest.paths[index]
        if self.config.on_corrupt == "raise":
            raise CorruptSampleError(path, reason)
        self._damage[index] = reason
        tiers.counter.add(replaced=1)
        tiers.say(f"damaged {index}", f"{path} cannot be used and is replaced by another sample: {reason}")
        same = np.flatnonzero(self.owners == self.owners[index])
        place = int(np.searchsorted(same, index))
        for other in np.roll(same, -place - 1)[:REPLACEMENTS].tolist():
            view = tiers.memory.get([other])[0][0]
            outcome = self._below_memory(tiers, [other])[other] if view is None else self._sample(other, view)
            if not isinstance(outcome, str):
                return outcome
            self._damage[other] = outcome
        raise CorruptSampleError(
            path, f"{reason}; the {min(REPLACEMENTS, len(same) - 1)} samples after it are no better"
        )

    def _sample(self, index: int, view: View) -> Sample:
        return Sample(view.data, int(self.manifest.labels[index]), index, view.height, view.width)

    def _key(self, index: int) -> Key:
        return Key(self.manifest.paths[index], int(self.manifest.sizes[index]), int(self.manifest.mtimes_ns[index]))

    # ------------------------------------------------------------------------------------------------ other nodes

    def serve(self) -> str:
        """Start to serve this node's samples to others, from a process beside this one; one rank of a node does.

        Returns:
            the endpoint, for `connect` on the other nodes.

        Raises:
            ValueError: for a `peer_address` that this node does not have.
            RuntimeError: when the server does not start.
        """
        tiers = self._tiers()
        if tiers.server is None:
            tiers.server = PeerServer(self, self._run, node_address(self.config.peer_address))
        return tiers.server.endpoint

    def connect(self, endpoints: Mapping[int, str]) -> None:
        """Read samples of other nodes from their memory. endpoints: what `serve` returned, by node."""
        self._endpoints = {node: where for node, where in endpoints.items() if node != self.place.node_index}
        self._connect(self._tiers())

    def _connect(self, tiers: Tiers) -> None:
        if tiers.peers is not None:
            tiers.peers.close()
        tiers.peers = PeerClient(self._endpoints, self._run, self.format, tiers.say) if self._endpoints else None

    # ------------------------------------------------------------------------------------------------ the rest

    def counters(self) -> TierCounts:
        """Where this process had its samples from, since it opened the store."""
        return self._tiers().counter.read()

    def node_counters(self) -> TierCounts:
        """The same of all processes of the run on this node, workers and those that have ended included."""
        return TierCounts(*self._tiers().memory.rows().sum(0).tolist())

    def sizes(self) -> TierSizes:
        """What the tiers of this node hold now."""
        tiers = self._tiers()
        return TierSizes(tiers.memory.cached, tiers.memory.bytes, tiers.disk.entries(), tiers.disk.bytes())

    def flush(self) -> None:
        """Write to disk what waits to be written."""
        self._tiers().disk.flush()

    def close(self) -> None:
        """Write what waits and let go of everything; the last process of a run on a node frees its memory."""
        if self._opened is not None and self._opened.pid == os.getpid():
            self._closer()
        self._opened = None

    def _tiers(self) -> Tiers:
        if self._opened is not None and self._opened.pid == os.getpid():
            return self._opened
        if self._pid != os.getpid():  # forked: a thread of the parent may hold the lock for ever
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():
                self._opened = open_tiers(self.config, self.manifest, self.place, self._mine, self._run)
                # also when this object is forgotten, and when the process ends, a multiprocessing child included
                if self._endpoints:
                    self._connect(self._opened)
                self._closer = Finalize(self, self._opened.close, exitpriority=20)
            return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock", "_closer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = None
        self._lock, self._pid = threading.Lock(), os.getpid()
