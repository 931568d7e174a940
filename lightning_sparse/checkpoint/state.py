"""The state of one device in a checkpoint: flat pieces of parameters, for any number of nodes and devices."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse.sharding import dim_order

VERSION = 8
"""Version of the checkpoint format."""
Layout = tuple[list[int], list[int]]
"""A parameter's shape, and its dims in memory order, the outermost first."""


class Piece(NamedTuple):
    """Elements [begin, end) of one parameter, in its memory order, as a flat tensor."""

    name: str
    begin: int
    end: int
    tensor: Tensor

    @property
    def place(self) -> tuple[str, int, int]:
        return self[:3]


@dataclass
class State:
    """The state of one device between two steps, on the CPU, in types that ``torch.load(weights_only=True)`` reads.

    Attributes:
        pieces: pieces of parameters, by quantity, such as "residual".
        layouts: layouts of the parameters, by name.
        own: state that no other device can use.
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        places = {quantity: [piece.place for piece in pieces] for quantity, pieces in self.pieces.items()}
        tensors = {
            _name_of(quantity, *piece.place): piece.tensor
            for quantity, pieces in self.pieces.items()
            for piece in pieces
        }
        # Each tensor has its own name, because `torch.distributed.checkpoint` does not look into tuples.
        return {**tensors, "rest": ({"pieces": places, "layouts": self.layouts, "own": self.own},)}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> State:
        (fields,) = saved["rest"]
        state = State(layouts=fields["layouts"], own=fields["own"])
        for quantity, places in fields["pieces"].items():
            state.pieces[quantity] = [
                Piece(name, begin, end, saved[_name_of(quantity, name, begin, end)]) for name, begin, end in places
            ]
        return state

    def cut(self, quantity: str, name: str, begin: int, end: int) -> Iterator[Piece]:
        """Yield views of the pieces that overlap elements [begin, end) of a parameter."""
        for piece in self.pieces.get(quantity, ()):
            first, last = max(begin, piece.begin), min(end, piece.end)
            if piece.name == name and first < last:
                yield Piece(name, first, last, piece.tensor[first - piece.begin : last - piece.begin])


def serialize_checked(content: Any) -> io.BytesIO:
    """Serialize with torch.save(), or raise ValueError for content that a safe load would refuse."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if refused:
        raise ValueError(
            f"the state of an optimizer, scheduler or loss scaler has values of {', '.join(sorted(refused))}, which a "
            f"safe load refuses, so this checkpoint could not be resumed exactly. Store tensors and plain Python "
            f"values (array.tolist()), or allow the types with torch.serialization.add_safe_globals."
        )
    return buffer


def for_folder(state: State) -> dict[str, Any]:
    """Return the state for `torch.distributed.checkpoint`, after the check of `serialize_checked`."""
    saved = state.to_dict()
    serialize_checked(saved["rest"])
    return saved


def _name_of(quantity: str, name: str, begin: int, end: int) -> str:
    return f"{quantity}/{name}/{begin}-{end}"


def layout_of(parameter: Tensor) -> Layout:
    """Return the layout of a parameter and of its gradient."""
    shape, dims = list(parameter.shape), list(range(parameter.dim()))
    if isinstance(parameter, DTensor) or torch.ops.aten.is_non_overlapping_and_dense(parameter):
        dims = dim_order(parameter)
    if parameter.is_complex():
        # A complex number counts as two real numbers.
        shape, dims = [*shape, 2], [*dims, len(shape)]
    return shape, dims


def flattened(whole: Tensor, layout: Layout) -> Tensor:
    return whole.permute(layout[1]).reshape(-1)


SliceReader = Callable[[State, str, int, int], Iterable[Piece]]
"""Returns a device's pieces of elements [begin, end) of a parameter."""


def read_slice(
    devices: Sequence[State], cut: SliceReader, name: str, begin: int, end: int, layout: Layout
) -> Tensor | None:
    """Read elements of one parameter from the pieces of a node's devices.

    Args:
        layout: memory order of begin and end. If it differs from the saved order, all elements are read.

    Returns:
        A flat tensor, zero where no device has a piece; None if there are no pieces, or the shape was different.
    """
    saved = next((device.layouts[name] for device in devices if name in device.layouts), None)
    if saved is None or saved[0] != layout[0]:
        return None
    # Mapped files may be larger than memory, so read no other elements.
    first, last = (begin, end) if saved[1] == layout[1] else (0, prod(saved[0]))
    flat: Tensor | None = None
    for device in devices:
        for piece in cut(device, name, first, last):
            if flat is None:
                flat = torch.zeros(last - first, dtype=piece.tensor.dtype)
            flat[piece.begin - first : piece.end - first] = piece.tensor
    if flat is None or saved[1] == layout[1]:
        return flat
    shape, dims = saved
    whole = flat.view([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(dims))])
    return flattened(whole, layout)[begin:end]


def sum_slice_over_nodes(
    nodes: Iterable[Sequence[State]], cut: SliceReader, name: str, begin: int, end: int, layout: Layout
) -> Tensor | None:
    """Return the sum of `read_slice` over nodes."""
    slices = (read_slice(devices, cut, name, begin, end, layout) for devices in nodes)  # one at a time
    parts = (part for part in slices if part is not None)
    first = next(parts, None)
    return None if first is None else functools.reduce(Tensor.add_, parts, first)
