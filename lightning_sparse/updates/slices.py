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
        for start, pending, piece in zip(self.of(start_S), self.of(pending_S), self.in_parameters(), strict=True):
            for here in _blocks(start):
                start[here].add_(pending[here]).sub_(piece[here])

    def add_change(self, own_S: Tensor, shared_S: Tensor, ahead: float, now_S: Tensor | None = None) -> None:
        """own_S += the parameters - what ``write_between`` wrote, given the same.

        Args:
            now_S: taken for the parameters.
        """
        pieces = self.in_parameters()
        nows = pieces if now_S is None else self.of(now_S)
        for own, shared, now, piece in zip(self.of(own_S), self.of(shared_S), nows, pieces, strict=True):
            if ahead == 1.0 and piece.dtype == torch.float32:
                own.copy_(now)  # it held own_S itself
                continue
            for here in _blocks(own):
                wrote = _between(own[here], shared[here], ahead)
                own[here].add_(now[here] - wrote.to(piece.dtype).float())

    def write_between(self, own_S: Tensor, shared_S: Tensor, ahead: float) -> None:
        """Write shared_S - ahead * (shared_S - own_S) into the parameters, rounded to their dtypes."""
        if ahead == 1.0:
            return self.write(own_S)
        for own, shared, piece in zip(self.of(own_S), self.of(shared_S), self.in_parameters(), strict=True):
            for here in _blocks(own):
                piece[here].copy_(_between(own[here], shared[here], ahead))
        return None

    def write(self, flat_S: Tensor) -> None:
        """Write a flat tensor into the parameters, rounded to their dtypes."""
        if self._pieces:
            torch._foreach_copy_(self.in_parameters(), self.of(flat_S))

    @property
    def rounds(self) -> bool:
        """Whether some parameter holds less than fp32."""
        return any(parameter.dtype != torch.float32 for parameter, _ in self._pieces)


def _between(own: Tensor, shared: Tensor, ahead: float) -> Tensor:
    return own if ahead == 1.0 else torch.lerp(shared, own, ahead)


def _blocks(piece: Tensor) -> Iterator[slice]:
    """So that on the CPU the second pass reads the cache."""
    size = piece.numel() if piece.is_cuda else _CACHED
    return (slice(at, at + size) for at in range(0, piece.numel(), size))
