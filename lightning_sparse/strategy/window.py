"""How long backward hides an exchange, and when ``density="auto"`` looks at it.

From the first bucket of a round until its last one is ready, exchanges of earlier buckets cost nothing: backward goes
on meanwhile. The last bucket hides behind nothing. So ``density="auto"`` gives every group but the last the largest
density whose exchange fits into that window (lightning_sparse.strategy.plan.free_density), and the last one the least.

The window differs between ranks and from round to round. A decision takes the median of the last few rounds, of the
slowest rank: an exchange waits for it anyway. There are few decisions, each in a round that is the same on all ranks,
and one wherever the rates of the networks have changed; what was decided is saved in checkpoints. A decision that comes
due before enough rounds were measured, as soon after a resume, waits for them.
"""

import statistics
import time
from collections import deque

import torch

DECISIONS = (16, 128, 1024)
"""Rounds before which the density is set: soon, and again when caches are warm and clocks have settled."""
ROUNDS = 8


class Window:
    """Measures the time between the first and the last bucket of each of the last `ROUNDS` rounds.

    On CUDA it is the device's time: events are recorded while backward is queued, and read when a decision is due.

    Attributes:
        decided: the round of the last decision; 0 for none.
    """

    def __init__(self) -> None:
        self.decided = 0
        self._marks: deque[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = deque(maxlen=ROUNDS)
        self._begin: float | torch.cuda.Event = 0.0

    def first(self, device: torch.device) -> None:
        """The first bucket of a round is ready."""
        self._begin = _mark(device)

    def last(self, device: torch.device) -> None:
        """The last bucket of a round is ready."""
        self._marks.append((self._begin, _mark(device)))

    def is_due(self, round_index: int) -> bool:
        """Whether a decision is to be taken before this round; the same on all ranks."""
        passed = any(self.decided < each <= round_index for each in DECISIONS)
        return passed and len(self._marks) == ROUNDS

    def seconds(self) -> float:
        """The median of the last rounds; on CUDA it waits for the device."""
        return statistics.median([_between(begin, end) for begin, end in self._marks] or [0.0])


def _mark(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
