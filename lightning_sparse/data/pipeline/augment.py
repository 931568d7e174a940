"""Which part of a picture a network sees: windows and flips from (seed, epoch, index), for a whole batch at once.

Both backends are given these windows, so DALI and torchvision cut the same region of the same sample, and what a sample
looks like in an epoch does not depend on the batch, the rank or the number of nodes. The distribution is that of
torchvision's RandomResizedCrop: ten attempts to draw an area and an aspect ratio that fit, else the largest window in
the centre.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.pipeline.rng import uniform

_ATTEMPTS = 10
_SEED_OFFSET = 0x5EED_0F_C209  # so that windows do not share their bits with the order of samples


class Windows(NamedTuple):
    """One window a sample, in pixels of the stored picture. All arrays have the shape [B]."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    flip: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How windows are drawn.

    Args:
        crop_scale: least and greatest share of the picture's area.
        crop_ratio: least and greatest width / height of the window.
        flip: probability of a flip from left to right.
        seed: windows repeat with it.

    Raises:
        ValueError: for a value out of its range.
    """

    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale={self.crop_scale} must be two shares of the area, 0 < least <= greatest <= 1."
            )
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio={self.crop_ratio} must be two ratios width/height, 0 < least <= greatest.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip={self.flip} must be a probability in [0, 1].")

    def windows(
        self, epoch: int, indices: NDArray[np.int64], heights: NDArray[np.int64], widths: NDArray[np.int64]
    ) -> Windows:
        """Random windows in pictures of these sizes.

        Args:
            indices: of the samples in the manifest [B].
            heights, widths: of the stored pictures [B].
        """
        count = 4 * _ATTEMPTS + 1
        drawn = uniform(self.seed + _SEED_OFFSET, epoch, indices[:, None], np.arange(count))
        area, aspect, down, right = np.moveaxis(drawn[:, 1:].reshape(-1, _ATTEMPTS, 4), 2, 0)
        area = heights[:, None] * widths[:, None] * _between(area, *self.crop_scale)
        aspect = np.exp(_between(aspect, *np.log(self.crop_ratio)))
        width = np.round(np.sqrt(area * aspect)).astype(np.int64)
        height = np.round(np.sqrt(area / aspect)).astype(np.int64)
        fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
        rows, first = np.arange(len(indices)), fits.argmax(1)
        width, height, down, right = (each[rows, first] for each in (width, height, down, right))
        top = (down * (heights - height + 1)).astype(np.int64)
        left = (right * (widths - width + 1)).astype(np.int64)
        drawn_windows = Windows(top, left, height, width, drawn[:, 0] < self.flip)
        return _where(fits[rows, first], drawn_windows, self._largest(heights, widths))

    def _largest(self, heights: NDArray[np.int64], widths: NDArray[np.int64]) -> Windows:
        least, greatest = self.crop_ratio
        width = np.minimum(widths, np.round(heights * greatest).astype(np.int64))
        height = np.minimum(heights, np.round(widths / least).astype(np.int64))
        return _centred(heights, widths, np.maximum(height, 1), np.maximum(width, 1))


def centre_windows(heights: NDArray[np.int64], widths: NDArray[np.int64]) -> Windows:
    """The window that resizing the short side to 8/7 of the network's and cutting out the centre leaves: 7/8 of it."""
    side = np.maximum(1, np.minimum(heights, widths) * 7 // 8)
    return _centred(heights, widths, side, side)


def _centred(
    heights: NDArray[np.int64], widths: NDArray[np.int64], height: NDArray[np.int64], width: NDArray[np.int64]
) -> Windows:
    top, left = (heights - height) // 2, (widths - width) // 2
    return Windows(top, left, height, width, np.zeros(len(heights), np.bool_))


def _where(mask: NDArray[np.bool_], yes: Windows, no: Windows) -> Windows:
    places = [np.where(mask, a, b) for a, b in zip(yes[:4], no[:4], strict=True)]
    return Windows(places[0], places[1], places[2], places[3], yes.flip)


def _between(drawn: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + drawn * (high - low)
