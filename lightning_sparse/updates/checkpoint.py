"""Saves and loads the state of `LocalUpdates` in a checkpoint.

On the same cluster, a device continues bit-identically from its own state. On another cluster, each node starts from
the global weights and the mean of the old nodes' pending updates, so the mean over nodes stays equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.checkpoint.state import Layout, Piece, State, layout_of, read_slice, sum_slice_over_nodes
from lightning_sparse.sharding import flat_view_of_part, part_of
from lightning_sparse.updates.buffers import Buffers
from lightning_sparse.updates.optimizer import LocalOptimizer
from lightning_sparse.updates.state import slice_diff, unsent_of

Names = Mapping[int, str]
"""Names of parameters by ``id()``."""


def state_of(optimizers: Sequence[LocalOptimizer], names: Names, buffers: Buffers) -> State:
    """Return the state of this device between two steps. Waits for messages in flight."""
    state, saved = State(layouts=_layouts(optimizers, names)), list[dict[str, Any]]()
    for local_optimizer in optimizers:
        places, other_values = local_optimizer.state.slices.named(names), {}
        for quantity, tensor in local_optimizer.state_dict().items():
            # Tensors of the slice are stored by parameter, so that any division can read them.
            if places and tensor.dtype == torch.float32 and tensor.shape == (local_optimizer.state.slices.numel,):
                cut = torch.split(tensor, [end - begin for _, begin, end in places])
                pieces = [Piece(*place, piece) for place, piece in zip(places, cut, strict=True)]
                state.pieces.setdefault(quantity, []).extend(pieces)
            else:
                other_values[quantity] = tensor
        saved.append({"steps": local_optimizer.steps, "places": len(places), **other_values})
    state.own = {
        "optimizers": saved,
        "buffers": {name: buffer.detach().cpu() for name, buffer in buffers.own().items()},
    }
    return state


def fits(optimizers: Sequence[LocalOptimizer], names: Names, buffers: Buffers, state: State) -> bool:
    """Return whether this device had the same pieces of the parameters when the state was saved."""
    places = [place for local_optimizer in optimizers for place in local_optimizer.state.slices.named(names)]
    return (
        [piece.place for piece in state.pieces.get("shared", ())] == places
        and len(state.own["optimizers"]) == len(optimizers)
        and _layouts(optimizers, names) == state.layouts
        and buffers.fit(state.own["buffers"])
    )


@torch.no_grad()
def load(optimizers: Sequence[LocalOptimizer], names: Names, buffers: Buffers, state: State) -> None:
    """Continue exactly from the state of this device. Every rank calls it."""
    pieces = {quantity: {piece.place: piece.tensor for piece in entries} for quantity, entries in state.pieces.items()}
    for local_optimizer, saved in zip(optimizers, state.own["optimizers"], strict=True):
        local_optimizer.steps = saved["steps"]
        places = local_optimizer.state.slices.named(names)
        own_pieces = {quantity: tensors for quantity, tensors in pieces.items() if places and places[0] in tensors}
        flat = {quantity: torch.cat([tensors[place] for place in places]) for quantity, tensors in own_pieces.items()}
        local_optimizer.load_state_dict({**saved, **flat})
    buffers.load(state.own["buffers"])


@torch.no_grad()
def load_from(
    optimizers: Sequence[LocalOptimizer], names: Names, module: nn.Module, nodes: Sequence[Sequence[State]]
) -> None:
    """Start from the global weights and the mean of the nodes' pending updates."""
    parameters = dict(module.named_parameters())
    saved = [entry["steps"] for entry in nodes[0][0].own["optimizers"]]
    for index, local_optimizer in enumerate(optimizers):
        local_optimizer.steps = saved[index] if len(saved) == len(optimizers) else max(saved, default=0)
        state = local_optimizer.state
        # A message in flight would be added to the loaded weights.
        state.receive()
        pending_S = torch.zeros_like(state.global_S)
        views = state.slices.of(state.global_S), state.slices.of(pending_S)
        for place, shared_view, pending_view in zip(state.slices.named(names), *views, strict=True):
            pair = _taken_up(nodes, *place, layout_of(parameters[place[0]]))
            if pair is not None:
                shared_view.copy_(pair[0])
                pending_view.copy_(pair[1])
        state.set_pending(pending_S)
        state.write_model()
        local_optimizer.gather()


@torch.no_grad()
def load_alone(module: nn.Module, nodes: Sequence[Sequence[State]]) -> None:
    """Load the global weights minus the mean pending updates on a single node, which exchanges nothing."""
    for name, parameter in module.named_parameters():
        part = part_of(parameter)
        pair = _taken_up(nodes, name, part.begin, part.end, layout_of(parameter))
        if pair is not None:
            flat_view_of_part(parameter, part).copy_(pair[0] - pair[1])


def _taken_up(
    nodes: Sequence[Sequence[State]], name: str, begin: int, end: int, layout: Layout
) -> tuple[Tensor, Tensor] | None:
    """Return the global weights of a range, and the mean of the unsent updates; None if the range was not exchanged."""
    shared = read_slice(nodes[0], lambda state, *place: state.cut("shared", *place), name, begin, end, layout)
    unsent = sum_slice_over_nodes(nodes, _unsent, name, begin, end, layout)
    return None if shared is None or unsent is None else (shared, unsent.div_(len(nodes)))


def _unsent(state: State, name: str, begin: int, end: int) -> Iterator[Piece]:
    rows = zip(*state.pieces.values(), strict=True)
    for saved in state.own["optimizers"]:
        at = 0  # offset of the piece in the slice; patches have indices of the slice
        for row in islice(rows, saved["places"]):
            piece = row[0]
            first, last = max(begin, piece.begin), min(end, piece.end)
            if piece.name == name and first < last:
                overlap = slice(first - piece.begin, last - piece.begin)
                tensors = {
                    quantity: row_piece.tensor[overlap] for quantity, row_piece in zip(state.pieces, row, strict=True)
                }
                patches = slice_diff(saved, at + overlap.start, at + overlap.stop)
                yield Piece(name, first, last, unsent_of({**tensors, **patches}))
            at += piece.end - piece.begin


def _layouts(optimizers: Sequence[LocalOptimizer], names: Names) -> dict[str, Layout]:
    parameters = chain.from_iterable(local_optimizer.parameters for local_optimizer in optimizers)
    return {names[id(parameter)]: layout_of(parameter) for parameter in parameters}
