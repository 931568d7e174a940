"""Batches of images: the choice of the backend, DALI or torch, and torch's.

torch makes batches in threads of this process. Reading, decoding and resizing release the GIL, the memory tier is read
without a copy, and nothing is pickled. Each thread makes whole batches, and one more batch than threads is made ahead
of the training step. Whole-array work but resizing uses numpy, because torch would start a team of OpenMP threads for
each of these threads.

For a GPU, batches are made of uint8, uploaded as such, a quarter of the bytes, and normalised there.
"""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_sparse.data.config import Backend, ImageOptions, is_installed
from lightning_sparse.data.decode import decode, resized
from lightning_sparse.data.pipeline.batch import Batch, BatchRequest, Pipeline, PreparedBatch, prepare
from lightning_sparse.data.pipeline.prefetch import prefetch_map
from lightning_sparse.data.sample import SampleReader

Chosen = Literal["dali", "torch"]


def image_pipeline(
    store: SampleReader, options: ImageOptions, *, batch_size: int, threads: int, device: torch.device
) -> Pipeline:
    """Make the pipeline of the chosen backend. batch_size: largest number of samples in a request."""
    gpu = device.index if device.type == "cuda" else None
    if options.backend == "dali":
        from lightning_sparse.data.pipeline.dali import DaliPipeline

        return DaliPipeline(store, options, batch_size=batch_size, threads=threads, device=gpu)
    return TorchPipeline(store, options, threads=threads, device=None if gpu is None else device)


def has_dali() -> bool:
    """Whether this process can use DALI."""
    return is_installed("nvidia.dali")


def choose_backend(
    wanted: Backend, device: torch.device, *, has_dali: bool, kept: str | None = None
) -> tuple[Chosen, str]:
    """Return the backend and the reason for it, a pure function.

    On a CPU torch is faster (benchmarks/results/data-backends-*.json).

    Args:
        has_dali: whether all ranks have DALI.
        kept: backend of the run that this one continues.

    Raises:
        ValueError: if DALI is wanted and not installed.
    """
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
    if device.type != "cuda":
        return "torch", "on a CPU it is faster than DALI"
    if not has_dali:
        return "torch", "DALI, which runs on the GPU, is not installed on all ranks"
    return "dali", "it runs on the GPU"


class TorchPipeline:
    """Makes batches with torch.

    Args:
        threads: number of batches made at the same time.
        device: device to upload pixels to and to normalise them on; None: the CPU, in these threads.
    """

    def __init__(
        self, store: SampleReader, options: ImageOptions, *, threads: int = 2, device: torch.device | None = None
    ) -> None:
        self._store, self._options, self._device = store, options, device
        self._pin = device is not None and device.type == "cuda"
        self._threads, self.ahead = threads, threads + 1
        self._open: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
        self._buffers = BufferPool(threads + 3)
        # (pixel / 255 - mean) / std = pixel * scale + shift
        self._scale = (1 / (255 * np.array(options.std))).astype(np.float32)
        self._shift = (-np.array(options.mean) / np.array(options.std)).astype(np.float32)

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """Yield batches in the order of requests."""
        batches = prefetch_map(self._make, requests, self.ahead, "batches", self._threads)
        self._open.add(batches)
        try:
            for batch in batches:
                yield batch if self._device is None else self._uploaded(*batch, self._device)
        finally:
            batches.close()

    def close(self) -> None:
        """End the threads of open iterators."""
        for each in list(self._open):
            each.close()

    def _make(self, request: BatchRequest) -> Batch:
        """Return float32 [B, 3, size, size], normalised; for another device, uint8 [B, size, size, 3]."""
        prepared = prepare(self._store, request, self._options)
        count, size = len(request.indices), request.size
        if self._device is None:
            images = torch.from_numpy(self._buffers.take((count, 3, size, size)))
            put: Callable[[NDArray[np.uint8], NDArray[Any]], None] = self._normalise
        else:
            images, put = torch.empty((count, size, size, 3), dtype=torch.uint8, pin_memory=self._pin), _copy
        for position, target in enumerate(images.numpy()):
            image = cropped(prepared, position, self._store.format)
            put(image[:, ::-1] if prepared.crops.flip[position] else image, target)
        return images, prepared.labels.pin_memory() if self._pin else prepared.labels

    def _normalise(self, image: NDArray[np.uint8], target: NDArray[np.float32]) -> None:
        for plane, scale, shift, out in zip(
            image.transpose(2, 0, 1).copy(), self._scale, self._shift, target, strict=True
        ):
            np.multiply(plane, scale, out=out)
            np.add(out, shift, out=out)

    def _uploaded(self, images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> Batch:
        """Return the same as `_normalise` gives, on the device. Called in the consumer's thread, for its stream."""
        scale, shift = (torch.from_numpy(each).to(device).view(3, 1, 1) for each in (self._scale, self._shift))
        pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2)
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.mul_(scale).add_(shift), labels.to(device, non_blocking=True)


def _copy(image: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    target[:] = image


class BufferPool:
    """Memory for batches, reused when a batch and all views of it are collected.

    New memory costs a page fault per 4 KB, which takes as long as resizing.

    Args:
        keep: largest number of unused blocks.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[NDArray[np.float32]] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return an uninitialised array. Its block is not reused while the array or a tensor made from it exists."""
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


def cropped(prepared: PreparedBatch, position: int, store_format: str) -> NDArray[np.uint8]:
    """Return the crop of an image at its final size, not flipped, uint8 [size, size, 3]."""
    image = prepared.images[position]
    if store_format == "jpeg":
        image = decode(image.tobytes(), prepared.short_side)
    top, left, height, width = (each[position] for each in prepared.crops[:4])
    return resized(image[top : top + height, left : left + width].copy(), prepared.size, prepared.size)
