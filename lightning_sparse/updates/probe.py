"""Finds optimizers that undo received updates, by their effect on the parameters.

An optimizer with its own copy of the weights, such as fp32 master weights, overwrites the parameters with the copy. So
it removes received updates. Before an early step, the probe changes a few elements by much more than a step does. After
the step, it measures the fraction of this change that is left, and removes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.updates.slices import Slices

ELEMENTS = 4  # few, because some optimizers use the norm of the weights
WINDOW = 1 << 20  # limit of the probed elements of a piece
LARGE = 8.0  # times the largest change of the last step
CLEAR = 4.0  # times the largest change of this step
STEPS = 24
ENOUGH = 4  # steps that show a share; then the search ends
KEEPS = 0.9
"""If a step leaves at least this share of a change, the optimizer steps the parameters themselves."""
OVERWRITES = 0.4
"""If each step leaves less than this share, the optimizer overwrites the parameters."""
MOST = 0.75  # quantile; a step that clips weights undoes up to half of the changes


@dataclass
class _Tried:
    """One piece of a parameter in a probed step."""

    piece: Tensor
    places: Tensor  # indices of the changed elements, at most a quarter of the piece
    signs: Tensor
    before: Tensor  # the piece before the change

    def changed(self, size: float) -> Tensor:
        return (self.before[self.places].double() + size * self.signs).to(self.piece.dtype)

    def take_back(self, size: float) -> tuple[float, float]:
        """Remove the rest of the change. Return the fraction left, and the largest change of other elements."""
        changes = self.piece.double() - self.before.double()
        shares = changes[self.places] * self.signs / size if size else torch.ones_like(self.signs)
        most = shares.quantile(MOST).item()
        follows = shares >= min(most, 0.5 * most)  # the others were clipped
        share = shares[follows].mean().item()
        if share >= KEEPS:  # everything is left, up to noise and weight decay
            share = 1.0
        changes[self.places] = 0
        usual = changes.abs().max().item()
        left = torch.where(follows | (usual > size / CLEAR), share, shares).clamp(0.0, 1.0)
        self.piece[self.places] -= (size * left * self.signs).to(self.piece.dtype)
        return share, usual


class Probe:
    """Changes elements before steps of one optimizer, in the largest piece of each dtype of this device's slice."""

    def __init__(self) -> None:
        # Number of probed steps, and of steps that showed a fraction.
        self.steps = self.found = 0
        self.most = 0.0  # largest fraction that a step left
        self.sizes: dict[torch.dtype, float] = {}  # of the next change; 0 until a step shows how much it changes
        self._tried: list[_Tried] = []

    @property
    def under_way(self) -> bool:
        return bool(self._tried)

    @property
    def over(self) -> bool:
        # The fraction is 1 if the optimizer steps the parameters themselves, and one such step ends the search. It is 0
        # with master weights, and between 0 and 1 if the optimizer pulls the weights back towards a copy. Early steps
        # of schedule-free optimizers may leave little, so several steps are needed to show that an optimizer overwrites
        # the parameters.
        return self.steps >= STEPS or self.found >= ENOUGH or self.most >= KEEPS

    @torch.no_grad()
    def begin(self, slices: Slices) -> None:
        """Change elements of the parameters, before a step of the optimizer."""
        if self.over or self.under_way:
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
            piece[tried.places] = tried.changed(self.sizes.setdefault(dtype, 0.0))
            self._tried.append(tried)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Remove the change inside, for a closure of the step that computes gradients."""
        tried, self._tried, values = self._tried, [], []
        with torch.no_grad():
            for trial in tried:
                now = trial.piece[trial.places]
                values.append(now)
                # change by the step so far; 0 in most optimizers
                moved = now - trial.changed(self.sizes[trial.piece.dtype])
                trial.piece[trial.places] = trial.before[trial.places] + moved
        yield
        with torch.no_grad():
            for trial, now in zip(tried, values, strict=True):
                trial.piece[trial.places] = now
        self._tried = tried

    @torch.no_grad()
    def cancel(self) -> bool:
        """Remove the change before the step. Return whether there was a change; ``begin`` makes it again."""
        was_under_way = self.under_way
        for trial in self._tried:
            trial.piece[trial.places] = trial.before[trial.places]
        self._tried = []
        return was_under_way

    @torch.no_grad()
    def end(self) -> None:
        """Remove the change after the step, and store the fraction that was left."""
        self.steps += 1
        shares = []
        for trial in self._tried:
            size = self.sizes[trial.piece.dtype]
            share, usual = trial.take_back(size)
            if size and 0 < usual <= size / CLEAR:
                shares.append(max(0.0, share))
            scale = trial.before.double().square().mean().sqrt().item()  # limit: a larger change would ruin the step
            self.sizes[trial.piece.dtype] = min(LARGE * usual, scale or math.inf)
        self._tried = []
        if shares:
            self.found, self.most = self.found + 1, max(self.most, min(shares))

    def state_dict(self) -> dict[str, float]:
        sizes = {str(dtype): size for dtype, size in self.sizes.items()}
        return {"steps": float(self.steps), "found": float(self.found), "most": self.most, **sizes}

    def load_state_dict(self, saved: Mapping[str, float]) -> None:
        self.steps, self.found, self.most = int(saved["steps"]), int(saved["found"]), saved["most"]
        sizes = {name.partition(".")[2]: size for name, size in saved.items() if name.startswith("torch.")}
        self.sizes = {getattr(torch, name): size for name, size in sizes.items()}
