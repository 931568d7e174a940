"""Parameters that FSDP2 has sharded over a node: where a device's shard lies in the whole, and its memory."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def reason_against(parameter: Tensor) -> str:
    """Why a parameter's shards cannot be exchanged; empty where they can."""
    if not isinstance(parameter, DTensor):
        return "is not sharded, and others are"
    if parameter.device_mesh.ndim != 1:
        return f"is sharded over a mesh of {parameter.device_mesh.ndim} axes"
    if parameter.placements != (Shard(0),):
        return f"is placed as {parameter.placements}"
    return ""
