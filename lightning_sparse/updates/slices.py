"""The slice of an optimizer's parameters that a device owns, as one flat fp32 tensor and as pieces of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse import kernels
from lightning_sparse.kernels import plain
from lightning_sparse.sharding import Part, flat_view_of_part

_CACHED = 1 << 16  # elements that stay in a core's cache


class Slices:
    """The concatenated pieces of parameters that a device owns, S elements in total.

    Args:
        mine: the part of each parameter that this device owns, or None.
    """

    def __init__(self, parameters: Sequence[Tensor], mine: Sequence[Part | None]) -> None:
        self.pieces = [
            (parameter, part)
            for parameter, part in zip(parameters, mine, strict=True)
            if part is not None and part.end > part.begin
        ]
        self._sizes = [part.end - part.begin for _, part in self.pieces]
        self.numel = sum(self._sizes)
        self._views: list[Tensor] = []
        self._seen: list[object] = []  # keys of the cached views

    def named(self, names: Mapping[int, str]) -> list[tuple[str, int, int]]:
        """Return the pieces as (name, begin, end)."""
        return [(names[id(parameter)], part.begin, part.end) for parameter, part in self.pieces]

    def by_piece(self, flat_S: Tensor) -> dict[tuple[int, Part], Tensor]:
        """Return the views of ``of`` by (``id()`` of the parameter, part)."""
        keys = [(id(parameter), part) for parameter, part in self.pieces]
        return dict(zip(keys, self.of(flat_S), strict=True))

    def of(self, flat_S: Tensor) -> list[Tensor]:
        """Return views of a flat tensor [S], one per piece."""
        return list(torch.split(flat_S, self._sizes)) if self._sizes else []

    def in_parameters(self) -> list[Tensor]:
        """Return views of the parameters' memory, one per piece."""
        # Cached while the parameters stay in place: with many small parameters, making views takes longer than using
        # them.
        places = [_place_of(parameter) for parameter, _ in self.pieces]
        if places != self._seen or None in places:
            self._views = [flat_view_of_part(parameter, part) for parameter, part in self.pieces]
            self._seen = places
        return self._views

    def read(self) -> Tensor:
        """Return the parameters, fp32 [S]."""
        device = self.pieces[0][0].device if self.pieces else torch.device("cpu")
        flat_S = torch.empty(self.numel, dtype=torch.float32, device=device)
        self.copy_to(flat_S)
        return flat_S

    def copy_to(self, flat_S: Tensor) -> None:
        if self.pieces:
            torch._foreach_copy_(self.of(flat_S), self.in_parameters())

    def add_progress(self, start_S: Tensor, pending_S: Tensor) -> None:
        """Compute start_S += pending_S - parameters."""
        for start, pending, piece in _batches(self.of(start_S), self.of(pending_S), self.in_parameters()):
            torch._foreach_add_(start, pending)
            torch._foreach_sub_(start, piece)

    def accumulate_delta(
        self, local_S: Tensor, global_S: Tensor, local_fraction: float, now_S: Tensor | None = None
    ) -> None:
        """Compute local_S += parameters - the values that ``lerp_into`` wrote for the same arguments.

        Args:
            now_S: values to use instead of the parameters, in the precision of the parameters.
        """
        model = self.in_parameters()
        if now_S is not None:
            model = [now.to(piece.dtype) for now, piece in zip(self.of(now_S), model, strict=True)]
        if model:
            _kernels_for(model).accumulate_delta(local_S, global_S, model, local_fraction)

    def lerp_into(self, local_S: Tensor, global_S: Tensor, local_fraction: float) -> None:
        """Write global_S - local_fraction * (global_S - local_S) into the parameters, rounded to their dtypes."""
        model = self.in_parameters()
        if model:
            _kernels_for(model).lerp_into(local_S, global_S, model, local_fraction)
            torch.autograd.graph.increment_version(model)  # as torch's own operators do, so that autograd detects it

    def between(self, local_S: Tensor, global_S: Tensor, local_fraction: float) -> Tensor:
        """Return the values that ``lerp_into`` writes, in fp32, on the device of the two models."""
        flat_S = torch.empty_like(local_S)
        model = [torch.empty_like(piece, device=local_S.device) for piece in self.in_parameters()]
        if model:
            _kernels_for(self.in_parameters()).lerp_into(local_S, global_S, model, local_fraction)
            torch._foreach_copy_(self.of(flat_S), model)
        return flat_S

    def write(self, flat_S: Tensor) -> None:
        if self.pieces:
            torch._foreach_copy_(self.in_parameters(), self.of(flat_S))

    @property
    def is_rounded(self) -> bool:
        return any(parameter.dtype != torch.float32 for parameter, _ in self.pieces)


def _place_of(parameter: Tensor) -> object:
    # The key of a DTensor is as slow to compute as the view.
    if isinstance(parameter, DTensor):
        return None
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _kernels_for(model: Sequence[Tensor]) -> ModuleType:
    # The compiled kernels support neither float64 nor unaligned memory, such as that of a mapped file.
    odd = any(piece.dtype == torch.float64 or piece.data_ptr() % piece.element_size() for piece in model)
    return plain if odd else kernels


def _batches(*lists: list[Tensor]) -> Iterator[Sequence[list[Tensor]]]:
    # CUDA: all tensors, in few launches. CPU: a few elements at a time, which stay in the cache.
    if lists[0] and lists[0][0].is_cuda:
        yield lists
        return
    for tensors in zip(*lists, strict=True):
        for blocks in zip(*(torch.split(tensor, _CACHED) for tensor in tensors), strict=True):
            yield [[block] for block in blocks]
