"""Decides how an engine loads a checkpoint. All ranks reach the same decision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.agree import all_agree, differing, gather
from lightning_sparse.checkpoint.side_files import CHECKPOINT_KEY, EngineCheckpoint
from lightning_sparse.checkpoint.state import VERSION, State
from lightning_sparse.engine import Engine
from lightning_sparse.messages import listed, log_if_slow


def restore(engine: Engine, saved: EngineCheckpoint, device: torch.device) -> dict[str, Any] | None:
    """Load an engine from a checkpoint. A collective of the world.

    Returns:
        The side file of this rank if the device continues exactly, else None.

    Raises:
        ValueError: if the checkpoint has another format.
        RuntimeError: if nodes have different global weights afterwards.
    """
    check_version(saved)
    agree = partial(all_agree, reduce=partial(dist.all_reduce, group=engine.topology.world), device=device)
    with log_if_slow(f"restoring {saved.path}"):
        side = _restore(engine, saved, agree, device)
        parts = engine.global_parts()
        differ = bool(parts) and differing(parts, partial(dist.all_reduce, group=engine.topology.inter), device) != []
        alike = agree(not differ)
    if not alike:
        raise RuntimeError(
            f"nodes have different global weights after loading {saved.path}, so they would train different models. "
            f"Make sure that all nodes read the same files, resume from another checkpoint, or remove the entry "
            f"{CHECKPOINT_KEY!r} from this checkpoint to continue from its weights alone."
        )
    return side


class Plan(Enum):
    EXACT = "each device loads its own state"
    PARTIAL = "as EXACT, but devices without a readable state begin with nothing pending"
    RESHARD = "each device loads its share of the states of all devices"


def _plan(engine: Engine, saved: EngineCheckpoint, own: State | None, agree: Callable[[bool], bool]) -> Plan:
    # Every branch depends on values that are equal on all ranks, so all ranks call the same collectives.
    metadata = saved.metadata
    if agree(own is not None and engine.fits(metadata, own)):
        return Plan.EXACT
    some_are_missing = not agree(own is not None)
    may_begin_anew = saved.is_of(engine.topology) and some_are_missing and not engine.requires_all_ranks
    if may_begin_anew and agree(own is None or engine.fits(metadata, own)):
        return Plan.PARTIAL
    return Plan.RESHARD


def _restore(
    engine: Engine, saved: EngineCheckpoint, agree: Callable[[bool], bool], device: torch.device
) -> dict[str, Any] | None:
    topology, metadata = engine.topology, saved.metadata
    own = State.from_dict(saved.side) if saved.is_of(topology) and saved.side is not None else None
    _log_changes(engine, metadata)
    plan = _plan(engine, saved, own, agree)
    if plan is not Plan.RESHARD:
        engine.load(metadata, own)
        if own is None:
            line = f"rank {topology.rank}: no readable residual of {saved.path}; it starts from zero"
            engine.log_once(f"{line}, so {engine.loss_message}", logging.WARNING, every_rank=True)
        return saved.side if plan is Plan.EXACT else None
    nodes = saved.read_all(device)
    missing = sum(map(len, metadata["nodes"])) - sum(map(len, nodes))
    if missing and engine.requires_all_ranks:
        engine.log_once(f"{saved.path} lacks readable files of some ranks: {engine.loss_message}", logging.WARNING)
        return None
    engine.load_from(metadata, nodes)
    engine.log_once(f"{len(nodes)} node(s) were saved and {topology.num_nodes} resume: {engine.reshard_message}")
    if missing:
        engine.log_once(
            f"{missing} side file(s) of {saved.path} are not readable: {engine.loss_message}", logging.WARNING
        )
    return None


def _log_changes(engine: Engine, metadata: Mapping[str, Any]) -> None:
    differences = engine.config.differences(metadata["config"]).items()
    changes = [f"{name}: {was!r} -> {now!r}" for name, (was, now) in differences]
    if changes:
        engine.log_once(
            f"options differ from the saved run, and the new options apply ({', '.join(changes)})", logging.WARNING
        )


def check_loaded_by_all(saved: EngineCheckpoint | None) -> None:
    """Raise ValueError unless all ranks have loaded the same save, or none. A collective of the world."""
    with log_if_slow("comparing which checkpoint each rank has loaded"):
        loaded: list[str | None] = gather(None if saved is None else saved.metadata["save_id"])
    other = [rank for rank, save_id in enumerate(loaded) if save_id != loaded[0]]
    if other:
        raise ValueError(
            f"rank(s) {listed(other)} loaded {loaded[other[0]] or 'no checkpoint'} and rank 0 {loaded[0] or 'none'}: "
            f"the nodes do not share the checkpoint folder, or ckpt_path differs. Resume from a path at which all "
            f"nodes see the same file."
        )


def check_version(saved: EngineCheckpoint) -> None:
    version = saved.metadata["version"]
    if version != VERSION:
        raise ValueError(
            f"{saved.path} has format {version} of lightning_sparse, but this version reads format {VERSION}. Use the "
            f"version that wrote it, or remove the entry {CHECKPOINT_KEY!r} to continue from its weights alone."
        )
