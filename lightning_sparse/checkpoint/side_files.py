"""What ranks know alone, beside a checkpoint: written without a collective, taken up by any number of ranks.

    epoch=3.ckpt                                  checkpoint["lightning_sparse"] = manifests, each with a save id
    epoch=3.ckpt.residual/<save id>/rank00002.pt  the `State` of one device

A checkpoint that is a folder has them inside (`lightning_sparse.checkpoint.folder`).

No collective, because a save may come from a signal handler or from an exception that one rank alone met. The save id
ties the two: an old main file never meets newer side files. Side files are written before the main file, under a
temporary name that is renamed when whole, and rank 0 waits for those of all ranks; the ids of earlier saves are removed
after it. So a job that is killed at any point of saving leaves a checkpoint that is whole: the old one or the new one.

A side file is a zip archive, as torch.save writes it, whose entries carry CRC-32 checksums. torch.load does not verify
them; here they are, so a damaged file counts as missing. Local files are mapped, not read.
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.checkpoint.state import VERSION, State, pickled
from lightning_sparse.engine import Engine
from lightning_sparse.internals import default_store, default_timeout
from lightning_sparse.messages import PATIENCE, log
from lightning_sparse.topology import Topology

KEY = "lightning_sparse"
FAILED = "failed: "  # what a rank arrives with that could not write


@dataclass
class Saved:
    """What a checkpoint has of one engine, until that exists.

    Attributes:
        manifest: what all ranks know alike.
        path: of the main file.
        side: what this rank alone knew; None if its file is missing, damaged, or of another save.
    """

    manifest: dict[str, Any]
    path: str
    side: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """Kind of the engine; early formats knew one."""
        return str(self.manifest.get("kind", "gradients"))

    def is_of(self, topology: Topology) -> bool:
        """Return whether it is of a cluster of the same ranks in the same nodes."""
        return tuple(map(tuple, self.manifest["nodes"])) == topology.nodes

    def read(self, rank: int, *, verify: bool = True) -> dict[str, Any] | None:
        """Return what that rank alone knew."""
        return read_side_file(self.path, self.manifest["save_id"], rank, verify=verify)

    def read_all(self, device: torch.device) -> list[list[State]]:
        """Return the states of all ranks by node, without those that some rank cannot read. Local files are mapped, and
        each is verified by one rank, so that none reads them all. A collective of the world."""
        here, size, nodes = dist.get_rank(), dist.get_world_size(), self.manifest["nodes"]
        files = {rank: self.read(rank, verify=rank % size == here) for node in nodes for rank in node}
        unread = torch.tensor([files[rank] is None for rank in sorted(files)], dtype=torch.uint8, device=device)
        dist.all_reduce(unread, op=dist.ReduceOp.MAX)
        missing = unread.tolist()
        readable = [[files[rank] for rank in node if not missing[rank]] for node in nodes]
        return [[State.from_dict(each) for each in node if each is not None] for node in readable]


class Saves:
    """Side files of the checkpoints of one strategy on one rank.

    Args:
        kind: of the strategy's engines.

    Attributes:
        run_id: in the ids of saves; the same on all ranks.
        loaded: what the last checkpoint that was loaded has, until it is restored.
    """

    def __init__(self, kind: str) -> None:
        self.run_id = ""
        self.loaded: list[Saved] = []
        self._kind = kind
        self._counts: Counter[tuple[int, int]] = Counter()
        self._looked = False

    # -- saving --------------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(
        self, path: Any, engines: Sequence[Engine], timeout: timedelta | None, entries: Mapping[str, Any]
    ) -> Iterator[list[dict[str, Any]] | None]:
        """Write this rank's side files, then the caller writes the main file with the manifests that are yielded;
        afterwards those of earlier saves are removed.

        Args:
            path: of the main file.
            engines: to save; none for weights alone, and None is yielded then.
            timeout: of rank 0's wait for the files of all ranks.
            entries: what a strategy adds to the first of this rank's files.

        Raises:
            RuntimeError: on all ranks, when one could not write, or when side files of some are missing and the main
                file would replace a whole checkpoint.
        """
        path = os.fspath(path)
        manifests = [self.manifest_of(engine, index) for index, engine in enumerate(engines)]
        ids = [manifest["save_id"] for manifest in manifests]
        if manifests:
            self._write(path, engines, ids, timeout, entries)
            if dist.get_rank() > 0 and engines[0].topology.device_index == 0:
                _clean_own_folder(path, but=ids)
        yield manifests or None
        if not dist.is_initialized() or dist.get_rank() == 0:
            remove_side_files(path, but=ids)

    def _write(
        self,
        path: str,
        engines: Sequence[Engine],
        ids: Sequence[str],
        timeout: timedelta | None,
        entries: Mapping[str, Any],
    ) -> None:
        """Write this rank's side files, and wait until rank 0 has seen that all ranks wrote theirs."""
        rank, barrier = dist.get_rank(), StoreBarrier(f"lightning_sparse/{'/'.join(ids)}", dist.get_world_size())
        try:
            for index, (engine, save_id) in enumerate(zip(engines, ids, strict=True)):
                more = {"entries": dict(entries)} if index == 0 else {}
                write_side_file({**engine.state().to_dict(), **more}, save_id, path, rank)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            barrier.arrive(rank, f"{FAILED}{said}")  # else rank 0 would wait in vain
            if rank == 0:
                barrier.conclude(_failure(path, said))
            raise
        barrier.arrive(rank, path)
        if rank > 0:
            if failure := barrier.conclusion(timeout):
                raise RuntimeError(failure)
            return
        try:
            _wait_for_all(barrier, path, timeout)
        except RuntimeError as error:
            barrier.conclude(str(error))
            raise
        barrier.conclude("")
        if len(set(barrier.names)) == 1:  # a launcher that gives each rank a folder of its own collects them
            self._look_for_all(path, ids[0])

    def _look_for_all(self, path: str, save_id: str) -> None:
        """On rank 0, at the first save: warn if it does not see the files of other nodes."""
        if self._looked:
            return
        self._looked = True
        fs, folder = _folder(path)
        fs.invalidate_cache(folder)
        unseen = [rank for rank in range(dist.get_world_size()) if not fs.exists(_side_path(path, save_id, rank)[1])]
        if unseen:
            log.warning(
                "the side files of rank(s) %s are not in %s as rank 0 sees it: nodes do not share that folder. A "
                "resume is exact on these very nodes alone, and another number of nodes loses what those ranks had "
                "not sent. Save to a folder that all nodes share.",
                _listed(unseen),
                folder,
            )

    def manifest_of(self, engine: Engine, index: int = 0) -> dict[str, Any]:
        """Return what the main file says of an engine; each call names another save."""
        self._counts[index, engine.rounds] += 1  # a later fit may come to the same round
        return {
            "save_id": f"{self.run_id}-{index}-{engine.rounds}-{self._counts[index, engine.rounds]}",
            **engine.header(),
        }

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Mapping[str, Any], path: Any, rank: int) -> None:
        """Read this rank's side files, for engines that exist now or later."""
        self.take(load(checkpoint, os.fspath(path), rank), path, rank)

    def take(self, found: Sequence[Saved], path: Any, rank: int) -> None:
        """Keep what a checkpoint has of this strategy's engines."""
        self.loaded = [each for each in found if each.kind == self._kind]
        other = next((each.kind for each in found if each.kind != self._kind), None)
        if other is not None and rank == 0:
            log.warning(
                "%s was saved by a strategy that exchanges %s: its weights are taken, and what nodes had not sent then "
                "is lost",
                path,
                other,
            )

    def entries(self, topology: Topology) -> dict[str, Any]:
        """Return what the first rank of this node added to its file; empty on another cluster, and of another format,
        which `restore` refuses."""
        if not self.loaded or not self.loaded[0].is_of(topology) or self.loaded[0].manifest["version"] != VERSION:
            return {}
        side = self.loaded[0].read(topology.nodes[topology.node_index][0])
        return {} if side is None else dict(side["entries"])


def new_run_id() -> str:
    """Return an id that rank 0 makes and all ranks share."""
    return uuid.uuid4().hex[:8]


# -- files -------------------------------------------------------------------------------------------------------------


def write_side_file(content: dict[str, Any], save_id: str, checkpoint_path: str, rank: int) -> None:
    """Write what this rank alone knows beside the checkpoint.

    Raises:
        ValueError: for content that a safe load would refuse when it is needed.
    """
    buffer = pickled({**content, "save_id": save_id})
    fs, path = _side_path(checkpoint_path, save_id, rank)
    fs.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        with open(f"{path}.part", "wb") as local:
            local.write(buffer.getbuffer())
            local.flush()
            os.fsync(local.fileno())  # else a machine that fails may keep the name and lose what it names
        os.replace(f"{path}.part", path)
        return
    with fs.open(f"{path}.part", "wb") as file:
        file.write(buffer.getbuffer())
    fs.mv(f"{path}.part", path)


def remove_side_files(checkpoint_path: Any, *, but: Collection[str] = ()) -> None:
    """Remove the side files of a checkpoint, but not those of the save ids to keep."""
    fs, folder = _folder(os.fspath(checkpoint_path))
    with contextlib.suppress(FileNotFoundError):
        for each in fs.ls(folder, detail=False):
            if os.path.basename(each) not in but:
                fs.rm(each, recursive=True)
        if not but:
            fs.rm(folder, recursive=True)


def _clean_own_folder(checkpoint_path: str, *, but: Collection[str]) -> None:
    """Remove what rank 0 does not see: earlier saves in a folder that nodes do not share, which has no files of rank 0.
    This node's last save stays, for rank 0 may not have replaced the main file yet."""
    fs, folder = _folder(checkpoint_path)
    with contextlib.suppress(FileNotFoundError):
        earlier = [each for each in fs.ls(folder, detail=False) if os.path.basename(each) not in but]
        own = [each for each in earlier if not fs.exists(f"{each}/rank00000.pt")]
        for each in sorted(own, key=fs.modified)[:-1]:
            fs.rm(each, recursive=True)


def load(checkpoint: Mapping[str, Any], checkpoint_path: str, rank: int) -> list[Saved]:
    """Return what the checkpoint has of each engine, with this rank's side files; empty without such a strategy."""
    manifests = checkpoint.get(KEY) or []
    return [Saved(each, checkpoint_path, read_side_file(checkpoint_path, each["save_id"], rank)) for each in manifests]


def read_side_file(checkpoint_path: str, save_id: str, rank: int, *, verify: bool = True) -> dict[str, Any] | None:
    """Return one rank's side file; None when the file is missing, damaged, or of another save.

    Args:
        verify: read it whole, compare its checksums, and log what is damaged; False where another rank does.
    """
    for place in dict.fromkeys((checkpoint_path, _target(checkpoint_path))):
        fs, path = _side_path(place, save_id, rank)
        try:
            if isinstance(fs, LocalFileSystem):
                content = _content(Path(path), verify)
            else:
                with fs.open(path, "rb") as file:
                    content = _content(io.BytesIO(file.read()), verify)
        except FileNotFoundError:
            continue
        except Exception as error:  # torch.load of a damaged file raises whatever its parser stumbled over
            if verify:
                log.warning("%s cannot be read and counts as missing (%s: %s)", path, type(error).__name__, error)
            continue
        if content.get("save_id") == save_id:
            return content
    return None


def _content(file: Path | IO[bytes], verify: bool) -> dict[str, Any]:
    """Load a file of torch.save(), whose checksums are right; one with a path is mapped."""
    if verify:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
    if isinstance(file, Path):
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    else:
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
    return content


def _folder(checkpoint_path: str) -> tuple[Any, str]:
    fs, path = fsspec.core.url_to_fs(checkpoint_path)
    return fs, f"{path}/{KEY}" if fs.isdir(path) else f"{path}.residual"


def _target(checkpoint_path: str) -> str:
    """save_last may link to another checkpoint, whose side files are then the ones that count. For reading only: a
    save puts a file of its own in the place of the link."""
    return os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path


def _side_path(checkpoint_path: str, save_id: str, rank: int) -> tuple[Any, str]:
    fs, folder = _folder(checkpoint_path)
    return fs, f"{folder}/{save_id}/rank{rank:05d}.pt"


# -- waiting for all ---------------------------------------------------------------------------------------------------


class StoreBarrier:
    """All ranks arrive, and one waits for them, once: through the process group's store rather than by a collective.

    A save may come from a signal handler or from an exception that one rank alone has met. Then rank 0 waits in vain
    for a while, but the collectives of the ranks stay in step.

    Args:
        key: the same on all ranks, and another one for each barrier.
        world_size: how many ranks there are.
    """

    def __init__(self, key: str, world_size: int, store: Store | None = None) -> None:
        self.names: list[str] = []  # that ranks arrived with, once they were waited for
        self._keys = [f"{key}/{rank}" for rank in range(world_size)]
        self._end = f"{key}/end"
        self._store = store or default_store()

    def arrive(self, rank: int, name: str = "") -> None:
        """Record that this rank has arrived."""
        self._store.set(self._keys[rank], name)

    def wait(self, timeout: timedelta | None) -> list[int]:
        """Wait until all have arrived, or the time is over; None stands for the timeout of the process group.

        Returns:
            The ranks that have not arrived; empty when all have.
        """
        timeout = timeout or default_timeout
        missing = self._wait(min(timeout, PATIENCE))
        if missing and timeout > PATIENCE:
            log.warning("waiting for rank(s) %s to write what they know beside a checkpoint", _listed(missing))
            missing = self._wait(timeout - PATIENCE)
        for rank, key in enumerate(self._keys):
            if rank not in missing:
                self.names.append(self._store.get(key).decode())
            self._store.delete_key(key)
        return missing

    def conclude(self, failure: str) -> None:
        """Tell those that arrived how it ended; empty for well."""
        self._store.set(self._end, failure)

    def conclusion(self, timeout: timedelta | None) -> str:
        """Wait for what the one that waited concludes; empty, too, when it takes too long: it may not be there."""
        timeout = timeout or default_timeout
        there = self._has_come([self._end], min(timeout, PATIENCE))
        if not there and timeout > PATIENCE:
            log.warning("waiting for rank 0 to see that all ranks wrote what they know beside a checkpoint")
            there = self._has_come([self._end], timeout - PATIENCE)
        return self._store.get(self._end).decode() if there else ""

    def _wait(self, timeout: timedelta) -> list[int]:
        if self._has_come(self._keys, timeout):
            return []
        return [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]

    def _has_come(self, keys: list[str], timeout: timedelta) -> bool:
        try:
            self._store.wait(keys, timeout)
        except RuntimeError:  # it took longer than that
            return False
        return True


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _failure(path: str, why: str) -> str:
    return f"a rank could not write its residuals of {path} ({why}): a checkpoint of that name stays as it was."


def _wait_for_all(barrier: StoreBarrier, path: str, timeout: timedelta | None) -> None:
    """On rank 0, wait for the side files of all ranks: a main file without some of them would not be whole."""
    missing = barrier.wait(timeout)
    failed = [name.removeprefix(FAILED) for name in barrier.names if name.startswith(FAILED)]
    if failed:
        raise RuntimeError(_failure(path, failed[0]))
    names = {os.path.basename(each) for each in barrier.names}
    if len(names) > 1:
        log.warning(
            "ranks save a checkpoint by different names (%s): a resume will not find all residuals. Log what is in the "
            "name with sync_dist=True",
            ", ".join(sorted(names)),
        )
    if not missing:
        return
    said = f"rank(s) {_listed(missing)} did not write their residuals of {path} in time"
    fs, main = fsspec.core.url_to_fs(path)
    if fs.exists(main):
        raise RuntimeError(f"{said}: the checkpoint of that name stays as it was. Look for what stopped them.")
    log.warning("%s: it is saved without them, and they are lost on resume", said)
