"""Side files: the state of each rank next to a checkpoint, readable by any number of ranks.

    epoch=3.ckpt                                  ["lightning_sparse"]: metadata of each engine, with a save id
    epoch=3.ckpt.residual/<save id>/rank00002.pt  the `State` of one device

A checkpoint folder contains its side files (`lightning_sparse.checkpoint.folder`).

Each rank writes its side files under a temporary name and renames them. Rank 0 then writes the main file, and removes
the side files of earlier saves. So a job that is killed during a save leaves a complete checkpoint, old or new. The
main file and its side files have the same save id. A damaged side file counts as missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import uuid
import zipfile
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from lightning_sparse.checkpoint.state import VERSION, State, serialize_checked
from lightning_sparse.checkpoint.verdict import Reports, decide, forget
from lightning_sparse.engine import Engine
from lightning_sparse.messages import listed, log
from lightning_sparse.topology import Topology

CHECKPOINT_KEY = "lightning_sparse"


@dataclass
class EngineCheckpoint:
    """The part of a checkpoint that belongs to one engine, until the engine exists."""

    metadata: dict[str, Any]  # equal on all ranks
    path: str  # of the main file
    side: dict[str, Any] | None  # of this rank

    @property
    def kind(self) -> str:
        return str(self.metadata["kind"])

    def is_of(self, topology: Topology) -> bool:
        return tuple(map(tuple, self.metadata["nodes"])) == topology.nodes

    def read(self, rank: int, *, verify: bool = True) -> dict[str, Any] | None:
        """Return the side file of one rank; None if it is missing, damaged, or of another save."""
        return read_side_file(self.path, self.metadata["save_id"], rank, verify=verify)

    def read_all(self, device: torch.device) -> list[list[State]]:
        """Return the states of all ranks by node. Skip a state if any rank cannot read it. A collective."""
        own_rank, size, nodes = dist.get_rank(), dist.get_world_size(), self.metadata["nodes"]
        # One rank verifies each file, so no rank reads all files.
        files = {rank: self.read(rank, verify=rank % size == own_rank) for node in nodes for rank in node}
        unread = torch.tensor([files[rank] is None for rank in sorted(files)], dtype=torch.uint8, device=device)
        dist.all_reduce(unread, op=dist.ReduceOp.MAX)
        missing = unread.tolist()
        readable = [[files[rank] for rank in node if not missing[rank]] for node in nodes]
        return [[State.from_dict(file) for file in node if file is not None] for node in readable]


class SideFiles:
    """Side files of the checkpoints of one strategy on one rank.

    Attributes:
        run_id: part of each save id; equal on all ranks.
        loaded: parts of the last loaded checkpoint, until engines load them.
    """

    def __init__(self, kind: str) -> None:
        self.run_id = ""
        self.loaded: list[EngineCheckpoint] = []
        self._kind = kind
        self._counts: Counter[tuple[int, int]] = Counter()
        self._checked_sharing = False
        self._decided: deque[str] = deque(maxlen=2)  # keys of the last saves

    # -- saving --------------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        path: Any,
        engines: Sequence[Engine],
        timeout: timedelta | None,
        entries: Mapping[str, Any],
        *,
        weights_only: bool = False,
    ) -> Iterator[list[dict[str, Any]] | None]:
        """Write this rank's side files, and yield the metadata for the main file, which the caller writes.

        Args:
            path: path of the main file.
            engines: engines to save. Without any, only weights are saved, and None is yielded.
            timeout: time limit for the files of all ranks.
            entries: entries that a strategy adds to the first file.
            weights_only: write no side file of this rank, and yield None.

        Raises:
            RuntimeError: on all other ranks, if a rank could not write; that rank raises its own error. On all ranks,
                if side files are missing and the main file would replace a complete checkpoint.
        """
        path = os.fspath(path)
        metadata_list = [self.metadata_of(engine, index) for index, engine in enumerate(engines)]
        ids = [metadata["save_id"] for metadata in metadata_list]
        if metadata_list:
            self._write(path, () if weights_only else engines, ids, timeout, entries)
            if dist.get_rank() > 0 and engines[0].topology.device_index == 0:
                _remove_stale_local_saves(path, but=ids)
        yield None if weights_only else metadata_list or None
        if not dist.is_initialized() or dist.get_rank() == 0:
            remove_side_files(path, but=() if weights_only else ids)

    def _write(
        self,
        path: str,
        engines: Sequence[Engine],
        ids: Sequence[str],
        timeout: timedelta | None,
        entries: Mapping[str, Any],
    ) -> None:
        rank, failure = dist.get_rank(), None
        report: dict[str, Any] = {"path": path, "error": "", "replaces": False, "writes": len(engines) > 0}
        try:
            if rank == 0:
                fs, main_file = fsspec.core.url_to_fs(path)
                report["replaces"] = fs.exists(main_file)
            for index, (engine, save_id) in enumerate(zip(engines, ids, strict=False)):  # there may be ids alone
                extras = {"entries": dict(entries)} if index == 0 else {}
                write_side_file({**engine.state().to_dict(), **extras}, save_id, path, rank)
        except Exception as error:
            failure, report["error"] = error, f"{type(error).__name__}: {error}"
        key, task = f"lightning_sparse/{'/'.join(ids)}", "write their side files"
        # Not a collective: a save may come from a signal handler, or from an exception on one rank.
        verdict, reports = decide(key, json.dumps(report), partial(_verdict, path), timeout, task)
        if len(self._decided) == 2:
            forget(self._decided[0])  # no rank waits for it, because all have reported for a later save
        self._decided.append(key)
        if failure is not None:
            raise failure
        if verdict:
            raise RuntimeError(verdict)
        if rank == 0:
            contents = [json.loads(text) for text in reports if text is not None]
            paths = [content["path"] for content in contents]
            _warn_of_reports(path, paths, len(reports))
            writes = all(content["writes"] for content in contents)
            if writes and len(set(paths)) == 1:  # otherwise, a launcher has given each rank its own folder
                self._warn_if_not_shared(path, ids[0])

    def _warn_if_not_shared(self, path: str, save_id: str) -> None:
        if self._checked_sharing:
            return
        self._checked_sharing = True
        fs, folder = _folder(path)
        fs.invalidate_cache(folder)
        unseen = [rank for rank in range(dist.get_world_size()) if not fs.exists(_side_path(path, save_id, rank)[1])]
        if unseen:
            log.warning(
                "the side files of rank(s) %s are not in %s on rank 0's node: nodes do not share this folder. So a "
                "resume is exact only on the same nodes, and another number of nodes loses the state of these "
                "ranks. Save to a folder that all nodes share",
                listed(unseen),
                folder,
            )

    def metadata_of(self, engine: Engine, index: int = 0) -> dict[str, Any]:
        """Return an engine's entry of the main file, with a new save id."""
        self._counts[index, engine.rounds] += 1  # a later fit may reach the same round again
        return {
            "save_id": f"{self.run_id}-{index}-{engine.rounds}-{self._counts[index, engine.rounds]}",
            **engine.checkpoint_metadata(),
        }

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Mapping[str, Any], path: Any, rank: int) -> None:
        self.take(load(checkpoint, os.fspath(path), rank), path, rank)

    def take(self, found: Sequence[EngineCheckpoint], path: Any, rank: int) -> None:
        self.loaded = [checkpoint for checkpoint in found if checkpoint.kind == self._kind]
        other = next((checkpoint.kind for checkpoint in found if checkpoint.kind != self._kind), None)
        if other is not None and rank == 0:
            log.warning(
                "%s was saved by a strategy that exchanges %s: only its weights are loaded, and its pending updates or "
                "residuals are lost",
                path,
                other,
            )

    def entries(self, topology: Topology) -> dict[str, Any]:
        """Return the additional entries of this node's first side file; empty on another cluster."""
        if not self.loaded or not self.loaded[0].is_of(topology) or self.loaded[0].metadata["version"] != VERSION:
            return {}
        side = self.loaded[0].read(topology.nodes[topology.node_index][0])
        return {} if side is None else dict(side["entries"])


def new_run_id() -> str:
    """Return a random id. Broadcast it from rank 0 to all ranks."""
    return uuid.uuid4().hex[:8]


# -- files -------------------------------------------------------------------------------------------------------------


def write_side_file(content: dict[str, Any], save_id: str, checkpoint_path: str, rank: int) -> None:
    """Write this rank's side file, or raise ValueError for content that a safe load refuses."""
    buffer = serialize_checked({**content, "save_id": save_id})
    fs, path = _side_path(checkpoint_path, save_id, rank)
    fs.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        with open(f"{path}.part", "wb") as local:
            local.write(buffer.getbuffer())
            local.flush()
            os.fsync(local.fileno())  # otherwise, a crash of the machine may keep the name and lose the contents
        os.replace(f"{path}.part", path)
        return
    with fs.open(f"{path}.part", "wb") as file:
        file.write(buffer.getbuffer())
    fs.mv(f"{path}.part", path)


def remove_side_files(checkpoint_path: Any, *, but: Collection[str] = ()) -> None:
    """Remove the side files of a checkpoint, except the saves ``but``."""
    fs, folder = _folder(os.fspath(checkpoint_path))
    with contextlib.suppress(FileNotFoundError):
        for path in fs.ls(folder, detail=False):
            if os.path.basename(path) not in but:
                fs.rm(path, recursive=True)
        if not but:
            fs.rm(folder, recursive=True)


def _remove_stale_local_saves(checkpoint_path: str, *, but: Collection[str]) -> None:
    fs, folder = _folder(checkpoint_path)
    with contextlib.suppress(FileNotFoundError):
        earlier = [path for path in fs.ls(folder, detail=False) if os.path.basename(path) not in but]
        # If the nodes do not share the folder, rank 0 cannot remove these saves, which have no file of rank 0. This
        # node's last save stays, because rank 0 may not have replaced the main file yet.
        own = [path for path in earlier if not fs.exists(f"{path}/rank00000.pt")]
        for path in sorted(own, key=fs.modified)[:-1]:
            fs.rm(path, recursive=True)


def load(checkpoint: Mapping[str, Any], checkpoint_path: str, rank: int) -> list[EngineCheckpoint]:
    """Return the part of each engine, with this rank's side file."""
    metadata_list = checkpoint.get(CHECKPOINT_KEY) or []
    return [
        EngineCheckpoint(metadata, checkpoint_path, read_side_file(checkpoint_path, metadata["save_id"], rank))
        for metadata in metadata_list
    ]


def read_side_file(checkpoint_path: str, save_id: str, rank: int, *, verify: bool = True) -> dict[str, Any] | None:
    """Return one rank's side file; None if it is missing, damaged, or of another save.

    Args:
        verify: read the whole file, compare its checksums, and log damage.
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
        except Exception as error:  # torch.load of a damaged file can raise any type
            if verify:
                log.warning("%s cannot be read and counts as missing (%s: %s)", path, type(error).__name__, error)
            continue
        if content.get("save_id") == save_id:
            return content
    return None


def _content(file: Path | IO[bytes], verify: bool) -> dict[str, Any]:
    if verify:
        # torch.load does not verify the CRC-32 checksums of the archive.
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
    return fs, f"{path}/{CHECKPOINT_KEY}" if fs.isdir(path) else f"{path}.residual"


def _target(checkpoint_path: str) -> str:
    # save_last may link to another checkpoint, which has the side files. This is only for reading, because a save
    # replaces the link by a file.
    return os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path


def _side_path(checkpoint_path: str, save_id: str, rank: int) -> tuple[Any, str]:
    fs, folder = _folder(checkpoint_path)
    return fs, f"{folder}/{save_id}/rank{rank:05d}.pt"


def _verdict(path: str, reports: Reports) -> str:
    contents = [None if report is None else json.loads(report) for report in reports]
    error = next((report["error"] for report in contents if report is not None and report["error"]), "")
    if error:
        return f"a rank could not write its state for {path} ({error}): a checkpoint of that name stays as it was."
    missing = [rank for rank, report in enumerate(contents) if report is None]
    # A main file that replaces a complete checkpoint must be complete. Only rank 0 knows whether it replaces one.
    if missing and (contents[0] is None or contents[0]["replaces"]):
        return (
            f"rank(s) {listed(missing)} did not write their state for {path} in time, so the existing checkpoint "
            f"stays. Look for errors of these ranks."
        )
    return ""


def _warn_of_reports(path: str, paths: Sequence[str], world_size: int) -> None:
    names = sorted({os.path.basename(file) for file in paths})
    if len(names) > 1:
        log.warning(
            "ranks save a checkpoint under different names (%s), so a resume cannot find the state of all ranks. Log "
            "the metrics in the file name with sync_dist=True",
            ", ".join(names),
        )
    if len(paths) < world_size:
        log.warning(
            "%d rank(s) did not write their state for %s in time: it is saved without this state, which a resume loses",
            world_size - len(paths),
            path,
        )
