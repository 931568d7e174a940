"""Which rank of the scope steps which parameter. Pure: every rank computes the same answer from the same sizes."""

from collections.abc import Sequence


def assign(numels: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Deal whole parameters out, the largest first, each to the rank that has least so far.

    Whole, because the step of one parameter may look at all of it (a layer-wise norm, a matrix). The largest share is
    at most the mean plus the largest parameter, so one huge parameter bounds what can be gained.

    Args:
        numels: elements of each parameter.
        loads: elements that each rank has already; its length is the number of ranks.

    Returns:
        The owner of each parameter, an index into `loads`. Ties go to the earlier parameter and the lower rank.

    >>> assign([3, 10, 4, 4], loads=[0, 0])
    [1, 0, 1, 1]
    >>> assign([5], loads=[7, 0, 0])
    [1]
    """
    totals = list(loads)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owner = min(range(len(totals)), key=totals.__getitem__)
        owners[index] = owner
        totals[owner] += max(1, numels[index])  # an empty parameter is work too
    return owners


def loads_of(numels: Sequence[int], owners: Sequence[int], size: int) -> list[int]:
    """Elements that each of `size` ranks owns.

    >>> loads_of([3, 10, 4, 4], [1, 0, 1, 1], size=2)
    [10, 11]
    """
    loads = [0] * size
    for numel, owner in zip(numels, owners, strict=True):
        loads[owner] += max(1, numel)
    return loads
