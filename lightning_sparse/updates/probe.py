"""Finds optimizers that undo what other nodes send: by what they do to the parameters, whatever they store.

An optimizer with a copy of the weights (fp32 master weights, slow weights) overwrites the parameters with it, and so
removes received updates. Before an early step, a few elements are changed by much more than a step changes them. The
share of this change that is left after the step is 1 for an optimizer that steps the parameters themselves, 0 for one
with master weights, and between them where the weights are pulled back towards a copy. The change is then removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.updates.slices import Slices

ELEMENTS = 64
WINDOW = 1 << 20  # elements of a piece that are looked at
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
        """Remove what is left of a change. Return its share, and the largest change of the other elements."""
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
        steps: that were tried; `STEPS` at most.
        sizes: of the change in the next step, by dtype; 0 where a step is to show first how much it changes.
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
    def end(self) -> float:
        """Remove the change after the step.

        Returns:
            The smallest share of it that was left where the step sets no bounds, 1 where the step does not tell.
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
        """Return what a resumed run goes on with."""
        return {"steps": float(self.steps), **{str(dtype): size for dtype, size in self.sizes.items()}}

    def load_state_dict(self, saved: Mapping[str, float]) -> None:
        """Go on where it was saved."""
        self.steps = int(saved["steps"])
        self.sizes = {getattr(torch, n.partition(".")[2]): size for n, size in saved.items() if n != "steps"}
