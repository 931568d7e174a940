"""Random crops and flips for a batch, as a pure function of (seed, epoch, index).

Both backends use these crops, so DALI and torch cut the same region of a sample, and the augmentation does not
depend on the batch, the rank or the number of nodes. The distribution is that of torchvision's RandomResizedCrop: ten
attempts to draw an area and an aspect ratio that fit, else the largest crop in the centre.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.rng import uniform

Integers = NDArray[np.int64]
_ATTEMPTS = 10
_RATIO = (3 / 4, 4 / 3)  # range of the aspect ratio, width / height
_SEED_OFFSET = 0x5EED_0F_C209  # so that crops and the order of samples are independent


class Crops(NamedTuple):
    """One crop per sample, in pixels of the cached image. All arrays have shape [B]."""

    top: Integers
    left: Integers
    height: Integers
    width: Integers
    flip: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Options of random crops and flips.

    Args:
        crop_scale: range of the crop's area, as a fraction of the image's area.
        flip: probability of a horizontal flip.
        seed: random seed.

    Raises:
        ValueError: if an option is out of range.
    """

    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale={self.crop_scale} must be two fractions of the area, 0 < least <= greatest <= 1."
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip={self.flip} must be a probability in [0, 1].")

    def crops(self, epoch: int, indices: Integers, heights: Integers, widths: Integers) -> Crops:
        """Draw random crops.

        Args:
            indices: indices of the samples in the manifest [B].
            heights, widths: sizes of the cached images [B].
        """
        count = 4 * _ATTEMPTS + 1
        drawn = uniform(self.seed + _SEED_OFFSET, epoch, indices[:, None], np.arange(count))
        area, aspect, down, right = np.moveaxis(drawn[:, 1:].reshape(-1, _ATTEMPTS, 4), 2, 0)
        area = heights[:, None] * widths[:, None] * _between(area, *self.crop_scale)
        aspect = np.exp(_between(aspect, *np.log(_RATIO)))
        width = np.round(np.sqrt(area * aspect)).astype(np.int64)
        height = np.round(np.sqrt(area / aspect)).astype(np.int64)
        fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
        rows, first = np.arange(len(indices)), fits.argmax(1)
        width, height, down, right = (each[rows, first] for each in (width, height, down, right))
        top = (down * (heights - height + 1)).astype(np.int64)
        left = (right * (widths - width + 1)).astype(np.int64)
        boxes = zip((top, left, height, width), _largest(heights, widths)[:4], strict=True)
        return Crops._make([*(np.where(fits[rows, first], a, b) for a, b in boxes), drawn[:, 0] < self.flip])


def centre_crops(heights: Integers, widths: Integers) -> Crops:
    """Return centre crops of 7/8 of the shorter side: as resizing to 256 and cropping 224."""
    side = np.maximum(1, np.minimum(heights, widths) * 7 // 8)
    return _centred(heights, widths, side, side)


def _largest(heights: Integers, widths: Integers) -> Crops:
    least, greatest = _RATIO
    width = np.minimum(widths, np.round(heights * greatest).astype(np.int64))
    height = np.minimum(heights, np.round(widths / least).astype(np.int64))
    return _centred(heights, widths, np.maximum(height, 1), np.maximum(width, 1))


def _centred(heights: Integers, widths: Integers, height: Integers, width: Integers) -> Crops:
    top, left = (heights - height) // 2, (widths - width) // 2
    return Crops(top, left, height, width, np.zeros(len(heights), np.bool_))


def _between(drawn: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + drawn * (high - low)
