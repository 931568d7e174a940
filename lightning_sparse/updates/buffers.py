"""A module's buffers: each node trains with its own, the world sees their average."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_sparse.exchange import HierCommunicator


class Buffers:
    """The floating-point buffers of a module, such as the statistics of batch norm. Others stay as they are.

    Args:
        module: the model.
        communicator: of all ranks.
    """

    def __init__(self, module: nn.Module, communicator: HierCommunicator) -> None:
        self._module, self._communicator = module, communicator
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # a buffer, this rank's own, and the average it shows

    @torch.no_grad()
    def average(self) -> None:
        """Average over all ranks, in place. A collective of the world, if there are any."""
        buffers = self._floats()
        if not buffers:
            return
        # fp64: an average of equal values is that value, so constants stay exact
        flat = torch.cat([each.flatten().double() for each in buffers])
        self._communicator.flat_all_reduce(flat)
        flat /= self._communicator.topology.world_size
        for buffer, mean in zip(buffers, torch.split(flat, [each.numel() for each in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def show_averaged(self) -> None:
        """Average, and remember this rank's own."""
        own = [(each, each.clone()) for each in self._floats()]
        self.average()
        self._kept = [(buffer, kept, buffer.clone()) for buffer, kept in own]

    def show_own(self) -> None:
        """Put this rank's own back, except buffers that were changed meanwhile."""
        for buffer, own, averaged in self._kept:
            if torch.equal(buffer, averaged):
                buffer.copy_(own)
        self._kept = []

    def own(self) -> list[Tensor]:
        """This rank's own, whatever is shown."""
        kept = {id(buffer): own for buffer, own, averaged in self._kept if torch.equal(buffer, averaged)}
        return [kept.get(id(each), each) for each in self._floats()]

    def fit(self, saved: list[Tensor]) -> bool:
        """Whether saved ones are of the shapes of these."""
        return [each.shape for each in saved] == [each.shape for each in self._floats()]

    def load(self, own: list[Tensor]) -> None:
        """Go on with saved ones."""
        for buffer, saved in zip(self._floats(), own, strict=True):
            buffer.copy_(saved)

    def _floats(self) -> list[Tensor]:
        return [each for each in self._module.buffers() if each.is_floating_point() and each.numel()]
