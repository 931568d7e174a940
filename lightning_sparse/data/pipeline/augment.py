"""Random crops and flips for a batch, as a pure function of (seed, epoch, index).

Both backends use these crops, so DALI and torch cut the same region of a sample, and the augmentation does not
depend on the batch, the rank or the number of nodes. The distribution is that of torchvision's RandomResizedCrop: ten
attempts to draw an area and an aspect ratio that fit, else the largest crop in the centre.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.pipeline.options import ImageOptions
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


def random_crops(options: ImageOptions, epoch: int, indices: Integers, heights: Integers, widths: Integers) -> Crops:
    """Draw random crops and flips.

    Args:
        indices: indices of the samples in the manifest [B].
        heights, widths: sizes of the cached images [B].
    """
    count = 4 * _ATTEMPTS + 1
    drawn = uniform(options.seed + _SEED_OFFSET, epoch, indices[:, None], np.arange(count))
    area, aspect, down, right = np.moveaxis(drawn[:, 1:].reshape(-1, _ATTEMPTS, 4), 2, 0)
    area = heights[:, None] * widths[:, None] * _between(area, *options.crop_scale)
    aspect = np.exp(_between(aspect, *np.log(_RATIO)))
    width = np.round(np.sqrt(area * aspect)).astype(np.int64)
    height = np.round(np.sqrt(area / aspect)).astype(np.int64)
    fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
    rows, first = np.arange(len(indices)), fits.argmax(1)
    width, height, down, right = (each[rows, first] for each in (width, height, down, right))
    top = (down * (heights - height + 1)).astype(np.int64)
    left = (right * (widths - width + 1)).astype(np.int64)
    boxes = zip((top, left, height, width), _largest(heights, widths)[:4], strict=True)
    return Crops._make([*(np.where(fits[rows, first], a, b) for a, b in boxes), drawn[:, 0] < options.flip])


def centre_crops(heights: Integers, widths: Integers, part: tuple[int, int] = (7, 8)) -> Crops:
    """Return centre crops of this part of the shorter side: 7/8 is what resizing to 256 and cropping 224 sees."""
    side = np.maximum(1, np.minimum(heights, widths) * part[0] // part[1])
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
