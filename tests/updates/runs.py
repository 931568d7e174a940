"""Runs of `LocalUpdates` on real ranks, shared by several tests."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.strategy.models import flat_parameters, loss_of, mlp

Make = Callable[[nn.Module], Optimizer]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def start(make: Make, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Optimizer, LocalUpdates]:
    """Return a DDP-wrapped model of one node, its optimizer, and its updates."""
    topology = discover()
    model = mlp(seed=topology.rank) if model is None else model  # initial weights differ by rank
    optimizer = make(model)
    updates = LocalUpdates(model, optimizer, UpdatesConfig(**options), topology)
    ddp: nn.Module = DistributedDataParallel(model, process_group=topology.intra)
    return ddp, optimizer, updates


def steps(ddp: nn.Module, optimizer: Optimizer, updates: LocalUpdates, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        updates.step()


def shared_of(updates: LocalUpdates) -> Tensor:
    """Return the global weights of the whole model, flat."""
    with updates.global_weights():
        return flat_parameters(updates.module).clone()


def mean_over_nodes(tensor: Tensor) -> Tensor:
    """Return the mean over nodes of a tensor that is equal on all devices of a node."""
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
