"""Files of all ranks beside a checkpoint, written and read without a collective.

What a rank alone knows is in a file of its own; rank 0 puts a small manifest into the checkpoint:

    epoch=3.ckpt                                 checkpoint["lightning_sparse"] = manifests, each with a save id
    epoch=3.ckpt.residual/<save id>/rank00002.pt what this rank alone knows

There is no collective, because a save may come from a signal handler or from an exception that one rank alone met. The
save id ties the two: an old main file never meets newer side files. Side files are written before the main file, under
a temporary name that is renamed when whole; the ids of earlier saves are removed after it. So a job that is killed at
any point of saving leaves a checkpoint that is whole: the old one or the new one.
"""

import contextlib
import io
import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import fsspec
import torch

KEY = "lightning_sparse"


@dataclass
class Saved:
    """What load() found, until the state it belongs to exists."""

    manifest: dict[str, Any]
    path: str
    side: dict[str, Any] | None


def check_version(saved: Saved, current: int, *readable: int) -> None:
    """Raise ValueError for a format that this version does not read."""
    version = saved.manifest["version"]
    if version != current and version not in readable:
        raise ValueError(
            f"{saved.path} was written in format {version} of lightning_sparse, this one reads {current}: use the "
            f"version that wrote it, or remove the entry {KEY!r} to go on from its weights alone."
        )


def new_run_id() -> str:
    """Rank 0 makes one and all ranks share it; with the round it names a save."""
    return uuid.uuid4().hex[:8]


def write_side_file(content: dict[str, Any], save_id: str, checkpoint_path: str, rank: int) -> None:
    """Write what this rank alone knows beside the checkpoint."""
    buffer = io.BytesIO()
    torch.save({**content, "save_id": save_id}, buffer)
    fs, path = _side_path(checkpoint_path, save_id, rank)
    fs.makedirs(os.path.dirname(path), exist_ok=True)
    with fs.open(f"{path}.part", "wb") as file:
        file.write(buffer.getvalue())
    fs.mv(f"{path}.part", path)


def exists(checkpoint_path: str) -> bool:
    """Whether there is a checkpoint of that name."""
    fs, path = fsspec.core.url_to_fs(checkpoint_path)
    return bool(fs.exists(path))


def remove_side_files(checkpoint_path: Any, *, but: Collection[str] = ()) -> None:
    """Remove the side files of a checkpoint, but not those of the save ids to keep."""
    fs, folder = _folder(os.fspath(checkpoint_path))
    with contextlib.suppress(FileNotFoundError):
        for each in fs.ls(folder, detail=False):
            if os.path.basename(each) not in but:
                fs.rm(each, recursive=True)
        if not but:
            fs.rm(folder, recursive=True)


def load(checkpoint: dict[str, Any], checkpoint_path: str, rank: int) -> list[Saved]:
    """What the checkpoint has of each module, with this rank's side files; empty without this strategy."""
    manifests = checkpoint.get(KEY) or []
    if isinstance(manifests, dict):  # format 3 of Trainer
        manifests = [manifests]
    return [Saved(each, checkpoint_path, read_side_file(checkpoint_path, each["save_id"], rank)) for each in manifests]


def read_side_file(checkpoint_path: str, save_id: str, rank: int) -> dict[str, Any] | None:
    """One rank's side file; None when the file is missing, damaged, or of another save."""
    for place in dict.fromkeys((checkpoint_path, _target(checkpoint_path))):
        fs, path = _side_path(place, save_id, rank)
        try:
            with fs.open(path, "rb") as file:
                content: dict[str, Any] = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        except Exception:  # torch.load of a damaged file raises whatever its parser stumbled over
            continue
        if content.get("save_id") == save_id:
            return content
    return None


def _folder(checkpoint_path: str) -> tuple[Any, str]:
    fs, path = fsspec.core.url_to_fs(checkpoint_path)
    return fs, f"{path}.residual"


def _target(checkpoint_path: str) -> str:
    """save_last may link to another checkpoint, whose side files are then the ones that count. For reading only: a
    save puts a file of its own in the place of the link."""
    return os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path


def _side_path(checkpoint_path: str, save_id: str, rank: int) -> tuple[Any, str]:
    fs, folder = _folder(checkpoint_path)
    return fs, f"{folder}/{save_id}/rank{rank:05d}.pt"
