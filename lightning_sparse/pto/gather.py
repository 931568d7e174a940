"""One flat, padded all-gather that brings every rank's parameters to all ranks of the scope.

With W ranks, rank w's parameters packed one after the other, and B the bytes of the largest share:

    share_B of rank w     [ p0 | p4 | p7 | padding ]
    gathered              share_B of rank 0, share_B of rank 1, ... share_B of rank W-1

Bytes, so that parameters of any dtype travel together: one collective a device, however many dtypes there are. Pieces
begin at multiples of ALIGN bytes, which lets them be viewed as their own dtype. Sizes follow from shapes and owners, so
all ranks know them without asking.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGN = 16

Gather = Callable[[Tensor], Tensor]
"""All-gather of a flat tensor of equal size on all ranks of the scope, in the order of its ranks."""


@dataclass
class Share:
    """A rank's parameters on one device, and where each begins."""

    parameters: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0

    def append(self, parameter: Tensor) -> None:
        """Put one more behind the others."""
        self.parameters.append(parameter)
        self.offsets.append(self.nbytes)
        self.nbytes += aligned(parameter)

    def views(self, share_B: Tensor) -> list[Tensor]:
        """The parameters' places in a flat share, each with its dtype and shape."""
        return [
            share_B[offset : offset + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            for p, offset in zip(self.parameters, self.offsets, strict=True)
        ]


class FlatGather:
    """Gathers what each rank owns.

    Args:
        parameters: all parameters, in the same order on all ranks.
        owners: for each, the index of its rank in the scope.
        index: this rank's index in the scope.
        size: W, the number of ranks in the scope.
    """

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int], index: int, size: int) -> None:
        self.index = index
        self.shares: dict[torch.device, list[Share]] = {}  # by device, in order of first appearance; then by owner
        for parameter, owner in zip(parameters, owners, strict=True):
            if parameter.numel():
                of_device = self.shares.setdefault(parameter.device, [Share() for _ in range(size)])
                of_device[owner].append(parameter)

    @property
    def nbytes(self) -> int:
        """What one gather brings to this rank."""
        return sum((len(shares) - 1) * max(share.nbytes for share in shares) for shares in self.shares.values())

    @torch.no_grad()
    def __call__(self, gather: Gather) -> None:
        """Send what this rank owns, and overwrite the others with what their owners sent. A collective."""
        for device, shares in self.shares.items():
            share_B = torch.empty(max(share.nbytes for share in shares), dtype=torch.uint8, device=device)
            mine = shares[self.index]
            _copy(mine.views(share_B), mine.parameters)
            gathered_WB = gather(share_B).view(len(shares), -1)
            for share, received_B in self._others(shares, gathered_WB):
                _copy(share.parameters, share.views(received_B))

    def _others(self, shares: list[Share], gathered_WB: Tensor) -> Iterator[tuple[Share, Tensor]]:
        for owner, (share, received_B) in enumerate(zip(shares, gathered_WB, strict=True)):
            if owner != self.index:
                yield share, received_B


def aligned(tensor: Tensor) -> int:
    """Bytes of a tensor, rounded up so that the next may follow."""
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
