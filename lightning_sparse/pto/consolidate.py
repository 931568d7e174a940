"""Optimizer state from its owners to one rank, for a checkpoint.

What state consists of is the optimizer's affair: nested dicts, lists and tuples of tensors and plain values. Each owner
describes its own as the same structure with meta tensors, which is small and travels as an object; the tensors follow
in one flat message an owner. On the receiving rank everything is put together on the CPU, where it is wanted: that rank
alone ever holds it all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_sparse.pto.gather import aligned
from lightning_sparse.topology import Topology

State = dict[tuple[int, int], Any]
"""State by the parameter's place in the optimizer and the element that the part begins with."""


def collect(state: State, topology: Topology, device: torch.device, to: int) -> State | None:
    """Put the state of all owners together. A collective of the ranks of the scope.

    Args:
        state: what this rank owns.
        topology: the scope: its ``intra`` group spans this rank's node.
        device: where the group communicates.
        to: the rank that receives.

    Returns:
        On rank `to` all state, on the CPU; None elsewhere.
    """
    ranks = topology.nodes[topology.node_index]
    if topology.rank != to:
        described = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), state)
        dist.gather_object(described, None, dst=to, group=topology.intra)
        if flat_B := _packed(state, device):
            dist.send(flat_B[0], dst=to, group=topology.intra)
        return None
    whole: State = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)
    if len(ranks) == 1:
        return whole
    descriptions: list[State] = [{} for _ in ranks]
    dist.gather_object({}, descriptions, dst=to, group=topology.intra)
    for rank, description in zip(ranks, descriptions, strict=True):
        if rank != to:
            whole.update(_received(description, rank, topology, device))
    return dict(sorted(whole.items()))


def _packed(state: State, device: torch.device) -> list[Tensor]:
    """All tensors in one, or nothing when there are none."""
    tensors = _tensors(state)
    nbytes = sum(map(_room, tensors))
    if not nbytes:
        return []
    flat_B = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for tensor, piece in zip(tensors, _pieces(flat_B, tensors), strict=True):
        piece.copy_(tensor.detach())
    return [flat_B]


def _received(description: State, rank: int, topology: Topology, device: torch.device) -> State:
    stubs = _tensors(description)
    flat_B = torch.empty(sum(map(_room, stubs)), dtype=torch.uint8, device=device)
    if flat_B.numel():
        dist.recv(flat_B, src=rank, group=topology.intra)
    pieces = iter(_pieces(flat_B.cpu(), stubs))
    # Laid out like the owner's (channels last, say), and with storage of its own.
    filled: State = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="cpu").copy_(next(pieces)), description)
    return filled


def _pieces(flat_B: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    sections = torch.split(flat_B, [_room(t) for t in tensors])
    return [
        section[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for section, t in zip(sections, tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return aligned(tensor.numel() * tensor.element_size())


def _tensors(state: State) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
