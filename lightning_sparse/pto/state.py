"""Collect the state of a sharded optimizer for a checkpoint, and cut and join the states of parts.

State is any nesting of dicts, lists and tuples of tensors and plain values. Each rank sends its state as a pickled
object with meta tensors, then all tensors in one flat buffer. The receiver unpacks it on the CPU.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.communicator import Group
from lightning_sparse.internals import tree_leaves, tree_map, tree_map_only
from lightning_sparse.pto.gather import aligned
from lightning_sparse.sharding import Part, flat_view, flatten_like

StateByPart = dict[tuple[int, int], Any]
"""State by (index of the parameter in the optimizer, first element of the part)."""


def collect(state: StateByPart, group: Group, device: torch.device, to: int) -> StateByPart | None:
    """Collect the state of all ranks on rank `to`, on the CPU; else return None. A collective of the scope."""
    ranks = group.ranks
    if group.rank != to:
        described = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), state)
        refused = _refused(described)
        dist.gather_object(refused or described, None, dst=to, group=group.handle)
        if refused:  # otherwise rank `to` would wait for it
            raise ValueError(refused)
        tensors = _tensors(state)
        flat_B = _buffer(tensors, device)
        for tensor, piece in zip(tensors, _pieces(flat_B, tensors), strict=True):
            piece.copy_(tensor.detach())
        if flat_B.numel():
            dist.send(flat_B, dst=to, group=group.handle)
        return None
    whole: StateByPart = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)
    if len(ranks) == 1:
        return whole
    descriptions: list[StateByPart | str] = [{} for _ in ranks]
    dist.gather_object({}, descriptions, dst=to, group=group.handle)
    for rank, description in zip(ranks, descriptions, strict=True):
        if rank != to and not isinstance(description, str):
            whole.update(_received(description, rank, group, device))
    refusals = [
        f"rank {rank}: {description}"
        for rank, description in zip(ranks, descriptions, strict=True)
        if isinstance(description, str)
    ]
    if refusals:
        raise RuntimeError("; ".join(refusals))
    return dict(sorted(whole.items()))


def _refused(described: StateByPart) -> str:
    try:
        pickle.dumps(described)
    except Exception as error:  # an object's own methods can raise any type
        return (
            f"the state of an optimizer cannot be collected ({type(error).__name__}: {error}). Store only plain values"
        )
    return ""


def _received(description: StateByPart, rank: int, group: Group, device: torch.device) -> StateByPart:
    stubs = _tensors(description)
    flat_B = _buffer(stubs, device)
    if flat_B.numel():
        dist.recv(flat_B, src=rank, group=group.handle)
    pieces = iter(_pieces(flat_B.cpu(), stubs))
    # copy: the owner's memory format (such as channels last), and separate storage
    filled: StateByPart = tree_map_only(
        Tensor, lambda t: torch.empty_like(t, device="cpu").copy_(next(pieces)), description
    )
    return filled


def _buffer(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, device=device)


def _pieces(flat_B: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    sections = torch.split(flat_B, [_room(t) for t in tensors])
    return [
        section[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for section, t in zip(sections, tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return aligned(tensor.numel() * tensor.element_size())


def _tensors(state: StateByPart) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


# -- parts of a state --------------------------------------------------------------------------------------------------


def cut_state(state: Any, parameter: Tensor, part: Part) -> Any:
    """Slice the state of a whole parameter; tensors of other shapes, such as step counts, stay."""

    def cut(leaf: Tensor) -> Tensor:
        if leaf.shape != parameter.shape:
            return leaf
        return flatten_like(parameter, leaf)[part.begin : part.end].clone()

    return tree_map_only(Tensor, cut, state)


def join_states(states: Sequence[Any], parameter: Tensor, parts: Sequence[Part]) -> Any:
    """Concatenate the states of all parts, in the memory layout of the parameter."""

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor) or first.shape != (parts[0].end - parts[0].begin,):
            return first
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=first.dtype, device=first.device)
        torch.cat(leaves, out=flat_view(whole))
        return whole

    return tree_map(join, *states)


def placed_like(state: Any, like: Mapping[str, Any], device: torch.device) -> Any:
    """Move state to `device`, and scalars to their device in `like`, another parameter's state."""

    def place(key: Any, value: Any) -> Any:
        template = like.get(key)
        where = template.device if isinstance(template, Tensor) and template.dim() == 0 else device
        return tree_map_only(Tensor, lambda tensor: tensor.to(where), value)

    return {key: place(key, value) for key, value in state.items()} if isinstance(state, dict) else state
