"""Residuals to disk and back, without a collective.

Every rank's residual is different, so each has its shards by group in a side file of its own (see side_files).

On the same topology a resumed run is exact: round, layout, residuals and measured rates are what they were. On another
one the sum over nodes is kept: every new node starts with an equal share of it, and the rates are measured again.
Velocities of momentum correction are kept likewise. Where the run that resumes has none (one node, or it was turned
off), they and the residuals become gradients that SGD's own momentum carries as far.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.gradients.config import HierConfig
from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.gradients.residual import ResidualStore
from lightning_sparse.gradients.schedule import Warmup
from lightning_sparse.gradients.state import HierState
from lightning_sparse.strategy.side_files import Saved, check_version, read_side_file, write_side_file

_VERSION = 4
_READABLE = (3,)


def manifest_of(state: HierState, run_id: str) -> dict[str, Any]:
    """For the main file: plain types only."""
    choice = state.exchange.choice
    return {
        "version": _VERSION,
        "save_id": f"{run_id}-{state.round}",
        "round": state.round,
        "config": state.config.to_dict(),
        **choice.found(),
        "warmup": [state.warmup.epochs, state.warmup.rounds],
        "momentum": {} if state.momentum is None else state.momentum.tails(),
        "nodes": [list(node) for node in state.topology.nodes],
        "parameters": dict(state.parameters.numels),
        "settled": _plain(state.layout.settled),
        "previous": _plain(state.layout.previous),
        "stores": [_plain(sorted(store.known, key=lambda group: group.names)) for store in state.feedback.stores],
    }


def side_content(state: HierState) -> dict[str, Any]:
    """This rank's residuals, for its side file."""
    return {"stores": [_content(store) for store in state.settled_stores()]}


def save_side_file(state: HierState, save_id: str, checkpoint_path: str) -> None:
    """Write this rank's residuals beside the checkpoint."""
    write_side_file(side_content(state), save_id, checkpoint_path, state.topology.rank)


def fits(saved: Saved, state: HierState) -> bool:
    """Whether it was saved for a module with these parameters.

    Raises:
        ValueError: when it was saved in another format.
    """
    check_version(saved, _VERSION, *_READABLE)
    same: bool = saved.manifest["parameters"] == state.parameters.numels
    return same


def restore(saved: Saved, state: HierState, device: torch.device) -> None:
    """apply(), with what could not be restored in the log."""
    for complaint in apply(saved, state, device):
        state.log_once(complaint, logging.WARNING, every_rank=complaint.startswith("rank"))


def apply(saved: Saved, state: HierState, device: torch.device) -> list[str]:
    """Put a state where the saved one was; what it holds is forgotten.

    Returns:
        What could not be restored, a sentence each, for the log.

    Raises:
        ValueError: when it was saved in another format.
    """
    check_version(saved, _VERSION, *_READABLE)
    manifest = saved.manifest
    state.forget()
    state.round = state.exchange.stats.rounds = manifest["round"]
    # Cut again: what is excluded now may not have been then. regroup() then brings the residuals along.
    state.layout.settle(state.layout.cut(_groups(manifest["settled"])))
    state.layout.previous = state.layout.cut(_groups(manifest["previous"]))
    if state.config.warmup_epochs is None and state.config.warmup_steps is None:
        state.warmup = Warmup(*manifest.get("warmup", ()))  # by the estimate of the run that began it
    complaints = _config_changes(state.config, manifest["config"])
    same = tuple(map(tuple, manifest["nodes"])) == state.topology.nodes
    if same:
        state.exchange.choice.go_on(manifest, auto=manifest["config"]["density"] == "auto")
    if same and len(manifest["stores"]) <= len(state.feedback.stores):
        complaints += _apply_same(saved, state.feedback.stores, device, state.topology.rank)
    else:
        complaints += _apply_other(saved, state.feedback.stores, state.topology.num_nodes, device)
    return complaints


def _apply_same(saved: Saved, stores: list[ResidualStore], device: torch.device, rank: int) -> list[str]:
    if saved.side is not None:
        for store, content in zip(stores, saved.side["stores"], strict=False):
            for names, numels, shard in content["groups"]:
                store.known.add(group := ParamGroup(tuple(names), tuple(numels)))
                if shard is not None:
                    store.current[group] = shard.to(device)
            store.parked.update({name: value.to(device) for name, value in content["parked"].items()})
        return []
    for store, groups in zip(stores, saved.manifest["stores"], strict=False):
        store.known.update(_groups(groups))  # the same on all ranks, or collectives would differ
    return [f"rank {rank}: no readable residual beside {saved.path}; it starts from zero, so what waited there is lost"]


def _apply_other(saved: Saved, stores: list[ResidualStore], num_nodes: int, device: torch.device) -> list[str]:
    nodes = saved.manifest["nodes"]
    totals: list[dict[str, Tensor]] = [{} for _ in saved.manifest["stores"]]
    missing = 0
    for node in nodes:
        read = [read_side_file(saved.path, saved.manifest["save_id"], rank) for rank in node]
        sides = [side for side in read if side is not None]
        missing += len(read) - len(sides)
        for index, total in enumerate(totals):
            contents = [side["stores"][index] for side in sides if index < len(side["stores"])]
            for name, value in _of_node(contents, len(node)).items():
                total[name] = total[name] + value if name in total else value
    if len(totals) > len(stores):
        totals = [_without_velocity(totals[0], totals[1], saved.manifest.get("momentum", {}))]
    for store, total in zip(stores, totals, strict=False):
        store.parked.update({name: (value / num_nodes).to(device) for name, value in total.items()})
    shape = f"{len(nodes)} node(s) were saved and {num_nodes} resume"
    kept = f"{shape}: the sum of residuals over nodes is kept, shared out equally"
    lost = f"{missing} side file(s) of {saved.path} are not readable: what waited there is lost"
    return [kept, lost] if missing else [kept]


def _without_velocity(
    residual: dict[str, Tensor], velocity: dict[str, Tensor], tails: dict[str, tuple[float, float]]
) -> dict[str, Tensor]:
    """What is to be sent where SGD keeps its momentum itself (MomentumCorrection.tails)."""
    sent = {name: value * tails.get(name, (1.0, 0.0))[0] for name, value in residual.items()}
    for name, value in velocity.items():
        tail = value * tails.get(name, (1.0, 0.0))[1]
        sent[name] = sent[name] + tail if name in sent else tail
    return sent


def _of_node(contents: list[dict[str, Any]], num_devices: int) -> dict[str, Tensor]:
    """One node's residual by parameter, from its devices' stores; nothing of a group that is not whole."""
    shards: dict[ParamGroup, list[Tensor | None]] = {}
    whole: dict[str, Tensor] = dict(contents[0]["parked"]) if contents else {}
    for content in contents:
        for names, numels, shard in content["groups"]:
            shards.setdefault(ParamGroup(tuple(names), tuple(numels)), []).append(shard)
    for group, parts in shards.items():
        held = next((part for part in parts if part is not None), None)
        if held is not None and len(parts) == num_devices:
            flat = torch.cat([torch.zeros_like(held) if part is None else part for part in parts])
            whole.update({name: flat[place] for name, place in group.slices.items()})
    return whole


def _content(store: ResidualStore) -> dict[str, Any]:
    return {
        "groups": [(*_plain([group])[0], _on_cpu(store.current.get(group))) for group in store.known],
        "parked": {name: value.cpu() for name, value in store.parked.items()},
    }


def _on_cpu(shard: Tensor | None) -> Tensor | None:
    return None if shard is None else shard.cpu()


def _config_changes(config: HierConfig, saved: dict[str, Any]) -> list[str]:
    changes = [f"{name}: {was!r} -> {now!r}" for name, (was, now) in config.differences(saved).items()]
    return [f"options differ from the saved run's, the new ones hold ({', '.join(changes)})"] if changes else []


def _plain(groups: Any) -> list[tuple[list[str], list[int]]]:
    return [(list(group.names), list(group.numels)) for group in groups]


def _groups(plain: list[tuple[list[str], list[int]]]) -> tuple[ParamGroup, ...]:
    return tuple(ParamGroup(tuple(names), tuple(numels)) for names, numels in plain)
