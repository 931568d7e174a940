"""What a path is: one way of summing a shard over nodes.

A path knows three things of itself: the bytes that it receives between nodes, the seconds that it takes by given
`Rates`, and how to run. Nothing else in the package knows how many paths there are, or their names.

With M nodes of L devices and a tensor of N elements on each rank, device l of each node holds the shard l of S = N / L
elements: this node's sum. ``run`` is a generator of three stretches, so that several shards share the network
(lightning_sparse.exchange.lanes): before the first ``yield`` the device works alone, between the two it communicates
with other nodes, after the second it works alone again. It returns the sum over nodes. Each ``yield`` gives the tensors
made so far that later stretches use: they may run on other CUDA streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.rates import Rates

Loss = Literal["nothing", "rounding", "entries"]
Stretches = Generator[Sequence[Tensor], None, Tensor]


class Work(NamedTuple):
    """One tensor on one cluster: M nodes, L devices per node, N elements of ``itemsize`` bytes."""

    num_nodes: int
    num_devices: int
    numel: int
    itemsize: int = 4

    @property
    def shard_numel(self) -> int:
        """S."""
        return -(-self.numel // self.num_devices)


@dataclass
class Shard:
    """What a device contributes to one exchange.

    Args:
        sum_S: this node's sum; may be overwritten. For a path that is not ``by_shard``: the whole tensor, N elements.
        residual_S: what earlier exchanges left, fp32; None for zero.
        next_S: room for what this one leaves, fp32, uninitialised; None to drop it.
        factor: what ``sum_S`` is multiplied by before the residual is added, a 0-dim fp32 tensor; None for 1.
        on_sent: called with the indices of the entries that this device sends, int64, where these are not all.
        on_received: called with the messages of all nodes, in node order, which are not summed then; of the path
            ``sparse`` alone.
        beside: bytes to send along, which ``on_received`` finds at the end of each message; of that path alone, too.
        target_S: fp32, what the engine adds the sum to, times ``alpha``; a path may do so itself, and return it.
    """

    sum_S: Tensor
    residual_S: Tensor | None = None
    next_S: Tensor | None = None
    factor: Tensor | None = None
    on_sent: Callable[[Tensor], None] | None = field(default=None, repr=False)
    on_received: Callable[[Tensor], None] | None = field(default=None, repr=False)
    beside: Tensor | None = None
    target_S: Tensor | None = None
    alpha: float = 1.0

    @property
    def used_to_the_end(self) -> tuple[Tensor, ...]:
        """What any stretch may use."""
        return (self.sum_S,) if self.next_S is None else (self.sum_S, self.next_S)

    def result(self) -> Tensor:
        """fp32 of S elements, uninitialised: the sums themselves if they allow it, for they are used up by then."""
        return self.sum_S if self.sum_S.dtype == torch.float32 else torch.empty_like(self.sum_S, dtype=torch.float32)

    def deliver(self, total_S: Tensor) -> Tensor:
        """The sum over nodes, or what it was added to."""
        if self.target_S is None or total_S is self.target_S:
            return total_S
        return self.target_S.add_(total_S, alpha=self.alpha)


@dataclass(frozen=True)
class Path(ABC):
    """One way of summing a shard over nodes.

    Attributes:
        name: as in ``exchange="..."`` and in logs.
        leaves: what an exchange leaves for the residual.
        in_place: it sums in the dtype and the units of ``sum_S``, and returns ``sum_S`` itself.
        by_shard: False for a path over all ranks at once, which takes whole tensors.
        automatic: ``exchange="auto"`` considers it.
    """

    name: ClassVar[str]
    leaves: ClassVar[Loss] = "nothing"
    in_place: ClassVar[bool] = False
    by_shard: ClassVar[bool] = True
    automatic: ClassVar[bool] = True

    work: Work

    @classmethod
    def of(cls, work: Work, density: float, value_dtype: torch.dtype) -> Path | None:
        """The path for this work, or None where it cannot take it."""
        return cls(work)

    @property
    def sent(self) -> int:
        """Entries of its shard that a device sends."""
        return self.work.shard_numel

    @property
    def applied(self) -> float:
        """Entries of its shard that an exchange applies, at most: several nodes may send the same one."""
        return self.work.shard_numel

    @property
    def steps(self) -> int:
        """Of the collectives between nodes."""
        return 2 * (self.work.num_nodes - 1)

    @abstractmethod
    def bytes(self) -> float:
        """Received per device from other nodes."""

    def seconds_between(self, rates: Rates) -> float:
        """Spent in collectives between nodes."""
        return rates.inter.seconds(self.steps, self.bytes())

    def seconds_of_kernels(self, rates: Rates) -> float:
        """Spent on the device, besides what collectives do there."""
        return 0.0

    def seconds(self, rates: Rates) -> float:
        """Of the exchange, the reduce-scatter before it and the all-gather after it, without any overlap."""
        others = self.work.num_devices - 1
        nbytes = others * self.work.shard_numel * self.work.itemsize
        inside = 2 * rates.intra.seconds(others, nbytes) + nbytes * rates.add
        return inside + self.seconds_between(rates) + self.seconds_of_kernels(rates)

    @abstractmethod
    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        """Sum over nodes, in node order."""
