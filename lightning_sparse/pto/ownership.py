"""Assign parameters, or parts of them, to ranks. Pure functions: all ranks compute the same assignment."""

from collections.abc import Sequence
from typing import NamedTuple

GRAIN = 64
"""Parts begin at multiples of this many elements, so that vectorised optimizers give bit-identical results."""
BALANCED = 1.1
"""Ratio of the largest share to the mean up to which no parameter is divided."""


class Part(NamedTuple):
    """Elements [begin, end) of a parameter, in memory order, and the rank of the scope that steps them."""

    owner: int
    begin: int
    end: int


Parts = tuple[Part, ...]


def divide(numels: Sequence[int], costs: Sequence[int], loads: Sequence[int], cuttable: Sequence[bool]) -> list[Parts]:
    """Assign whole parameters if that balances the ranks; else divide the costliest ones among all ranks.

    Args:
        numels: number of elements of each parameter.
        costs: cost of each parameter's step, in any unit.
        loads: current cost of each rank, in the same unit; its length is the number of ranks.
        cuttable: whether a parameter's parts can be stepped separately.

    Returns:
        The parts of each parameter, ascending.

    >>> divide([10, 6, 4], [10, 6, 4], loads=[0, 0], cuttable=[True] * 3)
    [(Part(owner=0, begin=0, end=10),), (Part(owner=1, begin=0, end=6),), (Part(owner=1, begin=0, end=4),)]
    >>> divide([900, 100], [900, 100], loads=[0, 0], cuttable=[True] * 2)[0]
    (Part(owner=0, begin=0, end=448), Part(owner=1, begin=448, end=900))
    """
    cut: set[int] = set()
    while True:
        parts = _deal(numels, costs, loads, cut)
        totals = [a + b for a, b in zip(loads, loads_of(parts, costs, len(loads)), strict=True)]
        whole = [i for i, numel in enumerate(numels) if cuttable[i] and i not in cut and numel > GRAIN]
        if not whole or max(totals) * len(loads) <= BALANCED * sum(totals):
            return parts
        cut.add(max(whole, key=lambda i: costs[i]))


def assign(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the owner of each piece: the costliest first, each to the rank with the least load.

    The largest load is at most the mean plus the costliest piece. Ties go to the earlier piece and the lower rank.

    >>> assign([3, 10, 4, 4], loads=[0, 0])
    [1, 0, 1, 1]
    >>> assign([5], loads=[7, 0, 0])
    [1]
    """
    totals = list(loads)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(len(totals)), key=totals.__getitem__)
        owners[index] = owner
        totals[owner] += max(1, costs[index])  # an empty parameter has a cost, too
    return owners


def loads_of(parts: Sequence[Parts], costs: Sequence[int], size: int) -> list[int]:
    """Return the load of each of `size` ranks.

    >>> loads_of([(Part(0, 0, 5), Part(1, 5, 10)), (Part(1, 0, 4),)], costs=[100, 7], size=2)
    [50, 57]
    """
    loads = [0] * size
    for of_parameter, cost in zip(parts, costs, strict=True):
        numel = of_parameter[-1].end
        for part in of_parameter:
            loads[part.owner] += max(1, cost * (part.end - part.begin) // max(1, numel))
    return loads


def _deal(numels: Sequence[int], costs: Sequence[int], loads: Sequence[int], cut: set[int]) -> list[Parts]:
    size, totals = len(loads), list(loads)
    in_parts = {i: tuple(Part(rank, *bounds) for rank, bounds in enumerate(_bounds(numels[i], size))) for i in cut}
    for index, parts in in_parts.items():
        totals = [a + b for a, b in zip(totals, loads_of([parts], [costs[index]], size), strict=True)]
    whole = [i for i in range(len(numels)) if i not in cut]
    owner_of = dict(zip(whole, assign([costs[i] for i in whole], totals), strict=True))
    return [in_parts.get(i) or (Part(owner_of[i], 0, numel),) for i, numel in enumerate(numels)]


def _bounds(numel: int, count: int) -> list[tuple[int, int]]:
    step = max(GRAIN, round(numel / count / GRAIN) * GRAIN)
    begins = list(range(0, numel, step))[:count]
    return list(zip(begins, [*begins[1:], numel], strict=True))
