"""Runs with FSDP2 inside nodes and updates between nodes, shared by several tests."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.fsdp import mesh_of, shard
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.updates.runs import Make


class Blocks(nn.Module):
    """Repeated blocks between two layers, with sizes that no tested number of devices divides."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(13, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 11)) for _ in range(3))
        self.last = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


class Attention(nn.Module):
    """torch's own attention layers, which hold parameters and also have children with parameters, and batch norm."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.norm = nn.Linear(13, 12), nn.BatchNorm1d(12)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))[:, None]
        for layer in self.layers:
            x = layer(x)
        return x[:, 0]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = torch.randn(8, 13, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = model(batch).square().mean()
    return loss


def start(make: Make, seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer, LocalUpdates]:
    """Return a model that is sharded inside its node, its optimizer, and its updates."""
    topology = discover()
    model = shard(Blocks(seed), mesh_of(topology))
    optimizer = make(model)
    return model, optimizer, LocalUpdates(model, optimizer, UpdatesConfig(**options), topology)


def steps(model: nn.Module, optimizer: Optimizer, updates: LocalUpdates | None, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if updates is not None:
            updates.step()


def whole(model: nn.Module) -> Tensor:
    """Return all parameters, flat and in order. A collective inside the node if they are sharded."""
    tensors = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in tensors])
