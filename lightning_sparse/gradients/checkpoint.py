"""Residuals in a checkpoint, as pieces of parameters. Nothing here is a collective.

On the same nodes, a resumed run is exact. On other nodes, each new node starts with an equal share of the sum over the
old nodes, also of velocities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checkpoint.state import Layout, Piece, State, layout_of, sum_slice_over_nodes
from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.gradients.residual import Entry, ResidualStore
from lightning_sparse.gradients.tracking import Parameters

QUANTITIES = ("residual", "velocity")
"""Names of the saved quantities, in the order of a state's stores."""
PlainGroup = tuple[list[str], list[int]]
"""A `ParamGroup` in types that a checkpoint may hold."""


def state_of(stores: Sequence[ResidualStore], parameters: Parameters) -> State:
    """Return the state of stores without an open round."""
    by_quantity = dict(zip(QUANTITIES, stores, strict=False))
    pieces = {
        quantity: [
            Piece(name, param_slice.start, param_slice.stop, shard[shard_slice].cpu())
            for group, shard in store.committed.items()
            for name, shard_slice, param_slice in _cut(store, group)
        ]
        for quantity, store in by_quantity.items()
    }
    parked = {
        quantity: {name: value.cpu() for name, value in store.by_name.items()}
        for quantity, store in by_quantity.items()
    }
    return State(pieces, layouts_of(parameters), {"parked": parked})


def layouts_of(parameters: Parameters) -> dict[str, Layout]:
    return {name: layout_of(parameters[name]) for name in parameters.numels}


def load(
    stores: Sequence[ResidualStore], groups: Sequence[Sequence[PlainGroup]], saved: State | None, parameters: Parameters
) -> None:
    """Fill empty stores with the state of this device.

    Args:
        groups: for each store, the groups that any device of the node knew.
        saved: state of this device; None: its residuals are zero.
    """
    for quantity, store, plain_groups in zip(QUANTITIES, stores, groups, strict=False):
        # All ranks need the same groups, because collectives follow from them (`ResidualStore.regroup`).
        store.entries.update({group: Entry() for group in groups_of(plain_groups)})
        if saved is None:
            continue
        pieces = {piece.name: piece for piece in saved.pieces.get(quantity, ())}
        for group, entry in store.entries.items():
            cut = _cut(store, group)
            if any(name in pieces for name, _, _ in cut):
                device = parameters[group.names[0]].device
                shard_S = torch.zeros(group.shard_numel(store.num_devices), dtype=torch.float32, device=device)
                for name, shard_slice, _ in cut:
                    shard_S[shard_slice] = pieces[name].tensor
                entry.committed = shard_S
        parked = saved.own["parked"].get(quantity, {})
        store.by_name.update({name: value.to(parameters[name].device) for name, value in parked.items()})


def load_shares(
    stores: Sequence[ResidualStore],
    metadata: Mapping[str, Any],
    nodes: Sequence[Sequence[State]],
    parameters: Parameters,
    num_nodes: int,
) -> None:
    """Fill empty stores with 1 / ``num_nodes`` of the sum over the saved nodes, by parameter until groups exist."""
    totals = [_totals(nodes, quantity, parameters) for quantity, _ in zip(QUANTITIES, metadata["stores"], strict=False)]
    if len(totals) > len(stores):
        # This run has no velocities: it has one node, or the option is off.
        totals = [_without_velocity(totals[0], totals[1], metadata["momentum"])]
    for store, by_name in zip(stores, totals, strict=False):
        shares = {name: value / num_nodes for name, value in by_name.items()}
        store.by_name.update({name: share.to(parameters[name].device) for name, share in shares.items()})


def _totals(nodes: Sequence[Sequence[State]], quantity: str, parameters: Parameters) -> dict[str, Tensor]:
    """Return the sum over nodes by parameter, flat in bucket order."""

    def cut(device: State, name: str, begin: int, end: int) -> Iterator[Piece]:
        yield from device.cut(quantity, name, begin, end)
        parked = device.own["parked"].get(quantity, {})
        if name in parked:  # equal on all of the node's devices
            yield Piece(name, begin, end, parked[name][begin:end])

    numels = parameters.numels.items()
    totals = {
        name: sum_slice_over_nodes(nodes, cut, name, 0, numel, layout_of(parameters[name])) for name, numel in numels
    }
    return {name: value for name, value in totals.items() if value is not None}


def _without_velocity(
    residual: dict[str, Tensor], velocity: dict[str, Tensor], momentum_equivalents: Mapping[str, Sequence[float]]
) -> dict[str, Tensor]:
    # These gradients have an equal effect through SGD's own momentum (`MomentumCorrection.momentum_equivalents`).
    sent = {name: value * momentum_equivalents.get(name, (1.0, 0.0))[0] for name, value in residual.items()}
    for name, value in velocity.items():
        tail = value * momentum_equivalents.get(name, (1.0, 0.0))[1]
        sent[name] = sent[name] + tail if name in sent else tail
    return sent


def _cut(store: ResidualStore, group: ParamGroup) -> list[tuple[str, slice, slice]]:
    return group.shard_slices(group.names, store.device_index, store.num_devices)


def plain(groups: Iterable[ParamGroup]) -> list[PlainGroup]:
    return [(list(group.names), list(group.numels)) for group in groups]


def groups_of(plain: Iterable[PlainGroup]) -> tuple[ParamGroup, ...]:
    return tuple(ParamGroup(tuple(names), tuple(numels)) for names, numels in plain)
