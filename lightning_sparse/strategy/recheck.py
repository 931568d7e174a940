"""Whether the networks still are what they were measured to be.

They are measured once, while nothing else runs; a neighbour's traffic may have been on them then, or be there now. So
the collectives between nodes are timed all along, and before a few rounds, the same on all ranks, their time is held
against what the cost model says of it. Where one is `CONTRADICTS` times the other, both networks are measured again;
if a round as it is made now would then take `CHANGED` times as long, or as short, the new rates are those to decide by.

A rank that comes late to a collective finds it fast and the others wait for it, so the least time of all ranks is the
network's.
"""

from collections.abc import Callable

from lightning_sparse.strategy.stopwatch import Stopwatch

CHECKS = (64, 512, 4096, 32768)
"""Rounds before which it is looked at; so this many decisions at most are taken back."""
ROUNDS = 8  # timed for each
CONTRADICTS, CHANGED = 2.0, 1.5


class Recheck:
    """Times the rounds before each check."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def is_due(self, round_index: int, stopwatch: Stopwatch) -> bool:
        """Whether to look before this round; call it before each. The same on all ranks, but for one that resumed
        within the last few rounds, and then all did."""
        if round_index + ROUNDS in CHECKS:
            self._begin = stopwatch.seconds()
        return round_index in CHECKS and self._begin is not None

    def measured(self, stopwatch: Stopwatch, least: Callable[[float], float]) -> float:
        """Seconds that collectives between nodes took in a round, by ``least`` of all ranks."""
        assert self._begin is not None
        taken, self._begin = stopwatch.seconds() - self._begin, None
        return least(taken / ROUNDS)


def differ(one: float, other: float, factor: float) -> bool:
    """Whether one time is at least so many times the other."""
    return max(one, other) >= factor * min(one, other)
