"""How far the pending updates of nodes agree: the share of them that a node's model keeps with ``step_ahead="auto"``.

Ideally, a node subtracts the mean of all nodes' pending updates from the global weights, but it knows only its own
pending updates. The least-squares estimate of the mean from them is a * pending, with

    a = M * sum of mean^2 / sum over nodes of the sum of pending^2           over entries; mean is of the M nodes

This is 1 if the pending updates of all nodes are equal, as at the start of a training, and 1 / M if they are
independent noise, as later. It is measured on a sample of the entries, which nodes exchange with some messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_sparse.exchange.lanes import AsyncHostTensor

SAMPLE_SIZE = 2048  # of a sample: 8 KB once in INTERVAL exchanges
INTERVAL = 64


@dataclass(frozen=True)
class UpdateCorrelation:
    """How far nodes agree on the pending updates of one slice."""

    numel: int

    @staticmethod
    def should_sample(exchanges: int) -> bool:
        """Whether a sample rides along with this one, counted from 1: often at first, when agreement falls fast."""
        return exchanges % INTERVAL == 0 or (0 < exchanges < INTERVAL and exchanges.bit_count() == 1)

    @property
    def sample_bytes(self) -> int:
        """Size of each sample of the slice, for which other nodes reserve memory."""
        return 4 * (self.numel // self._stride)

    def sample(self, exchanges: int, local_S: Tensor, global_S: Tensor) -> Tensor:
        """Return the pending updates at places that differ from sample to sample, as bytes."""
        places = self.places(exchanges)
        return (global_S[places] - local_S[places]).view(torch.uint8)

    def places(self, exchanges: int) -> slice:
        """Return the places of a sample. All exchanges have the same number of places."""
        stride = self._stride
        return slice(exchanges * 7919 % stride, self.numel // stride * stride, stride)

    @property
    def _stride(self) -> int:
        return -(-self.numel // SAMPLE_SIZE)

    def measure(self, samples: AsyncHostTensor) -> float | None:
        """a, the same on all nodes, whatever their processors; None where nothing is pending, or not finite."""
        pending = samples.read().view(torch.float32).double()
        nodes = len(pending)
        together = _total(reduce(torch.add, pending).square())
        apart = _total(reduce(torch.add, pending.square()))
        if not 0 < apart < math.inf:
            return None
        return min(1.0, max(1.0 / nodes, round(together / apart / nodes, 3)))


def _total(values: Tensor) -> float:
    """The sum, rounded once: torch's depends on the processor, and nodes that differ here drift apart."""
    return math.fsum(values.tolist())
