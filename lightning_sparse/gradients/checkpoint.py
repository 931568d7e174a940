"""The residuals of `HierState` for a checkpoint, and back; no collective.

On the same nodes a resumed run is exact: round, layout, residuals and measured rates are what they were. On others the
sum over nodes is kept: every new node starts with an equal share of it, and the rates are measured again. Velocities of
momentum correction are kept likewise. Where the run that resumes has none (one node, or it was turned off), they and
the residuals become gradients that SGD's own momentum carries as far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.engine import Layout, Piece, State, layout_of, total
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.gradients.config import Warmup
from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.gradients.residual import ResidualStore

if TYPE_CHECKING:
    from lightning_sparse.gradients.state import HierState

QUANTITIES = ("residual", "velocity")
"""Names of what is kept, in the order of a state's stores."""


def manifest_of(state: HierState) -> dict[str, Any]:
    """Return what all ranks know alike, in plain types."""
    rates = state.exchange.choice.rates
    return {
        "round": state.round,
        "rates": None if rates is None else rates.to_list(),
        "warmup": [state.warmup.epochs, state.warmup.rounds],
        "momentum": {} if state.momentum is None else state.momentum.tails(),
        "parameters": dict(state.parameters.numels),
        "settled": _plain(state.layout.settled),
        "previous": _plain(state.layout.previous),
        "stores": [_plain(sorted(store.known, key=lambda group: group.names)) for store in state.settled_stores()],
    }


def state_of(state: HierState) -> State:
    """Return this device's residuals, and velocities if there are, as settle() would leave them now."""
    stores = dict(zip(QUANTITIES, state.settled_stores(), strict=False))
    pieces = {
        quantity: [
            Piece(name, there.start, there.stop, shard[here].cpu())
            for group, shard in store.current.items()
            for name, here, there in _cut(store, group)
        ]
        for quantity, store in stores.items()
    }
    parked = {
        quantity: {name: value.cpu() for name, value in store.parked.items()} for quantity, store in stores.items()
    }
    return State(pieces, layouts_of(state), {"parked": parked})


def layouts_of(state: HierState) -> dict[str, Layout]:
    """Return the layout of each parameter."""
    return {name: layout_of(state.parameters[name]) for name in state.parameters.numels}


def load(state: HierState, manifest: Mapping[str, Any], saved: State | None) -> None:
    """Put a state where the saved one was, on the same nodes; None: with residuals of zero. It forgets its own."""
    _begin(state, manifest)
    choice = state.exchange.choice
    if choice.rates is None and manifest["rates"] is not None:
        choice.rates = Rates.from_list(manifest["rates"])  # measured again, they might decide otherwise
    for quantity, store, groups in zip(QUANTITIES, state.stores, manifest["stores"], strict=False):
        store.known.update(_groups(groups))  # the same on all ranks, or collectives would differ
        if saved is None:
            continue
        found = {piece.name: piece for piece in saved.pieces.get(quantity, ())}
        for group in store.known:
            cut = _cut(store, group)
            if any(name in found for name, _, _ in cut):
                shard_S = torch.zeros(group.shard_numel(store.num_devices), device=_device(state, group.names[0]))
                for name, here, _ in cut:
                    shard_S[here] = found[name].tensor
                store.current[group] = shard_S
        parked = saved.own["parked"].get(quantity, {})
        store.parked.update({name: value.to(_device(state, name)) for name, value in parked.items()})


def load_from(state: HierState, manifest: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
    """Share the sum over the saved nodes out equally; it waits by parameter until groups take it up."""
    _begin(state, manifest)
    totals = [_totals(state, nodes, quantity) for quantity, _ in zip(QUANTITIES, manifest["stores"], strict=False)]
    if len(totals) > len(state.stores):
        totals = [_without_velocity(totals[0], totals[1], manifest["momentum"])]
    for store, by_name in zip(state.stores, totals, strict=False):
        shares = {name: value / state.topology.num_nodes for name, value in by_name.items()}
        store.parked.update({name: share.to(_device(state, name)) for name, share in shares.items()})


def _begin(state: HierState, manifest: Mapping[str, Any]) -> None:
    state.restart()
    state.round = state.exchange.stats.rounds = manifest["round"]
    # Cut again: what is excluded now may not have been then. regroup() then brings the residuals along.
    state.layout.settle(state.layout.cut(_groups(manifest["settled"])))
    state.layout.previous = state.layout.cut(_groups(manifest["previous"]))
    if state.config.warmup_epochs is None and state.config.warmup_steps is None:
        state.warmup = Warmup(*manifest["warmup"])  # by the estimate of the run that began it


def _totals(state: HierState, nodes: Sequence[Sequence[State]], quantity: str) -> dict[str, Tensor]:
    """Return the sum over nodes of a quantity by parameter, flat in the order of buckets."""

    def cut(device: State, name: str, begin: int, end: int) -> Iterator[Piece]:
        yield from device.cut(quantity, name, begin, end)
        parked = device.own["parked"].get(quantity, {})
        if name in parked:  # the same on all devices of a node
            yield Piece(name, begin, end, parked[name][begin:end])

    known = state.parameters
    found = {name: total(nodes, cut, name, 0, numel, layout_of(known[name])) for name, numel in known.numels.items()}
    return {name: value for name, value in found.items() if value is not None}


def _device(state: HierState, name: str) -> torch.device:
    return state.parameters[name].device


def _without_velocity(
    residual: dict[str, Tensor], velocity: dict[str, Tensor], tails: Mapping[str, Sequence[float]]
) -> dict[str, Tensor]:
    """Return what is to be sent where SGD keeps its momentum itself (MomentumCorrection.tails)."""
    sent = {name: value * tails.get(name, (1.0, 0.0))[0] for name, value in residual.items()}
    for name, value in velocity.items():
        tail = value * tails.get(name, (1.0, 0.0))[1]
        sent[name] = sent[name] + tail if name in sent else tail
    return sent


def _cut(store: ResidualStore, group: ParamGroup) -> list[tuple[str, slice, slice]]:
    return group.shard_slices(group.names, store.device_index, store.num_devices)


def _plain(groups: Iterable[ParamGroup]) -> list[tuple[list[str], list[int]]]:
    return [(list(group.names), list(group.numels)) for group in groups]


def _groups(plain: Iterable[tuple[list[str], list[int]]]) -> tuple[ParamGroup, ...]:
    return tuple(ParamGroup(tuple(names), tuple(numels)) for names, numels in plain)
