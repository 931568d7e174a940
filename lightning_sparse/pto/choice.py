"""Time the full step, then the shared one, over the first steps of a run, to keep the faster.

The results are bit-identical either way. All ranks compare the medians of the slowest rank, so they decide alike.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_sparse.exchange.communicator import HierCommunicator

STEPS = 6
"""Steps of each kind. The first one allocates state and memory, and does not count."""


class Verdict(NamedTuple):
    """Seconds per step of the slowest rank: the full step, and the shared step with its gather."""

    plain: float
    shared: float

    def __str__(self) -> str:
        return f"{self.plain * 1e3:.2f} ms for the full step, {self.shared * 1e3:.2f} ms shared and gathered"


@dataclass
class Choice:
    """Times `STEPS` full steps, then `STEPS` shared ones."""

    _taken: list[float] = field(default_factory=list)
    _since: float = 0.0

    @property
    def sharing(self) -> bool:
        """Whether the next step is shared."""
        return self.left <= STEPS

    @property
    def left(self) -> int:
        """Steps to time."""
        return 2 * STEPS - len(self._taken)

    def begin(self, device: torch.device) -> None:
        """Start timing a step."""
        self._since = _now(device)

    def end(self, device: torch.device) -> None:
        """Stop timing, after the gather of a shared step."""
        self._taken.append(_now(device) - self._since)

    def verdict(self, communicator: HierCommunicator, device: torch.device) -> Verdict:
        """Return the times of the slowest rank. A collective of the world."""
        kinds = [self._taken[1:STEPS], self._taken[STEPS + 1 :]]
        slowest = torch.tensor([statistics.median(kind) for kind in kinds], dtype=torch.float64, device=device)
        communicator.flat_all_reduce(slowest, op=dist.ReduceOp.MAX)
        return Verdict(*slowest.tolist())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
