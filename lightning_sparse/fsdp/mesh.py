"""FSDP2 inside each node: the mesh of a node, and what to shard where nobody says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_sparse.topology import Topology


def mesh_of(topology: Topology) -> DeviceMesh:
    """The ranks as a mesh of axes "replicate" (the nodes) and "shard" (the devices of a node), over the topology's
    groups; on one node, of one row.

    Raises:
        ValueError: for nodes of unequal size.
    """
    if topology.kind == "unequal nodes":
        raise ValueError(
            f"nodes of {sorted({len(node) for node in topology.nodes})} devices cannot hold the same shards: start the "
            f"same number of processes on each node, or name groups of equal size with LIGHTNING_SPARSE_NODE."
        )
    mesh = topology.mesh_of_axes("replicate", "shard")
    if mesh is not None:
        return mesh
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, (1, topology.world_size), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard a model over the devices of each node: each block that repeats, then the whole.

    Blocks are the children of the outermost ``ModuleList`` and ``Sequential`` whose class occurs there more than once,
    as the layers of a Transformer do. A model that is sharded already stays as it is.

    Args:
        model: on the CPU, a device, or the meta device.
        mesh: from ``mesh_of``, or its axis "shard".
        **options: of ``fully_shard``.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    names = mesh.mesh_dim_names
    inside = mesh["shard"] if names is not None and len(names) > 1 else mesh
    for block in blocks(model):
        fully_shard(block, mesh=inside, **options)
    for each in model.children() if isinstance(model, (nn.ModuleList, nn.ModuleDict)) else [model]:
        fully_shard(each, mesh=inside, **options)  # a list has no forward() of its own
    return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that repeat.

    >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)), nn.Linear(2, 1))
    >>> [type(block).__name__ for block in blocks(nn.ModuleDict({"layers": layers}))]
    ['Sequential', 'Sequential', 'Sequential']
    """
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            kinds = [type(each) for each in child]
            repeated = [each for each in child if kinds.count(type(each)) > 1 and any(True for _ in each.parameters())]
            if repeated:
                yield from repeated
                continue
        yield from blocks(child)
