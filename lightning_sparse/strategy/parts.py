"""A bucket cut into compression groups, and put together again.

Mostly a bucket *is* a group. It is several when the whole model comes as one bucket again (a second fit, a resumed
run): then each part is a copy that is written back. Parameters that no rank used are left out: their place in the
gradient is zero while the part is reduced, and afterwards what it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.strategy.layout import ParamGroup


@dataclass(frozen=True)
class Arrived:
    """What a bucket holds.

    Attributes:
        used: which of its parameters this rank used; None where that is not asked.
    """

    group: ParamGroup
    flat_N: Tensor
    index: int
    last: bool
    used: list[bool] | None


class Part:
    """One group of a bucket; what is written to ``grad_N`` reaches the bucket with restore().

    Args:
        arrived: the bucket.
        group: a settled group inside it, or its own.
        masked: names of the group's parameters that no rank used.
    """

    def __init__(self, arrived: Arrived, group: ParamGroup, masked: frozenset[str]) -> None:
        self.group, self.masked = group, masked
        self._pieces: list[Tensor] = []
        self.grad_N = arrived.flat_N
        if group != arrived.group:
            places = arrived.group.slices()
            self._pieces = [arrived.flat_N[places[name]] for name in group.names]
            self.grad_N = torch.cat(self._pieces)
        places = group.slices()
        self._saved = {name: self.grad_N[places[name]].clone() for name in masked}
        for name in masked:
            self.grad_N[places[name]].zero_()

    def restore(self) -> None:
        """After the reduction: masked parameters get back what they had, and a copy is written to the bucket."""
        places = self.group.slices()
        for name, values in self._saved.items():
            self.grad_N[places[name]].copy_(values)
        if self._pieces:
            torch._foreach_copy_(self._pieces, list(torch.split(self.grad_N, list(self.group.numels))))
