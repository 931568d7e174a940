"""The shard whole, by an all-reduce between nodes: the 2-D form of DDP's all-reduce."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Path, Shard
from lightning_sparse.exchange.rates import Rates


@dataclass(frozen=True)
class Dense(Path):
    """Everything is sent, the residual included, so nothing is left."""

    name = "dense"
    in_place = True

    def bytes(self) -> float:
        nodes = self.work.num_nodes
        return 2 * (nodes - 1) / nodes * self.work.shard_numel * self.work.itemsize

    def seconds_between(self, rates: Rates) -> float:
        nbytes = self.bytes()
        return rates.inter.seconds(2 * (self.work.num_nodes - 1), nbytes) + nbytes / 2 * rates.add

    def seconds(self, rates: Rates) -> float:
        return self._inside(rates) + self.seconds_between(rates)

    def run(self, comm: HierCommunicator, shard: Shard) -> Generator[None, None, Tensor]:
        sum_S = shard.sum_S
        if shard.residual_S is not None:
            sum_S.add_(shard.residual_S)
        yield
        comm.all_reduce(sum_S)
        yield
        return sum_S
