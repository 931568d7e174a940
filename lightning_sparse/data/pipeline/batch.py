"""Batch requests, their samples and their crops: the part of the pipeline that both backends share.

Both backends call `prepare`, so they use the same samples, labels and crops for the same request: DALI and torch cut
the same region of a sample. Crops are a pure function of (seed, epoch, index), so the augmentation does not depend on
the batch, the rank or the number of nodes. Their distribution is that of torchvision's RandomResizedCrop: ten attempts
to draw an area and an aspect ratio that fit, else the largest crop in the centre.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.config import ImageOptions
from lightning_sparse.data.decode import scaled
from lightning_sparse.data.rng import uniform
from lightning_sparse.data.sample import SampleReader

Batch = tuple[Tensor, Tensor]
Integers = NDArray[np.int64]
_ATTEMPTS = 10
_RATIO = (3 / 4, 4 / 3)  # range of the aspect ratio, width / height
_SEED_OFFSET = 0x5EED_0F_C209  # so that crops and the order of samples are independent


class BatchRequest(NamedTuple):
    """A batch of a rank.

    Attributes:
        indices: indices of the samples in the manifest [B].
        epoch: number of the epoch, for random transforms.
        size: height and width of the images in the batch; 0 for other samples.
        train: random transforms if True.
    """

    indices: NDArray[np.int64]
    epoch: int
    size: int
    train: bool


class Crops(NamedTuple):
    """One crop per sample, in pixels of the cached image. All arrays have shape [B]."""

    top: Integers
    left: Integers
    height: Integers
    width: Integers
    flip: NDArray[np.bool_]


class PreparedBatch(NamedTuple):
    """A batch request with its samples.

    Attributes:
        images: as cached: pixels, or JPEG files.
        crops: to cut out and resize, in pixels of the images once they are decoded to `short_side`.
        sizes: heights [B] and widths [B] of the images as cached.
        scale: `sizes`, divided by those at `short_side`.
        size: height and width of the images in the batch.
        short_side: shorter side of decoded images, at most.
    """

    indices: NDArray[np.int64]
    images: list[NDArray[np.uint8]]
    labels: Tensor
    crops: Crops
    sizes: tuple[NDArray[np.int64], NDArray[np.int64]]
    scale: tuple[NDArray[np.float64], NDArray[np.float64]]
    size: int
    short_side: int


class Pipeline(Protocol):
    """Makes batches of requests, in order and ahead of time.

    Attributes:
        ahead: requests that it takes, at most, before it yields the batch of the first of them.
    """

    ahead: int

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Any, None, None]:
        """Yield batches; of images: float32 [B, 3, size, size] and labels int64 [B].

        Work starts with the first next() and stops when the generator is closed.
        """

    def close(self) -> None:
        """Free threads and memory. Open iterators end."""


def label_tensor(labels: Sequence[Any]) -> Tensor:
    """Return labels as they come from a store: int64, or float32 if one of them is not whole, [B] or [B, L]."""
    tensor = torch.from_numpy(np.array(labels))
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    return tensor.float() if tensor.is_floating_point() else tensor


def prepare(store: SampleReader, request: BatchRequest, options: ImageOptions) -> PreparedBatch:
    """Read the samples of a request and compute their crops."""
    samples = store.get(request.indices.tolist())
    widths, heights = np.array([(each.width, each.height) for each in samples], np.int64).reshape(-1, 2).T
    # crops are those of the decoded images, also of JPEG files: both give the same pixels
    at_short_side = [scaled((each.width, each.height), store.short_side) for each in samples]
    decoded_widths, decoded_heights = np.array(at_short_side, np.int64).reshape(-1, 2).T
    if request.train:
        crops = random_crops(options, request.epoch, request.indices, decoded_heights, decoded_widths)
    else:
        crops = centre_crops(decoded_heights, decoded_widths, options.centre(request.size))
    labels = label_tensor([each.label for each in samples])
    return PreparedBatch(
        request.indices,
        [each.data for each in samples],
        labels,
        crops,
        (heights, widths),
        (heights / decoded_heights, widths / decoded_widths),
        request.size,
        store.short_side,
    )


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
