"""Batches through torchvision, in threads of this process.

Reading, decoding and resizing release the GIL, the memory tier is read without a copy, and nothing is pickled. Each
thread makes whole batches, and one more batch than threads is in progress during a training step. Whole-array work uses
numpy, because torch would start a team of OpenMP threads for each of these threads.
"""

import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as F

from lightning_sparse.data.decode import decode
from lightning_sparse.data.pipeline.batch import Batch, BatchRequest, PreparedBatch, Transform, prepare
from lightning_sparse.data.pipeline.prefetch import prefetch
from lightning_sparse.data.sample import SampleReader


class TorchPipeline:
    """Makes batches with torchvision.

    Args:
        threads: number of batches made at the same time.
        pin: use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, store: SampleReader, transform: Transform, *, threads: int = 2, pin: bool = False) -> None:
        self._store, self._transform, self._pin = store, transform, pin
        self._prefetch = threads + 1
        self._buffers = BufferPool(threads + 3)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lightning_sparse batches")
        # (pixel / 255 - mean) / std = pixel * scale + shift
        self._scale = (1 / (255 * np.array(transform.std))).astype(np.float32)
        self._shift = (-np.array(transform.mean) / np.array(transform.std)).astype(np.float32)

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """Yield batches in the order of requests."""
        # in a thread: finding the samples of a step takes milliseconds if there are a thousand ranks
        ordered = prefetch(requests, self._prefetch, "order")
        pending: deque[Future[Batch]] = deque()
        try:
            while True:
                while len(pending) < self._prefetch and (request := next(ordered, None)) is not None:
                    pending.append(self._pool.submit(self._make, request))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for each in pending:
                each.cancel()
            ordered.close()

    def close(self) -> None:
        """Wait for running batches and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, request: BatchRequest) -> Batch:
        prepared = prepare(self._store, request, self._transform)
        shape = (len(request.indices), 3, request.size, request.size)
        images = torch.empty(shape, pin_memory=True) if self._pin else torch.from_numpy(self._buffers.take(shape))
        for position, target in enumerate(images.numpy()):
            image = resized(prepared, position, self._store.format)
            self._normalise(image[:, ::-1] if prepared.crops.flip[position] else image, target)
        return images, prepared.labels.pin_memory() if self._pin else prepared.labels

    def _normalise(self, image: NDArray[np.uint8], target: NDArray[np.float32]) -> None:
        for plane, scale, shift, out in zip(
            image.transpose(2, 0, 1).copy(), self._scale, self._shift, target, strict=True
        ):
            np.multiply(plane, scale, out=out)
            np.add(out, shift, out=out)


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


def resized(prepared: PreparedBatch, position: int, store_format: str) -> NDArray[np.uint8]:
    """Return the crop of an image at its final size, not flipped, uint8 [size, size, 3]."""
    image = prepared.images[position]
    if store_format == "jpeg":
        image = decode(image.tobytes(), prepared.short_side)
    top, left, height, width = (each[position] for each in prepared.crops[:4])
    crop = image[top : top + height, left : left + width].copy()
    # channels last: torch resizes uint8 with vector instructions in this layout
    tensor = F.resize(torch.from_numpy(crop).permute(2, 0, 1), [prepared.size, prepared.size], antialias=True)
    pixels: NDArray[np.uint8] = tensor.permute(1, 2, 0).contiguous().numpy()
    return pixels
