"""Batch requests, their samples and their crops: the part of the pipeline that both backends share.

Both backends call `prepare`, so they use the same samples, labels and crops for the same request.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.pipeline.augment import Augment, Crops, centre_crops
from lightning_sparse.data.sample import SampleReader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pixels in [0, 1]
Batch = tuple[Tensor, Tensor]


class BatchRequest(NamedTuple):
    """A batch of a rank.

    Attributes:
        indices: indices of the samples in the manifest [B].
        epoch: number of the epoch, for random crops.
        size: height and width of the images in the batch.
        train: random crops and flips if True, else centre crops.
    """

    indices: NDArray[np.int64]
    epoch: int
    size: int
    train: bool


class PreparedBatch(NamedTuple):
    """A batch request with its samples. images: as cached. crops: to cut out and resize."""

    indices: NDArray[np.int64]
    images: list[NDArray[np.uint8]]
    labels: NDArray[np.int64]
    crops: Crops
    size: int


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Augmentation and normalisation.

    Args:
        augment: random crops and flips in training.
        mean, std: mean and standard deviation of each channel, for pixels in [0, 1].

    Raises:
        ValueError: if an option is out of range.
    """

    augment: Augment = Augment()
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"mean={self.mean}, std={self.std} must be three numbers each, for red, green and blue in [0, 1], with "
                f"each std above 0."
            )


class Pipeline(Protocol):
    """Makes batches of requests, in order and ahead of time."""

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """Yield batches: images float32 [B, 3, size, size] and labels int64 [B].

        Work starts with the first next() and stops when the generator is closed.
        """

    def close(self) -> None:
        """Free threads and memory. Open iterators end."""


def prepare(store: SampleReader, request: BatchRequest, transform: Transform) -> PreparedBatch:
    """Read the samples of a request and compute their crops."""
    samples = store.get(request.indices.tolist())
    heights = np.array([each.height for each in samples], np.int64)
    widths = np.array([each.width for each in samples], np.int64)
    if request.train:
        crops = transform.augment.crops(request.epoch, request.indices, heights, widths)
    else:
        crops = centre_crops(heights, widths)
    labels = np.array([each.label for each in samples], np.int64)
    return PreparedBatch(request.indices, [each.data for each in samples], labels, crops, request.size)
