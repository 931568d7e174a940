"""Batches of images: crops, the choice of the backend, and the torch backend.

Both backends call `prepare`, so they cut the same region of the same sample. Crops are a pure function of (seed, epoch,
index), so they do not depend on the batch, the rank or the number of nodes. Their distribution is that of torchvision's
RandomResizedCrop.
"""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.config import Backend, ImageOptions, is_installed
from lightning_sparse.data.decode import SampleReader, decode, resized, scaled
from lightning_sparse.data.pipeline.loader import BatchRequest, label_tensor, prefetch_map
from lightning_sparse.data.rng import uniform

Batch = tuple[Tensor, Tensor]
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


class PreparedBatch(NamedTuple):
    """A batch request with its samples.

    Attributes:
        images: as cached: pixels, or JPEG files.
        crops: in pixels of the images once they are decoded to `short_side`.
        sizes: heights [B] and widths [B] of the images as cached.
        scale: `sizes`, divided by those at `short_side`.
    """

    indices: NDArray[np.int64]
    images: list[NDArray[np.uint8]]
    labels: Tensor
    crops: Crops
    sizes: tuple[NDArray[np.int64], NDArray[np.int64]]
    scale: tuple[NDArray[np.float64], NDArray[np.float64]]
    size: int
    short_side: int


def prepare(store: SampleReader, request: BatchRequest, options: ImageOptions) -> PreparedBatch:
    samples = store.get(request.indices.tolist())
    widths, heights = np.array([(sample.width, sample.height) for sample in samples], np.int64).reshape(-1, 2).T
    # also for JPEG files, crop the size that the decoded cache has, so that both formats give the same pixels
    at_short_side = [scaled((sample.width, sample.height), store.short_side) for sample in samples]
    decoded_widths, decoded_heights = np.array(at_short_side, np.int64).reshape(-1, 2).T
    if request.train:
        crops = random_crops(options, request.epoch, request.indices, decoded_heights, decoded_widths)
    else:
        crops = center_crops(decoded_heights, decoded_widths, options.eval_crop(request.size))
    labels = label_tensor([sample.label for sample in samples])
    return PreparedBatch(
        request.indices,
        [sample.data for sample in samples],
        labels,
        crops,
        (heights, widths),
        (heights / decoded_heights, widths / decoded_widths),
        request.size,
        store.short_side,
    )


def random_crops(options: ImageOptions, epoch: int, indices: Integers, heights: Integers, widths: Integers) -> Crops:
    """Draw random crops and flips for samples `indices` [B] of the manifest, with cached images of these sizes [B]."""
    count = 4 * _ATTEMPTS + 1
    drawn = uniform(options.seed + _SEED_OFFSET, epoch, indices[:, None], np.arange(count))
    area, aspect, down, right = np.moveaxis(drawn[:, 1:].reshape(-1, _ATTEMPTS, 4), 2, 0)
    area = heights[:, None] * widths[:, None] * _between(area, *options.crop_scale)
    aspect = np.exp(_between(aspect, *np.log(_RATIO)))
    width = np.round(np.sqrt(area * aspect)).astype(np.int64)
    height = np.round(np.sqrt(area / aspect)).astype(np.int64)
    fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
    # the first of ten attempts that fits, else the largest crop in the center
    rows, first = np.arange(len(indices)), fits.argmax(1)
    width, height, down, right = (drawn_values[rows, first] for drawn_values in (width, height, down, right))
    top = (down * (heights - height + 1)).astype(np.int64)
    left = (right * (widths - width + 1)).astype(np.int64)
    boxes = zip((top, left, height, width), _largest(heights, widths)[:4], strict=True)
    return Crops._make([*(np.where(fits[rows, first], a, b) for a, b in boxes), drawn[:, 0] < options.flip])


def center_crops(heights: Integers, widths: Integers, part: tuple[int, int] = (7, 8)) -> Crops:
    """Return center crops of this part of the shorter side. 7/8 equals a resize to 256 and a crop of 224."""
    side = np.maximum(1, np.minimum(heights, widths) * part[0] // part[1])
    return _centered(heights, widths, side, side)


def _largest(heights: Integers, widths: Integers) -> Crops:
    least, greatest = _RATIO
    width = np.minimum(widths, np.round(heights * greatest).astype(np.int64))
    height = np.minimum(heights, np.round(widths / least).astype(np.int64))
    return _centered(heights, widths, np.maximum(height, 1), np.maximum(width, 1))


def _centered(heights: Integers, widths: Integers, height: Integers, width: Integers) -> Crops:
    top, left = (heights - height) // 2, (widths - width) // 2
    return Crops(top, left, height, width, np.zeros(len(heights), np.bool_))


def _between(drawn: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + drawn * (high - low)


Chosen = Literal["dali", "torch"]


def has_dali() -> bool:
    return is_installed("nvidia.dali")


def choose_backend(
    wanted: Backend, device: torch.device, *, has_dali: bool, kept: str | None = None
) -> tuple[Chosen, str]:
    """Return the backend and the reason for it, a pure function. `kept`: backend of the run that this one continues."""
    if wanted == "dali" and not has_dali:
        raise ValueError(
            'backend="dali" needs DALI on all ranks: `pip install nvidia-dali-cuda130`, or use backend="auto".'
        )
    if wanted != "auto":
        return wanted, "as requested"
    if kept == "dali" and not has_dali:
        return "torch", "DALI, which this run began with and which resizes slightly differently, is not installed"
    if kept is not None:
        return "dali" if kept == "dali" else "torch", "as in the run that this one continues"
    # measured in benchmarks/results/data-backends-*.json
    if device.type != "cuda":
        return "torch", "on a CPU it is faster than DALI"
    if not has_dali:
        return "torch", "DALI, which runs on the GPU, is not installed on all ranks"
    return "dali", "it runs on the GPU"


class TorchPipeline:
    """Makes batches with torch, in threads of this process.

    Reading, decoding and resizing release the GIL, the memory tier is read without a copy, and nothing is pickled.
    `device` normalizes uploaded uint8 pixels; None: the CPU, in these threads.
    """

    def __init__(
        self, store: SampleReader, options: ImageOptions, *, threads: int = 2, device: torch.device | None = None
    ) -> None:
        self._store, self._options, self._device = store, options, device
        self._pin = device is not None and device.type == "cuda"
        self._threads, self.prefetch_depth = threads, threads + 1
        self._open: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
        self._buffers = BufferPool(threads + 3)
        # (pixel / 255 - mean) / std = pixel * scale + shift
        self._scale = (1 / (255 * np.array(options.std))).astype(np.float32)
        self._shift = (-np.array(options.mean) / np.array(options.std)).astype(np.float32)

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        batches = prefetch_map(self._make, requests, self.prefetch_depth, "batches", self._threads)
        self._open.add(batches)
        try:
            for batch in batches:
                yield batch if self._device is None else self._uploaded(*batch, self._device)
        finally:
            batches.close()

    def close(self) -> None:
        for batches in list(self._open):
            batches.close()

    def _make(self, request: BatchRequest) -> Batch:
        prepared = prepare(self._store, request, self._options)
        count, size = len(request.indices), request.size
        if self._device is None:
            images = torch.from_numpy(self._buffers.take((count, 3, size, size)))
            put: Callable[[NDArray[np.uint8], NDArray[Any]], None] = self._normalize
        else:
            # the device normalizes: uint8 is a quarter of the bytes of float32
            images, put = torch.empty((count, size, size, 3), dtype=torch.uint8, pin_memory=self._pin), _copy
        for position, target in enumerate(images.numpy()):
            image = crop_and_resize(prepared, position, self._store.format)
            put(image[:, ::-1] if prepared.crops.flip[position] else image, target)
        return images, prepared.labels.pin_memory() if self._pin else prepared.labels

    def _normalize(self, image: NDArray[np.uint8], target: NDArray[np.float32]) -> None:
        # in numpy: torch would start a team of OpenMP threads for each of these threads
        for plane, scale, shift, out in zip(
            image.transpose(2, 0, 1).copy(), self._scale, self._shift, target, strict=True
        ):
            np.multiply(plane, scale, out=out)
            np.add(out, shift, out=out)

    def _uploaded(self, images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> Batch:
        # in the consumer's thread, for its stream
        scale, shift = (torch.from_numpy(factors).to(device).view(3, 1, 1) for factors in (self._scale, self._shift))
        pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2)
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.mul_(scale).add_(shift), labels.to(device, non_blocking=True)


def _copy(image: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    target[:] = image


class BufferPool:
    """Memory for batches, reused when a batch and all views of it are collected. It keeps `keep` unused blocks."""

    def __init__(self, keep: int) -> None:
        # new memory costs a page fault per 4 KB, which takes as long as resizing
        self._free: deque[NDArray[np.float32]] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return an uninitialized array. Its block is not reused while the array or a tensor made from it exists."""
        size = int(np.prod(shape))
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(size, np.float32)
        if len(block) != size:
            block = np.empty(size, np.float32)
        array = block.reshape(shape)  # a separate object: its finalizer returns the block
        weakref.finalize(array, self._free.append, block).atexit = False
        return array


def crop_and_resize(prepared: PreparedBatch, position: int, store_format: str) -> NDArray[np.uint8]:
    """Return the crop of an image at its final size, not flipped, uint8 [size, size, 3]."""
    image = prepared.images[position]
    if store_format == "jpeg":
        image = decode(image.tobytes(), prepared.short_side)
    top, left, height, width = (crop[position] for crop in prepared.crops[:4])
    return resized(image[top : top + height, left : left + width].copy(), prepared.size, prepared.size)
