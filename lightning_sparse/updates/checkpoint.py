"""The state of `LocalUpdates` for a checkpoint, and back, also on another cluster.

On the same cluster a device goes on with its own state, bit-identically. On another one the global weights are kept,
and every new node starts with the mean of what the old nodes had pending, so the mean over nodes is kept, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse.engine import Layout, Piece, State, flattened, layout_of, mean_of, whole_of
from lightning_sparse.sharding import memory_of_part, part_of
from lightning_sparse.updates.state import unsent_of

if TYPE_CHECKING:
    from lightning_sparse.updates.local import LocalUpdates


def state_of(updates: LocalUpdates) -> State:
    """Return what this device alone knows between two steps; waits for messages under way."""
    names, state = updates.names, State(layouts=_layouts(updates))
    optimizers = []
    for one in updates.optimizers:
        places, more = one.state.slices.named(names), {}
        for quantity, tensor in one.state_dict().items():
            if places and tensor.dtype == torch.float32 and tensor.shape == (one.state.slices.numel,):
                cut = torch.split(tensor, [end - begin for _, begin, end in places])
                found = [Piece(*place, piece) for place, piece in zip(places, cut, strict=True)]
                state.pieces.setdefault(quantity, []).extend(found)
            else:
                more[quantity] = tensor
        optimizers.append({"steps": one.steps, "places": len(places), **more})
    buffers = {name: each.detach().cpu() for name, each in updates.buffers.own().items()}
    state.own = {"optimizers": optimizers, "buffers": buffers}
    return state


def fits(updates: LocalUpdates, state: State) -> bool:
    """Return whether this device held the same pieces of the parameters when it was saved."""
    places = [place for one in updates.optimizers for place in one.state.slices.named(updates.names)]
    return (
        [piece.place for piece in state.pieces.get("shared", ())] == places
        and len(state.own["optimizers"]) == len(updates.optimizers)
        and _layouts(updates) == state.layouts
        and updates.buffers.fit(state.own["buffers"])
    )


@torch.no_grad()
def load(updates: LocalUpdates, manifest: Mapping[str, Any], state: State) -> None:
    """Go on exactly where this device was saved; its state ``fits``. Every rank calls it."""
    updates.steps = manifest["steps"]
    pieces = {quantity: {each.place: each.tensor for each in found} for quantity, found in state.pieces.items()}
    for one, saved in zip(updates.optimizers, state.own["optimizers"], strict=True):
        one.steps = saved["steps"]
        places = one.state.slices.named(updates.names)
        there = {quantity: found for quantity, found in pieces.items() if places and places[0] in found}
        flat = {quantity: torch.cat([found[place] for place in places]) for quantity, found in there.items()}
        one.load_state_dict({**saved, **flat})
    updates.buffers.load(state.own["buffers"])


@torch.no_grad()
def load_from(updates: LocalUpdates, manifest: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
    """Start from the global weights and the mean of what was pending."""
    shared, pending = whole_of(nodes[0], "shared"), _mean_unsent(nodes)
    parameters = dict(updates.module.named_parameters())
    updates.steps = manifest["steps"]
    saved = [each["steps"] for each in nodes[0][0].own["optimizers"]]
    for index, one in enumerate(updates.optimizers):
        one.steps = saved[index] if len(saved) == len(updates.optimizers) else max(saved, default=0)
        state = one.state
        state.receive()
        pending_S = torch.zeros_like(state.shared_S)
        views = state.slices.of(state.shared_S), state.slices.of(pending_S)
        for (name, begin, end), shared_view, pending_view in zip(
            state.slices.named(updates.names), *views, strict=True
        ):
            if name in shared:
                layout = layout_of(parameters[name])
                shared_view.copy_(flattened(shared[name], layout)[begin:end])
                pending_view.copy_(flattened(pending[name], layout)[begin:end])
        state.set_pending(pending_S)
        state.begin()
        one.gather()


@torch.no_grad()
def load_alone(updates: LocalUpdates, nodes: Sequence[Sequence[State]]) -> None:
    """On one node nothing is exchanged: its weights are the global ones, with the mean of what was pending in them."""
    shared, pending = whole_of(nodes[0], "shared"), _mean_unsent(nodes)
    for name, parameter in updates.module.named_parameters():
        if name not in shared:
            continue
        if isinstance(parameter, DTensor):
            part = part_of(parameter)
            whole = flattened(shared[name] - pending[name], layout_of(parameter))
            memory_of_part(parameter, part).copy_(whole[part.begin : part.end])
        else:
            parameter.copy_(shared[name] - pending[name])


def _mean_unsent(nodes: Sequence[Sequence[State]]) -> dict[str, Tensor]:
    return mean_of((list(map(_with_unsent, states)) for states in nodes), "unsent")


def _with_unsent(state: State) -> State:
    """Return the pieces of what a device had not sent."""
    unsent: list[Piece] = []
    for saved in state.own["optimizers"]:
        here = slice(len(unsent), len(unsent) + saved["places"])
        if saved["places"]:
            flat = {quantity: torch.cat([each.tensor for each in of[here]]) for quantity, of in state.pieces.items()}
            places = [each.place for each in state.pieces["shared"][here]]
            cut = torch.split(unsent_of({**saved, **flat}), [end - begin for _, begin, end in places])
            unsent += [Piece(*place, tensor) for place, tensor in zip(places, cut, strict=True)]
    return State({"unsent": unsent}, state.layouts)


def _layouts(updates: LocalUpdates) -> dict[str, Layout]:
    parameters = chain.from_iterable(one.parameters for one in updates.optimizers)
    return {updates.names[id(each)]: layout_of(each) for each in parameters}
