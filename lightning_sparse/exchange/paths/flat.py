"""One all-reduce over all ranks: what DDP does, and the fastest where the network between nodes is not the slow one."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Path, Shard, Stretches
from lightning_sparse.exchange.rates import Rates


@dataclass(frozen=True)
class Flat(Path):
    """The whole tensor, in place. A device's residual joins at its shard's place, so that the sum over ranks has it
    once per node."""

    name = "flat"
    in_place = True
    by_shard = False

    @property
    def steps(self) -> int:
        return 2 * (self.work.num_nodes * self.work.num_devices - 1)

    @property
    def _added(self) -> float:
        """Bytes that a rank sums: all but its own part of the ring."""
        ranks = self.work.num_nodes * self.work.num_devices
        return (ranks - 1) / ranks * self.work.numel * self.work.itemsize

    def bytes(self) -> float:
        return 2 * self._added / self.work.num_devices if self.work.num_nodes > 1 else 0.0  # averaged over devices

    def seconds_between(self, rates: Rates) -> float:
        return super().seconds_between(rates) + self._added * rates.add

    def seconds(self, rates: Rates) -> float:
        return self.seconds_between(rates)

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        sum_N = shard.sum_S
        if shard.residual_S is not None:
            own = sum_N[comm.topology.device_index * shard.residual_S.numel() :][: shard.residual_S.numel()]
            own.add_(shard.residual_S[: own.numel()])
        comm.flat_all_reduce(sum_N)  # in the first lane, which alone uses the group of all ranks
        yield (sum_N,)
        yield (sum_N,)
        return sum_N
