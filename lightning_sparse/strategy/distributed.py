"""Folders of `torch.distributed.checkpoint`, for loops without Lightning and for strategies that are based on DDP.

``save`` and ``async_save`` write these entries of an engine with the key "updates":

    updates.metadata                                         entries that are equal on all ranks
    updates.rank2.engine.pending/layers.0.weight/0-8192      a piece of a parameter
    updates.rank2.engine.rest                                state that only this device can use
    updates.rank2.optimizers...                              the state of a node's own optimizers, by piece

A Trainer's checkpoint has the engine as "engine0", without its metadata, and these entries:

    state_dict.layers.0.weight                               the global weights, divided among all ranks
    optimizer_states.0.0                                     tensors of shared optimizer states, divided
    meta.pt                                                  all other entries, and the above with tensors on "meta"

Lightning's consolidate_checkpoint merges the folder and meta.pt into one file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.checkpoint.folder import META, verify
from lightning_sparse.checkpoint.restore import restore
from lightning_sparse.checkpoint.side_files import CHECKPOINT_KEY, EngineCheckpoint
from lightning_sparse.checkpoint.state import State
from lightning_sparse.engine import Engine
from lightning_sparse.internals import tree_leaves, tree_map_only
from lightning_sparse.strategy.adapter import with_tensors
from lightning_sparse.topology import Topology, device_type
from lightning_sparse.updates import LocalUpdates, optimizer_state

WEIGHTS, STATES = "state_dict", "optimizer_states"
"""Keys of a Trainer's checkpoint."""
META_TENSORS_KEY = f"{CHECKPOINT_KEY}_hollow"
"""Key in meta.pt of both entries above, with tensors on the device "meta"."""


def resume(engine: Engine, folder: str | os.PathLike[str], key: str) -> None:
    """Load an engine from a folder of ``torch.distributed.checkpoint``. Every rank calls it after loading the model.

    On the same cluster, the run continues bit-identically. On another cluster, unsent state is divided among the nodes,
    and each node's optimizers continue with the state of the first node. A single node loads no optimizer state,
    because its engine is inactive.

    Args:
        key: key under which the engine was saved.

    Raises:
        ValueError: if the folder has nothing under that key, or the state of another kind of engine.
        RuntimeError: if the folder is damaged, or nodes have different global weights afterwards.
    """
    # torch's load() needs the name and shape of each entry, which an engine of another cluster does not know. It also
    # verifies no checksums. So this function reads the folder itself, one piece at a time.
    device = torch.device(device_type(dist.get_backend_config()))
    verify(Path(folder), device)
    files = _Files(Path(folder), key)
    (metadata,) = files.read("metadata")
    if metadata["kind"] != engine.kind:
        raise ValueError(
            f"{key!r} in {folder} is the state of an engine that exchanges {metadata['kind']}, but this engine "
            f"exchanges {engine.kind}. Load only the model."
        )
    if not files.has("rank0.engine.rest"):  # it ran on one node
        engine.restart()
        return
    saved = InFolder.of(files, metadata, engine.topology)
    restore(engine, saved, device)
    if isinstance(engine, LocalUpdates) and engine.active:
        states = saved.optimizers(engine.topology)
        optimizer_state.check([local_optimizer.optimizer for local_optimizer in engine.optimizers], states)
        optimizer_state.load(engine.names, engine.stepped(), states)


@dataclass
class InFolder(EngineCheckpoint):
    """An engine's part of a folder. Tensors are read when they are sliced."""

    files: _Files

    @staticmethod
    def of(files: _Files, metadata: dict[str, Any], topology: Topology) -> InFolder:
        saved = InFolder(metadata, os.fspath(files.folder), None, files)
        saved.side = saved.read(topology.rank, whole=True) if saved.is_of(topology) else None
        return saved

    def read(self, rank: int, *, verify: bool = True, whole: bool = False) -> dict[str, Any]:
        files, name = self.files, f"rank{rank}.entries"
        state = files.state(rank, "engine", whole=whole)
        return {**state.to_dict(), **({"entries": files.read(name)[0]} if files.has(name) else {})}

    def optimizers(self, topology: Topology) -> list[State]:
        """Return the state of this node's optimizers; on another cluster, of the first node's."""
        ranks = self.metadata["nodes"][topology.node_index if self.is_of(topology) else 0]
        return [self.files.state(rank, "optimizers") for rank in ranks]


# -- checkpoints of a Trainer ------------------------------------------------------------------------------------------


def split_checkpoint(
    checkpoint: dict[str, Any], engines: Sequence[Engine], entries: Mapping[str, Any], alike: Collection[str]
) -> dict[str, Any]:
    """Remove this rank's part for ``torch.distributed.checkpoint.save`` from a checkpoint, and return it.

    Args:
        entries: state of this rank, or its node, in addition to the engines' state.
        alike: names of weights that are equal on all ranks. Other weights are saved from rank 0.
    """
    place = f"rank{dist.get_rank()}"
    weights: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {WEIGHTS: weights}
    for at, state in enumerate(checkpoint.get(STATES, ())):
        tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        pieces |= {f"{STATES}.{at}.{number}": tensor for number, tensor in enumerate(tensors)}
    for name, value in checkpoint[WEIGHTS].items():
        if isinstance(value, Tensor) and (place == "rank0" or name in alike):
            weights[name] = value
    for at, engine in enumerate(engines):
        pieces[f"engine{at}"] = {place: {**engine.device_state(), "entries": (entries,)}}
    hollow = {WEIGHTS: with_tensors(checkpoint.pop(WEIGHTS), lambda _, tensor: tensor.to("meta"))}
    if STATES in checkpoint:
        hollow[STATES] = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), checkpoint.pop(STATES))
    checkpoint[META_TENSORS_KEY] = hollow
    return pieces


def merge_checkpoint(folder: Path, topology: Topology, **options: Any) -> tuple[dict[str, Any], list[InFolder]]:
    """Read a split checkpoint, with options of ``torch.load``, and the part of each engine."""
    checkpoint: dict[str, Any] = torch.load(folder / META, map_location="cpu", **options)
    if META_TENSORS_KEY not in checkpoint:
        raise ValueError(
            f"{folder} was written by 'mstopk_fsdp', but this strategy reads folders of 'mstopk_hier' and "
            f"'mstopk_local'. Resume with 'mstopk_fsdp', and save one file (save_distributed_checkpoint=False)."
        )
    checkpoint |= checkpoint.pop(META_TENSORS_KEY)
    weights, states = _Files(folder, WEIGHTS), _Files(folder, STATES)
    checkpoint[WEIGHTS] = with_tensors(checkpoint[WEIGHTS], lambda name, _: weights.read(name))
    if STATES in checkpoint:
        checkpoint[STATES] = [_filled(state, states, at) for at, state in enumerate(checkpoint[STATES])]
    metadata_items = enumerate(checkpoint[CHECKPOINT_KEY])
    return checkpoint, [
        InFolder.of(_Files(folder, f"engine{at}"), metadata, topology) for at, metadata in metadata_items
    ]


def check_sharded(folder: Path, **options: Any) -> None:
    if (folder / META).is_file() and META_TENSORS_KEY in torch.load(folder / META, map_location="cpu", **options):
        raise ValueError(
            f"{folder} was written by 'mstopk_hier' or 'mstopk_local', but 'mstopk_fsdp' reads only its own folders. "
            f"Resume with that strategy, and save one file (save_distributed_checkpoint=False)."
        )


def _filled(state: Any, states: _Files, at: int) -> Any:
    # `split_checkpoint` numbers the tensors in the same order.
    number = count()
    return tree_map_only(Tensor, lambda _: states.read(f"{at}.{next(number)}"), state)


# -- files -------------------------------------------------------------------------------------------------------------


class _Files:
    """The entries under a key; each entry is an archive of torch.save() inside a file."""

    def __init__(self, folder: Path, key: str) -> None:
        stored = FileSystemReader(folder).read_metadata().storage_data
        self.folder, self._key = folder, key
        self._places = {index.fqn: place for index, place in stored.items()}

    def has(self, name: str) -> bool:
        return f"{self._key}.{name}" in self._places

    def read(self, name: str) -> Any:
        if not self.has(name):
            raise ValueError(
                f"{self.folder} has no {self._key}.{name}. Pass resume() the key under which the engine was saved, as "
                f"in torch.distributed.checkpoint.save({{key: engine}}, checkpoint_id=folder)."
            )
        place = self._places[f"{self._key}.{name}"]
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)

    def lazy_tensor(self, name: str) -> Tensor:
        return cast(Tensor, _LazyTensor(self, name))

    def state(self, rank: int, part: str, *, whole: bool = False) -> State:
        return State.from_dict(_Entries(self, f"rank{rank}.{part}", whole))


class _Entries(dict[str, Any]):
    def __init__(self, files: _Files, prefix: str, whole: bool) -> None:
        self._files, self._prefix, self._whole = files, prefix, whole

    def __missing__(self, name: str) -> Any:
        read = self._files.read if self._whole or name == "rest" else self._files.lazy_tensor
        return read(f"{self._prefix}.{name}")


@dataclass
class _LazyTensor:
    files: _Files
    name: str

    def __getitem__(self, here: slice) -> Tensor:
        tensor: Tensor = self.files.read(self.name)[here]
        return tensor
