"""One all-reduce over all ranks: what DDP does, and the fastest where the network between nodes is not the slow one."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Path, Shard
from lightning_sparse.exchange.rates import Rates


@dataclass(frozen=True)
class Flat(Path):
    """The whole tensor, in place. A device's residual joins at its shard's place, so that the sum over ranks has it
    once per node."""

    name = "flat"
    in_place = True
    by_shard = False

    @property
    def _ranks(self) -> int:
        return self.work.num_nodes * self.work.num_devices

    def bytes(self) -> float:
        if self.work.num_nodes == 1:
            return 0.0
        share = self.work.num_nodes / self._ranks  # averaged over devices
        return 2 * (self._ranks - 1) / self._ranks * self.work.numel * self.work.itemsize * share

    def seconds_between(self, rates: Rates) -> float:
        added = (self._ranks - 1) / self._ranks * self.work.numel * self.work.itemsize
        return rates.inter.seconds(2 * (self._ranks - 1), self.bytes()) + added * rates.add

    def seconds(self, rates: Rates) -> float:
        return self.seconds_between(rates)

    def run(self, comm: HierCommunicator, shard: Shard) -> Generator[None, None, Tensor]:
        sum_N = shard.sum_S
        if shard.residual_S is not None:
            own = sum_N[comm.topology.device_index * shard.residual_S.numel() :][: shard.residual_S.numel()]
            own.add_(shard.residual_S[: own.numel()])
        comm.flat_all_reduce(sum_N)  # in the first lane, which alone uses the group of all ranks
        yield
        yield
        return sum_N
