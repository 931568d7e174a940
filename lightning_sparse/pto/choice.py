"""Whether sharing pays: the plain step is timed, then the shared one, over the first steps of the run.

The paper shares a step where the work saved exceeds the gather. Both are known only where it runs, so both are
measured, a few steps each; the result is the same either way, bit for bit. All ranks take the slowest rank's medians,
so all decide alike, after the same step.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_sparse.exchange.communicator import HierCommunicator

STEPS = 6
"""Of each kind; the first one makes state and memory, and is not counted."""


@dataclass(frozen=True)
class Verdict:
    """Seconds a step, of the slowest rank: the optimizer alone, and the share of it with the gather."""

    plain: float
    shared: float

    def __str__(self) -> str:
        return f"{self.plain * 1e3:.2f} ms for the plain step, {self.shared * 1e3:.2f} ms shared and gathered"


@dataclass
class Choice:
    """Times a rank's steps, the first half of them plain and the second half shared."""

    _taken: list[float] = field(default_factory=list)
    _since: float = 0.0

    @property
    def sharing(self) -> bool:
        """Whether the next step is shared."""
        return len(self._taken) >= STEPS

    @property
    def begins_sharing(self) -> bool:
        """Whether the next step is the first shared one."""
        return len(self._taken) == STEPS

    @property
    def is_over(self) -> bool:
        """Whether both kinds were timed."""
        return len(self._taken) >= 2 * STEPS

    def begin(self, device: torch.device) -> None:
        """Just before the optimizer steps."""
        self._since = _now(device)

    def end(self, device: torch.device) -> None:
        """When the step, the gather included, is over."""
        self._taken.append(_now(device) - self._since)

    def verdict(self, communicator: HierCommunicator, device: torch.device) -> Verdict:
        """What all ranks found. A collective of the world."""
        kinds = [self._taken[1:STEPS], self._taken[STEPS + 1 :]]
        slowest = torch.tensor([statistics.median(kind) for kind in kinds], dtype=torch.float64, device=device)
        communicator.flat_all_reduce(slowest, op=dist.ReduceOp.MAX)
        return Verdict(*slowest.tolist())


def _now(device: torch.device) -> float:
    if device.type == "cuda":  # only while it is being measured
        torch.cuda.synchronize(device)
    return time.perf_counter()
