"""The slice of an optimizer's parameters that a device keeps, as one flat fp32 tensor and as pieces of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparse.fsdp.shards import memory_of_part
from lightning_sparse.pto.ownership import Part

_CACHED = 1 << 16  # elements that stay in a core's cache


class Slices:
    """The pieces of parameters that one device owns, one behind the other.

    Args:
        parameters: of one optimizer.
        mine: the part of each that this device owns, or None.

    Attributes:
        numel: S, elements of all pieces together.
    """

    def __init__(self, parameters: Sequence[Tensor], mine: Sequence[Part | None]) -> None:
        self._pieces = [
            (parameter, part)
            for parameter, part in zip(parameters, mine, strict=True)
            if part is not None and part.end > part.begin
        ]
        self._sizes = [part.end - part.begin for _, part in self._pieces]
        self.numel = sum(self._sizes)

    def named(self, names: dict[int, str]) -> list[tuple[str, int, int]]:
        """The pieces as (name, begin, end), given the parameters' names by ``id()``."""
        return [(names[id(parameter)], part.begin, part.end) for parameter, part in self._pieces]

    def by_piece(self, flat_S: Tensor) -> dict[tuple[int, Part], Tensor]:
        """The views of ``of`` by parameter, as its ``id()``, and part."""
        keys = [(id(parameter), part) for parameter, part in self._pieces]
        return dict(zip(keys, self.of(flat_S), strict=True))

    def of(self, flat_S: Tensor) -> list[Tensor]:
        """Views of a flat tensor of S elements, one a piece."""
        return list(torch.split(flat_S, self._sizes)) if self._sizes else []

    def in_parameters(self) -> list[Tensor]:
        """Views of the parameters' memory, one a piece."""
        return [memory_of_part(parameter, part) for parameter, part in self._pieces]

    def read(self) -> Tensor:
        """The parameters as they are, fp32."""
        device = self._pieces[0][0].device if self._pieces else torch.device("cpu")
        flat_S = torch.empty(self.numel, dtype=torch.float32, device=device)
        self.copy_to(flat_S)
        return flat_S

    def copy_to(self, flat_S: Tensor) -> None:
        """Read the parameters into a flat tensor."""
        if self._pieces:
            torch._foreach_copy_(self.of(flat_S), self.in_parameters())

    def add_progress(self, start_S: Tensor, pending_S: Tensor) -> None:
        """start_S += pending_S - the parameters."""
        for start, pending, piece in _batches(self.of(start_S), self.of(pending_S), self.in_parameters()):
            torch._foreach_add_(start, pending)
            torch._foreach_sub_(start, piece)

    def add_change(self, own_S: Tensor, shared_S: Tensor, ahead: float, now_S: Tensor | None = None) -> None:
        """own_S += the parameters - what ``write_between`` wrote, given the same.

        Args:
            now_S: taken for the parameters.
        """
        pieces = self.in_parameters()
        nows = pieces if now_S is None else self.of(now_S)
        if ahead == 1.0 and not self.rounds:
            torch._foreach_copy_(self.of(own_S), nows)  # they held own_S itself
            return
        for own, shared, now, piece in _batches(self.of(own_S), self.of(shared_S), nows, pieces):
            wrote = _rounded(torch._foreach_lerp(shared, own, ahead), piece)
            torch._foreach_sub_(wrote, now)
            torch._foreach_sub_(own, wrote)

    def write_between(self, own_S: Tensor, shared_S: Tensor, ahead: float) -> None:
        """Write shared_S - ahead * (shared_S - own_S) into the parameters, rounded to their dtypes."""
        if ahead == 1.0:
            return self.write(own_S)
        if own_S.is_cuda:  # few launches, of the kernel that `add_change` runs: an update of zero stays zero
            between = torch._foreach_lerp(self.of(shared_S), self.of(own_S), ahead)
            torch._foreach_copy_(self.in_parameters(), between)
            return None
        for own, shared, piece in zip(self.of(own_S), self.of(shared_S), self.in_parameters(), strict=True):
            if piece.dtype == torch.float32:
                torch.lerp(shared, own, ahead, out=piece)
            else:
                piece.copy_(torch.lerp(shared, own, ahead))
        return None

    def write(self, flat_S: Tensor) -> None:
        """Write a flat tensor into the parameters, rounded to their dtypes."""
        if self._pieces:
            torch._foreach_copy_(self.in_parameters(), self.of(flat_S))

    @property
    def rounds(self) -> bool:
        """Whether some parameter holds less than fp32."""
        return any(parameter.dtype != torch.float32 for parameter, _ in self._pieces)


def _rounded(values: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """As tensors of those dtypes hold them, in fp32."""
    return [
        each if to.dtype == each.dtype else each.to(to.dtype).float() for each, to in zip(values, like, strict=True)
    ]


def _batches(*lists: list[Tensor]) -> Iterator[Sequence[list[Tensor]]]:
    """The same elements of all lists: on the CPU few at a time, so that the second pass reads the cache; on CUDA all,
    for few launches."""
    if lists[0] and lists[0][0].is_cuda:
        yield lists
        return
    for tensors in zip(*lists, strict=True):
        for blocks in zip(*(torch.split(each, _CACHED) for each in tensors), strict=True):
            yield [[block] for block in blocks]
