"""DeMo (Peng, Quesnelle, Kingma 2024, "Decoupled Momentum Optimization"), for a row of the convergence tables.

Every node keeps a momentum of its own. A step takes the largest entries of its cosine transform, chunk by chunk, out of
it and sends those; all nodes step by the sign of the mean of what was sent. Momentum that was not sent stays.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.convergence.ways import WAYS, Way
from lightning_sparse.topology import Topology

CHUNK = 64  # at most, along each of the last two dims; the paper's
PAIR_BYTES = 4  # a value and a place in its chunk, of 16 bits each


def cosines(numel: int) -> Tensor:
    """The orthonormal DCT-II, [frequencies, places]."""
    frequency, place = torch.arange(numel)[:, None], torch.arange(numel)
    matrix = torch.cos(math.pi / numel * (place + 0.5) * frequency) * math.sqrt(2 / numel)
    matrix[0] /= math.sqrt(2)
    return matrix


class Chunks:
    """A parameter's cosine transform, chunk by chunk: [chunks, entries] and back."""

    def __init__(self, parameter: Tensor) -> None:
        rows, columns = (1, parameter.numel()) if parameter.ndim < 2 else (parameter.flatten(1).shape)
        self.high, self.wide = (max(d for d in range(1, CHUNK + 1) if n % d == 0) for n in (rows, columns))
        self.down, self.across = rows // self.high, columns // self.wide
        self.left, self.right = cosines(self.high), cosines(self.wide)
        self.shape = parameter.shape

    def encode(self, x: Tensor) -> Tensor:
        chunks = x.reshape(self.down, self.high, self.across, self.wide).transpose(1, 2)
        return (self.left @ chunks @ self.right.T).reshape(self.down * self.across, -1)

    def decode(self, entries_CE: Tensor) -> Tensor:
        chunks = self.left.T @ entries_CE.view(self.down, self.across, self.high, self.wide) @ self.right
        return chunks.transpose(1, 2).reshape(self.shape)


class DeMo(Way):
    """The row's optimizer has to be plain SGD, which takes the signs for gradients."""

    group = "node"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, options)
        self.density, self.decay = options["density"], options["decay"]
        self.momenta = [(p, torch.zeros_like(p), Chunks(p)) for p in model.parameters()]
        self.sent = 0
        optimizer.register_step_pre_hook(lambda *_: self.exchange(optimizer.param_groups[0]["lr"]))

    @torch.no_grad()
    def exchange(self, lr: float) -> None:
        """Put the sign of what all nodes sent where the gradients are."""
        found = [self.take(parameter, momentum, chunks, lr) for parameter, momentum, chunks in self.momenta]
        sizes = [index.numel() for index, _ in found]
        self.sent += sum(sizes)
        indices, values = (self.gather(torch.cat([each.flatten() for each in of])) for of in zip(*found, strict=True))
        for (parameter, _, chunks), (index_CK, _), at, size in zip(
            self.momenta, found, accumulate(sizes, initial=0), sizes, strict=False
        ):
            here = slice(at, at + size)
            index = torch.cat([each[here].view_as(index_CK) for each in indices], 1)
            value = torch.cat([each[here].view_as(index_CK) for each in values], 1)
            mean_CE = torch.zeros(len(index), chunks.high * chunks.wide)
            mean_CE.scatter_reduce_(1, index, value, "mean", include_self=False)
            assert parameter.grad is not None
            parameter.grad.copy_(chunks.decode(mean_CE).sign())

    def take(self, parameter: Tensor, momentum: Tensor, chunks: Chunks, lr: float) -> tuple[Tensor, Tensor]:
        """Move the largest entries out of the momentum: indices and values, [chunks, K]."""
        assert parameter.grad is not None
        momentum.mul_(self.decay).add_(parameter.grad, alpha=lr)
        entries_CE = chunks.encode(momentum)
        index_CK = entries_CE.abs().topk(max(1, round(self.density * entries_CE.shape[1]))).indices
        values_CK = entries_CE.gather(1, index_CK)
        momentum -= chunks.decode(torch.zeros_like(entries_CE).scatter_(1, index_CK, values_CK))
        return index_CK, values_CK

    def gather(self, flat: Tensor) -> list[Tensor]:
        """Of all ranks. Collective."""
        everyones = [torch.empty_like(flat) for _ in range(self.topology.world_size)]
        dist.all_gather(everyones, flat)
        return everyones

    def bytes_per_node(self) -> float:
        return float((self.topology.num_nodes - 1) * self.sent * PAIR_BYTES)


WAYS["demo"] = DeMo
