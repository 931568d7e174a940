"""How many entries are sent, and how many could be sent for free."""

from __future__ import annotations

import math
from collections.abc import Callable

STEPS_PER_DOUBLING = 2
"""Candidates of `free_density`: coarse, so that a small change of a measurement changes nothing."""


def num_selected(density: float, shard_numel: int) -> int:
    """K = ceil(density * S), at least 1 and at most S.

    >>> num_selected(0.01, 250), num_selected(0.01, 1), num_selected(1.0, 7)
    (3, 1, 7)
    """
    return min(shard_numel, max(1, math.ceil(density * shard_numel)))


def free_density(least: float, window: float, seconds: Callable[[float], float]) -> float:
    """The largest density from ``least`` to 1 whose exchange takes at most ``window`` seconds; ``least`` if none does.

    Args:
        seconds: of the exchange at a density.
    """
    steps = int(math.log2(1 / least) * STEPS_PER_DOUBLING)
    densities = [least * 2 ** (i / STEPS_PER_DOUBLING) for i in range(steps + 1)] + [1.0]
    return max((density for density in densities if seconds(density) <= window), default=least)
