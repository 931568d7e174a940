"""Checkpoints of loops without Lightning, in folders of `torch.distributed.checkpoint`.

What ``save`` and ``async_save`` write of an engine that is given to them under the key "updates":

    updates.manifest                                         what all ranks know alike
    updates.rank2.engine.pending/layers.0.weight/0-8192      a piece of a parameter
    updates.rank2.engine.rest                                what only this very device can go on with
    updates.rank2.optimizers...                              in the same way, of a node's own optimizers

``load`` asks for what it knows by name and shape, and an engine does not know what another cluster saved. So `resume`
reads the folder itself: of each device's pieces those that this one needs, one at a time, with their checksums, at
which ``load`` does not look.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.engine import Engine, State
from lightning_sparse.strategy.folders import verify
from lightning_sparse.strategy.saves import Saved, restore
from lightning_sparse.topology import device_type
from lightning_sparse.updates import LocalUpdates, moments


def resume(engine: Engine, folder: str | os.PathLike[str], key: str) -> None:
    """Let an engine go on from a folder that ``torch.distributed.checkpoint`` has saved: bit-identically on the same
    cluster, on another one with what waited, shared out anew. Every rank calls it, after the model was loaded. What
    a node's own optimizers had is loaded here; another cluster takes up that of the first node.

    Args:
        key: under which the engine was saved.

    Raises:
        ValueError: when the folder has nothing under that key, or what another kind of engine saved.
        RuntimeError: when it is damaged, or nodes hold different global weights afterwards.
    """
    device = torch.device(device_type(dist.get_backend_config()))
    verify(Path(folder), device)
    files = _Files(Path(folder), key)
    (manifest,) = files.read("manifest")
    if manifest["kind"] != engine.kind:
        raise ValueError(
            f"{key!r} in {folder} is of an engine that exchanges {manifest['kind']}, and this one exchanges "
            f"{engine.kind}: load the model alone, and begin with nothing pending."
        )
    if not files.have("rank0.engine.rest"):  # it ran on one node
        engine.restart()
        return
    saved = _InFolder(manifest, os.fspath(folder), None, files)
    same, topology = saved.is_of(engine.topology), engine.topology
    if same:
        saved.side = files.state(topology.rank, "engine", files.read).to_dict()
    restore(engine, saved, device)
    if isinstance(engine, LocalUpdates) and engine.active:
        ranks = manifest["nodes"][topology.node_index if same else 0]
        moments.load(engine, [files.state(rank, "optimizers", files.look) for rank in ranks])


@dataclass
class _InFolder(Saved):
    """What a folder has of an engine: its tensors are read when they are sliced."""

    files: _Files

    def read(self, rank: int, *, verify: bool = True) -> dict[str, Any]:
        return self.files.state(rank, "engine", self.files.look).to_dict()


class _Files:
    """What was saved under a key; each entry is an archive of torch.save() inside a file."""

    def __init__(self, folder: Path, key: str) -> None:
        stored = FileSystemReader(folder).read_metadata().storage_data
        self._folder, self._key = folder, key
        self._places = {index.fqn: place for index, place in stored.items()}

    def have(self, name: str) -> bool:
        """Return whether there is an entry."""
        return f"{self._key}.{name}" in self._places

    def read(self, name: str) -> Any:
        """Return an entry."""
        if not self.have(name):
            raise ValueError(
                f"{self._folder} has no {self._key}.{name}: give resume() the key under which the engine was saved, "
                f"as in torch.distributed.checkpoint.save({{key: engine}}, checkpoint_id=folder)."
            )
        place = self._places[f"{self._key}.{name}"]
        with open(self._folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)

    def look(self, name: str) -> Tensor:
        """Return a tensor that is read when it is sliced."""
        return cast(Tensor, _Unread(self, name))

    def state(self, rank: int, part: str, tensor_of: Callable[[str], Tensor]) -> State:
        """Return what a device had."""
        place = f"rank{rank}.{part}"
        (rest,) = self.read(f"{place}.rest")
        return State.joined(rest, lambda name: tensor_of(f"{place}.{name}"))


@dataclass
class _Unread:
    files: _Files
    name: str

    def __getitem__(self, here: slice) -> Tensor:
        found: Tensor = self.files.read(self.name)[here]
        return found
