"""Batch requests, their samples and their crops: the part of the pipeline that both backends share.

Both backends call `prepare`, so they use the same samples, labels and crops for the same request.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.decode import scaled
from lightning_sparse.data.pipeline.augment import Crops, centre_crops, random_crops
from lightning_sparse.data.pipeline.options import ImageOptions
from lightning_sparse.data.sample import SampleReader

Batch = tuple[Tensor, Tensor]


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
    """Makes batches of requests, in order and ahead of time."""

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
