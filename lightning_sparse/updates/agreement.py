"""How similar the pending updates of nodes are, which ``step_ahead="auto"`` uses.

Ideally, a node subtracts the mean of all nodes' pending updates from the global weights, but it knows only its own. The
least-squares estimate of the mean from its own pending updates is a * pending, with

    a = M * sum of mean^2 / sum over nodes of the sum of pending^2           over entries, with the mean of M nodes

a is 1 if the pending updates of all nodes are equal, and 1 / M if they are independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_sparse.exchange.lanes import AsyncHostTensor

SAMPLE_SIZE = 2048  # entries per sample: 8 KB every INTERVAL exchanges
INTERVAL = 64


@dataclass(frozen=True)
class UpdateCorrelation:
    """Measures a for one slice, on a sample of its entries."""

    numel: int

    @staticmethod
    def should_sample(exchanges: int) -> bool:
        """Return whether exchange number ``exchanges``, counted from 1, carries a sample."""
        # Often at first (1, 2, 4, ...), when a falls fast.
        return exchanges % INTERVAL == 0 or (0 < exchanges < INTERVAL and exchanges.bit_count() == 1)

    @property
    def sample_bytes(self) -> int:
        return 4 * (self.numel // self._stride)

    def sample(self, exchanges: int, local_S: Tensor, global_S: Tensor) -> Tensor:
        """Return the pending updates at indices that differ from sample to sample, as bytes."""
        places = self.places(exchanges)
        return (global_S[places] - local_S[places]).view(torch.uint8)

    def places(self, exchanges: int) -> slice:
        # All samples have the same size, so messages with a sample have the same length.
        stride = self._stride
        return slice(exchanges * 7919 % stride, self.numel // stride * stride, stride)

    @property
    def _stride(self) -> int:
        return -(-self.numel // SAMPLE_SIZE)

    def measure(self, samples: AsyncHostTensor) -> float | None:
        """Return a, equal on all nodes; None if nothing is pending, or if a value is not finite."""
        pending = samples.read().view(torch.float32).double()
        nodes = len(pending)
        together = _total(reduce(torch.add, pending).square())
        apart = _total(reduce(torch.add, pending.square()))
        if not 0 < apart < math.inf:
            return None
        # Rounded, in fp64 on the CPU, so that all nodes get the same number.
        return min(1.0, max(1.0 / nodes, round(together / apart / nodes, 3)))


def _total(values: Tensor) -> float:
    # Rounds once. torch's sum depends on the CPU, and nodes with different results would drift apart.
    return math.fsum(values.tolist())
