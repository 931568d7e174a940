"""The shard whole, by an all-reduce between nodes: the 2-D form of DDP's all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Path, Shard, Stretches
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
        return super().seconds_between(rates) + self.bytes() / 2 * rates.add

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        sum_S = shard.sum_S
        if shard.residual_S is not None:
            sum_S.add_(shard.residual_S)
        yield (sum_S,)
        comm.all_reduce(sum_S)
        yield (sum_S,)
        return sum_S
