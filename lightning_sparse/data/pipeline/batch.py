"""What a batch is made of, before any backend touches a pixel: samples from the store, and the window of each.

Both backends start from `prepare`, so that they give the same samples, labels and windows for the same request.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.pipeline.augment import Augment, Windows, centre_windows
from lightning_sparse.data.sample import SampleReader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pixels in [0, 1]
Batch = tuple[Tensor, Tensor]


class Request(NamedTuple):
    """One batch of one rank.

    Attributes:
        indices: into the manifest [B].
        epoch: decides the windows of training; no matter without `train`.
        size: edge of the square that the network sees.
        train: random windows and flips; else the centre.
    """

    indices: NDArray[np.int64]
    epoch: int
    size: int
    train: bool


class Prepared(NamedTuple):
    """A request with its samples."""

    indices: NDArray[np.int64]
    pictures: list[NDArray[np.uint8]]
    labels: NDArray[np.int64]
    windows: Windows
    size: int


@dataclass(frozen=True, kw_only=True)
class Look:
    """What pictures look like when they reach the network.

    Args:
        augment: how windows are drawn in training.
        mean, std: of each channel, for pixels in [0, 1].

    Raises:
        ValueError: for a value out of its range.
    """

    augment: Augment = Augment()
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"mean={self.mean}, std={self.std}: give three numbers each, for red, green and blue in [0, 1], and no "
                f"std of 0."
            )


class Pipeline(Protocol):
    """Turns requests into batches, ahead of time and in their order."""

    def run(self, requests: Iterable[Request]) -> Generator[Batch, None, None]:
        """Batches of images float32 [B, 3, size, size] and labels int64 [B]. Nothing starts before the first next();
        closing stops what is under way."""

    def close(self) -> None:
        """Give back threads and memory. An iterator that is still open ends."""


def prepare(store: SampleReader, request: Request, look: Look) -> Prepared:
    """Read the samples of a request and draw their windows."""
    samples = store.get(request.indices.tolist())
    heights = np.array([each.height for each in samples], np.int64)
    widths = np.array([each.width for each in samples], np.int64)
    if request.train:
        windows = look.augment.windows(request.epoch, request.indices, heights, widths)
    else:
        windows = centre_windows(heights, widths)
    labels = np.array([each.label for each in samples], np.int64)
    return Prepared(request.indices, [each.data for each in samples], labels, windows, request.size)
