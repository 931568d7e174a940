"""Finds optimizers that undo received updates, by their effect on the parameters, not by their state.

An optimizer with a copy of the weights (fp32 master weights, slow weights) overwrites the parameters with it, and so
removes received updates. Before an early step, a few elements are changed by much more than a step changes them. After
the step, a share of this change is left, and it is then removed. The share is 1 if the optimizer steps the parameters
themselves. It is 0 with master weights, and between 0 and 1 if the optimizer pulls the weights back towards a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.updates.slices import Slices

ELEMENTS = 64
WINDOW = 1 << 20  # elements of a piece that are probed at most
LARGE = 16.0  # times the largest change of the last step
CLEAR = 2.0  # times the largest change of this step
STEPS = 24
MOST = 0.75  # a quantile: a step that clips weights takes up to half of the changes back, those beyond its bounds


@dataclass
class _Tried:
    """One piece of a parameter in a step.

    Attributes:
        places: of the elements that are changed; at most a quarter of the piece.
        before: the piece as it was.
    """

    piece: Tensor
    places: Tensor
    signs: Tensor
    before: Tensor

    def write(self, size: float) -> None:
        self.piece[self.places] = (self.before[self.places].double() + size * self.signs).to(self.piece.dtype)

    def take_back(self, size: float) -> tuple[float, float]:
        """Remove the rest of a change. Return the share that was left, and the largest change of other elements."""
        changes = self.piece.double() - self.before.double()
        shares = changes[self.places] * self.signs / size if size else torch.ones_like(self.signs)
        most = shares.quantile(MOST).item()
        follows = shares >= min(most, 0.5 * most)  # others were clipped by a bound
        share = shares[follows].median().item()
        changes[self.places] = 0
        usual = changes.abs().max().item()
        left = torch.where(follows | (usual > size / CLEAR), share, shares).clamp(0.0, 1.0)
        self.piece[self.places] -= (size * left * self.signs).to(self.piece.dtype)
        return share, usual


class Probe:
    """Changes elements before steps of one optimizer, in the largest piece of each dtype of this device's slice.

    Attributes:
        steps: number of probed steps; `STEPS` at most.
        sizes: size of the change before the next step, by dtype; 0 until a step shows how much it changes.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.sizes: dict[torch.dtype, float] = {}
        self._tried: list[_Tried] = []

    @property
    def under_way(self) -> bool:
        """Whether elements are changed now."""
        return bool(self._tried)

    @torch.no_grad()
    def begin(self, slices: Slices) -> None:
        """Change elements of the parameters; call it before a step."""
        if self.steps >= STEPS or self.under_way:
            return
        largest: dict[torch.dtype, Tensor] = {}
        for piece in slices.in_parameters():
            if piece.numel() >= 4 and piece.numel() > largest.get(piece.dtype, piece[:0]).numel():
                largest[piece.dtype] = piece[:WINDOW]
        for dtype, piece in largest.items():
            count = min(ELEMENTS, piece.numel() // 4)
            places = torch.randperm(piece.numel(), generator=torch.Generator().manual_seed(self.steps))[:count]
            signs = 1.0 - 2.0 * (torch.arange(count) % 2)
            tried = _Tried(piece, places.to(piece.device), signs.double().to(piece.device), piece.clone())
            tried.write(self.sizes.setdefault(dtype, 0.0))
            self._tried.append(tried)

    @torch.no_grad()
    def cancel(self) -> bool:
        """Remove the change before the step. Return whether there was one; ``begin`` makes the same change again."""
        was_under_way = self.under_way
        for each in self._tried:
            each.piece[each.places] = each.before[each.places]
        self._tried = []
        return was_under_way

    @torch.no_grad()
    def end(self) -> float:
        """Remove the change after the step.

        Returns:
            The smallest share of the change that was left where the step sets no bounds, or 1 if the step shows none.
        """
        smallest = 1.0
        self.steps += 1
        for each in self._tried:
            size = self.sizes[each.piece.dtype]
            share, usual = each.take_back(size)
            if size and 0 < usual <= size / CLEAR:
                doubt = 2.0 * usual / size / math.sqrt(len(each.places))
                smallest = min(smallest, share + doubt)
            scale = each.before.double().square().mean().sqrt().item()  # a larger change would be another model
            self.sizes[each.piece.dtype] = min(LARGE * usual, scale or math.inf)
        self._tried = []
        return smallest

    def state_dict(self) -> dict[str, float]:
        """Return the state for a resumed run."""
        return {"steps": float(self.steps), **{str(dtype): size for dtype, size in self.sizes.items()}}

    def load_state_dict(self, saved: Mapping[str, float]) -> None:
        """Continue from a saved state."""
        self.steps = int(saved["steps"])
        self.sizes = {getattr(torch, n.partition(".")[2]): size for n, size in saved.items() if n != "steps"}
