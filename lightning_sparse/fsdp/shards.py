"""Parameters that FSDP2 has sharded over a node: where a device's shard lies in the whole, and its memory."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.pto.narrow import memory_of
from lightning_sparse.pto.ownership import Part


def local_of(tensor: Tensor) -> Tensor:
    """What this device holds of a tensor: its shard, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor) -> Part:
    """The elements of a parameter that this device holds, in memory order."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    row = prod(parameter.shape[1:])
    begin = offset[0] * row if prod(shape) else 0
    return Part(mesh.get_local_rank(), begin, begin + prod(shape))


def memory_of_part(parameter: Tensor, part: Part) -> Tensor:
    """A flat view of that part's memory."""
    if isinstance(parameter, DTensor):
        return memory_of(parameter.to_local())
    return memory_of(parameter)[part.begin : part.end]


def check_sharded(name: str, parameter: Tensor) -> None:
    """Raise ValueError for a parameter whose shards cannot be exchanged."""
    if not isinstance(parameter, DTensor):
        reason = "is not sharded, and others are"
    elif parameter.device_mesh.ndim != 1:
        reason = f"is sharded over a mesh of {parameter.device_mesh.ndim} axes"
    elif parameter.placements != (Shard(0),):
        reason = f"is placed as {parameter.placements}"
    else:
        return
    raise ValueError(
        f"parameter {name} {reason}, and what nodes exchange are shards along dim 0 over a node's devices: give "
        f"fully_shard() the node's mesh, device_mesh['shard'], for the whole model."
    )


def begin_with_first(tensor: Tensor, communicator: HierCommunicator) -> None:
    """Give all ranks what rank 0 has of a tensor; of a sharded one all nodes what the first has."""
    if isinstance(tensor, DTensor):
        communicator.node_broadcast(local_of(tensor.data))
    elif tensor.numel():
        communicator.world_broadcast(tensor.data)
